"""Starts a command in several processes of this host, and ends as one process would.

torchrun's engine cannot serve here. After a signal it gives processes 30 seconds and then kills
them, which may be less than a save takes; it ends with status 1 where ``valence`` documents others;
SIGUSR1 ends it; the first process that has saved and ended counts as a failure, for which the
others are signalled again, and a second signal ends them at once. Under torchrun itself all that is
as torchrun has it. This module imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from valence.errors import UserError
from valence.terminal import write_line

LISTENS = "VALENCE_STORE_FD"
"""Names the socket on which rank 0 is to listen: opened here, so that no other program can take the
port in between.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MISTAKE, OUT_OF_TIME = 2, 124
STOPPED = (OUT_OF_TIME, *(128 + number for number in SIGNALS))
"""Statuses of a process that was asked to end, and has saved."""
GRACE = 6.0
"""Seconds in which a process may end by itself when another has failed, or when it was asked twice.

Longer than it looks whether another has failed before it says so itself: it is to leave its folder
in order.
"""
ECHO = 2.0
"""Seconds within which the same signal once more (but for Ctrl-C) is the same one: schedulers send
it twice.
"""
KEPT = 1 << 16
"""Bytes, the last, of what a process said that are shown when it fails."""
LOOKS_EVERY = 0.05
PR_SET_PDEATHSIG = 1


def needed(nproc: int | None) -> bool:
    """Whether processes are to be started: several are asked for, and this is not one of them.

    Raises UserError when there are others already, and not as many.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE"))
    if nproc is None or local is None:
        return nproc is not None
    if int(local) != nproc:
        what = f"{nproc} processes are asked for where {local} have been started"
        raise UserError(
            what,
            code="nproc-conflict",
            where="--nproc",
            fix="leave it out under torchrun and accelerate launch",
        )
    return False


def usable_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    arguments: Sequence[str],
    nproc: int,
    *,
    program: Sequence[str] = (sys.executable, "-m", "valence"),
) -> int:
    """Runs the program with these arguments in nproc processes that know of each other, and returns
    their exit status.

    That is 0; 124, 130, 138 or 143 when all have stopped and saved; else that of the first that
    failed: 2 for a mistake, 1 for all else. Its error is shown first and once, the others are
    ended. Signals reach each process once and are waited for. Rank 0 has this process's output;
    what the others say is shown when they fail. Raises UserError for fewer than 1.
    """
    if nproc < 1:
        raise UserError(
            f"{nproc} is no number of processes",
            code="nproc-invalid",
            where="--nproc",
            fix="give at least 1",
        )
    asked: list[int] = []
    with ExitStack() as ending:
        for number in SIGNALS:
            ending.callback(
                signal.signal, number, signal.signal(number, lambda number, _: asked.append(number))
            )
        return _Launched([*program, *arguments], nproc, asked, ending).wait()


class _Worker:
    """One of the processes.

    What it says passes through here, but for what rank 0 prints, so that a terminal stays one.
    """

    def __init__(
        self, command: Sequence[str], rank: int, listening: socket.socket, nproc: int
    ) -> None:
        self.rank = rank
        self.said = b""
        self._passes, self._passing = rank == 0, threading.Lock()
        self.process = subprocess.Popen(
            command,
            env=_environment(rank, nproc, listening),
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            # else Ctrl-C in a terminal would reach it both from there and from here
            start_new_session=True,
            preexec_fn=_with_parent,
            pass_fds=(listening.fileno(),) if rank == 0 else (),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)

    def listen(self) -> None:
        self._reader.start()

    def hush(self) -> str:
        """From now on nothing that it says is passed on. Returns the last of what was."""
        with self._passing:
            self._passes = False
            return self.said.decode(errors="replace")

    def _read(self) -> None:
        stream = self.process.stderr or self.process.stdout
        assert stream is not None
        with stream as pipe, open(2, "wb", closefd=False) as ours:
            while chunk := os.read(pipe.fileno(), KEPT):
                with self._passing:
                    self.said = (self.said + chunk)[-KEPT:]
                    if self._passes:
                        ours.write(chunk)
                        ours.flush()

    @property
    def status(self) -> int | None:
        """None while it runs; 128 and the signal's number when one ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def words(self) -> str:
        """The last that it said."""
        if self._reader.is_alive():
            self._reader.join(GRACE)  # what it started may still hold the other end
        return self.said.decode(errors="replace").strip()


class _Launched:
    def __init__(
        self, command: Sequence[str], nproc: int, asked: list[int], ending: ExitStack
    ) -> None:
        self.asked = asked
        self.workers: list[_Worker] = []
        self._last, self._at, self._kill_at = 0, float("-inf"), float("inf")
        ending.callback(self._end)
        with socket.create_server(("127.0.0.1", 0), backlog=nproc) as listening:
            for rank in range(nproc):
                self.workers.append(_Worker(command, rank, listening, nproc))
        for worker in self.workers:  # no thread before all are forked
            worker.listen()

    def wait(self) -> int:
        while True:
            while self.asked:
                self._pass_on(self.asked.pop(0))
            if time.monotonic() > self._kill_at:
                return 128 + self._last  # what still runs is killed on the way out
            statuses = [worker.status for worker in self.workers]
            for worker, status in zip(self.workers, statuses, strict=True):
                if status not in (None, 0, *STOPPED):
                    return self._failed(worker, status)
            if None not in statuses:
                return next((status for status in statuses if status), 0)
            time.sleep(LOOKS_EVERY)

    def _pass_on(self, number: int) -> None:
        now = time.monotonic()
        if number == self._last and number != signal.SIGINT and now - self._at < ECHO:
            return
        if self._last:
            self._kill_at = now + GRACE
        self._last, self._at = number, now
        self._signal(number)

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            worker.process.send_signal(number)  # which does nothing to one that has ended

    def _failed(self, worker: _Worker, status: int) -> int:
        """Shows the error of a process.

        Rank 0 says nothing any more: it would only say the same, or that another is missing.
        """
        words = worker.words()
        passed = self.workers[0].hush()
        mistake = (
            words[words.rfind("valence: ") :] if status == MISTAKE and "valence: " in words else ""
        )
        shown = worker.rank == 0 or (mistake and mistake in passed)
        lines = [] if shown or not words else [mistake or f"rank {worker.rank} says:\n{words}"]
        if status > 128:
            why = (
                ", as the system does when there is no memory left"
                if status - 128 == signal.SIGKILL
                else ""
            )
            lines.append(
                f"rank {worker.rank} was ended by {signal.Signals(status - 128).name}{why}"
            )
        if lines:
            write_line("\n".join(lines), sys.stderr)
        return MISTAKE if status == MISTAKE else 1

    def _end(self) -> None:
        """No process is left."""
        if time.monotonic() < self._kill_at:
            self._signal(signal.SIGTERM)
            ends = time.monotonic() + GRACE
            while any(worker.status is None for worker in self.workers) and time.monotonic() < ends:
                time.sleep(LOOKS_EVERY)
        self._signal(signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
            worker.words()


def _environment(rank: int, nproc: int, listening: socket.socket) -> dict[str, str]:
    cores = usable_cores()
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), "PYTHONFAULTHANDLER": "1"}
    ours = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": listening.getsockname()[1],
    } | ({LISTENS: listening.fileno()} if rank == 0 else {})
    return defaults | dict(os.environ) | {name: str(value) for name, value in ours.items()}


_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _with_parent() -> None:
    """In a new process: should the one that started it be killed, it is asked to end (and
    saves).
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
