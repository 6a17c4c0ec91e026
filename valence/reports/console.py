"""Progress on the terminal: bars or plain lines for a phase, and a live dashboard for training."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from valence.reports.formatting import duration, number, rate, visible
from valence.terminal import print_message, prints_only_warnings

STATUS_METRICS = {"loss": "loss", "reward/mean": "reward", "rewards/margins": "margin", "kl": "kl"}
"""Metrics shown next to a bar, with their titles."""

WINDOW = 50
"""Updates over which rate and time left are measured."""

DASHBOARDS: WeakKeyDictionary[Console, Dashboard] = WeakKeyDictionary()
"""The dashboards that are on screen."""


def can_draw(console: Console) -> bool:
    """Whether bars are drawn on the console, instead of printing plain lines."""
    is_plain = console.is_dumb_terminal or getattr(console, "plain", False)
    return console.is_terminal and not is_plain


class Progress:
    """Progress of one phase, as a context manager.

    On a terminal it is a bar, inside the dashboard if there is one. Elsewhere it prints plain
    lines: the first, the last, and at most one every ``every`` seconds. Nothing with
    ``quiet``, or on a console that prints only warnings.

    start: the amount done before, by a resumed run. brief: no line for a phase that ends within
    ``every`` seconds. Rate and time left are measured over the latest updates without the time
    before the first one, which is warm-up.
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
        self._console, self.name, self._total = console, visible(phase), total
        self._quiet = quiet or prints_only_warnings(console)
        self._every, self._clock = every, clock
        self._silent_until = clock() + every if brief else 0.0
        self._paused = 0.0
        self._done = start
        self._metrics: Mapping[str, object] = {}
        self._points: deque[tuple[float, int, int | None]] = deque(maxlen=WINDOW)
        self._printed_at: float | None = None
        self._printed_done: int | None = None
        self._bar: RichProgress | None = None
        self._dashboard: Dashboard | None = None

    def __enter__(self) -> Self:
        self._first = (self._now(), self._done, 0)
        if not self._quiet and can_draw(self._console):
            self._draw()
        return self

    def _draw(self) -> None:
        self._dashboard = DASHBOARDS.get(self._console)
        if self._dashboard:
            self._dashboard.enter(self)
            return
        self._bar = _make_bar(self._console)
        self._task = self._bar.add_task(
            self.name, total=self._total, completed=self._done, status=""
        )
        self._bar.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dashboard:
            self._dashboard.leave(self)
        elif self._bar:
            self._bar.update(self._task, status=self._status(ended=True))
            self._bar.stop()
        elif not self._quiet:
            self._print(ended=True)

    def update(self, done: int, *, tokens: int | None = None) -> None:
        """done: of the total so far. tokens: processed in this phase so far."""
        self._done = done
        if self._points and self._points[-1][1] == done:
            self._points.pop()  # the same amount again, with more information
        self._points.append((self._now(), done, tokens))
        if self._dashboard:
            self._dashboard.mark_changed()
        elif self._bar:
            self._bar.update(self._task, completed=done, status=self._status())
        elif not self._quiet and (
            self._printed_at is None or self._now() - self._printed_at >= self._every
        ):
            self._print()

    def record(self, metrics: Mapping[str, object]) -> None:
        """Show the main metrics of a record of the log from the next update on."""
        self._metrics = metrics

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hide the bar while another phase runs; its time does not count for the rate."""
        start = self._clock()
        if self._bar:
            self._bar.stop()
        try:
            yield
        finally:
            self._paused += self._clock() - start
            if self._bar:
                self._bar.start()

    @property
    def amount(self) -> tuple[int, int]:
        """The amount done, and the total."""
        return self._done, self._total

    def _now(self) -> float:
        return self._clock() - self._paused

    def _print(self, ended: bool = False) -> None:
        is_repeated = ended and self._printed_done == self._done == self._total
        if is_repeated or self._clock() < self._silent_until:
            return
        status = self._status(ended)
        self._printed_at, self._printed_done = self._now(), self._done
        print_message(self._console, f"{self.name} {self._done}/{self._total}  {status}".rstrip())

    def _status(self, ended: bool = False) -> str:
        parts = [self.speed(ended)]
        for name, title in STATUS_METRICS.items():
            value = self._metrics.get(name)
            if isinstance(value, (int, float)):
                parts.append(f"{title} {number(value)}")
        return "  ".join(filter(None, parts))

    def speed(self, ended: bool = False) -> str:
        """Tokens (or items, if no tokens were counted) per second and the time left; at the end
        the time taken.
        """
        if not self._points:
            return ""
        last = self._points[-1]
        first = self._points[0] if len(self._points) > 1 and not ended else self._first
        seconds, done = last[0] - first[0], last[1] - first[1]
        if seconds <= 0 or done <= 0:
            return ""
        num_tokens = 0 if last[2] is None or first[2] is None else last[2] - first[2]
        # A batch of completions counts its tokens when it ends.
        speed = rate(num_tokens / seconds) if num_tokens else rate(done / seconds, "it")
        if ended or last[1] >= self._total:
            return f"{speed}  {duration(self._now() - self._first[0])}"
        return f"{speed}  {duration((self._total - last[1]) * seconds / done)} left"


def _make_bar(console: Console) -> RichProgress:
    one_line = Column(no_wrap=True, overflow="ellipsis")
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False, table_column=one_line),
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
    )


# The dashboard

METRICS = {
    "loss": "loss",
    "eval/loss": "held-out loss",
    "reward/mean": "reward",
    "eval/reward/mean": "held-out reward",
    "rewards/margins": "margin",
    "eval/rewards/margins": "held-out margin",
    "kl": "kl",
    "rewards/accuracies": "accuracy",
    "eval/rewards/accuracies": "held-out acc.",
    "rewards/auc": "auc",
    "eval/rewards/auc": "held-out auc",
    "eval/rewards/spearman": "held-out rank",
    "rollout/length": "answer tokens",
    "rollout/truncated": "cut off",
    "grad_norm": "grad norm",
    "lr": "lr",
    "tokens/s": "tokens/s",
    "memory": "memory GB",
}
"""The metrics that are shown if they exist, in this order, with their titles."""
WITH_CURVE, MAX_CURVES = tuple(METRICS)[:7], 4
"""The metrics that may have a curve, and the number of curves."""
MAX_POINTS, RECALLED_RECORDS = 40, 1000
"""Points of a curve. Records read from the log of a resumed run, as not all have every metric."""

MAX_WIDTH = 100
TITLE_WIDTH, VALUE_WIDTH = 16, 10
CELL_WIDTH = TITLE_WIDTH + VALUE_WIDTH + 2
ANSWER_LINES, MAX_WARNINGS = 2, 3
REFRESHES_PER_SECOND, MAX_TIME_SHARE = 2, 0.005
"""Twice a second is enough for people. Drawing takes at most this share of the time, so that a slow
processor is left to the training.
"""

LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
NOT_FINITE = "\N{MULTIPLICATION SIGN}"


def sparkline(values: Sequence[float], ascii_only: bool = False) -> str:
    """A character per value, between the lowest and the highest; the middle if all are equal."""
    levels = ASCII_LEVELS if ascii_only else LEVELS
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (high - low) if 0 < high - low < float("inf") else 0.0
    scale = scale if scale < float("inf") else 0.0  # the difference is subnormal

    def level(value: float) -> str:
        if not abs(value) < float("inf"):
            return "x" if ascii_only else NOT_FINITE
        return levels[round((value - low) * scale) if scale else len(levels) // 2]

    return "".join(map(level, values))


class Dashboard(Progress):
    """Progress of training, which on a terminal also shows metrics, curves, a completion and
    warnings.

    Phases that run during training have their bars inside it, and printed lines appear above it.
    Training and drawing run in different threads: what is drawn is replaced, never changed.

    warnings: returns those so far.
    """

    def __init__(
        self,
        console: Console,
        phase: str,
        total: int,
        *,
        start: int = 0,
        warnings: Callable[[], Sequence[str]] = tuple,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, phase, total, start=start, every=every, clock=clock)
        self._warnings = warnings
        self._history: dict[str, tuple[float, ...]] = {}
        self._phases: tuple[Progress, ...] = ()
        self._activity = ""
        self._completion: tuple[str, str, str] | None = None
        self.live: Live | None = None
        """Draws the dashboard while it is on screen."""
        self._height = 0, 0
        """The width of the terminal, and the largest number of lines that were drawn in it."""
        self._ended = False
        self.num_changes = 0
        self.line_widths: list[int] = []
        """Columns of the lines that were drawn last."""

    def record(self, metrics: Mapping[str, object]) -> None:
        super().record(metrics)
        for name in METRICS:
            value = metrics.get(name)
            if isinstance(value, (int, float)):
                points = self._history.get(name, ())[1 - MAX_POINTS :]
                self._history[name] = (*points, float(value))
        self.mark_changed()

    def recall(self, log: Path) -> None:
        """Read the last records of the log of a resumed run."""
        try:
            with log.open(encoding="utf-8") as lines:
                for line in deque(lines, RECALLED_RECORDS):
                    record = json.loads(line)
                    self.record(record if isinstance(record, dict) else {})
        except (OSError, ValueError):  # only curves are lost; other readers report the damage
            return

    def answer(self, prompt: str, completion: str, reward: float | None) -> None:
        """Show the latest completion of the policy. reward: None without a score."""
        score = "no score" if reward is None else f"reward {number(reward)}"
        self._completion = prompt, completion, score
        self.mark_changed()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Show an activity that has no progress bar."""
        self._activity = activity
        self.mark_changed()
        try:
            yield
        finally:
            self._activity = ""
            self.mark_changed()

    def _draw(self) -> None:
        if self._console in DASHBOARDS:  # a run inside a run
            super()._draw()
            return
        self._dashboard = DASHBOARDS[self._console] = self
        self.live = _DashboardLive(self, self._console)
        self.live.start(refresh=True)

    def enter(self, phase: Progress) -> None:
        """Show the bar of a phase."""
        self._phases = (*self._phases, phase)
        self.mark_changed()

    def leave(self, phase: Progress) -> None:
        """Remove the bar of a phase; the dashboard ends with its own phase."""
        self._phases = tuple(active for active in self._phases if active is not phase)
        self.mark_changed()
        if phase is self and self.live:
            del DASHBOARDS[self._console]
            self._ended = True
            self.live.stop()

    def mark_changed(self) -> None:
        self.num_changes += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, room = min(options.max_width, MAX_WIDTH), options.size.height - 1
        parts = [part for part in self._parts(console, width, options.ascii_only) if part]
        num_bars = 1 if self._ended else 2
        while len(parts) > 1 and num_bars + sum(map(len, parts)) > room:
            parts.pop()
        is_spaced = num_bars + sum(map(len, parts)) + len(parts) <= room
        lines = [line for part in parts for line in ((Text(""), *part) if is_spaced else part)]
        del lines[max(0, room - num_bars) :]
        if not self._ended:  # a part that shrinks or disappears moves nothing
            before = self._height[1] if self._height[0] == width else 0
            self._height = width, min(room, max(before, num_bars + len(lines)))
            lines += [Text("")] * (self._height[1] - num_bars - len(lines))
        self.line_widths = [width] * num_bars + [min(width, line.cell_len) for line in lines]
        yield self._bars(width)
        for line in lines:
            line.truncate(width)
            yield line

    def _parts(self, console: Console, width: int, ascii_only: bool) -> Iterator[list[Text]]:
        """The lines of each part, most important first. A low terminal shows the first ones."""
        known = [name for name in METRICS if name in self._history]
        curved = [name for name in known if name in WITH_CURVE][:MAX_CURVES]
        yield [self._curve(name, width, ascii_only) for name in curved]
        cells = [self._cell(name) for name in known if name not in curved]
        per_line = max(1, (width + 2) // (CELL_WIDTH + 2))
        yield [Text("   ").join(cells[i : i + per_line]) for i in range(0, len(cells), per_line)]
        yield self._warning_lines(width)
        yield self._completion_lines(console, width)

    def _bars(self, width: int) -> Table:
        """Fixed columns, so that nothing moves when another phase starts."""
        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        name, amount, speed = (22, 13, 28) if width >= 80 else (12, 11, 25)
        bar = max(4, width - name - amount - speed - 6)
        table.add_column(width=name, no_wrap=True, overflow="ellipsis")
        table.add_column(width=bar)
        table.add_column(width=amount, no_wrap=True, overflow="ellipsis", justify="right")
        table.add_column(width=speed, no_wrap=True, overflow="ellipsis")
        phases: list[Progress] = [self] if self._ended else [self, *self._phases[-1:]]
        for phase in phases:
            done, total = phase.amount
            table.add_row(
                Text(phase.name, style="" if phase is self else "dim"),
                ProgressBar(total=max(1, total), completed=done, width=bar),
                Text(f"{done:,}/{total:,}"),
                Text(phase.speed(self._ended)),
            )
        if len(phases) == 1 and not self._ended:
            table.add_row(Text(self._activity, style="dim"), "", "", "")
        return table

    def _cell(self, name: str) -> Text:
        value = f"{number(self._history[name][-1]):>{VALUE_WIDTH}}"
        return Text.assemble((f"{METRICS[name]:<{TITLE_WIDTH}}", "dim"), value)

    def _curve(self, name: str, width: int, ascii_only: bool) -> Text:
        values = self._history[name][-max(4, min(MAX_POINTS, width - CELL_WIDTH)) :]
        return Text.assemble(self._cell(name), "  ", (sparkline(values, ascii_only), "cyan"))

    def _warning_lines(self, width: int) -> list[Text]:
        warnings = list(self._warnings())
        lines = [_one_line(warning, width) for warning in warnings[-MAX_WARNINGS:]]
        return _labelled(("warnings", f"{len(warnings):,} so far", ""), lines, "yellow")

    def _completion_lines(self, console: Console, width: int) -> list[Text]:
        if self._completion is None:
            return []
        prompt, completion, score = self._completion
        flat = Text(" ".join(visible(completion).split()) or "(nothing)")
        wrapped = list(flat.wrap(console, width - TITLE_WIDTH))
        lines = wrapped[:ANSWER_LINES]
        if len(wrapped) > len(lines):
            lines[-1] = _one_line(f"{lines[-1].plain} {wrapped[len(lines)].plain}", width)
        lines += [Text("")] * (ANSWER_LINES - len(lines))
        return _labelled(("last answer", score, ""), [_one_line(f"> {prompt}", width), *lines])


def _one_line(text: str, width: int) -> Text:
    """A text next to a label, cut to one line of the terminal."""
    line = Text(" ".join(visible(text).split()), no_wrap=True)
    line.truncate(max(4, width - TITLE_WIDTH), overflow="ellipsis")
    return line


def _labelled(labels: Sequence[str], lines: Sequence[Text], style: str = "") -> list[Text]:
    """Lines next to a column of labels."""
    cells = (f"{label:<{TITLE_WIDTH}}"[:TITLE_WIDTH] for label in labels)
    pairs = zip(cells, lines, strict=False)
    return [Text.assemble((label, "dim"), (line.plain, style)) for label, line in pairs]


class _DashboardLive(Live):
    """Draws only when something has changed, and the latest state at the end."""

    def __init__(self, dashboard: Dashboard, console: Console) -> None:
        super().__init__(
            dashboard,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )
        self._of, self._drawn, self._rests_until = dashboard, (-1, console.size), 0.0
        self._width = console.width

    def refresh(self) -> None:
        state: Any = (self._of.num_changes, self.console.size)
        if self.is_started and (state == self._drawn or time.monotonic() < self._rests_until):
            return
        start = time.thread_time()
        self._drawn = state
        super().refresh()
        self._rests_until = time.monotonic() + (time.thread_time() - start) / MAX_TIME_SHARE

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Count the lines on screen again: a terminal that became narrower has wrapped them."""
        width = self.console.width
        if width < self._width and self._of.line_widths:
            num_lines = sum(max(1, -(-columns // width)) for columns in self._of.line_widths)
            self._live_render._shape = (width, num_lines)
        self._width = width
        return super().process_renderables(renderables)
