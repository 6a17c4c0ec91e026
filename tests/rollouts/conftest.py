"""Fixtures that several files of this folder use: a stand-in for a vLLM server, and a client of
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollouts.vllm_server import Fake, generator, serving
from valence.rollouts.transports import DiskTransfer
from valence.rollouts.vllm import VLLMGenerator


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client looks often whether a server that went away is back."""
    monkeypatch.setattr("valence.rollouts.client.POLL_SECONDS", 0.01)
    monkeypatch.setattr("valence.rollouts.client.MAX_PAUSE", 0.02)
    monkeypatch.setattr("valence.rollouts.servers.POLL_SECONDS", 0.01)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as server:
        yield server


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def sampler(fake: Fake, tmp_path: Path, notes: list[str]) -> Iterator[VLLMGenerator]:
    result = generator(fake.url, DiskTransfer(tmp_path / "weights"), log=notes.append)
    yield result
    result.close()
