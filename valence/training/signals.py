"""Stop a run early on SIGINT, SIGTERM, SIGUSR1, SIGHUP or when its time is over.

A step is finished first; everything else ends at once. A second signal always ends at once.
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
"""Exit status at the end of run.max_time, like that of the `timeout` command.

The status of a signal is 128 plus its number.
"""


DUPLICATE_SECONDS, DUPLICATE_KEY_SECONDS = 2.0, 0.2
"""A repetition of the same signal within this time is ignored. Ctrl-C, which people press twice,
has a shorter time.
"""


class Interrupted(KeyboardInterrupt):
    """A signal or the clock ends the program.

    status: the exit status. at_once: after a second signal, the program exits without saving.
    """

    def __init__(self, reason: str, status: int, at_once: bool = False) -> None:
        super().__init__(reason)
        self.status, self.at_once = status, at_once


class Stop:
    """Requests to stop by signals and the clock.

    While ``patient``, the first request only sets ``requested``; otherwise it raises Interrupted.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.reason = ""
        self.status = 0
        self.patient = False
        self.where = ""
        """Appended to the reason in the message of Interrupted."""
        self._began = self._requested_at = time.monotonic()
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
            self._ask("run.max_time was reached", OUT_OF_TIME)
        return bool(self.reason)

    def limit(self, seconds: float) -> None:
        """End the run this many seconds after the creation of this object (0: never).

        Interrupts the main thread, whatever it is doing.
        """
        if not seconds:
            return
        self._ends_at = self._began + seconds
        if self._listens:
            self._clock = threading.Timer(max(0.0, self._ends_at - time.monotonic()), self._call)
            self._clock.daemon = True
            self._clock.start()

    def no_limit(self) -> None:
        """Remove the time limit."""
        self._ends_at = float("inf")
        if self._clock:
            self._clock.cancel()

    def _call(self) -> None:
        self._clock_calls = True
        _thread.interrupt_main()

    def ended(self, at_once: bool = False) -> Interrupted:
        message = ": ".join(text for text in (self.reason, self.where) if text)
        return Interrupted(message, self.status, at_once)

    def _ask(self, reason: str, status: int) -> None:
        self.reason, self.status, self._requested_at = reason, status, time.monotonic()
        if self.patient:
            signal_name = "a signal (Ctrl-C)" if self.out_of_time else "a second signal"
            message = (
                f"{reason}: finishing the current step; send {signal_name} to stop immediately"
            )
            print_message(self.console, message, "yellow")

    def adopt(self, reason: str, status: int) -> None:
        """Stop because another process of the run received a request to stop."""
        if not self.reason:
            self._ask(reason, status)

    def _signalled(self, number: int, _: Any) -> None:
        by_clock, self._clock_calls = self._clock_calls, False
        if by_clock and self.reason:
            return  # already stopping
        if self.reason:
            interval = DUPLICATE_KEY_SECONDS if number == signal.SIGINT else DUPLICATE_SECONDS
            if number + 128 == self.status and time.monotonic() - self._requested_at < interval:
                return  # schedulers and terminals may signal a job and also its processes
            raise self.ended(at_once=True)
        if by_clock:
            self._ask("run.max_time was reached", OUT_OF_TIME)
        else:
            self._ask(signal.Signals(number).name, 128 + number)
        if not self.patient:
            raise self.ended()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block, the first signal does not raise."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        before: dict[int, Any] = {}
        try:
            for number in SIGNALS:
                # ignored, for example by nohup, or not handled by Python
                if signal.getsignal(number) not in (
                    signal.SIG_IGN,
                    None,
                ):
                    before[number] = signal.signal(number, self._signalled)
            self._listens = True
        except ValueError:  # only the main thread may handle signals
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

    is_synchronized: whether all processes have reached the same point, so that they can save when
    the run ends.
    """

    def __init__(self, local: Stop, world: Group) -> None:
        self.local, self.world = local, world
        self.is_synchronized = world.size == 1

    def requested(self) -> bool:
        """Whether any process has a request to stop; then all of them stop. All processes call it.

        A request that arrives later does not count, because the other processes do not know it.
        """
        is_requested = self.world.any(self.local.requested)
        if is_requested and self.world.size > 1:
            requests = gather_objects(self.world, [self.local.reason, self.local.status])
            self.local.adopt(*next(request for request in requests if request[0]))
            self.is_synchronized = True
        return is_requested

    def check(self) -> None:
        """Raise Interrupted on all processes if any has a request to stop. All processes call
        it.
        """
        if self.requested():
            raise self.local.ended()

    def deferred(self) -> AbstractContextManager[None]:
        """Inside the block, signals are kept for the next ``check`` if there are other processes.

        Those would wait for a process that ended alone.
        """
        return self.local.waiting() if self.world.size > 1 else nullcontext()
