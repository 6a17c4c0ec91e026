"""Charts of several runs: their curves in one chart, and reward against divergence; as plain
dictionaries that plotly.js draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from valence.reports.charts import COUNTERS, esc, figure, short
from valence.reports.comparable_runs import HEADLINES, ComparedRun, has_same_scale, trained_seconds
from valence.reports.rows import Json
from valence.statistics import finite

COLOURS = ("#3b7ddd", "#d9661f", "#2a9d74", "#8b62d6", "#c9437f", "#8f7a10", "#1a94b8", "#75808c")
"""Colours of the runs, in order; each readable on white and on black."""

STROKES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "12 4"}
"""Dashes of lines by plotly's names, as SVG has them. From the ninth run on, the colours repeat
with the next dashes.
"""

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star")

MAX_POINTS = 400
"""Maximum points of a curve. Longer curves show means of neighbouring records."""

SLOWER = 1.1
"""Ratio of the times per step from which curves against time are drawn."""

TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
"""Units of the axis of the time with their seconds; the longest run has at least two of its
unit.
"""

Point = tuple[float, float]

REWARD_NOTE = (
    "Each point is an evaluation on held-out prompts. Vertical: the mean reward. Horizontal: the "
    "divergence from the reference (kl, nats per completion). Lines follow the steps; the last one "
    "has a large mark. At the same kl, a higher reward is better."
)
MARGIN_NOTE = (
    "Each point is an evaluation. Vertical: the margin, logratio/chosen minus logratio/rejected in "
    "nats, which does not depend on beta. Horizontal: the drift, the absolute value of kl/raw in "
    "nats, measured on mismatched answers. Lines follow the steps; the last one has a large mark. "
    "At the same margin, a run further to the left has changed less on other text."
)


def line_style(place: int) -> tuple[str, str]:
    """Colour and dashes of a run, by its place among the runs."""
    dashes = tuple(STROKES)
    return COLOURS[place % len(COLOURS)], dashes[place // len(COLOURS) % len(dashes)]


def curves(runs: Sequence[ComparedRun]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Curves against steps of every metric that two or more runs have and that varies, by name:
    those of held-out rows, and those of training.
    """
    figures: tuple[dict[str, Json], dict[str, Json]] = {}, {}
    for name in _metric_names(runs):
        is_held_out = name.startswith("eval/")
        lines = [_points(run, name) for run in runs]
        if _is_comparable(lines):
            figures[not is_held_out][name] = _chart(
                runs, lines, "optimizer steps", marks=is_held_out, note=_note(runs, name)
            )
    return figures


def curves_over_time(runs: Sequence[ComparedRun]) -> dict[str, Json]:
    """The main metrics against training time, unless all runs take about the same time per step."""
    times = [_training_time(run) for run in runs]
    paces = [max(seconds.values()) / max(seconds) for seconds in times if max(seconds, default=0)]
    if len(paces) < 2 or max(paces) <= SLOWER * min(paces):
        return {}
    longest = max(max(seconds.values(), default=0.0) for seconds in times)
    unit, unit_seconds = next(item for item in TIME_UNITS if longest >= 2 * item[1] or item[1] == 1)
    x_title = f"training time ({unit})"
    figures: dict[str, Json] = {}
    for name in (n for n in _metric_names(runs) if n.removeprefix("eval/") in HEADLINES):
        lines = [
            [(seconds[s] / unit_seconds, y) for s, y in _points(run, name) if s in seconds]
            for run, seconds in zip(runs, times, strict=True)
        ]
        if _is_comparable(lines):
            is_held_out, note = name.startswith("eval/"), _note(runs, name)
            figures[name] = _chart(runs, lines, x_title, marks=is_held_out, note=note)
    return figures


