"""What a run says on the terminal: progress of long phases, tables, and how numbers are written for
people.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

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


STEERING = (range(0x7F, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
"""Codes of controls, of embeddings, overrides and isolates of the direction, which would go on
behind a text, of surrogates.
"""
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {code: 0xFFFD for codes in STEERING for code in codes}
"""What stands for characters that steer a terminal or are no text."""

BOARDS: WeakKeyDictionary[Console, Board] = WeakKeyDictionary()
"""Those that are drawn now."""


def draws(console: Console) -> bool:
    """Whether bars are drawn there, not plain lines printed."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not getattr(console, "plain", False)
    )


def visible(text: str) -> str:
    """The text with control characters (except newline and tab) as their pictures, and lone
    surrogates and what turns the direction of the text behind it replaced, so that data can neither
    steer a terminal nor make a file that is not UTF-8.
    """
    return text.translate(PICTURES)


def esc(value: object) -> str:
    """Any value as HTML text."""
    return html.escape(text(value))


def number(value: float | int) -> str:
    """A number at about four digits: ``1,234``, ``0.6931``, ``1.23e-05``."""
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def text(value: object) -> str:
    """Any value for people: numbers as ``number`` does, a dash for what is absent or empty, a list
    or mapping with commas, deeper ones as JSON.
    """
    if value is None or value in ({}, [], ()):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, (list, tuple)) and not any(map(_is_container, value)):
        return ", ".join(text(item) for item in value)
    if isinstance(value, Mapping) and not any(map(_is_container, value.values())):
        return ", ".join(f"{text(key)} {text(item)}" for key, item in value.items())
    return visible(exact(value))


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def exact(value: object) -> str:
    """A value as it would stand in a recipe, not rounded: 5 for 5.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def duration(seconds: float) -> str:
    """Seconds as ``0.4s``, ``12s``, ``3m12s``, ``2h03m`` or ``1d02h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for size, unit, smaller, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller:02d}{small_unit}"
    return f"{whole}s"


def rate(per_second: float, unit: str = "tok") -> str:
    """A rate as ``1,234 tok/s``."""
    return f"{per_second:,.0f} {unit}/s" if per_second >= 100 else f"{per_second:.3g} {unit}/s"


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


def compare(
    before: Mapping[str, object], after: Mapping[str, object]
) -> list[tuple[str, str, str, str]]:
    """Rows (metric, before, after, change) for a table of two evaluations; a dash where one lacks
    the metric.
    """
    rows: list[tuple[str, str, str, str]] = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        change = ""
        if isinstance(old, (int, float)) and isinstance(new, (int, float)):
            change = f"{'+' if new > old else ''}{number(new - old)}"
        rows.append((visible(name), text(old), text(new), change))
    return rows


def as_tables(
    value: Mapping[str, Any], title: str = ""
) -> list[tuple[str, Sequence[str], list[list[Any]]]]:
    """A mapping of any shape as tables (title, header, rows): its plain values together, then each
    inner mapping or list of mappings by itself.
    """
    plain = [[key.replace("_", " "), item] for key, item in value.items() if not _has_rows(item)]
    tables: list[tuple[str, Sequence[str], list[list[Any]]]] = (
        [(title, ("", ""), plain)] if plain else []
    )
    for key, item in value.items():
        words = key.replace("_", " ")
        name = f"{title}: {words}" if title else words
        if not _has_rows(item):
            continue
        if isinstance(item, Mapping) and not all(_is_row(inner) for inner in item.values()):
            tables += as_tables(item, name)
            continue
        records = (
            [{"": k, **inner} for k, inner in item.items()] if isinstance(item, Mapping) else item
        )
        header = list(dict.fromkeys(column for record in records for column in record))
        tables.append(
            (name, header, [[record.get(column, "") for column in header] for record in records])
        )
    return tables


def audit_in_words(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the audit of one list of rows says, its findings as sentences, without what charts
    show.
    """
    said = found.get("said", {})
    kept = {key: value for key, value in found.items() if key not in ("distributions", "said")}
    if findings := kept.get("findings"):
        kept["findings"] = {
            said.get(name, name.replace("_", " ")): each for name, each in findings.items()
        }
    return kept


def audit_warnings(found: Mapping[str, Any]) -> list[str]:
    """What the audit of one list of rows holds against it: rows that were not used, and its
    findings, a line each.
    """
    said = found.get("said", {})
    unused = [(_unused(u), u["rows"]) for u in found.get("unused", ())]
    findings = [
        (said[name], ())
        if name in said
        else (name.replace("_", " ") + (f" ({number(f['count'])})" if f["rows"] else ""), f["rows"])
        for name, f in found.get("findings", {}).items()
    ]
    return [
        f"{what}; such as {', '.join(rows)}" if rows else what
        for what, rows in (*unused, *findings)
    ]


def _unused(found: Mapping[str, Any]) -> str:
    """The kind of reason, if it says anything, and what was said of the first of the rows."""
    kind = "" if found["kind"] == "bad" else str(found["kind"]).replace("_", " ") + "; "
    if found["count"] == 1:
        return f"1 row was not used ({kind}{found['reason']})"
    return f"{number(found['count'])} rows were not used ({kind}the first: {found['reason']})"


def _has_rows(value: object) -> bool:
    is_records = isinstance(value, (list, tuple)) and all(
        isinstance(item, Mapping) for item in value
    )
    return bool(value) and (isinstance(value, Mapping) or is_records)


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) and not any(_has_rows(item) for item in value.values())
