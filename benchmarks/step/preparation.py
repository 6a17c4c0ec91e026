"""Measure how long training waits for micro-batches that are prepared at the start of a step, or in
a thread during the previous step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.step.cases import WAITING_BAR, Case
from benchmarks.step.inputs import Models, draw_sets
from benchmarks.step.valence_side import StepTimes, ValenceSide

NUM_SETS = 2
HEADER = f"\n  {'':24}{'s/step':>8}{'waiting':>10}{'prepared ahead: s/step':>25}{'waiting':>10}"


@dataclass(frozen=True)
class Preparation:
    """Rounds of consecutive steps of a case, without and with preparation ahead."""

    case: Case
    inline: list[StepTimes]
    ahead: list[StepTimes]
    steps: int

    @property
    def waiting(self) -> float:
        """Share of training (percent) for which the main thread waits for micro-batches."""
        return waiting_share(self.ahead)

    def __str__(self) -> str:
        inline, ahead = (
            f"{median(times.total for times in rounds) / self.steps:{width}.3f}"
            f"{waiting_share(rounds):9.3f}%"
            for rounds, width in ((self.inline, 8), (self.ahead, 25))
        )
        return f"  {self.case.name:24}{inline}{ahead}"


def waiting_share(rounds: list[StepTimes]) -> float:
    """Share of time (percent) in which the main thread waits or prepares."""
    return 100 * sum(times.waiting for times in rounds) / sum(times.total for times in rounds)


def measure_preparation(ours: ValenceSide, *, rounds: int, steps: int) -> Preparation:
    """Run a case's steps both ways. The order changes from round to round."""
    times: dict[bool, list[StepTimes]] = {False: [], True: []}
    for turn in range(rounds):
        for ahead in (False, True) if turn % 2 == 0 else (True, False):
            times[ahead].append(ours.consecutive_steps(steps, ahead=ahead))
    return Preparation(ours.case, times[False], times[True], steps)


def measure_all(
    cases: tuple[Case, ...],
    models_of: Callable[[Case], Models],
    cache: Path,
    dtype: torch.dtype,
    *,
    quick: bool,
) -> list[Preparation]:
    """Measure each case, and print its line."""
    print(
        f"{HEADER}\n  (waiting: main thread, for micro-batches; bar {WAITING_BAR}% of a step)",
        flush=True,
    )
    preparations: list[Preparation] = []
    for case in cases:
        torch.compiler.reset()
        sets = draw_sets(case, NUM_SETS)
        ours = ValenceSide(case, models_of(case), sets, cache, dtype=dtype, checkpointing=False)
        for number in range(NUM_SETS):
            ours.rows(number)  # caches values of the reference
        rounds, steps = (2, 2) if quick else (4, 4)
        preparations.append(measure_preparation(ours, rounds=rounds, steps=steps))
        print(preparations[-1], flush=True)
    return preparations
