"""Curves of several runs laid over each other, and what a run pays in divergence for its reward; as
plain plotly dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from valence.reports.compared import Compared, trained_seconds
from valence.reports.comparison_tables import HEADLINES, scaled_apart
from valence.reports.console import esc
from valence.reports.curves import COUNTERS
from valence.reports.figures import figure
from valence.reports.rows import Json
from valence.reports.stats import finite, short

COLOURS = ("#3b7ddd", "#d9661f", "#2a9d74", "#8b62d6", "#c9437f", "#8f7a10", "#1a94b8", "#75808c")
"""Of the runs, in their order; each readable on white and on black."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""From the ninth run on, the colours come again with the next of these."""

STROKES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "12 4"}
"""The same in a drawing."""

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star")

POINTS = 400
"""Most points of one curve; longer curves show means of neighbouring records."""

SLOWER = 1.1
"""Curves against time are worth drawing when a run takes so many times as long for a step as
another.
"""

Point = tuple[float, float]

OWN = (
    "Each point is an evaluation: what the held-out answers are worth against how far they are "
    "from the reference (kl, nats "
    "of an answer); lines go from step to step, to the large mark. Of two runs at the same kl, "
    "the higher one has learnt more "
    "for the same distance."
)
STORED = (
    "Each point is an evaluation: by how many nats preferred answers have become likelier than "
    "others (logratio/chosen less "
    "logratio/rejected, which does not depend on beta) against what has changed on answers that "
    "do not fit their prompt (the "
    "size of kl/raw, nats); lines go from step to step, to the large mark. Of two runs with the "
    "same margin, the one further "
    "left has changed less besides."
)


def key(runs: Sequence[Compared]) -> str:
    """The line of each run with its label, as HTML that stays in sight while its curves are
    read.
    """
    boxes: list[str] = []
    for place, run in enumerate(runs):
        colour, dash = look(place)
        stroke = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{STROKES[dash]}"'
        line = (
            f'<svg width="32" height="10" aria-hidden="true"><line x1="0" y1="5" x2="32" '
            f'y2="5" {stroke}/></svg>'
        )
        boxes.append(f"<span>{line} {esc(run.label)}</span>")
    style = (
        "position:sticky;top:2.4rem;z-index:8;background:var(--bg);padding:.4rem "
        "0;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;"
    )
    return (
        f'<div style="{style}max-height:6rem;overflow:auto;font-size:.9rem">{"".join(boxes)}</div>'
    )


def look(place: int) -> tuple[str, str]:
    """Colour and dashes of a run, by its place among the runs."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def curves(runs: Sequence[Compared]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Of every number that two or more runs have, and that varies, the curves against steps, by its
    name: those of held-out rows, and those of training.
    """
    made: tuple[dict[str, Json], dict[str, Json]] = {}, {}
    for name in _names(runs):
        held_out = name.startswith("eval/")
        lines = [_against_steps(run, name) for run in runs]
        if _worth_drawing(lines):
            made[not held_out][name] = _drawn(
                runs, lines, "optimizer steps", marks=held_out, note=_note(runs, name)
            )
    return made


def _worth_drawing(lines: Sequence[Sequence[Point]]) -> bool:
    return sum(bool(line) for line in lines) > 1 and len({y for line in lines for _, y in line}) > 1


def _names(runs: Sequence[Compared]) -> list[str]:
    """Names in the logs, those that say most first."""
    first = [f"{kind}{name}" for name in HEADLINES for kind in ("eval/", "")]
    seen = dict.fromkeys(name for run in runs for record in run.records for name in record)
    seen |= dict.fromkeys(
        f"eval/{name}" for run in runs for numbers in run.evaluations.values() for name in numbers
    )
    rest = [
        name
        for name in seen
        if name not in first and name not in COUNTERS and not name.startswith("test/")
    ]
    return [*(name for name in first if name in seen), *rest]


def _against_steps(run: Compared, name: str) -> list[tuple[int, float]]:
    if name.startswith("eval/"):
        short_name = name.removeprefix("eval/")
        return [
            (step, numbers[short_name])
            for step, numbers in run.evaluations.items()
            if finite(numbers.get(short_name))
        ]
    return [(record["step"], record[name]) for record in run.records if finite(record.get(name))]


