"""One training process. It notes where it is in memory that outlives it, and can kill itself at a chosen file operation."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

PRELOADED = [
    "valence.cli", "valence.api", "valence.report.page", "peft", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "torch.utils.flop_counter", "torch._dynamo",
]  # fmt: skip
"""What every process needs and nothing changes: loaded once, before it is forked."""
LOADING, TRAINING, EVALUATION, FINISHING = range(4)


class Notes(ctypes.Structure):
    """Of a process: its phase, optimizer steps that it ran, file operations of saves and others, and when it was ready to train
    (seconds of the machine's monotonic clock, 0: never)."""

    _fields_ = (
        ("phase", ctypes.c_int), ("steps", ctypes.c_int), ("saving", ctypes.c_int), ("other", ctypes.c_int),
        ("ready", ctypes.c_double),
    )  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """When: at file operation number ``at`` (from 1) of saves, or of others in the run's folder; or after ``at`` seconds."""

    by: Literal["saving", "other", "seconds"]
    at: float


DIRECTORY = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.chmod": 2, "os.rename": 2, "shutil.rmtree": 1}
"""Events of operations on a path, and which of their arguments is the directory that it is relative to."""
WRITES = os.O_WRONLY | os.O_RDWR


def operations(act: Callable[[str, str], None]) -> None:
    """From now on calls ``act`` with the name and the path of every operation of this process that changes files, before it
    happens. What it raises prevents the operation. There is no way back but to have ``act`` do nothing."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in DIRECTORY:
            act(event, _path(args[0], args[DIRECTORY[event]] if len(args) > DIRECTORY[event] else None))
        elif (event == "open" and isinstance(args[2], int) and args[2] & WRITES) or event == "os.truncate":
            act(event, _path(args[0], None))

    def fsync(handle: Any) -> None:
        act("os.fsync", _path(handle if isinstance(handle, int) else handle.fileno(), None))
        flush(handle)

    flush, os.fsync = os.fsync, fsync
    sys.addaudithook(audit)


def _path(name: Any, directory: int | None) -> str:
    if isinstance(name, int):
        return os.readlink(f"/proc/self/fd/{name}")
    where = os.fsdecode(name)
    if not os.path.isabs(where) and directory is not None and directory >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{directory}"), where)
    return os.path.abspath(where)


def train(recipe: str, run: str, notes: Notes, kill: Kill | None, said: str) -> None:
    """`valence train`, in a process that was forked for it. said: a file for what it prints."""
    if len(os.listdir(f"/proc/{os.getppid()}/task")) > 1:
        sys.exit("the parent had threads when it forked")
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    _note(notes)

    def count(_: str, path: str) -> None:
        if not path.startswith(run + os.sep):
            return
        kind = "saving" if path[len(run) + 1 :].startswith("checkpoints") else "other"
        setattr(notes, kind, getattr(notes, kind) + 1)
        if kill is not None and kill.by == kind and getattr(notes, kind) >= kill.at:
            os.kill(os.getpid(), signal.SIGKILL)

    operations(count)
    from tqdm import std

    from valence.cli import main

    vars(std)["TqdmDefaultWriteLock"].mp_lock = None  # a semaphore, which would outlive a process that is killed
    sys.argv = ["valence", "train", recipe, f"run.dir={run}"]
    main()


def _note(notes: Notes) -> None:
    """Has the run tell its phase and its steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from valence.training.loop import Run

    @contextmanager
    def during(phase: int, after: int | None = None):
        before, notes.phase = notes.phase, phase
        yield
        notes.phase = before if after is None else after

    fit, evaluate = Run.fit, Run.evaluate

    def noted_fit(self: Run) -> dict[str, float]:
        notes.ready = time.monotonic()
        with during(TRAINING, after=FINISHING):
            return fit(self)

    def noted_evaluate(self: Run, rows: Any = None, *, name: str = "eval") -> Any:
        with during(EVALUATION):
            return evaluate(self, rows, name=name)

    Run.fit, Run.evaluate = noted_fit, noted_evaluate
    register_optimizer_step_post_hook(lambda *_: setattr(notes, "steps", notes.steps + 1))
