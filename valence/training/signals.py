"""SIGINT and SIGTERM: a step is finished first, anything else ends at once, and a second signal always does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console


class Stop:
    """What signals have asked for. While ``patient`` the first one only sets ``requested``; else it raises KeyboardInterrupt."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.requested = False
        self.patient = False

    def _signalled(self, number: int, _: Any) -> None:
        if self.requested or not self.patient:
            raise KeyboardInterrupt
        self.requested = True
        self.console.print(f"{signal.Signals(number).name}: finishing the step; once more ends at once", style="yellow")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block the first signal is kept for later."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Both signals come here inside the block."""
        before: dict[int, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._signalled)
        except ValueError:  # not the main thread: signals are somebody else's business
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
