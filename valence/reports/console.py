"""What a run says on the terminal: progress of long phases, tables, and how numbers are written for
people.
"""

from __future__ import annotations

import html
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakKeyDictionary

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from valence.reports.formatting import duration, number, rate, text, visible
from valence.terminal import print_message

SHOWN = {"loss": "loss", "reward/mean": "reward", "rewards/margins": "margin", "kl": "kl"}
"""Metrics that stand beside the bar, with the words for them."""

WINDOW = 50
"""Updates over which rate and time left are measured."""


class Board(Protocol):
    """Something drawn on a console for longer, inside which the phases that run meanwhile have
    their bars.
    """

    def enter(self, phase: Progress) -> None: ...

    def leave(self, phase: Progress) -> None: ...

    def changed(self) -> None: ...


BOARDS: WeakKeyDictionary[Console, Board] = WeakKeyDictionary()
"""Those that are drawn now."""


def draws(console: Console) -> bool:
    """Whether bars are drawn there, not plain lines printed."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not getattr(console, "plain", False)
    )


def esc(value: object) -> str:
    """Any value as HTML text."""
    return html.escape(text(value))


class Progress:
    """Progress of one phase, as a context manager: a bar on a terminal, inside the board that is
    drawn there if there is one; elsewhere plain lines, at most one every ``every`` seconds and
    always the first and the last; nothing when ``quiet``.

    ``start``: how much was done before (a resumed run). ``brief``: no line of a phase that is over
    within ``every`` seconds. Rate and time left are measured over the latest updates, leaving out
    what passed before the first one, which pays for warming up.
    """

    def __init__(
        self,
        console: Console,
        phase: str,
        total: int,
        *,
        start: int = 0,
        quiet: bool = False,
        every: float = 5.0,
        brief: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._phase, self._total, self._quiet = console, visible(phase), total, quiet
        self._every, self._clock = every, clock
        self._silent_until = clock() + every if brief else 0.0
        self._away = 0.0
        self._done = start
        self._metrics: Mapping[str, object] = {}
        self._points: deque[tuple[float, int, int | None]] = deque(maxlen=WINDOW)
        self._printed_at: float | None = None
        self._printed_done: int | None = None
        self._bar: Bar | None = None
        self._board: Board | None = None

    def __enter__(self) -> Self:
        self._first = (self._now(), self._done, 0)
        if not self._quiet and draws(self._console):
            self._draw()
        return self

    def _draw(self) -> None:
        self._board = BOARDS.get(self._console)
        if self._board:
            self._board.enter(self)
            return
        self._bar = _bar(self._console)
        self._task = self._bar.add_task(
            self._phase, total=self._total, completed=self._done, status=""
        )
        self._bar.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._board:
            self._board.leave(self)
        elif self._bar:
            self._bar.update(self._task, status=self._status(ended=True))
            self._bar.stop()
        elif not self._quiet:
            self._print(ended=True)

    def update(self, done: int, *, tokens: int | None = None) -> None:
        """``done``: of the total so far; ``tokens``: run through in this phase so far."""
        self._done = done
        point = (self._now(), done, tokens)
        if self._points and self._points[-1][1] == done:
            self._points[-1] = point  # the same amount said again, with more to say about it
        else:
            self._points.append(point)
        if self._board:
            self._board.changed()
        elif self._bar:
            self._bar.update(self._task, completed=done, status=self._status())
        elif not self._quiet and (
            self._printed_at is None or self._now() - self._printed_at >= self._every
        ):
            self._print()

    def record(self, metrics: Mapping[str, object]) -> None:
        """Takes in a record of the log: its main numbers stand beside the bar from the next update
        on.
        """
        self._metrics = metrics

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Take a bar away while another phase runs inside this one; its time does not count for the
        rate.
        """
        began = self._clock()
        if self._bar:
            self._bar.stop()
        try:
            yield
        finally:
            self._away += self._clock() - began
            if self._bar:
                self._bar.start()

    @property
    def name(self) -> str:
        return self._phase

    @property
    def amount(self) -> tuple[int, int]:
        """How much is done, of how much."""
        return self._done, self._total

    def _now(self) -> float:
        return self._clock() - self._away

    def _print(self, ended: bool = False) -> None:
        status = self._status(ended)
        if (
            ended and self._printed_done == self._done == self._total
        ) or self._clock() < self._silent_until:
            return
        self._printed_at, self._printed_done = self._now(), self._done
        line = f"{self._phase} {self._done}/{self._total}  {status}".rstrip()
        print_message(self._console, line)

    def _status(self, ended: bool = False) -> str:
        parts = [self.speed(ended)]
        for name, word in SHOWN.items():
            value = self._metrics.get(name)
            if isinstance(value, (int, float)):
                parts.append(f"{word} {number(value)}")
        return "  ".join(part for part in parts if part)

    def speed(self, ended: bool = False) -> str:
        """Tokens per second (or items, when no tokens are known) and the time left; at the end the
        time taken.
        """
        if not self._points:
            return ""
        last = self._points[-1]
        first = self._points[0] if len(self._points) > 1 and not ended else self._first
        seconds, done = last[0] - first[0], last[1] - first[1]
        if seconds <= 0 or done <= 0:
            return ""
        if last[2] is None or first[2] is None:
            speed = rate(done / seconds, "it")
        else:
            speed = rate((last[2] - first[2]) / seconds)
        if ended or last[1] >= self._total:
            return f"{speed}  {duration(self._now() - self._first[0])}"
        return f"{speed}  {duration((self._total - last[1]) * seconds / done)} left"


def _bar(console: Console) -> Bar:
    status = TextColumn(
        "{task.fields[status]}",
        markup=False,
        table_column=Column(no_wrap=True, overflow="ellipsis"),
    )
    phase = TextColumn("{task.description}", markup=False)
    # Twice a second is enough for people, and leaves the processor to the training.
    return Bar(
        phase,
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        status,
        console=console,
        refresh_per_second=2,
    )
