"""The command line, called in this process, and a folder in which to call it."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence import cli
from valence.errors import UserError

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "completion": f"answer {i * 7}",
        "label": i % 3 == 0,
    }
    for i in range(10)
]


def command(*words: str) -> int:
    """Exit status of ``valence`` with these arguments."""
    try:
        _run(words)
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def command_error(*words: str) -> UserError:
    """The error for which ``valence`` with these words prints a message and ends with status 2."""
    with pytest.raises(SystemExit) as info:
        _run(words)
    error = info.value.__cause__
    assert isinstance(error, UserError)
    assert info.value.code == cli.MISTAKE
    return error


def _run(words: tuple[str, ...]) -> None:
    with patch.object(sys, "argv", ["valence", *words]):
        cli.main()


@cache
def _saved_model() -> TemporaryDirectory[str]:
    """A folder with a tiny model and its tokenizer, until this process ends."""
    folder = TemporaryDirectory()
    tokenizer = tiny_tokenizer()
    model = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder


def write_place(folder: Path) -> None:
    """Write a model, rows and a recipe into a folder."""
    shutil.copytree(_saved_model().name, folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "recipe.yaml").write_text(
        "method: kto\n"
        "model: {name: ./model, lora: {rank: 2}}\n"
        "data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl, limit: 4}],"
        " max_length: 128}\n"
        "train: {batch_size: 5, learning_rate: 1e-3}\n"
        "run: {dir: runs/first}\n"
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows and a recipe, which is the current one."""
    write_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
