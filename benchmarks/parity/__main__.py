"""python -m benchmarks.parity [--quick]: compare a step of Valence with TRL's step, and with
HALOs' formulas.

Exit status: 0 all figures are within their bars, 1 some are not, 2 there is no environment with
TRL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.parity.cases import CASES, Case
from benchmarks.parity.intended import INTENDED
from benchmarks.parity.sides import Figures, Here, theirs
from benchmarks.parity.stages import Stage, real_stage, tiny_stage
from benchmarks.peers import NO_TRL, peer_python

BAR = 1e-4
SHOWN = tuple(row.case for row in INTENDED if row.case is not None)


@dataclass(frozen=True)
class Difference:
    """One figure of one case on both sides.

    A figure that either side lacks, or that is not finite, has an infinite difference.
    """

    case: Case
    figure: str
    ours: float
    theirs: float

    @property
    def relative(self) -> float:
        if self.ours == self.theirs:
            return 0.0
        difference = abs(self.ours - self.theirs) / max(abs(self.ours), abs(self.theirs))
        return difference if difference < float("inf") else float("inf")

    @property
    def held(self) -> bool:
        return BAR < self.relative < float("inf") if self.case in SHOWN else self.relative <= BAR


def compared(case: Case, mine: Figures, other: Figures) -> list[Difference]:
    def named(figures: Figures, name: str) -> float:
        return figures.get(name, float("nan"))

    return [
        Difference(case, name, named(mine, case.names.get(name, name)), named(other, name))
        for name in case.figures
    ]


def run(stage_of: Callable[[Path], Stage], cases: Sequence[Case], python: Path) -> list[Difference]:
    """Run both sides of every case on one stage, and print a table."""
    with TemporaryDirectory() as scratch:
        stage = stage_of(Path(scratch))
        of_trl = [case for case in cases if case.peer == "TRL"]
        peer_results = theirs(of_trl, python, stage, Path(scratch))
        in_order = iter(peer_results.figures)
        here = Here(stage)
        versions = ", ".join(f"{name} {version}" for name, version in peer_results.versions.items())
        print(f"\n{stage.name}; {versions}; HALOs by its formulas", flush=True)
        print(f"{'':6}{'case':38}{'figure':22}{'Valence':>14}{'other':>14}{'relative':>10}")
        differences: list[Difference] = []
        for case in cases:
            other = next(in_order) if case.peer == "TRL" else here.formulas(case)
            rows = compared(case, here.ours(case), other)
            for row in rows:
                print(line(row), flush=True)
            differences += rows
    if not any(row.figure == "kl" and row.ours > 0 for row in differences):
        raise RuntimeError("every z0 is clamped, so the comparison would not cover it")
    return differences


def line(row: Difference) -> str:
    mark = "" if row.held else "  SHORT"
    meant = "  meant" if row.case in SHOWN else ""
    numbers = f"{row.ours:14.7g}{row.theirs:14.7g}{row.relative:10.1e}"
    return f"{row.case.peer:6}{row.case.name:38}{row.figure:22}{numbers}{meant}{mark}"


def verdict(stage: str, differences: Sequence[Difference]) -> str:
    """The largest difference of each figure over all cases, with its bar and `held` or `short`."""
    worst: dict[str, float] = {}
    for row in differences:
        if row.case not in SHOWN:
            worst[row.figure] = max(worst.get(row.figure, 0.0), row.relative)
    parts = [
        f"{name} {value:.1e} (bar {BAR:.0e}) {'held' if value <= BAR else 'short'}"
        for name, value in worst.items()
    ]
    meant = [row for row in differences if row.case in SHOWN]
    if meant:
        smallest = min(row.relative for row in meant)
        held = "held" if all(row.held for row in meant) else "short"
        parts.append(f"smallest intended difference {smallest:.1e} (bar over {BAR:.0e}) {held}")
    return f"{stage}: " + ", ".join(parts)


def print_intended() -> None:
    print("\nIntended differences")
    for row in INTENDED:
        print(
            f"\n{row.peer:6}"
            f"{row.case.name if row.case else 'not run: one side rejects or lacks it'}"
        )
        print(f"      difference: {row.title}\n      reason:     {row.reason}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the tiny random model")
    quick = parser.parse_args().quick
    python = peer_python()
    if python is None:
        print(NO_TRL, file=sys.stderr)
        return 2
    disable_progress_bar()
    differences_by_stage = {"tiny": run(tiny_stage, (*CASES, *SHOWN), python)}
    if not quick:
        differences_by_stage["real"] = run(
            real_stage, [case for case in CASES if case.real], python
        )
    print_intended()
    print("\n" + "; ".join(verdict(name, rows) for name, rows in differences_by_stage.items()))
    return 0 if all(row.held for rows in differences_by_stage.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