def over_time(runs: Sequence[Compared]) -> dict[str, Json]:
    """The numbers that say most against minutes of training, unless all runs take about the same
    time for a step.
    """
    times = [_minutes(run) for run in runs]
    paces = [max(own.values()) / max(own) for own in times if own and max(own) > 0]
    if len(paces) < 2 or max(paces) <= SLOWER * min(paces):
        return {}
    made: dict[str, Json] = {}
    for name in (name for name in _names(runs) if name.removeprefix("eval/") in HEADLINES):
        lines = [
            [(at[s], y) for s, y in _against_steps(run, name) if s in at]
            for run, at in zip(runs, times, strict=True)
        ]
        if _worth_drawing(lines):
            made[name] = _drawn(
                runs,
                lines,
                "minutes of training",
                marks=name.startswith("eval/"),
                note=_note(runs, name),
            )
    return made


def _note(runs: Sequence[Compared], name: str) -> str:
    """The number's name in the log, and whether its size means the same in all runs."""
    apart = scaled_apart([run for run in runs if _against_steps(run, name)], name)
    return (
        f"{name}; each run has a scale of its own (method, loss.* or reward): shapes compare, "
        f"sizes do not"
        if apart
        else name
    )


def _minutes(run: Compared) -> dict[int, float]:
    """By step, where the log says."""
    at = zip(run.records, trained_seconds(run.records), strict=True)
    return {record["step"]: seconds / 60 for record, seconds in at if seconds is not None}


def frontier(runs: Sequence[Compared]) -> dict[str, tuple[str, Json]]:
    """What each evaluation came to against how far it is from the reference: by title, with a
    sentence on how it is read. One for runs on own answers, one for stored answers of which drift
    is logged (kto).
    """
    made: dict[str, tuple[str, Json]] = {}
    for title, said, x_title, y_title, place_of in (
        ("Reward against divergence", OWN, "kl (nats)", "reward", _reward_and_kl),
        (
            "Margin against drift",
            STORED,
            "size of kl/raw (nats)",
            "margin (nats)",
            _margin_and_drift,
        ),
    ):
        each = [
            _some({step: at for step, found in run.evaluations.items() if (at := place_of(found))})
            for run in runs
        ]
        if not any(each):
            continue
        axis = {"title": {"text": y_title}}
        chart = _drawn(
            runs,
            [list(points.values()) for points in each],
            x_title,
            marks=True,
            height=24,
            yaxis=axis,
        )
        for trace, points in zip(chart["data"], filter(None, each), strict=True):
            trace |= {"text": [f"step {step}" for step in points], "hovertemplate": "%{text}: %{y}"}
            trace["marker"]["size"] = [7] * (len(points) - 1) + [14]
        made[title] = said, chart
    return made


def _some(points: Mapping[int, Point]) -> dict[int, Point]:
    """As many as are drawn, evenly spread, with the last."""
    return dict(list(points.items())[:: -math.ceil(len(points) / POINTS) or -1][::-1])


def _reward_and_kl(found: Json) -> Point | None:
    kl, reward = found.get("kl", found.get("rollout/kl")), found.get("reward/mean")
    return (kl, reward) if finite(kl) and finite(reward) else None


def _margin_and_drift(found: Json) -> Point | None:
    chosen, rejected, drift = (
        found.get(name) for name in ("logratio/chosen", "logratio/rejected", "kl/raw")
    )
    return (
        (abs(drift), chosen - rejected)
        if finite(chosen) and finite(rejected) and finite(drift)
        else None
    )


def _drawn(
    runs: Sequence[Compared],
    lines: Sequence[Sequence[Point]],
    x_title: str,
    *,
    marks: bool,
    **layout: Any,
) -> Json:
    """A line for each run that has points, each run always in the same look."""
    traces: list[dict[str, Any]] = []
    for place, (run, line) in enumerate(zip(runs, lines, strict=True)):
        if not line:
            continue
        colour, dash = look(place)
        points = _thin(line)
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


def _thin(line: Sequence[Point]) -> list[Point]:
    width = math.ceil(len(line) / POINTS)
    groups = [line[i : i + width] for i in range(0, len(line), width)]
    return [
        (short(group[len(group) // 2][0]), short(sum(y for _, y in group) / len(group)))
        for group in groups
    ]
