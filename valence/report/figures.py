"""Curves and histograms as plain dictionaries that plotly.js draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from valence.report.console import esc
from valence.report.rundata import Json, RunData

POINTS = 1500
"""Most points of one curve; longer curves show means of neighbouring steps."""

BINS = 24
"""Bins of a histogram."""

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss",)),
    ("Implicit rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("Drift on mismatched answers (nats): kl is z0, kl/raw without the clamp", ("kl/raw", "kl")),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("lr",)),
    ("Tokens per second", ("tokens/s",)),
)
"""Charts that come first, with the metrics in each. Every other metric that varies gets a chart of its own."""

COUNTERS = frozenset({"step", "epoch", "tokens", "seconds", "tokens_seen", "examples_seen"})
"""Metrics that only count along with the steps or measure the logging itself; a curve of them says nothing."""

COLOURS = ("#3b7ddd", "#d9661f", "#8b62d6", "#2a9d74")
"""Lines and bars; each readable on white and on black, and by colour-blind people."""


def figures(run: RunData) -> dict[str, Json]:
    """Curves by title, as plotly figures; metrics of evaluations are points beside the training metric's line."""
    names = dict.fromkeys(name.removeprefix("eval/") for record in run.metrics for name in record)
    known = {name for _, group in CHARTS for name in group}
    rest = [(name, (name,)) for name in names if name not in known | COUNTERS]
    made: dict[str, Json] = {}
    for title, group in (*CHARTS, *rest):
        traces = [t for i, name in enumerate(group) for t in _curves(run.metrics, name, COLOURS[i])]
        values = {y for trace in traces for y in trace["y"]}
        if len(values) > 1 or (traces and title in dict(CHARTS)):
            made[title] = {"data": traces, "layout": {"showlegend": len(traces) > 1, "xaxis": {"tickformat": ",~f"}}}
    return made


def _curves(records: Sequence[Json], name: str, colour: str) -> list[Json]:
    """The line of a training metric and the points of the same metric in evaluations, whichever exist."""
    traces: list[Json] = []
    short = name.removeprefix("rewards/")
    for key, label, mode in ((name, short, "lines"), (f"eval/{name}", f"{short}, held out", "lines+markers")):
        points = [(r["step"], r[key]) for r in records if _finite(r.get(key))]
        if not points:
            continue
        steps, values = zip(*_thin(points), strict=True)
        line = {"color": colour, "width": 1.5, "dash": "solid" if mode == "lines" else "dot"}
        mode = "lines+markers" if len(points) == 1 else mode
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": esc(label),
                "x": steps,
                "y": values,
                "line": line,
                "marker": {"size": 6, "color": colour},
            }
        )
    return traces


def _thin(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    width = mean_width(len(points))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(g[len(g) // 2][0], float(f"{sum(v for _, v in g) / len(g):.6g}")) for g in groups]


def mean_width(points: int) -> int:
    """How many neighbouring steps make one point of a curve."""
    return math.ceil(points / POINTS)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def rewards_by_class(evaluation: Json) -> dict[str, list[float]]:
    """Implicit rewards of an evaluation's rows, by class of the row (or side of the pair)."""
    names = {True: "thumbs up", False: "thumbs down", None: "no label"}
    by_class: dict[str, list[float]] = {}
    for row in evaluation["rows"]:
        label = row.get("label")
        pairs = (
            (names.get(label, str(label)), row.get("reward")),
            ("chosen", row.get("reward_chosen")),
            ("rejected", row.get("reward_rejected")),
        )
        for name, reward in pairs:
            if _finite(reward):
                by_class.setdefault(name, []).append(reward)
    return dict(sorted(by_class.items(), key=lambda kv: kv[0] in ("thumbs down", "rejected")))


def histogram(by_class: Mapping[str, list[float]], low: float, high: float) -> Json:
    """Overlaid histograms in equal bins from ``low`` to ``high``."""
    size = (high - low) / BINS or 1.0
    bins = {"start": low, "end": high + size, "size": size}  # the largest value opens a bin of its own
    data = [
        {
            "type": "histogram",
            "name": f"{esc(name)} ({len(values)})",
            "x": [float(f"{v:.6g}") for v in values],
            "xbins": bins,
            "opacity": 0.6,
            "marker": {"color": colour},
        }
        for (name, values), colour in zip(by_class.items(), COLOURS, strict=False)
    ]
    layout = {
        "barmode": "overlay",
        "showlegend": True,
        "yaxis": {"title": {"text": "rows"}},
        "xaxis": {"range": [low, high + size], "title": {"text": "reward"}},
    }
    return {"data": data, "layout": layout}


# --- Sections ---------------------------------------------------------------------------------------------------------
