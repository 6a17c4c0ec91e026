"""Fixtures that several files of this folder use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny
from tests.tiny import tiny_tokenizer
from tests.training.scoring import FILES, write
from valence import cli
from valence.training import score_rows as module


def two_models(folder: Path) -> None:
    """The folders of two tiny models that differ in their weights alone: `model` and `other`."""
    tokenizer = tiny_tokenizer()
    for name, seed in (("model", 0), ("other", 1)):
        tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, seed=seed).save_pretrained(folder / name)  # type: ignore[operator]
        tokenizer.save_pretrained(folder / name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and a file of each kind of rows, which is the current one. Windows are small."""
    two_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setattr(cli.console, "width", 200)
    for name, rows in FILES.items():
        write(f"{name}.jsonl", rows)
    return tmp_path
