"""python -m benchmarks.flips [--quick] [--seeds N]: thumbs that were turned round on purpose, and
how many the run page shows.

One thumb in twenty of the training rows and of the held-out rows is flipped; KTO trains an adapter
of SmolLM2-135M-Instruct on them. The figure is the share of flipped rows among the tenth of the
rows that the page calls most surprising: of training rows, which the model has learnt from, and of
held-out rows, which it has not. By chance it is 0.1. Two sets: the quickstart's thumbs, judged by a
rule, and LLaMA-Factory's demonstration set, 300 judged answers to all kinds of instructions, of
which those that are not too long are taken. `--quick`: the quickstart alone, one seed, one epoch.
Exit status: 0 all shares held their bars, 1 some did not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils.logging import disable_progress_bar

import valence
from examples.demo import assets
from valence.reports.rows import surprise

FLIPPED, LOOKED_AT = 0.05, 0.1
"""Share of the rows that is turned round, and share of the rows that is looked at."""
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
LETTERS = 1200
"""Of an instruction and its answer, in the demonstration set."""
BARS = {"quickstart": 0.3, "instructions": 0.15}
"""Least mean share of the flipped training rows that must be found, below what was measured first:
three times that of chance, and one and a half times.
"""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Found:
    """Share of the flipped rows among the most surprising ones, and of how many: of training and of
    held-out rows.
    """

    train: float
    held_out: float
    flipped: tuple[int, int]


def quickstart() -> tuple[Rows, Rows]:
    train, held = (
        (QUICKSTART / f"{name}.jsonl").read_text(encoding="utf-8")
        for name in ("feedback", "held_out")
    )
    return [json.loads(line) for line in train.splitlines()], [
        json.loads(line) for line in held.splitlines()
    ]


def instructions() -> tuple[Rows, Rows]:
    every = json.loads(
        (assets.llamafactory_data() / "kto_en_demo.json").read_text(encoding="utf-8")
    )
    short = [
        row for row in every if sum(len(turn["content"]) for turn in row["messages"]) <= LETTERS
    ]
    random.Random(0).shuffle(short)
    cut = len(short) * 3 // 4
    return short[:cut], short[cut:]


SETS = {"quickstart": quickstart, "instructions": instructions}


def flip(rows: Rows, seed: int) -> tuple[Rows, set[int]]:
    """The rows with one in twenty turned round, and which these are."""
    chosen = set(random.Random(seed).sample(range(len(rows)), max(1, round(FLIPPED * len(rows)))))
    return [
        row | {"label": not row["label"]} if i in chosen else row for i, row in enumerate(rows)
    ], chosen


def share(evaluation: Path, flipped: set[int]) -> float:
    """Of the flipped rows (places in their file) those among the most surprising ones.

    A row's origin ends with its line.
    """
    rows = json.loads(evaluation.read_text(encoding="utf-8"))["rows"]
    ordered = [int(row["origin"].rsplit(":", 1)[1]) - 1 for row, _ in surprise(rows)]
    assert len(ordered) == len(rows)
    seen = set(ordered[: math.ceil(LOOKED_AT * len(ordered))])
    there = flipped & set(ordered)
    return len(seen & there) / len(there)


def recipe(model: Path, folder: Path, seed: int, epochs: float) -> dict[str, Any]:
    return {
        "method": "kto",
        "model": {"name": str(model), "dtype": assets.quick_dtype(), "lora": {"rank": 16}},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "held.jsonl"),
            "max_length": 512,
        },
        "train": {
            "batch_size": 16,
            "epochs": epochs,
            "learning_rate": 1.2e-4,
            "warmup": 0.1,
            "seed": seed,
            "compile": "off",
        },
        "eval": {"every": 1000.0, "at_start": False, "train_examples": 10_000},
        "run": {"dir": str(folder / "run")},
    }


def look(name: str, model: Path, seed: int, epochs: float) -> Found:
    """One run on flipped rows, and what its page would show."""
    parts = [flip(rows, seed) for rows in SETS[name]()]
    with TemporaryDirectory() as place:
        folder = Path(place)
        for file, (rows, _) in zip(("train", "held"), parts, strict=True):
            (folder / f"{file}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
        run = valence.train(recipe(model, folder, seed, epochs), quiet=True)
        evaluations = [
            folder / "run" / "eval" / f"{each}.json" for each in ("train", f"step-{run.step}")
        ]
        train, held = (
            share(path, flipped) for path, (_, flipped) in zip(evaluations, parts, strict=True)
        )
    return Found(train, held, (len(parts[0][1]), len(parts[1][1])))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flips", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the quickstart alone, one seed, one epoch"
    )
    parser.add_argument("--only", nargs="+", choices=SETS, metavar="SET")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(arguments)
    names, seeds, epochs = (
        (["quickstart"], 1, 1.0) if given.quick else (given.only or list(SETS), given.seeds, 2.0)
    )
    disable_progress_bar()
    model, figures = assets.smollm2(), list[tuple[str, bool]]()
    print(
        f"{'set':<14}{'seed':>5}{'flipped':>9}{'found':>8}{'held out':>10}{'found':>8}", flush=True
    )
    for name in names:
        found: list[Found] = []
        for seed in range(seeds):
            found.append(one := look(name, model, seed, epochs))
            print(
                f"{name:<14}{seed:>5}{one.flipped[0]:>9}{one.train:>8.2f}{one.flipped[1]:>10}{one.held_out:>8.2f}",
                flush=True,
            )
        mean, held = fmean(each.train for each in found), fmean(each.held_out for each in found)
        figures.append(
            (f"{name} {mean:.2f}>={BARS[name]:g} (held out {held:.2f})", mean >= BARS[name])
        )
    print("; ".join(f"{said} {'held' if held else 'short'}" for said, held in figures))
    return 0 if all(held for _, held in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
