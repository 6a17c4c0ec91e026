"""Start a command in several processes of this host, with the exit status of a single process.

torchrun's agent cannot replace this module. After a signal it kills processes within 30 seconds,
which may be shorter than a save. It ends with status 1 where ``valence`` documents others. SIGUSR1
ends it. It treats the first process that has saved and ended as a failure and signals the others
again, and a second signal ends them at once. Under torchrun these limits apply. This module imports
no torch.
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

LISTEN_FD_VARIABLE = "VALENCE_STORE_FD"
"""Environment variable with the file descriptor of rank 0's listening socket. The launcher opens
it, so that no other program can take the port before rank 0 listens.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MISTAKE, OUT_OF_TIME = 2, 124
STOPPED = (OUT_OF_TIME, *(128 + number for number in SIGNALS))
"""Exit statuses of a process that has saved after a request to stop."""
GRACE = 6.0
"""Seconds that a process has to end by itself after another has failed, or after a second signal.

Longer than a process waits before it raises the error of a collective, so that it can clean up its
folder.
"""
REPEAT_INTERVAL = 2.0
"""Seconds within which a repeated signal (except Ctrl-C) is ignored: schedulers send it twice."""
MAX_OUTPUT = 1 << 16
"""Bytes at the end of a process's output that are shown when it fails."""
POLL_INTERVAL = 0.05
PR_SET_PDEATHSIG = 1


def needs_launch(nproc: int | None) -> bool:
    """Whether the command must start processes: several are requested, and this is not one of them.

    Raises UserError if a different number of processes has been started already.
    """
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE"))
    if nproc is None or started is None:
        return nproc is not None
    if int(started) != nproc:
        raise UserError(
            f"--nproc is {nproc}, but the launcher (torchrun, accelerate) started {started} "
            "processes",
            code="nproc-conflict",
            where="--nproc",
            fix="remove --nproc, and set the number of processes in the launcher",
        )
    return False


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    arguments: Sequence[str],
    nproc: int,
    *,
    program: Sequence[str] = (sys.executable, "-m", "valence"),
) -> int:
    """Run the program with these arguments in ``nproc`` connected processes.

    Returns the exit status: 0; 124, 130, 138 or 143 if all have stopped and saved; otherwise that
    of the first process that failed: 2 for a user's mistake, 1 for other errors. Its error is shown
    once, and the others are ended. Each signal is forwarded once, and the launcher waits for its
    effect. Rank 0 writes to this process's output; the output of others is shown if they fail.
    Raises UserError for fewer than 1 process.
    """
    if nproc < 1:
        raise UserError(
            "--nproc must be at least 1",
            code="nproc-invalid",
            where="--nproc",
            fix="set it to a number of processes, or remove it to use one process",
        )
    signals: list[int] = []
    with ExitStack() as cleanup:
        for number in SIGNALS:
            previous = signal.signal(number, lambda number, _: signals.append(number))
            cleanup.callback(signal.signal, number, previous)
        return _Launcher([*program, *arguments], nproc, signals, cleanup).wait()


