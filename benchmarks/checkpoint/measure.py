"""A run with saves: step times during a save and without one, and the parts of a save."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
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
from valence.runs import store
from valence.runs.checkpoints import check
from valence.trainer.trainer import Trainer

WARM, QUIET = 3, 4
"""Steps before anything is measured, and steps without a save before each save."""
PARTS = ("snapshot", "write", "fsync", "checksum", "rename", "remove")
SEAMS: tuple[tuple[str, Any, str], ...] = (
    ("snapshot", store.Snapshot, "__init__"),
    ("write", store.Snapshot, "write"),
    ("fsync", os, "fsync"),
    ("checksum", hashlib, "file_digest"),
    ("rename", Path, "rename"),
    ("remove", shutil, "rmtree"),
)


@dataclass
class Figures:
    """All of one case, in seconds and bytes. steps: those without a save; a number of each save in
    all other lists.

    during_write: additional seconds of the steps until the save was on disk, compared with as many
    steps without a save; written: all seconds of these steps.
    at_once: a save that is waited for, with its parts, and ``worked`` its seconds of processors.
    peak: memory (MB) of a save in the background. resumed: checking the files, reading them, and
    taking them up. fresh, warm: a copy of as many bytes as the files have, into new memory and into
    memory that is there.
    """

    weights: int
    size: int = 0
    steps: list[float] = field(default_factory=list[float])
    call: list[float] = field(default_factory=list[float])
    during_write: list[float] = field(default_factory=list[float])
    written: list[float] = field(default_factory=list[float])
    at_once: list[float] = field(default_factory=list[float])
    worked: list[float] = field(default_factory=list[float])
    parts: dict[str, float] = field(default_factory=dict[str, float])
    peak: float = 0.0
    resumed: tuple[float, float, float] = (0.0, 0.0, 0.0)
    fresh: float = 0.0
    warm: float = 0.0

    @property
    def stall(self) -> float:
        """By how much a save in the background delays training."""
        return median(
            call + during for call, during in zip(self.call, self.during_write, strict=True)
        )


class Enough(Exception):
    """All has been measured."""


def measured(case: Case, folder: Path, tokenizer: PreTrainedTokenizerBase, rounds: int) -> Figures:
    """Trains a case, saving in between, and resumes from the checkpoint."""
    torch.set_num_threads(case.threads)
    timings: list[Generator[None, float, None]] = []
    ended = 0.0

    def after_step(_: Trainer, __: Mapping[str, Any]) -> None:
        nonlocal ended
        try:
            timings[0].send(time.perf_counter() - ended)
        except StopIteration:
            raise Enough from None
        ended = time.perf_counter()

    run = build(case, folder, tokenizer, (after_step,))
    figures = Figures(sum(p.numel() for p in run.state.trained_weights.values()))
    timings.append(_script(run, folder, figures, rounds))
    next(timings[0])
    with suppress(Enough):
        run.fit()
    assert run.folder is not None
    run.folder.close()
    figures.fresh, figures.warm = copies(figures.size)
    figures.resumed = _resumed(run, _checkpoint(folder))
    return figures


def _script(
    run: Trainer, folder: Path, figures: Figures, rounds: int
) -> Generator[None, float, None]:
    """What is done between steps.

    It is sent the seconds of each, and ends when all has been measured.
    """
    for _ in range(WARM):
        yield
    run.save()  # the first one also hashes what is frozen
    slowed: list[list[float]] = []
    for _ in range(rounds):
        yield
        for _ in range(QUIET):
            figures.steps.append((yield))
        began = time.perf_counter()
        run.save(wait=False)
        figures.call.append(time.perf_counter() - began)
        slowed.append([])
        while writing():
            slowed[-1].append((yield))
        yield
        began, before = time.perf_counter(), time.process_time()
        with timed() as parts:
            run.save()
        figures.at_once.append(time.perf_counter() - began)
        figures.worked.append(time.process_time() - before)
        for name in PARTS:
            figures.parts[name] = figures.parts.get(name, 0.0) + parts[name] / rounds
    usual = median(figures.steps)
    figures.during_write = [sum(seconds) - len(seconds) * usual for seconds in slowed]
    figures.written = [sum(seconds) for seconds in slowed]
    yield
    figures.peak = peak_above_idle(lambda: _in_background(run))[1]
    figures.size = sum(path.stat().st_size for path in _checkpoint(folder).iterdir())


def _in_background(run: Trainer) -> None:
    run.save(wait=False)
    while writing():
        time.sleep(0.01)


def writing() -> bool:
    """Whether a save goes on in the background."""
    return any(thread.name.startswith("save ") for thread in threading.enumerate())


def _checkpoint(folder: Path) -> Path:
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return checkpoint


@contextmanager
def timed() -> Iterator[Mapping[str, float]]:
    """Seconds spent in each part of a save, in whatever thread."""
    spent: dict[str, float] = defaultdict(float)
    with ExitStack() as patches:
        for name, owner, attribute in SEAMS:
            patches.enter_context(
                patch.object(owner, attribute, _clocked(getattr(owner, attribute), name, spent))
            )
        yield spent


def _clocked(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def clocked(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            spent[name] += time.perf_counter() - began

    return clocked


def _resumed(run: Trainer, path: Path) -> tuple[float, float, float]:
    """Seconds to check the files of a checkpoint, to read its state, and to take it up."""
    moments = [time.perf_counter()]
    check(path)
    moments.append(time.perf_counter())
    state = store.load(path)
    moments.append(time.perf_counter())
    run.load_state_dict(state)
    moments.append(time.perf_counter())
    begun, checked, read, written = moments
    return checked - begun, read - checked, written - read


def copies(size: int) -> tuple[float, float]:
    """Seconds of a copy of this size, into new memory and into memory that is there: medians of
    five.
    """
    source = torch.ones(size, dtype=torch.uint8)
    fresh: list[float] = []
    warm: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        target = source.clone()
        fresh.append(time.perf_counter() - began)
        began = time.perf_counter()
        target.copy_(source)
        warm.append(time.perf_counter() - began)
        del target
    return median(fresh), median(warm)
