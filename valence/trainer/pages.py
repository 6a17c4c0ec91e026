"""The page of a run, written again as the run goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

EVERY, SHARE = 20.0, 50.0
"""The page is written at most every so many seconds, and takes at most one part in so many of the
time.
"""


class Pages:
    """When the page is due, and that it failed, which is told once and keeps nothing else from
    going on.
    """

    def __init__(
        self, folder: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._due = clock() + EVERY
        self._told = False

    def update(self) -> None:
        """Writes the page if it is due."""
        began = self._clock()
        if began < self._due:
            return
        self.write("running")
        now = self._clock()
        self._due = now + max(EVERY, SHARE * (now - began))

    def write(self, status: str) -> None:
        """status: that the page says the run has."""
        from valence.reports.page import write_page

        try:
            write_page(self._folder, status)
        except (
            Exception
        ) as error:  # the page is for reading: a defect of it must not end a training
            if not self._told:
                self._warn(f"cannot write the page ({error!r})")
            self._told = True
