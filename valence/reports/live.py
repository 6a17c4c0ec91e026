"""Training on a terminal: progress, the main numbers and their curves, an answer, and the warnings,
drawn in one place.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from valence.reports.console import BOARDS, Progress
from valence.reports.formatting import number, visible

WORDS = {
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
"""The metrics that are shown, if they exist, in this order, with the words for them."""
CURVED, CURVES = 7, 4
"""The first so many of them may have a curve; so many of those that exist get one."""
POINTS, RECALLED = 40, 1000
"""Records that a curve goes back; and that are read of a run that is taken up, as not all have
every number.
"""

WIDEST = 100
NAME, VALUE = 16, 10
"""Columns of a metric's name and of its value."""
CELL = NAME + VALUE + 2
ANSWER_LINES, WARNINGS = 2, 3
A_SECOND, SHARE = 2, 0.005
"""Drawings, at most: enough for people.

And the share of the time that they may take, where a processor is slow.
"""

LEVELS, PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
ODD = "\N{MULTIPLICATION SIGN}"
"""Of a value that is not finite."""


def sparkline(values: Sequence[float], ascii_only: bool = False) -> str:
    """A character for each value, from the lowest to the highest; the middle where all are the
    same.
    """
    levels = PLAIN_LEVELS if ascii_only else LEVELS
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (high - low) if 0 < high - low < float("inf") else 0.0
    scale = scale if scale < float("inf") else 0.0  # the smallest numbers that there are

    def level(value: float) -> str:
        if not abs(value) < float("inf"):
            return "x" if ascii_only else ODD
        return levels[round((value - low) * scale) if scale else len(levels) // 2]

    return "".join(map(level, values))


class Dashboard(Progress):
    """Progress of training, which on a terminal shows more: see above.

    Phases that run meanwhile have their bars inside it, and what is printed meanwhile appears above
    it. The training goes on in one thread and the drawing in another: what is drawn is replaced,
    never changed.

    ``warnings``: those so far.
    """

    def __init__(
        self,
        console: Console,
        phase: str,
        total: int,
        *,
        start: int = 0,
        quiet: bool = False,
        warnings: Callable[[], Sequence[str]] = tuple,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, phase, total, start=start, quiet=quiet, every=every, clock=clock)
        self._warnings = warnings
        self._history: dict[str, tuple[float, ...]] = {}
        self._phases: tuple[Progress, ...] = ()
        self._doing = ""
        self._answered: tuple[str, str, str] | None = None
        self.live: Live | None = None
        """What draws it, while it is the board of its console."""
        self._tallest = 0, 0
        self._ended = False
        self.changes = 0
        """How often what is drawn has changed."""
        self.widths: list[int] = []
        """Of the lines that were drawn last, in columns of the terminal."""

    def record(self, metrics: Mapping[str, object]) -> None:
        super().record(metrics)
        for name in WORDS:
            value = metrics.get(name)
            if isinstance(value, (int, float)):
                self._history[name] = (*self._history.get(name, ())[1 - POINTS :], float(value))
        self.changed()

    def recall(self, log: Path) -> None:
        """Takes in the last records of the log of a run that is taken up."""
        try:
            with log.open(encoding="utf-8") as lines:
                for line in deque(lines, RECALLED):
                    record = json.loads(line)
                    self.record(record if isinstance(record, dict) else {})
        except (
            OSError,
            ValueError,
            # curves begin anew: whoever reads the log for more than curves says what is wrong with
            # it
        ):
            return

    def answer(self, prompt: str, said: str, reward: float | None) -> None:
        """The latest answer of the policy; no reward where it could not be judged."""
        self._answered = prompt, said, "no score" if reward is None else f"reward {number(reward)}"
        self.changed()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Says what goes on inside the block, where that has no progress of its own."""
        self._doing = what
        self.changed()
        try:
            yield
        finally:
            self._doing = ""
            self.changed()

    # ------------------------------------------------------------------ as a board

    def _draw(self) -> None:
        if self._console in BOARDS:  # a run inside a run
            super()._draw()
            return
        self._board = BOARDS[self._console] = self
        self.live = _Calm(self, self._console)
        self.live.start(refresh=True)

    def enter(self, phase: Progress) -> None:
        self._phases = (*self._phases, phase)
        self.changed()

    def leave(self, phase: Progress) -> None:
        self._phases = tuple(each for each in self._phases if each is not phase)
        self.changed()
        if phase is self and self.live:
            del BOARDS[self._console]
            self._ended = True
            self.live.stop()

    def changed(self) -> None:
        self.changes += 1

    # ------------------------------------------------------------------ what is drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, room = min(options.max_width, WIDEST), options.size.height - 1
        parts = [part for part in self._parts(console, width, options.ascii_only) if part]
        bars = 1 if self._ended else 2
        while len(parts) > 1 and bars + sum(map(len, parts)) > room:
            parts.pop()
        spaced = bars + sum(map(len, parts)) + len(parts) <= room
        lines = [line for part in parts for line in ((Text(""), *part) if spaced else part)][
            : max(0, room - bars)
        ]
        if not self._ended:  # a part that shrinks or goes away moves nothing
            before = self._tallest[1] if self._tallest[0] == width else 0
            self._tallest = width, min(room, max(before, bars + len(lines)))
            lines += [Text("")] * (self._tallest[1] - bars - len(lines))
        self.widths = [width] * bars + [min(width, line.cell_len) for line in lines]
        yield self._bars(width)
        for line in lines:
            line.truncate(width)
            yield line

    def _parts(self, console: Console, width: int, ascii_only: bool) -> Iterator[list[Text]]:
        """The lines of each part, the most important first: those at the end give way where the
        terminal is low.
        """
        known = [name for name in WORDS if name in self._history]
        curved = [name for name in known if name in tuple(WORDS)[:CURVED]][:CURVES]
        yield [self._curve(name, width, ascii_only) for name in curved]
        yield self._numbers([name for name in known if name not in curved], width)
        yield self._warned(width)
        yield self._sample(console, width)

    def _bars(self, width: int) -> Table:
        """Fixed columns, so that nothing moves when another phase begins."""
        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        phase, amount, speed = (22, 13, 28) if width >= 80 else (12, 11, 25)
        bar = max(4, width - phase - amount - speed - 6)
        table.add_column(width=phase, no_wrap=True, overflow="ellipsis")
        table.add_column(width=bar)
        table.add_column(width=amount, no_wrap=True, overflow="ellipsis", justify="right")
        table.add_column(width=speed, no_wrap=True, overflow="ellipsis")
        phases: list[Progress] = [self] if self._ended else [self, *self._phases[-1:]]
        for each in phases:
            done, total = each.amount
            table.add_row(
                Text(each.name, style="" if each is self else "dim"),
                ProgressBar(total=max(1, total), completed=done, width=bar),
                Text(f"{done:,}/{total:,}"),
                Text(each.speed(self._ended)),
            )
        if len(phases) == 1 and not self._ended:
            table.add_row(Text(self._doing, style="dim"), "", "", "")
        return table

    def _curve(self, name: str, width: int, ascii_only: bool) -> Text:
        values = self._history[name]
        drawn = values[-max(4, min(POINTS, width - CELL)) :]
        return Text.assemble(_cell(name, values[-1]), "  ", (sparkline(drawn, ascii_only), "cyan"))

    def _numbers(self, names: Sequence[str], width: int) -> list[Text]:
        across = max(1, (width + 2) // (CELL + 2))
        rows = [names[i : i + across] for i in range(0, len(names), across)]
        return [
            Text("   ").join([_cell(name, self._history[name][-1]) for name in row]) for row in rows
        ]

    def _warned(self, width: int) -> list[Text]:
        said = list(self._warnings())
        lines = [_line(" ".join(visible(each).split()), width - NAME) for each in said[-WARNINGS:]]
        return _labelled(("warnings", f"{len(said):,} so far", ""), lines, "yellow")

    def _sample(self, console: Console, width: int) -> list[Text]:
        if self._answered is None:
            return []
        prompt, said, reward = self._answered
        found = Text(" ".join(visible(said).split()) or "(nothing)").wrap(console, width - NAME)
        lines = list(found)[:ANSWER_LINES]
        if len(found) > len(lines):
            lines[-1] = _line(f"{lines[-1].plain.rstrip()} {found[len(lines)].plain}", width - NAME)
        lines += [Text("")] * (ANSWER_LINES - len(lines))
        return _labelled(
            ("last answer", reward, ""),
            [_line("> " + " ".join(visible(prompt).split()), width - NAME), *lines],
        )


def _cell(name: str, value: Any) -> Text:
    return Text.assemble((f"{WORDS[name]:<{NAME}}", "dim"), f"{number(value):>{VALUE}}")


def _line(text: str, width: int) -> Text:
    line = Text(text, no_wrap=True)
    line.truncate(max(4, width), overflow="ellipsis")
    return line


def _labelled(labels: Sequence[str], lines: Sequence[Text], style: str = "") -> list[Text]:
    """Lines beside a column of labels."""
    shown = zip((f"{label:<{NAME}}"[:NAME] for label in labels), lines, strict=False)
    return [Text.assemble((label, "dim"), (line.plain, style)) for label, line in shown]


class _Calm(Live):
    """Draws when something has changed, and the latest state at the end."""

    def __init__(self, board: Dashboard, console: Console) -> None:
        super().__init__(
            board, console=console, refresh_per_second=A_SECOND, vertical_overflow="crop"
        )
        self._of, self._drawn, self._rests_until = board, (-1, console.size), 0.0
        self._width = console.width

    def refresh(self) -> None:
        now = (self._of.changes, self.console.size)
        if self.is_started and (now == self._drawn or time.monotonic() < self._rests_until):
            return
        began = time.thread_time()
        self._drawn = now
        super().refresh()
        self._rests_until = time.monotonic() + (time.thread_time() - began) / SHARE

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """A terminal that was made narrower has by now wrapped the lines that are drawn, which are
        to be drawn over.
        """
        width = self.console.width
        if width < self._width and self._of.widths:
            self._live_render._shape = (
                width,
                sum(max(1, -(-each // width)) for each in self._of.widths),
            )
        self._width = width
        return super().process_renderables(renderables)
