"""Models of a hub that cannot be reached."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.tiny import tiny_tokenizer
from valence import network
from valence.engine import loading
from valence.engine.models import load_tokenizer, read_config
from valence.errors import UserError


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Addresses that were asked for, none of which answers."""
    import httpx

    asked: list[str] = []

    def head(url: str, **_: object) -> None:
        asked.append(url)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "head", head)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    network.hub_problem.cache_clear()
    yield asked
    network.hub_problem.cache_clear()


def test_a_hub_that_cannot_be_reached_is_asked_once(requests: list[str]) -> None:
    for load, setting in ((load_tokenizer, "model.tokenizer or model.name"), (read_config, "model.name")):
        began = time.monotonic()
        with pytest.raises(UserError) as error:
            load("nobody/nothing")
        assert time.monotonic() - began < 5  # libraries retry for a minute
        assert error.value.where == setting
        assert "nobody/nothing" in error.value.what
        assert constants.ENDPOINT in error.value.what
        for remedy in ("folder", "HF_HOME", "HF_ENDPOINT"):
            assert remedy in (error.value.fix or "")
    assert requests == [constants.ENDPOINT]


def test_what_was_downloaded_is_used_without_a_hub(tmp_path: Path) -> None:
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
        environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint}
        code = (
            "import time; from valence.engine.models import load_tokenizer; began = time.monotonic(); "
            "found = len(load_tokenizer('some/model')); print(found, time.monotonic() - began)"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    count, seconds = done.stdout.split()
    assert int(count) == len(tiny_tokenizer())
    assert float(seconds) < 3 * network.DEADLINE


def test_names_that_are_neither_folders_nor_hub_ids() -> None:
    for name in ("./nowhere", "a/b/c", "a b"):
        with pytest.raises(UserError, match="folder"):
            loading.must_exist(name, "model.name")
