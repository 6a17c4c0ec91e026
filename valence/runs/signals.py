"""What ends a run early: SIGINT, SIGTERM, SIGUSR1, SIGHUP and the clock.

A step is finished first, anything else ends at once, and a second signal always does.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console

from valence.distributed.process_group import Group, gather_objects
from valence.terminal import print_message

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
OUT_OF_TIME = 124
"""Exit status when run.max_time is over: that of the `timeout` command.

Of a signal it is 128 and its number.
"""


ECHO, ECHO_OF_A_KEY = 2.0, 0.2
"""Seconds within which the same signal once more is taken for the same one; of Ctrl-C, which people
press twice.
"""


class Interrupted(KeyboardInterrupt):
    """Something asked the program to end.

    ``status``: its exit status. ``at_once``: it was asked for twice, so nothing is done any more
    but leaving.
    """

    def __init__(self, reason: str, status: int, at_once: bool = False) -> None:
        super().__init__(reason)
        self.status, self.at_once = status, at_once


class Stop:
    """What signals and the clock have asked for.

    While ``patient`` the first only sets ``requested``; else it raises Interrupted.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.reason = ""
        self.status = 0
        self.patient = False
        self.where = ""
        """What is added to the reason when it ends."""
        self._began = self._asked_at = time.monotonic()
        self._ends_at = float("inf")
        self._listens = False
        self._clock: threading.Timer | None = None
        self._clock_calls = False

    @property
    def out_of_time(self) -> bool:
        return self.status == OUT_OF_TIME

    @property
    def requested(self) -> bool:
        if not self.reason and time.monotonic() >= self._ends_at:
            self._ask("run.max_time is over", OUT_OF_TIME)
        return bool(self.reason)

    def limit(self, seconds: float) -> None:
        """Ends the run so many seconds after this object was made (0: never), whatever the main
        thread is busy with then.
        """
        if not seconds:
            return
        self._ends_at = self._began + seconds
        if self._listens:
            self._clock = threading.Timer(max(0.0, self._ends_at - time.monotonic()), self._call)
            self._clock.daemon = True
            self._clock.start()

    def no_limit(self) -> None:
        """There is nothing left that could take long."""
        self._ends_at = float("inf")
        if self._clock:
            self._clock.cancel()

    def _call(self) -> None:
        self._clock_calls = True
        _thread.interrupt_main()

    def ended(self, at_once: bool = False) -> Interrupted:
        said = ": ".join(part for part in (self.reason, self.where) if part)
        return Interrupted(said, self.status, at_once)

    def _ask(self, reason: str, status: int) -> None:
        self.reason, self.status, self._asked_at = reason, status, time.monotonic()
        if self.patient:
            message = f"{reason}: finishing what is under way; another signal ends at once"
            print_message(self.console, message, "yellow")

    def take_over(self, reason: str, status: int) -> None:
        """Another process of the run was asked to stop."""
        if not self.reason:
            self._ask(reason, status)

    def _signalled(self, number: int, _: Any) -> None:
        by_clock, self._clock_calls = self._clock_calls, False
        if by_clock and self.reason:
            return  # it stops already
        if self.reason:
            echo = ECHO_OF_A_KEY if number == signal.SIGINT else ECHO
            if number + 128 == self.status and time.monotonic() - self._asked_at < echo:
                return  # a scheduler or a terminal may send it to a job and to its processes
            raise self.ended(at_once=True)
        if by_clock:
            self._ask("run.max_time is over", OUT_OF_TIME)
        else:
            self._ask(signal.Signals(number).name, 128 + number)
        if not self.patient:
            raise self.ended()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block the first signal is kept for later."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    @contextmanager
    def listening(self) -> Iterator[None]:
        """All of them come here inside the block."""
        before: dict[int, Any] = {}
        try:
            for number in SIGNALS:
                # ignored, as nohup has it, or not Python's
                if signal.getsignal(number) not in (
                    signal.SIG_IGN,
                    None,
                ):
                    before[number] = signal.signal(number, self._signalled)
            self._listens = True
        except ValueError:  # not the main thread: signals are somebody else's business
            pass
        try:
            yield
        finally:
            if self._clock:
                self._clock.cancel()
            self._listens, self._ends_at = False, float("inf")
            for number, handler in before.items():
                signal.signal(number, handler)


class SharedStop:
    """The requests to stop of all processes of a run.

    is_synchronized: whether all processes have reached the same place, so that they may save what
    there is when something ends the run.
    """

    def __init__(self, local: Stop, world: Group) -> None:
        self.local, self.world = local, world
        self.is_synchronized = world.size == 1

    def requested(self) -> bool:
        """Whether any process was asked to stop; then all of them are. All processes call it.

        A request that reaches this process later does not count: the others do not know of it.
        """
        is_requested = self.world.any(self.local.requested)
        if is_requested and self.world.size > 1:
            requests = gather_objects(self.world, [self.local.reason, self.local.status])
            self.local.take_over(*next(request for request in requests if request[0]))
            self.is_synchronized = True
        return is_requested

    def check(self) -> None:
        """Raise Interrupted on all processes when any was asked to stop. All processes call it."""
        if self.requested():
            raise self.local.ended()

    def deferred(self) -> AbstractContextManager[None]:
        """Inside the block, signals are kept for the next ``check`` if there are other processes.

        Those would wait for a process that ended alone.
        """
        return self.local.waiting() if self.world.size > 1 else nullcontext()
