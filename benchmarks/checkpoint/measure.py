"""A run with saves: step times during a save and without one, and the parts of a save."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.checkpoint.cases import Case, build
from benchmarks.step.memory import peak_above_idle
from valence.training import state_files
from valence.training.checkpoints import check
from valence.training.trainer import Trainer

WARM_UP_STEPS, STEPS_BETWEEN_SAVES = 3, 4
"""Steps before the first measurement, and steps without a save before each save."""
PARTS = ("snapshot", "write", "fsync", "checksum", "rename", "remove")
PATCHED: tuple[tuple[str, Any, str], ...] = (
    ("snapshot", state_files.Snapshot, "__init__"),
    ("write", state_files.Snapshot, "write"),
    ("fsync", os, "fsync"),
    ("checksum", hashlib, "file_digest"),
    ("rename", Path, "rename"),
    ("remove", shutil, "rmtree"),
)


@dataclass
class Figures:
    """Figures of one case, in seconds unless stated otherwise. Lists have one item per save, but
    ``steps`` one per step.

    weights: trained weights. size: bytes of a checkpoint. steps: steps without a save.
    call: the call that starts a background save. until_written: the steps until that save is on
    disk. during_write: ``until_written`` minus the same number of typical steps.
    synchronous: a save that blocks training; cpu_seconds: its processor time; parts: mean of each
    of its parts. peak: additional memory of a background save (MB).
    resume_seconds: checking the files, reading them, and restoring the state.
    copy_to_new, copy_to_existing: copying ``size`` bytes into new and into allocated memory.
    """

    weights: int
    size: int = 0
    steps: list[float] = field(default_factory=list[float])
    call: list[float] = field(default_factory=list[float])
    during_write: list[float] = field(default_factory=list[float])
    until_written: list[float] = field(default_factory=list[float])
    synchronous: list[float] = field(default_factory=list[float])
    cpu_seconds: list[float] = field(default_factory=list[float])
    parts: dict[str, float] = field(default_factory=dict[str, float])
    peak: float = 0.0
    resume_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    copy_to_new: float = 0.0
    copy_to_existing: float = 0.0

    @property
    def stall(self) -> float:
        """Median delay of training by a background save."""
        return median(
            call + during for call, during in zip(self.call, self.during_write, strict=True)
        )


class Finished(Exception):
    """Ends the run when all measurements are complete."""


def step_timer(
    timings: Sequence[Generator[None, float, None]],
) -> Callable[[Trainer, Mapping[str, Any]], None]:
    """A callback that sends the duration of each step to the only item of `timings`.

    Raises Finished when that generator ends.
    """
    step_end = 0.0

    def after_step(_: Trainer, __: Mapping[str, Any]) -> None:
        nonlocal step_end
        try:
            timings[0].send(time.perf_counter() - step_end)
        except StopIteration:
            raise Finished from None
        step_end = time.perf_counter()

    return after_step


def measure_case(
    case: Case, folder: Path, tokenizer: PreTrainedTokenizerBase, rounds: int
) -> Figures:
    """Train a case with saves, and resume from the last checkpoint."""
    torch.set_num_threads(case.threads)
    timings: list[Generator[None, float, None]] = []
    run = build(case, folder, tokenizer, (step_timer(timings),))
    figures = Figures(sum(p.numel() for p in run.state.trained_weights.values()))
    timings.append(measurement_loop(run, folder, figures, rounds))
    next(timings[0])
    with suppress(Finished):
        run.fit()
    assert run.folder is not None
    run.folder.close()
    figures.copy_to_new, figures.copy_to_existing = copies(figures.size)
    figures.resume_seconds = measure_resume(run, _checkpoint(folder))
    return figures


def measurement_loop(
    run: Trainer, folder: Path, figures: Figures, rounds: int
) -> Generator[None, float, None]:
    """Save between steps, and fill in ``figures``.

    The caller sends the duration of each step. The generator ends when all measurements are
    complete.
    """
    for _ in range(WARM_UP_STEPS):
        yield
    run.save()  # the first save also hashes the frozen weights
    seconds_while_writing: list[list[float]] = []
    for _ in range(rounds):
        yield
        for _ in range(STEPS_BETWEEN_SAVES):
            figures.steps.append((yield))
        start = time.perf_counter()
        run.save(wait=False)
        figures.call.append(time.perf_counter() - start)
        seconds_while_writing.append([])
        while is_saving():
            seconds_while_writing[-1].append((yield))
        yield
        start, cpu_start = time.perf_counter(), time.process_time()
        with time_parts() as parts:
            run.save()
        figures.synchronous.append(time.perf_counter() - start)
        figures.cpu_seconds.append(time.process_time() - cpu_start)
        for name in PARTS:
            figures.parts[name] = figures.parts.get(name, 0.0) + parts[name] / rounds
    typical = median(figures.steps)
    figures.during_write = [
        sum(seconds) - len(seconds) * typical for seconds in seconds_while_writing
    ]
    figures.until_written = [sum(seconds) for seconds in seconds_while_writing]
    yield
    figures.peak = peak_above_idle(lambda: save_in_background(run))[1]
    figures.size = sum(path.stat().st_size for path in _checkpoint(folder).iterdir())


def save_in_background(run: Trainer) -> None:
    run.save(wait=False)
    while is_saving():
        time.sleep(0.01)


def is_saving() -> bool:
    """Whether a background save is in progress."""
    return any(thread.name.startswith("save ") for thread in threading.enumerate())


def _checkpoint(folder: Path) -> Path:
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return checkpoint


@contextmanager
def time_parts() -> Iterator[Mapping[str, float]]:
    """Yield a mapping that accumulates the seconds of each part of a save, over all threads."""
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as patches:
        for name, owner, attribute in PATCHED:
            patches.enter_context(
                patch.object(
                    owner, attribute, _with_timer(getattr(owner, attribute), name, seconds)
                )
            )
        yield seconds


def _with_timer(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call_with_timer(*args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            spent[name] += time.perf_counter() - start

    return call_with_timer


def measure_resume(run: Trainer, path: Path) -> tuple[float, float, float]:
    """Seconds for checking the files of a checkpoint, reading its state, and restoring it."""
    timestamps = [time.perf_counter()]
    check(path)
    timestamps.append(time.perf_counter())
    state = state_files.load(path)
    timestamps.append(time.perf_counter())
    run.load_state_dict(state)
    timestamps.append(time.perf_counter())
    start, checked, loaded, restored = timestamps
    return checked - start, loaded - checked, restored - loaded


def copies(size: int) -> tuple[float, float]:
    """Median seconds of five copies of ``size`` bytes into new memory and into allocated memory."""
    source = torch.ones(size, dtype=torch.uint8)
    copy_to_new: list[float] = []
    copy_to_existing: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        target = source.clone()
        copy_to_new.append(time.perf_counter() - start)
        start = time.perf_counter()
        target.copy_(source)
        copy_to_existing.append(time.perf_counter() - start)
        del target
    return median(copy_to_new), median(copy_to_existing)
