"""python -m benchmarks.methods [--quick] [--only NAME ...]: check that each method, trained for a
few steps on SmolLM2-135M-Instruct and real rows, changes its target metric on held-out rows.

Exit status: 0 every metric changed as expected, 1 some did not.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from benchmarks.methods import rows
from benchmarks.methods.cases import CASES, QUICK, Case
from examples.demo import assets
from valence.api import build_run
from valence.methods import METHODS
from valence.models.build import load_model, load_tokenizer

QUICK_STEPS = 5


@dataclass(frozen=True)
class CaseResult:
    """The held-out metric of a case before and after training, and the duration (s)."""

    case: Case
    before: float
    after: float
    seconds: float

    @property
    def is_reached(self) -> bool:
        """Whether the metric changed in the expected direction."""
        return self.after > self.before if self.case.up else self.after < self.before

    @property
    def line(self) -> str:
        """The case in the summary: change, bar and outcome."""
        bar, outcome = ">0" if self.case.up else "<0", "held" if self.is_reached else "short"
        return f"{self.case.name} {self.after - self.before:+.4f}{bar} {outcome}"


def recipe(case: Case, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Write the rows of a case and return its recipe."""
    train, held_out = rows.write(case.rows, folder)
    data: dict[str, Any] = {"train": str(train), "eval": str(held_out), "max_length": 512}
    sections = dict(case.sections)
    if "mix" in sections:
        sections["mix"] = [
            part | {"train": str(rows.write(part["train"], folder)[0])} for part in sections["mix"]
        ]
    return {
        "method": case.method,
        "model": {"name": str(model), "dtype": assets.quick_dtype(), "lora": {"rank": 16}},
        "data": data | sections.pop("data", {}),
        "train": {
            "batch_size": 8,
            "max_steps": steps,
            "learning_rate": case.rate,
            "schedule": "constant",
            "compile": "off",
        },
        "eval": {"every": 10_000},
        "reference": {"cache": "off"} if METHODS[case.method].needs_reference else {},
        "run": {"dir": str(folder / "run")},
        **sections,
    }


def run(case: Case, folder: Path, base: nn.Module, model: Path, steps: int) -> CaseResult:
    """Train a copy of the base model, and evaluate it before and after."""
    start = time.monotonic()
    with TemporaryDirectory(dir=folder) as scratch:
        policy = None if METHODS[case.method].is_reward_model else copy.deepcopy(base)
        trainer = build_run(recipe(case, model, Path(scratch), steps), model=policy, quiet=True)
        trainer.fit()
        first, last = (
            trainer.evaluations[step][case.number] for step in sorted(trainer.evaluations)
        )
    return CaseResult(case, first, last, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"only {', '.join(QUICK)}, and {QUICK_STEPS} steps of each",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[case.name for case in CASES],
        metavar="NAME",
        help="these cases",
    )
    options = parser.parse_args()
    names = options.only or (QUICK if options.quick else [case.name for case in CASES])
    disable_progress_bar()
    model = assets.smollm2()
    load_tokenizer(str(model))
    base = load_model(str(model), dtype=getattr(torch, assets.quick_dtype()))
    results: list[CaseResult] = []
    print(f"{'case':24}{'held-out metric':22}{'before':>10}{'after':>10}{'seconds':>9}")
    with TemporaryDirectory() as folder:
        for case in (case for case in CASES if case.name in names):
            result = run(
                case, Path(folder), base, model, QUICK_STEPS if options.quick else case.steps
            )
            results.append(result)
            outcome = "held" if result.is_reached else "short"
            print(
                f"{case.name:24}{case.number:22}{result.before:10.4f}{result.after:10.4f}"
                f"{result.seconds:9.0f}  {outcome}",
                flush=True,
            )
    print("; ".join(result.line for result in results))
    return 0 if all(result.is_reached for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
