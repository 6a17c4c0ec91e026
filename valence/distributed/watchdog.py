"""Find out which process does not reach a collective, and end a process that waits for it too long.

Every process records its last collective in a store that all can read. PyTorch's monitored barrier
and flight recorder do not replace this: dev/decisions/0042-pytorch-for-processes.md.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from valence.errors import UserError
from valence.terminal import write_line

MAX_RANKS = 8
"""Ranks that a message names at most."""
POLL_INTERVAL = 1.0
"""Seconds."""
MIN_PAUSE, MAX_PAUSE = 0.001, 0.25
"""Seconds between two looks at a phase of another process."""
STATUS = 2
"""Exit status of a process that the watchdog ends."""


@dataclass(frozen=True)
class Collective:
    """A collective: its number in this process, from 1, and its name."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"`{self.name}` #{self.number}"


class CollectiveTracker:
    """The last collective of every process of a group, in a store of rank 0 or its launcher."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    def subgroup(self, name: str, ranks: Sequence[int]) -> CollectiveTracker:
        """A tracker for the collectives of some of these ranks."""
        return CollectiveTracker(PrefixStore(name, self.store), self.rank, ranks)

    def record(self, collective: Collective) -> None:
        """Record that this process enters a collective. Does not block."""
        self.store.set(f"at/{self.rank}", f"{collective.number} {collective.name}")

    def wait_for_all(self, seconds: float) -> None:
        """Block until every rank has recorded something. Raises RuntimeError after ``seconds``."""
        self.store.wait([f"at/{rank}" for rank in self.ranks], timedelta(seconds=seconds))

    def missing_ranks(self) -> list[int]:
        """The ranks that have recorded nothing yet."""
        return [rank for rank in self.ranks if not self.store.check([f"at/{rank}"])]

    def last_collectives(self) -> dict[int, Collective] | None:
        """The last collective of every other rank, or None if the store does not answer."""
        ranks = [rank for rank in self.ranks if rank != self.rank]
        values: list[bytes] = []

        def read() -> None:
            with suppress(RuntimeError):
                values.extend(self.store.multi_get([f"at/{rank}" for rank in ranks]))

        # In a thread that may be abandoned: after its timeout, the store cancels the request at
        # rank 0's host, and waits for the answer to that for ever.
        reader = threading.Thread(target=read, name="collectives", daemon=True)
        reader.start()
        reader.join(self.store.timeout.total_seconds())  # pyright: ignore[reportAttributeAccessIssue]
        if len(values) < len(ranks):
            return None
        parts = [value.decode().partition(" ") for value in values]
        return {
            rank: Collective(int(number), name)
            for rank, (number, _, name) in zip(ranks, parts, strict=True)
        }

    @contextmanager
    def reporting(self, phase: str, interval: float) -> Iterator[Callable[[], None]]:
        """Inside the block, report every ``interval`` seconds that a phase of this process goes on.

        The value of the block makes every process in ``wait_for_end`` call its ``assist`` once.
        """
        ended = threading.Event()
        num_calls = 0

        def report() -> None:
            num_reports = 0
            while not ended.wait(interval):
                num_reports += 1
                with suppress(RuntimeError):  # the others notice that reports are missing
                    self.store.set(f"{phase}/report", str(num_reports))

        def call_assistants() -> None:
            nonlocal num_calls
            num_calls += 1
            self.store.set(f"{phase}/calls", str(num_calls))

        reporter = threading.Thread(target=report, name="phase", daemon=True)
        reporter.start()
        try:
            yield call_assistants
        finally:
            ended.set()
            reporter.join()
            with suppress(RuntimeError):
                self.store.set(f"{phase}/end", "")

    def wait_for_end(self, phase: str, assist: Callable[[], object], deadline: float) -> bool:
        """Block until a phase ends in the process that reports it. assist: see ``reporting``.

        Returns False if there is no report for ``deadline`` seconds.
        """
        report, since, num_calls, pause = b"", time.monotonic(), 0, MIN_PAUSE
        while True:
            has_ended = self.store.check([f"{phase}/end"])
            requested = int(self._value(f"{phase}/calls") or 0)
            if num_calls < requested:
                num_calls += 1
                assist()
                since, pause = time.monotonic(), MIN_PAUSE
            elif has_ended:
                return True
            latest = self._value(f"{phase}/report")
            if latest != report:
                report, since = latest, time.monotonic()
            if time.monotonic() - since > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_PAUSE)

    def _value(self, key: str) -> bytes:
        """A value of the store; empty if it is not set."""
        return self.store.get(key) if self.store.check([key]) else b""

    def error(self, current: Collective, waited: float | None) -> UserError:
        """The error of a collective that failed: which ranks did not reach it, and where they are.

        waited: seconds, if they exceed the deadline; None if a connection broke.
        """
        others = self.last_collectives()
        code = "rank-lost" if waited is None else "rank-late"
        when = (
            f"within {waited:g} s"
            if waited is not None
            else "before a connection to another process broke"
        )
        if others is None:
            message = (
                f"{current} did not end {when}, and it is unknown which process is missing: rank "
                f"0, or its launcher, does not answer{_address(self.store)}"
            )
        elif behind := {
            rank: last for rank, last in others.items() if last.number < current.number
        }:
            message = f"{_ranks(behind)} did not reach {current} {when} ({_positions(behind)})"
        elif diverged := {
            rank: last
            for rank, last in others.items()
            if last.number == current.number and last.name != current.name
        }:
            code = "ranks-parted"
            message = (
                f"the processes run different collectives: this one runs {current}, "
                f"{_positions(diverged)}"
            )
        else:
            gone = f"rank {next(iter(others))}" if len(others) == 1 else "one of them"
            message = (
                f"{current} did not end {when}: all processes reached it, so {gone} has ended or "
                f"cannot be reached"
            )
        fix = "read the last output of these processes, and check whether their hosts are reachable"
        return UserError(message, code=code, where=f"rank {self.rank}", fix=fix)


def _address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""


def _ranks(ranks: Mapping[int, Collective]) -> str:
    names = ", ".join(map(str, list(ranks)[:MAX_RANKS]))
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"ranks {names}{more}" if len(ranks) > 1 else f"rank {names}"


def _positions(ranks: Mapping[int, Collective]) -> str:
    first = list(ranks.items())[:MAX_RANKS]
    rows = [(f"rank {rank}" if len(ranks) > 1 else "it", last) for rank, last in first]
    return ", ".join(
        f"{name} was last at {last}" if last.number else f"{name} has only started"
        for name, last in rows
    )


class CollectiveWatchdog:
    """Ends this process when a collective stays the device's next one for longer than the deadline.

    The host continues while a collective is queued on a device, and then blocks on the device: only
    another thread can check the time. deadline: seconds. error: the message for a collective.
    device: of this process. A thread starts with device 0, where its first call would create a
    context of several hundred megabytes for every process of the host.
    """

    def __init__(
        self, deadline: float, error: Callable[[Collective], UserError], device: torch.device
    ) -> None:
        self._deadline, self._error, self._device = deadline, error, device
        self._queued: deque[tuple[Collective, torch.cuda.Event]] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._poll, name="watchdog", daemon=True).start()

    def add(self, collective: Collective) -> None:
        """Watch the collective that was queued last."""
        done = torch.cuda.Event()
        done.record()
        self._queued.append((collective, done))

    def close(self) -> None:
        self._closed.set()

    def _poll(self) -> None:
        torch.cuda.set_device(self._device)
        since = time.monotonic()
        while not self._closed.wait(min(POLL_INTERVAL, self._deadline / 4)):
            if not self._queued or self._queued[0][1].query():
                since = time.monotonic()
            while self._queued and self._queued[0][1].query():
                self._queued.popleft()
            if time.monotonic() - since > self._deadline:
                write_line(f"valence: {self._error(self._queued[0][0])}", sys.stderr)
                os._exit(STATUS)
