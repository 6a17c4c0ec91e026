"""The recipe of each method, and a run with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import valence
from benchmarks.hindsight.rows import Arm

RATES = {"hindsight": 2e-4, "shuffled": 2e-4, "kto": 1.2e-4, "sft": 2e-4}
BATCH_SIZE = 8

Record = dict[str, Any]


def recipe(
    arm: Arm, model: Path, folder: Path, seed: int, epochs: float, overrides: Record
) -> Record:
    """The recipe of a method. overrides: sections that change that of hindsight."""
    sections: Record = {
        "method": "hindsight" if arm == "shuffled" else arm,
        "model": {"name": str(model), "dtype": "float32", "lora": {"rank": 16}},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 512},
        "train": {
            "batch_size": BATCH_SIZE,
            "epochs": epochs,
            "learning_rate": RATES[arm],
            "warmup": 0.1,
            "seed": seed,
            "compile": "off",
        },
        "run": {"dir": str(folder / "run"), "save_every": 100_000},
    }
    if arm not in ("kto", "sft"):
        for key, value in overrides.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
    return sections


def steps_of(settings: Record, rows: Sequence[Record], folder: Path) -> list[Record]:
    """Train on the rows. Return the log of each step."""
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    valence.train(settings, quiet=True)
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [step for step in map(json.loads, lines) if "loss" in step]
