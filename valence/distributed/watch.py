"""Deadlines on a device: the host goes on while a collective is queued there, so that somebody else
must look at the clock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from valence.distributed.posts import Place
from valence.errors import UserError
from valence.terminal import write_line

EVERY = 1.0
"""Seconds between two looks."""
STATUS = 2


class CollectiveWatchdog:
    """Ends this process when a collective is the device's next for longer than the deadline
    (seconds). The main thread cannot be
    told: it waits for the device. late: what to say of the place.
    """

    def __init__(self, deadline: float, late: Callable[[Place], UserError]) -> None:
        self._deadline, self._late = deadline, late
        self._queued: deque[tuple[Place, torch.cuda.Event]] = deque()
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="collectives", daemon=True).start()

    def add(self, place: Place) -> None:
        """The collective that was queued last."""
        done = torch.cuda.Event()
        done.record()
        self._queued.append((place, done))

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        since = time.monotonic()
        while not self._closed.wait(min(EVERY, self._deadline / 4)):
            if not self._queued or self._queued[0][1].query():
                since = time.monotonic()
            while self._queued and self._queued[0][1].query():
                self._queued.popleft()
            if time.monotonic() - since > self._deadline:
                write_line(f"valence: {self._late(self._queued[0][0])}", sys.stderr)
                os._exit(STATUS)
