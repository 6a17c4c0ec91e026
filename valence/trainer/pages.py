"""Update the report page of a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MIN_INTERVAL, MAX_SHARE = 20.0, 1 / 50
"""The page is written at most once in this many seconds, and takes at most this share of the time.
"""


class Pages:
    """Write the report page when it is due. Failures are reported once and stop nothing."""

    def __init__(
        self, folder: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._due = clock() + MIN_INTERVAL
        self._has_warned = False

    def update(self) -> None:
        """Write the page if it is due."""
        began = self._clock()
        if began < self._due:
            return
        self.write("running")
        now = self._clock()
        self._due = now + max(MIN_INTERVAL, (now - began) / MAX_SHARE)

    def write(self, status: str) -> None:
        """Write the page. status: the run's status on it."""
        from valence.reports.page import write_page

        try:
            write_page(self._folder, status)
        except Exception as error:  # a defect of the page must not end training
            if not self._has_warned:
                self._warn(f"the report page cannot be written ({error!r})")
            self._has_warned = True