def frontiers(runs: Sequence[ComparedRun]) -> dict[str, tuple[str, Json]]:
    """Gain against distance from the reference, by title with an explanation: one for online runs,
    one for offline runs that log their drift (kto).
    """
    figures: dict[str, tuple[str, Json]] = {}
    for title, note, x_title, y_title, point_of in (
        ("Reward against divergence", REWARD_NOTE, "kl (nats)", "reward", _reward_and_kl),
        (
            "Margin against drift",
            MARGIN_NOTE,
            "absolute value of kl/raw (nats)",
            "margin (nats)",
            _margin_and_drift,
        ),
    ):
        points_of = [
            _spread({s: p for s, m in run.evaluations.items() if (p := point_of(m))})
            for run in runs
        ]
        if not any(points_of):
            continue
        lines = [list(points.values()) for points in points_of]
        axis = {"title": {"text": y_title}}
        chart = _chart(runs, lines, x_title, marks=True, height=24, yaxis=axis)
        for trace, points in zip(chart["data"], filter(None, points_of), strict=True):
            trace |= {"text": [f"step {step}" for step in points], "hovertemplate": "%{text}: %{y}"}
            trace["marker"]["size"] = [7] * (len(points) - 1) + [14]
        figures[title] = note, chart
    return figures


def _is_comparable(lines: Sequence[Sequence[Point]]) -> bool:
    return sum(bool(line) for line in lines) > 1 and len({y for line in lines for _, y in line}) > 1


def _metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Names of logged metrics, most important first."""
    first = [f"{prefix}{name}" for name in HEADLINES for prefix in ("eval/", "")]
    names = dict.fromkeys(name for run in runs for record in run.records for name in record)
    names |= dict.fromkeys(
        f"eval/{name}" for run in runs for metrics in run.evaluations.values() for name in metrics
    )
    remaining = [n for n in names if n not in {*first, *COUNTERS} and not n.startswith("test/")]
    return [*(name for name in first if name in names), *remaining]


def _points(run: ComparedRun, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric."""
    if name.startswith("eval/"):
        short_name = name.removeprefix("eval/")
        values = [(step, metrics.get(short_name)) for step, metrics in run.evaluations.items()]
    else:
        values = [(record["step"], record.get(name)) for record in run.records]
    return [(step, value) for step, value in values if finite(value)]


def _note(runs: Sequence[ComparedRun], name: str) -> str:
    """The metric's name in the log, and whether its size means the same in all runs."""
    if has_same_scale([run for run in runs if _points(run, name)], name):
        return name
    return (
        f"{name}; runs have different scales (method, loss.* or reward): compare shapes, not values"
    )


def _training_time(run: ComparedRun) -> dict[int, float]:
    """Seconds of training by step, where the log has them."""
    times = zip(run.records, trained_seconds(run.records), strict=True)
    return {record["step"]: seconds for record, seconds in times if seconds is not None}


def _spread(points: Mapping[int, Point]) -> dict[int, Point]:
    """As many points as are drawn, evenly spread, with the last one."""
    width = math.ceil(len(points) / MAX_POINTS) or 1
    return dict(list(points.items())[::-width][::-1])


def _reward_and_kl(metrics: Json) -> Point | None:
    kl, reward = metrics.get("kl", metrics.get("rollout/kl")), metrics.get("reward/mean")
    return (kl, reward) if finite(kl) and finite(reward) else None


def _margin_and_drift(metrics: Json) -> Point | None:
    names = ("logratio/chosen", "logratio/rejected", "kl/raw")
    chosen, rejected, drift = (metrics.get(name) for name in names)
    if finite(chosen) and finite(rejected) and finite(drift):
        return abs(drift), chosen - rejected
    return None


def _chart(
    runs: Sequence[ComparedRun],
    lines: Sequence[Sequence[Point]],
    x_title: str,
    *,
    marks: bool,
    **layout: Any,
) -> Json:
    """A line for each run that has points. A run has the same style in all charts."""
    traces: list[dict[str, Any]] = []
    for place, (run, line) in enumerate(zip(runs, lines, strict=True)):
        if not line:
            continue
        colour, dash = line_style(place)
        points = _thinned(line)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if marks or len(points) == 1 else "lines",
                "name": esc(run.label),
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "line": {"color": colour, "width": 1.7, "dash": dash},
                "marker": {"color": colour, "size": 7, "symbol": SYMBOLS[place % len(SYMBOLS)]},
            }
        )
    return figure(traces, legend=False, xaxis={"title": {"text": x_title}}, **layout)


def _thinned(line: Sequence[Point]) -> list[Point]:
    width = math.ceil(len(line) / MAX_POINTS)
    groups = [line[i : i + width] for i in range(0, len(line), width)]
    return [
        (short(group[len(group) // 2][0]), short(sum(y for _, y in group) / len(group)))
        for group in groups
    ]
