"""Run all cases: check that both sides compute the same, time them, and compare the figures with
their bars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.step import THREADS
from benchmarks.step.cases import SMALL_STEPS, TINY, Case, Lengths, Shape
from benchmarks.step.inputs import Models, save_models
from benchmarks.step.measure import FULL, QUICK, Plan, Result, exact, measure
from benchmarks.step.peer import Peer
from benchmarks.step.preparation import measure_all
from benchmarks.step.report import table, verdict

EXACT_BAR = 1e-4


def small(case: Case) -> Case:
    """The case with a model and rows so small that float32 is fast."""
    return replace(case, shape=TINY, prompt=Lengths(12, 40), completion=Lengths(8, 30))


def compare(
    cases: tuple[Case, ...], peer: Peer | None, scratch: Path, *, quick: bool, float32: bool
) -> int:
    """Print every case's table as it finishes, then the verdict. Return the exit status.

    Without a peer, measures only how long training waits for micro-batches.
    """
    torch.set_num_threads(THREADS)
    disable_progress_bar()

    @cache
    def models(shape: Shape, lora: bool) -> Models:
        folder = scratch / f"{shape.name} {lora}"
        # large weights, so that every term of a loss affects the result
        difference = {"scale": 3.0, "noise": 0.3} if shape is TINY else {}
        return save_models(shape, folder, lora=lora, **difference)

    def models_of(case: Case) -> Models:
        return models(case.shape, case.lora)

    plan = QUICK if quick else FULL
    plan = plan.in_float32 if float32 else plan
    results: list[Result] | None = []
    if peer is not None:
        results = compare_with_peer(cases, models_of, peer, scratch, plan)
        if results is None:
            return 1
    preparations = measure_all(
        (*cases, SMALL_STEPS), models_of, scratch / "prepared", plan.dtype, quick=quick
    )
    line, is_reached = verdict(results, preparations)
    print(f"\n{line}")
    return 0 if is_reached else 1


def compare_with_peer(
    cases: tuple[Case, ...],
    models_of: Callable[[Case], Models],
    peer: Peer,
    scratch: Path,
    plan: Plan,
) -> list[Result] | None:
    """Print every case's table as it finishes. None: the sides do not compute the same."""
    versions = ", ".join(f"{name} {version}" for name, version in peer.ask("versions").items())
    print(f"TRL's environment: {versions}; {THREADS} threads on both sides", flush=True)
    difference, worst_case = exact(tuple(map(small, cases)), models_of, peer, scratch / "exact")
    print(
        f"float32, small model: losses and gradient norms agree to {difference:.0e} (bar "
        f"{EXACT_BAR:.0e}; {worst_case})",
        flush=True,
    )
    if not difference <= EXACT_BAR:
        print("no times, because the sides do not compute the same. short")
        return None
    results: list[Result] = []
    for case in cases:
        results.append(measure(case, models_of(case), peer, scratch / "values", plan))
        print(table(results[-1]), flush=True)
    return results
