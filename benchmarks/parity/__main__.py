"""python -m benchmarks.parity [--quick]: is a step of Valence the step that TRL takes?

Exit status: 0 all figures held, 1 some fell short, 2 there is no environment with TRL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.parity.cases import CASES, Case
from benchmarks.parity.sides import Figures, ours, theirs
from benchmarks.parity.stages import Stage, real_stage, tiny_stage
from benchmarks.peers import HOW_TO, peer_python

BAR = 1e-4


@dataclass(frozen=True)
class Difference:
    """One figure of one case on both sides. A figure that either side lacks, or that is not finite, is infinitely far off."""

    case: Case
    figure: str
    ours: float
    theirs: float

    @property
    def relative(self) -> float:
        if self.ours == self.theirs:
            return 0.0
        found = abs(self.ours - self.theirs) / max(abs(self.ours), abs(self.theirs))
        return found if found < float("inf") else float("inf")

    @property
    def held(self) -> bool:
        return self.relative <= BAR


def compared(case: Case, mine: Figures, other: Figures) -> list[Difference]:
    missing = float("nan")
    return [Difference(case, name, mine.get(name, missing), other.get(name, missing)) for name in case.figures]


def run(stage_of: Callable[[Path], Stage], python: Path) -> list[Difference]:
    """Both sides of every case on one stage, as a table on the way."""
    with TemporaryDirectory() as scratch:
        stage = stage_of(Path(scratch))
        found = theirs(python, stage, Path(scratch))
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        print(f"\n{stage.name}; {versions}", flush=True)
        print(f"{'case':38}{'figure':20}{'Valence':>16}{'TRL':>16}{'relative':>10}")
        differences: list[Difference] = []
        for case, other in zip(CASES, found.figures, strict=True):
            rows = compared(case, ours(case, stage), other)
            for row in rows:
                print(f"{case.name:38}{row.figure:20}{row.ours:16.8g}{row.theirs:16.8g}{row.relative:10.1e}", flush=True)
            differences += rows
    if not any(row.figure == "kl" and row.ours > 0 for row in differences):
        raise RuntimeError("every z0 is at its clamp: the comparison would say nothing about it")
    return differences


def verdict(stage: str, differences: list[Difference]) -> str:
    """The largest difference of each figure over all cases, its bar, and whether it held."""
    worst: dict[str, float] = {}
    for row in differences:
        worst[row.figure] = max(worst.get(row.figure, 0.0), row.relative)
    parts = [f"{name} {value:.1e} (bar {BAR:.0e}) {'held' if value <= BAR else 'short'}" for name, value in worst.items()]
    return f"{stage}: " + ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the tiny random model")
    quick = parser.parse_args().quick
    python = peer_python()
    if python is None:
        print(HOW_TO, file=sys.stderr)
        return 2
    stages = {"tiny": tiny_stage} if quick else {"tiny": tiny_stage, "real": real_stage}
    disable_progress_bar()
    found = {name: run(stage, python) for name, stage in stages.items()}
    print("\n" + "; ".join(verdict(name, rows) for name, rows in found.items()))
    return 0 if all(row.held for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
