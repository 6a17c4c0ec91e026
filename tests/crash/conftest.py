"""A model and rows for disturbed runs, and a disk that fails on request."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.crash.cases import write_rows
from tests.crash.helpers import Disk, Place
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny

# which says what file an operation is on
collect_ignore_glob = [] if Path("/proc/self/fd").is_dir() else ["test_*.py"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("crash")
    tokenizer = tiny_tokenizer(None)
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder)
    return Place(folder)


@pytest.fixture
def disk() -> Iterator[Disk]:
    actual = Disk()
    yield actual
    actual.rest()


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    """What a signal's handler raises is lost in a function that is called when objects are
    collected. Hypothesis has one.
    """
    remaining = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = remaining


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is printed is broken into lines."""
    monkeypatch.setenv("COLUMNS", "1000")
