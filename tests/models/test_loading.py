"""Models of a hub that cannot be reached."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from valence import network
from valence.models import loading
from valence.models.build import load_tokenizer, read_config


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Addresses that were asked for, none of which answers."""
    import httpx

    queries: list[str] = []

    def head(url: str, **_: object) -> None:
        queries.append(url)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "head", head)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    network.hub_problem.cache_clear()
    yield queries
    network.hub_problem.cache_clear()


def test_a_hub_that_cannot_be_reached_is_asked_once(requests: list[str]) -> None:
    for load, setting in (
        (load_tokenizer, "model.tokenizer or model.name"),
        (read_config, "model.name"),
    ):
        with raises_error("model-not-found", fix="HF_HOME") as raised:
            load("nobody/nothing")
        assert raised.error.where == setting
        assert "nobody/nothing" in raised.error.message
        assert constants.ENDPOINT in raised.error.message
        assert "HF_ENDPOINT" in (raised.error.fix or "")
    assert requests == [constants.ENDPOINT]


@pytest.mark.slow
def test_downloaded_models_load_without_a_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--some--model/snapshots/0"
    tiny_tokenizer().save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    refs = tmp_path / "hub/models--some--model/refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    with socket.socket() as deaf:  # accepts connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        environment = os.environ | {
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": endpoint,
        }
        code = (
            "from valence import network; from valence.models.build import load_tokenizer; "
            "network.DEADLINE = 0.5; print(len(load_tokenizer('some/model')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        deaf.setblocking(False)
        deaf.accept()[0].close()
        with pytest.raises(BlockingIOError):  # libraries that ask as well would retry for a minute
            deaf.accept()
    assert int(done.stdout) == len(tiny_tokenizer())


def test_names_that_are_neither_folders_nor_hub_ids() -> None:
    for name in ("./nowhere", "a/b/c", "a b"):
        with raises_error("model-not-found", where="model.name"):
            loading.must_exist(name, "model.name")
