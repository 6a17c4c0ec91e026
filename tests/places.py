"""A folder to type commands in: a model, rows and a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models import tiny
from tests.tiny import tiny_tokenizer
from valence import cli

ROWS = [
    {"prompt": [{"role": "user", "content": f"question {i}"}], "completion": f"answer {i * 7}", "label": i % 3 == 0}
    for i in range(10)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows and a recipe, which is the current one."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        "method: kto\n"
        "model: {name: ./model, lora: {rank: 2}}\n"
        "data: {train: [{path: rows.jsonl}], eval: [{path: rows.jsonl, limit: 4}], max_length: 128}\n"
        "train: {batch_size: 5, learning_rate: 1e-3}\n"
        "run: {dir: runs/first}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 160)
    return tmp_path
