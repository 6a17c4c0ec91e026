"""Training processes that record their progress in shared memory, and kill themselves at a chosen
file operation or step.
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
"""Modules that the fork server imports once for all training processes."""
LOADING, TRAINING, EVALUATION, FINISHING = range(4)
LAUNCHER = -1


class ProcessRecord(ctypes.Structure):
    """Progress of a process, in shared memory.

    phase: one of LOADING to FINISHING. steps: number of optimizer steps. saving, other: number of
    file operations in checkpoints, and elsewhere in the run's folder. killed: whether the process
    has sent the kill. ready: monotonic time (s) at which training started; 0 if it did not.
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
    """When to kill which process.

    by: "saving" and "other" count file operations (see ``ProcessRecord``), "steps" counts optimizer
    steps, where the kill follows the change of the weights; all from 1. "seconds": time since the
    start. at: the number of the operation or step, or the seconds. who: rank of the process, or
    LAUNCHER, which is killed at an operation or step of rank 0.
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
"""Audit events with a path, and the index of the argument ``dir_fd`` that the path is relative to.
"""
WRITES = os.O_WRONLY | os.O_RDWR


def on_file_change(callback: Callable[[str, str], None]) -> None:
    """Call ``callback`` with the name and path of every operation of this process that changes a
    file, before the operation.

    An exception of ``callback`` prevents the operation. An audit hook cannot be removed.
    """

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in DIRECTORY:
            callback(
                event,
                _path(args[0], args[DIRECTORY[event]] if len(args) > DIRECTORY[event] else None),
            )
        elif (
            event == "open" and isinstance(args[2], int) and args[2] & WRITES
        ) or event == "os.truncate":
            callback(event, _path(args[0], None))

    def fsync(handle: Any) -> None:
        callback("os.fsync", _path(handle if isinstance(handle, int) else handle.fileno(), None))
        flush(handle)

    flush, os.fsync = os.fsync, fsync
    sys.addaudithook(audit)


def _path(name: Any, directory: int | None) -> str:
    """Absolute path of a name or file descriptor. directory: ``dir_fd`` of the call."""
    if isinstance(name, int):
        return os.readlink(f"/proc/self/fd/{name}")
    path = os.fsdecode(name)
    if not os.path.isabs(path) and directory is not None and directory >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
    return os.path.abspath(path)


def train(
    recipe: str, run: str, records: Sequence[ProcessRecord], kill: Kill | None, output: str
) -> None:
    """Run `valence train` in this forked process, or launch further ones.

    records: one for each rank. output: path of the file for stdout and stderr.
    """
    if len(os.listdir(f"/proc/{os.getppid()}/task")) > 1:
        sys.exit("the parent had threads when it forked")
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["valence", "train", recipe, f"run.dir={run}"]
    launcher = os.getpid()
    if len(records) > 1:
        sys.argv += ["--nproc", str(len(records))]
        with popen_forks(lambda: _train_on_rank(run, records, kill, launcher)):
            _main()
    else:
        _train_on_rank(run, records, kill, launcher)


def _train_on_rank(
    run: str, records: Sequence[ProcessRecord], kill: Kill | None, launcher: int
) -> None:
    """Train on this rank, record its progress, and kill a process when ``kill`` says."""
    rank = int(os.environ.get("RANK", "0"))
    record = records[rank]
    record.pid = os.getpid()

    def count(kind: str) -> None:
        setattr(record, kind, getattr(record, kind) + 1)
        is_kill_here = kill is not None and kill.by == kind and rank == max(kill.who, 0)
        if (
            kill is not None
            and is_kill_here
            and getattr(record, kind) >= kill.at
            and not record.killed
        ):
            record.killed = 1
            os.kill(launcher if kill.who == LAUNCHER else record.pid, signal.SIGKILL)

    def on_change(_: str, path: str) -> None:
        if path.startswith(run + os.sep):
            count("saving" if path[len(run) + 1 :].startswith("checkpoints") else "other")

    _record_progress(record, lambda: count("steps"))
    on_file_change(on_change)
    from tqdm import std

    from valence.distributed import process_group

    # a semaphore would outlive a killed process
    vars(std)["TqdmDefaultWriteLock"].mp_lock = None
    # long enough for the launcher to see which process failed first
    process_group.HEAD_START = 0.3
    _main()


def _main() -> None:
    from valence.cli import main

    main()


def _record_progress(record: ProcessRecord, on_step: Callable[[], None]) -> None:
    """Record the phase of training, and call ``on_step`` after each optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from valence.training.trainer import Trainer

    @contextmanager
    def during(phase: int, after: int | None = None):
        before, record.phase = record.phase, phase
        yield
        record.phase = before if after is None else after

    fit, evaluate = Trainer.fit, Trainer.evaluate

    def recorded_fit(self: Trainer) -> dict[str, float]:
        record.ready = time.monotonic()
        with during(TRAINING, after=FINISHING):
            return fit(self)

    def recorded_evaluate(self: Trainer, rows: Any = None, *, name: str = "eval") -> Any:
        with during(EVALUATION):
            return evaluate(self, rows, name=name)

    Trainer.fit, Trainer.evaluate = recorded_fit, recorded_evaluate
    register_optimizer_step_post_hook(lambda *_: on_step())