class _Worker:
    """One of the processes.

    Its output passes through the launcher, except for the standard output of rank 0, which may be a
    terminal.
    """

    def __init__(
        self, command: Sequence[str], rank: int, listening: socket.socket, nproc: int
    ) -> None:
        self.rank = rank
        self._output = b""
        self._is_forwarded, self._lock = rank == 0, threading.Lock()
        self.process = subprocess.Popen(
            command,
            env=_environment(rank, nproc, listening),
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            # otherwise Ctrl-C reaches it from the terminal and from the launcher
            start_new_session=True,
            preexec_fn=end_with_parent,
            pass_fds=(listening.fileno(),) if rank == 0 else (),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start_reading(self) -> None:
        self._reader.start()

    def stop_forwarding(self) -> str:
        """Forward no more output. Returns the end of the output so far."""
        with self._lock:
            self._is_forwarded = False
            return self._output.decode(errors="replace")

    def _read(self) -> None:
        stream = self.process.stderr or self.process.stdout
        assert stream is not None
        with stream as pipe, open(2, "wb", closefd=False) as stderr:
            while chunk := os.read(pipe.fileno(), MAX_OUTPUT):
                with self._lock:
                    self._output = (self._output + chunk)[-MAX_OUTPUT:]
                    if self._is_forwarded:
                        stderr.write(chunk)
                        stderr.flush()

    @property
    def status(self) -> int | None:
        """None while it runs; 128 plus the signal's number if a signal ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def output(self) -> str:
        """The end of its output, after it has ended."""
        if self._reader.is_alive():
            self._reader.join(GRACE)  # its child processes may still hold the pipe
        return self._output.decode(errors="replace").strip()


class _Launcher:
    def __init__(
        self, command: Sequence[str], nproc: int, signals: list[int], cleanup: ExitStack
    ) -> None:
        self._signals = signals
        self._workers: list[_Worker] = []
        self._last, self._last_time, self._kill_time = 0, float("-inf"), float("inf")
        cleanup.callback(self._end_all)
        with socket.create_server(("127.0.0.1", 0), backlog=nproc) as listening:
            for rank in range(nproc):
                self._workers.append(_Worker(command, rank, listening, nproc))
        for worker in self._workers:  # no thread before all are forked
            worker.start_reading()

    def wait(self) -> int:
        """The exit status, once all have ended or one has failed."""
        while True:
            while self._signals:
                self._forward(self._signals.pop(0))
            if time.monotonic() > self._kill_time:
                return 128 + self._last  # cleanup kills processes that still run
            statuses = [worker.status for worker in self._workers]
            for worker, status in zip(self._workers, statuses, strict=True):
                if status not in (None, 0, *STOPPED):
                    return self._report_failure(worker, status)
            if None not in statuses:
                return next((status for status in statuses if status), 0)
            time.sleep(POLL_INTERVAL)

    def _forward(self, number: int) -> None:
        now = time.monotonic()
        is_repeated = number == self._last and now - self._last_time < REPEAT_INTERVAL
        if is_repeated and number != signal.SIGINT:
            return
        if self._last:
            self._kill_time = now + GRACE
        self._last, self._last_time = number, now
        self._signal(number)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            worker.process.send_signal(number)  # without effect on one that has ended

    def _report_failure(self, worker: _Worker, status: int) -> int:
        """Show the error of a process. Returns the exit status.

        Output of rank 0 is no longer forwarded: it would repeat the error, or report that another
        process is missing.
        """
        output = worker.output()
        forwarded = self._workers[0].stop_forwarding()
        mistake = (
            output[output.rfind("valence: ") :]
            if status == MISTAKE and "valence: " in output
            else ""
        )
        is_shown = worker.rank == 0 or (mistake and mistake in forwarded)
        lines = (
            []
            if is_shown or not output
            else [mistake or f"output of rank {worker.rank}:\n{output}"]
        )
        if status > 128:
            reason = (
                ", which the system sends when there is no memory left"
                if status - 128 == signal.SIGKILL
                else ""
            )
            name = signal.Signals(status - 128).name
            lines.append(f"rank {worker.rank} was ended by {name}{reason}")
        if lines:
            write_line("\n".join(lines), sys.stderr)
        return MISTAKE if status == MISTAKE else 1

    def _end_all(self) -> None:
        """End all processes: with SIGTERM, then with SIGKILL."""
        if time.monotonic() < self._kill_time:
            self._signal(signal.SIGTERM)
            end = time.monotonic() + GRACE
            while any(worker.status is None for worker in self._workers) and time.monotonic() < end:
                time.sleep(POLL_INTERVAL)
        self._signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()
            worker.output()


def _environment(rank: int, nproc: int, listening: socket.socket) -> dict[str, str]:
    cores = usable_cores()
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), "PYTHONFAULTHANDLER": "1"}
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": listening.getsockname()[1],
    } | ({LISTEN_FD_VARIABLE: listening.fileno()} if rank == 0 else {})
    return defaults | dict(os.environ) | {name: str(value) for name, value in variables.items()}


_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """In a new process: receive SIGTERM (and save) if the launcher is killed."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
