"""Rows of a run from Python: the same rows in any container give the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch

import valence
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny

ROWS = [
    {
        "prompt": f"question {i} ",
        "completion": f"{'good' if i % 2 else 'bad'} answer {i}",
        "label": "yes" if i % 2 else "no",
    }
    for i in range(8)
]


def losses(folder: Path, rows: Any, held_out: Any) -> list[float]:
    valence.train(
        {
            "method": "kto",
            "model": {"name": "tiny"},
            "run": {"dir": str(folder)},
            "train": {"max_steps": 1},
        },
        model=tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32, seed=0),
        tokenizer=tiny_tokenizer(),
        train=rows,
        eval=held_out,
        quiet=True,
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        value
        for record in records
        for name, value in record.items()
        if name in ("loss", "eval/loss")
    ]


def test_frames_data_sets_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(ROWS)
    frame.to_csv("rows.csv", index=False, sep=";")
    expected = losses(tmp_path / "list", ROWS, ROWS[:2])
    assert expected
    for name, rows in {
        "frame": frame,
        "data set": datasets.Dataset.from_list(ROWS),
        "path": Path("rows.csv"),
    }.items():
        assert losses(tmp_path / name, rows, pd.DataFrame(ROWS[:2])) == expected, name
    assert "path: rows.csv" in (tmp_path / "path" / "config.yaml").read_text()
