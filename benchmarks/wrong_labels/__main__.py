"""python -m benchmarks.wrong_labels [--quick] [--seeds N] [--look audit training]: how many
deliberately flipped labels an audit and a report find.

5, 10 and 20 % of the training labels are flipped, and two methods order the rows:

- audit: ``valence audit --model``, before any training. The hidden states are computed once.
- training: the order of the most surprising rows in the run's report, after KTO has trained an
  adapter of the same model, SmolLM2-135M-Instruct, on them.

The figure is the recall: the share of flipped rows among the first 10 and the first 20 % of the
rows. Random order has 0.1 and 0.2. ``form`` is the audit's order by the form of the completions,
without a model. Intervals are of the mean over seeds, which flip different rows of the same sets.
There are two sets: the quickstart's thumbs, which follow a rule, and LLaMA-Factory's demonstration
set of 300 rated answers to all kinds of instructions, without the longest ones. ``--quick``: only
the audit, 8 seeds. Exit status: 0 all figures reach their bars, 1 some do not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

import valence
from examples.demo import assets
from valence.apps.feedback.audit_labels import C_FORM, C_STATES, hidden_states, load_policy
from valence.data.label_audit import content_text
from valence.data.load import DataFile, stream
from valence.reports.form import form_of
from valence.reports.regression import cross_fit
from valence.reports.rows import surprise
from valence.statistics import mean_interval
from valence.targets import with_files
from valence.types import Judgement, content_id

FLIPPED, SHARES_READ = (0.05, 0.1, 0.2), (0.1, 0.2)
"""Shares of the rows that are flipped, and shares of the ordered rows that count as reviewed."""
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
LETTERS = 1200
"""Maximum characters of an instruction and its answer, in the demonstration set."""
BARS: dict[tuple[str, str, float], tuple[float, float]] = {
    ("audit", "quickstart", 0.05): (0.55, 0.75),
    ("audit", "quickstart", 0.1): (0.45, 0.7),
    ("audit", "quickstart", 0.2): (0.25, 0.48),
    ("audit", "instructions", 0.05): (0.2, 0.35),
    ("audit", "instructions", 0.1): (0.17, 0.33),
    ("audit", "instructions", 0.2): (0.12, 0.25),
    ("training", "quickstart", 0.05): (0.3, 0.3),
    ("training", "quickstart", 0.1): (0.28, 0.42),
    ("training", "quickstart", 0.2): (0.28, 0.42),
    ("training", "instructions", 0.05): (0.15, 0.2),
}
"""Minimum mean recall in the first 10 and 20 % of the rows, by method, set and share of flipped
below what was measured first.
"""
EXPERIMENTS = ("audit", "training")

Rows = list[dict[str, Any]]


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
    split = len(short) * 3 // 4
    return short[:split], short[split:]


SETS = {"quickstart": quickstart, "instructions": instructions}


def flip(rows: Rows, seed: int, share: float) -> tuple[Rows, set[int]]:
    """Flip the labels of a share of the rows. Return all rows, and the indices of flipped ones."""
    chosen = set(random.Random(seed).sample(range(len(rows)), max(1, round(share * len(rows)))))
    return [
        row | {"label": not row["label"]} if i in chosen else row for i, row in enumerate(rows)
    ], chosen


def recalls(order: Sequence[int], flipped: set[int]) -> tuple[float, ...]:
    """Share of the flipped rows among the first rows, for each of SHARES_READ."""
    return tuple(
        len(flipped & set(order[: math.ceil(share * len(order))])) / len(flipped & set(order))
        for share in SHARES_READ
    )


def recipe(model: Path, folder: Path, seed: int) -> dict[str, Any]:
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
            "epochs": 2.0,
            "learning_rate": 1.2e-4,
            "warmup": 0.1,
            "seed": seed,
            "compile": "off",
        },
        "eval": {"every": 1000.0, "at_start": False, "train_examples": 10_000},
        "run": {"dir": str(folder / "run")},
    }


def order_after_training(rows: Rows, held: Rows, model: Path, seed: int) -> list[int]:
    """Train on the rows, and return their indices with the most surprising labels first."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file, part in (("train", rows), ("held", held)):
            (folder / f"{file}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
            )
        valence.train(recipe(model, folder, seed), quiet=True)
        evaluation = json.loads((folder / "run" / "eval" / "train.json").read_text("utf-8"))["rows"]
    # a row's origin ends with its line number
    return [int(row["origin"].rsplit(":", 1)[1]) - 1 for row, _ in surprise(evaluation)]


