"""python -m benchmarks.step [--quick]: how fast, and in how much memory, is a training step beside TRL's?

Exit status: 0 all figures held, 1 some fell short, 2 there is no environment with TRL.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.peers import HOW_TO, peer_python
from benchmarks.step import THREADS
from benchmarks.step.cases import CASES, TINY, Case, Lengths, Shape
from benchmarks.step.measure import FULL, QUICK, exact, measured
from benchmarks.step.peer import Peer
from benchmarks.step.report import table, verdict
from benchmarks.step.stage import Models, save_models

EXACT_BAR = 1e-4


def small(case: Case) -> Case:
    """The case on a model and rows on which float32 takes no time."""
    return replace(case, shape=TINY, prompt=Lengths(12, 40), completion=Lengths(8, 30))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three cases (or those named), against TRL at its best alone")
    parser.add_argument("--only", metavar="NAME", action="append", help=f"a case, or several: {', '.join(c.name for c in CASES)}")
    arguments = parser.parse_args()
    cases = tuple(
        case for case in CASES if (case.name in arguments.only if arguments.only else case.quick or not arguments.quick)
    )
    python = peer_python()
    if python is None:
        print(HOW_TO, file=sys.stderr)
        return 2
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    with TemporaryDirectory() as scratch, Peer(python, Path(scratch) / "trl.log") as peer:
        return compare(cases, peer, Path(scratch), quick=arguments.quick)


def compare(cases: tuple[Case, ...], peer: Peer, scratch: Path, *, quick: bool) -> int:
    """Every case's table as it is done, then the verdict."""

    @cache
    def models(shape: Shape, lora: bool) -> Models:
        folder = scratch / f"{shape.name} {lora}"
        far = {"scale": 3.0, "noise": 0.3} if shape is TINY else {}  # in float32 every part of a loss should count
        return save_models(shape, folder, lora=lora, **far)

    versions = ", ".join(f"{name} {version}" for name, version in peer.ask("versions").items())
    print(f"TRL's environment: {versions}; {THREADS} threads on both sides", flush=True)
    far, where = exact(tuple(map(small, cases)), lambda case: models(TINY, case.lora), peer, scratch / "exact")
    print(f"float32, small model: losses and gradient norms agree to {far:.0e} (bar {EXACT_BAR:.0e}; {where})", flush=True)
    if not far <= EXACT_BAR:
        print("no time is shown: the sides do not compute the same. short")
        return 1
    plan, results = QUICK if quick else FULL, []
    for case in cases:
        results.append(measured(case, models(case.shape, case.lora), peer, scratch / "values", plan))
        print(table(results[-1]), flush=True)
        if quick:  # what was the fastest way for the first case will do for the others
            plan = replace(plan, ways=(results[0].way,))
    line, held = verdict(results)
    print(f"\n{line}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
