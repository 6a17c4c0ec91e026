"""python -m benchmarks.parity [--quick]: compare a step of Valence with TRL's step, and with
HALOs' formulas and that of hindsight's paper.

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
from benchmarks.parity.inputs import Inputs, real_inputs, tiny_inputs
from benchmarks.parity.intended import INTENDED
from benchmarks.parity.sides import Figures, LocalSides, run_trl
from benchmarks.peers import NO_TRL, peer_python

BAR, DOUBLE_BAR = 1e-4, 1e-12
"""Of the relative difference of a figure in float32, and in float64."""
INTENDED_CASES = tuple(row.case for row in INTENDED if row.case is not None)


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
        """Relative difference; infinite if a figure is missing or not finite."""
        if self.ours == self.theirs:
            return 0.0
        difference = abs(self.ours - self.theirs) / max(abs(self.ours), abs(self.theirs))
        return difference if difference < float("inf") else float("inf")

    @property
    def bar(self) -> float:
        return DOUBLE_BAR if self.case.double else BAR

    @property
    def is_as_expected(self) -> bool:
        """Whether the figures agree or, for an intended difference, differ."""
        return (
            self.bar < self.relative < float("inf")
            if self.case in INTENDED_CASES
            else self.relative <= self.bar
        )


def compare(case: Case, mine: Figures, other: Figures) -> list[Difference]:
    """The difference of each figure of a case."""

    def value_of(figures: Figures, name: str) -> float:
        return figures.get(name, float("nan"))

    return [
        Difference(case, name, value_of(mine, case.names.get(name, name)), value_of(other, name))
        for name in case.figures
    ]


def run(
    make_inputs: Callable[[Path], Inputs], cases: Sequence[Case], python: Path
) -> list[Difference]:
    """Run both sides of every case on the same inputs, and print a table."""
    with TemporaryDirectory() as scratch:
        inputs = make_inputs(Path(scratch))
        trl_cases = [case for case in cases if case.peer == "TRL"]
        peer_results = run_trl(trl_cases, python, inputs, Path(scratch))
        trl_figures = iter(peer_results.figures)
        local_sides = LocalSides(inputs)
        versions = ", ".join(f"{name} {version}" for name, version in peer_results.versions.items())
        formulas = "HALOs and hindsight's paper by their formulas"
        print(f"\n{inputs.name}; {versions}; {formulas}", flush=True)
        print(f"{'':6}{'case':38}{'figure':22}{'Valence':>14}{'other':>14}{'relative':>10}")
        differences: list[Difference] = []
        for case in cases:
            other = next(trl_figures) if case.peer == "TRL" else local_sides.formulas(case)
            rows = compare(case, local_sides.ours(case), other)
            for row in rows:
                print(format_line(row), flush=True)
            differences += rows
    if not any(row.figure == "kl" and row.ours > 0 for row in differences):
        raise RuntimeError("every z0 is clamped, so the comparison would not cover it")
    return differences


def format_line(row: Difference) -> str:
    """A line of the table."""
    failure_mark = "" if row.is_as_expected else "  SHORT"
    intended_mark = "  meant" if row.case in INTENDED_CASES else ""
    numbers = f"{row.ours:14.7g}{row.theirs:14.7g}{row.relative:10.1e}"
    return (
        f"{row.case.peer:6}{row.case.name:38}{row.figure:22}{numbers}{intended_mark}{failure_mark}"
    )


def verdict(name_of_inputs: str, differences: Sequence[Difference]) -> str:
    """The largest difference of each figure over all cases, with its bar and `held` or `short`."""
    worst: dict[tuple[str, float], float] = {}
    for row in differences:
        if row.case not in INTENDED_CASES:
            key = row.figure, row.bar
            worst[key] = max(worst.get(key, 0.0), row.relative)
    parts = [
        f"{name}{' in float64' if bar == DOUBLE_BAR else ''} {value:.1e} (bar {bar:.0e}) "
        f"{'held' if value <= bar else 'short'}"
        for (name, bar), value in worst.items()
    ]
    intended = [row for row in differences if row.case in INTENDED_CASES]
    if intended:
        smallest = min(row.relative for row in intended)
        outcome = "held" if all(row.is_as_expected for row in intended) else "short"
        parts.append(f"smallest intended difference {smallest:.1e} (bar over {BAR:.0e}) {outcome}")
    return f"{name_of_inputs}: " + ", ".join(parts)


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
    differences_by_stage = {"tiny": run(tiny_inputs, (*CASES, *INTENDED_CASES), python)}
    if not quick:
        differences_by_stage["real"] = run(
            real_inputs, [case for case in CASES if case.real], python
        )
    print_intended()
    print("\n" + "; ".join(verdict(name, rows) for name, rows in differences_by_stage.items()))
    return (
        0
        if all(row.is_as_expected for rows in differences_by_stage.values() for row in rows)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
