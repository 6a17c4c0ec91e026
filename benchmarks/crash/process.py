"""A training process, or several that one starts.

They record their position in shared memory, and can kill themselves at a chosen file operation.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.crash.forked import popen_forks

PRELOADED = [
    "benchmarks.crash.forked",
    "valence.cli",
    "valence.api",
    "valence.reports.page",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "torch.utils.flop_counter",
    "torch._dynamo",
    "peft.tuners.lora.bnb",
    "plotly.offline",
]
"""What every process needs and nothing changes: loaded once, before it is forked."""
LOADING, TRAINING, EVALUATION, FINISHING = range(4)
LAUNCHER = -1


class Notes(ctypes.Structure):
    """Of a process: its id, its phase, optimizer steps that it ran, file operations of saves and
    others, whether it has killed one, and when it was ready to train (seconds of the machine's
    monotonic clock, 0: never).
    """

    _fields_ = (
        ("pid", ctypes.c_int),
        ("phase", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("saving", ctypes.c_int),
        ("other", ctypes.c_int),
        ("killed", ctypes.c_int),
        ("ready", ctypes.c_double),
    )


@dataclass(frozen=True)
class Kill:
    """When: at file operation number ``at`` (from 1) of saves, or of others in the run's folder; in
    step ``at``, as soon as the weights have changed; or after ``at`` seconds. who: the rank of the
    process; or LAUNCHER, in what rank 0 does.
    """

    by: Literal["saving", "other", "steps", "seconds"]
    at: float
    who: int = 0


DIRECTORY = {
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 2,
    "os.chmod": 2,
    "os.rename": 2,
    "shutil.rmtree": 1,
}
"""Events of operations on a path, and which of their arguments is the directory that it is relative
to.
"""
WRITES = os.O_WRONLY | os.O_RDWR


def operations(act: Callable[[str, str], None]) -> None:
    """From now on calls ``act`` with the name and the path of every operation of this process that
    changes files, before it happens. What it raises prevents the operation. There is no way back
    but to have ``act`` do nothing.
    """

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in DIRECTORY:
            act(
                event,
                _path(args[0], args[DIRECTORY[event]] if len(args) > DIRECTORY[event] else None),
            )
        elif (
            event == "open" and isinstance(args[2], int) and args[2] & WRITES
        ) or event == "os.truncate":
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


def train(recipe: str, run: str, notes: Sequence[Notes], kill: Kill | None, command: str) -> None:
    """`valence train`, in a process that was forked for it, or in several. said: a file for what it
    prints.
    """
    if len(os.listdir(f"/proc/{os.getppid()}/task")) > 1:
        sys.exit("the parent had threads when it forked")
    out = os.open(command, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.argv = ["valence", "train", recipe, f"run.dir={run}"]
    launcher = os.getpid()
    if len(notes) > 1:
        sys.argv += ["--nproc", str(len(notes))]
        with popen_forks(lambda: _work(run, notes, kill, launcher)):
            _main()
    else:
        _work(run, notes, kill, launcher)


def _work(run: str, notes: Sequence[Notes], kill: Kill | None, launcher: int) -> None:
    """A process that trains."""
    rank = int(os.environ.get("RANK", "0"))
    rank_notes = notes[rank]
    rank_notes.pid = os.getpid()

    def count(kind: str) -> None:
        setattr(rank_notes, kind, getattr(rank_notes, kind) + 1)
        ours = kill is not None and kill.by == kind and rank == max(kill.who, 0)
        if (
            kill is not None
            and ours
            and getattr(rank_notes, kind) >= kill.at
            and not rank_notes.killed
        ):
            rank_notes.killed = 1
            os.kill(launcher if kill.who == LAUNCHER else rank_notes.pid, signal.SIGKILL)

    def changes(_: str, path: str) -> None:
        if path.startswith(run + os.sep):
            count("saving" if path[len(run) + 1 :].startswith("checkpoints") else "other")

    _note(rank_notes, lambda: count("steps"))
    operations(changes)
    from tqdm import std

    from valence.distributed import process_group

    vars(std)[
        "TqdmDefaultWriteLock"
    ].mp_lock = None  # a semaphore, which would outlive a process that is killed
    process_group.HEAD_START = 0.3  # long enough for who started it to see which one failed first
    _main()


def _main() -> None:
    from valence.cli import main

    main()


def _note(notes: Notes, stepped: Callable[[], None]) -> None:
    """Has the run tell its phase and its steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from valence.trainer.trainer import Trainer

    @contextmanager
    def during(phase: int, after: int | None = None):
        before, notes.phase = notes.phase, phase
        yield
        notes.phase = before if after is None else after

    fit, evaluate = Trainer.fit, Trainer.evaluate

    def noted_fit(self: Trainer) -> dict[str, float]:
        notes.ready = time.monotonic()
        with during(TRAINING, after=FINISHING):
            return fit(self)

    def noted_evaluate(self: Trainer, rows: Any = None, *, name: str = "eval") -> Any:
        with during(EVALUATION):
            return evaluate(self, rows, name=name)

    Trainer.fit, Trainer.evaluate = noted_fit, noted_evaluate
    register_optimizer_step_post_hook(lambda *_: stepped())