class AuditFeatures:
    """Features of the rows of a set that the audit's classifiers read."""

    def __init__(self, rows: Rows, model: Path) -> None:
        with TemporaryDirectory() as scratch:
            file = Path(scratch) / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            examples = [example for _, example in stream(DataFile(str(file)))]
        judged = [example for example in examples if isinstance(example, Judgement)]
        assert len(judged) == len(rows)
        policy, encoder = load_policy(
            str(model), with_files(str(model), [], ["data.max_length=2048"])
        )
        units = encoder.encode_all(judged).units
        assert len(units) == len(rows)
        states = hidden_states(policy, units)
        self.states = torch.cat(list(states))
        forms = [form_of(content_text(judgement.completion)) for judgement in judged]
        self.form = torch.tensor([list(form.values()) for form in forms]).log1p()
        self.groups = [content_id(judgement.prompt, judgement.completion) for judgement in judged]

    def order(self, features: torch.Tensor, rows: Rows, c: float) -> list[int]:
        """Indices of the rows with the least probable label first. c: strength of the
        regularization.
        """
        labels = [bool(row["label"]) for row in rows]
        up = cross_fit(features, labels, self.groups, c).probabilities.tolist()
        probabilities = [p if label else 1 - p for p, label in zip(up, labels, strict=True)]
        return sorted(range(len(rows)), key=lambda i: probabilities[i])


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval."""
    low, high = mean_interval(values) if len(values) > 1 else (math.nan, math.nan)
    return f"{fmean(values):.2f} [{max(0.0, low):.2f}, {min(1.0, high):.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_labels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the audit, 8 seeds")
    parser.add_argument("--only", nargs="+", choices=SETS, metavar="SET", default=list(SETS))
    parser.add_argument("--look", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--flipped", nargs="+", type=float, choices=FLIPPED, default=FLIPPED)
    parser.add_argument(
        "--seeds", type=int, help="default: 16 for the audit (8 if quick), 3 for training"
    )
    options = parser.parse_args(arguments)
    disable_progress_bar()
    model = assets.smollm2()
    measured: dict[tuple[str, str, float], list[tuple[float, ...]]] = {}
    print(
        f"{'set':<14}{'rows':>5}{'flipped':>9}  {'method':<10}{'first 10 %':>20}{'first 20 %':>20}"
    )
    for name in options.only:
        train, held = SETS[name]()
        audit_features = AuditFeatures(train, model) if "audit" in options.look else None
        for share in options.flipped:
            if audit_features is not None:
                for seed in range(options.seeds or (8 if options.quick else 16)):
                    rows, flipped = flip(train, seed, share)
                    for method, features, c in (
                        ("audit", audit_features.states, C_STATES),
                        ("form", audit_features.form, C_FORM),
                    ):
                        order = audit_features.order(features, rows, c)
                        measured.setdefault((method, name, share), []).append(
                            recalls(order, flipped)
                        )
            is_trained = "training" in options.look and not options.quick
            for seed in range(options.seeds or 3) if is_trained else ():
                rows, flipped = flip(train, seed, share)
                order = order_after_training(rows, flip(held, seed, share)[0], model, seed)
                measured.setdefault(("training", name, share), []).append(recalls(order, flipped))
            for method in ("audit", "form", "training"):
                if values := measured.get((method, name, share)):
                    ten, twenty = map(interval, zip(*values, strict=True))
                    print(
                        f"{name:<14}{len(train):>5}{share:>9.0%}  "
                        f"{method:<10}{ten:>20}{twenty:>20}",
                        flush=True,
                    )
    figures: list[tuple[str, bool]] = []
    for key, bars in BARS.items():
        for share_read, bar, values in zip(
            SHARES_READ, bars, zip(*measured.get(key, ()), strict=True), strict=False
        ):
            figure = fmean(values)
            label = f"{key[0]} {key[1]} {key[2]:.0%} in {share_read:.0%} {figure:.2f}>={bar:g}"
            figures.append((label, figure >= bar))
    print("; ".join(f"{label} {'held' if held else 'short'}" for label, held in figures))
    return 0 if figures and all(held for _, held in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
