"""The numbers of a run against its steps, as plain dictionaries that plotly.js draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valence.reports.console import esc
from valence.reports.figures import COLOURS, figure, translucent
from valence.reports.formatting import duration
from valence.reports.rundata import Json, RunData
from valence.reports.stats import finite, short

POINTS = 1000
"""Most points of one curve, about one for each pixel: of a longer one each point stands for several
neighbouring steps.
"""

BARS = 60
"""Most bars of the chart of the time."""

SHARE = {"range": [-0.02, 1.02], "tickformat": ".0%"}


@dataclass(frozen=True)
class Chart:
    """Metrics that belong together. note: what the chart shows, in a line. extremes: the smallest
    and the largest of the steps that a point stands for are drawn too. axis: of the values.
    """

    title: str
    metrics: tuple[str, ...]
    note: str = ""
    extremes: bool = False
    axis: Mapping[str, object] | None = None


LEARNING = (
    Chart("Loss", ("loss",), "", extremes=True),
    Chart(
        "Reward of own answers",
        ("reward/mean",),
        "mean of a round, and of answers to held-out prompts",
    ),
    Chart(
        "Rewards by class",
        ("rewards/chosen", "rewards/rejected"),
        "mean implicit reward of each class",
    ),
    Chart(
        "Margin",
        ("rewards/margins",),
        "mean reward of chosen answers (thumbs up) less that of rejected ones (thumbs down)",
    ),
    Chart("Accuracy and AUC", ("rewards/accuracies", "rewards/auc"), "50 % is chance", axis=SHARE),
    Chart(
        "Rank correlation", ("rewards/spearman", "rewards/pearson"), "of scores with the targets"
    ),
    Chart(
        "Log-probability of answers",
        ("logps/chosen", "logps/rejected"),
        "nats, summed over an answer",
    ),
    Chart("Log-probability of a token", ("logps/token",), "nats"),
    Chart("Entropy of the policy", ("entropy",), "nats a token"),
    Chart(
        "Load-balancing loss of the routers",
        ("router_aux_loss",),
        "experts per token when the load is uniform",
    ),
    Chart("Length of answers", ("rollout/length",), "tokens"),
    Chart(
        "Answers cut off, failed, tied",
        ("rollout/truncated", "rollout/failed", "rollout/tied"),
        "shares; tied: prompts whose answers are all worth the same",
        axis=SHARE,
    ),
)
KTO = "kl/raw"
"""A metric that only kto and its like have: then ``kl`` is their reference point, and no
divergence.
"""
DRIFT = Chart(
    "Drift on mismatched answers",
    (KTO, "kl"),
    "mean log-ratio (nats): as measured (kl/raw), and as used (kl)",
)
DIVERGENCE = "Divergence from the reference"
MACHINE = (
    Chart("Gradient norm", ("grad_norm",), "before clipping", extremes=True),
    # one that never changes would be drawn as 0
    Chart("Learning rate", ("lr",), axis={"rangemode": "tozero"}),
    Chart("Tokens per second", ("tokens/s",), "over the steps since the last record"),
    Chart("Memory", ("memory",), "GB, the largest so far", axis={"rangemode": "tozero"}),
)

COUNTERS = frozenset(
    {
        "step",
        "epoch",
        "tokens",
        "seconds",
        "tokens_seen",
        "examples_seen",
        "rounds",
        "prompts",
        "ranks",
    }
)
"""Metrics that only count along with the steps or measure the logging itself; a curve of them says
nothing.
"""

OF_A_ROUND = ("seconds/rollout", "seconds/reward", "seconds/measuring")
"""Seconds of a round on own answers, which ``seconds`` does not hold.

Those of a record are means over its rounds.
"""

BAND = {
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "rewards/margins": "margins",
    "reward/mean": "answers",
}
"""Metrics that evaluations have a band of, with its name there."""


def title_of(name: str) -> str:
    """What a number of the log is called above a curve of its own."""
    bare = name.removeprefix("eval/")
    held_out = ", held out" if bare != name else ""
    for chart in (*LEARNING, *MACHINE):
        if bare in chart.metrics:
            return (
                chart.title
                if len(chart.metrics) == 1
                else f"{chart.title}: {bare.rpartition('/')[2]}"
            ) + held_out
    return bare + held_out


def curves(run: RunData) -> dict[str, dict[str, Json]]:
    """Charts by their titles in three groups: those that say what was learnt, those that say how
    the machine fared, and every other number that varies.
    """
    kto = any(KTO in record or f"eval/{KTO}" in record for record in run.metrics)
    divergence = Chart(DIVERGENCE, ("rollout/kl" if kto else "kl",), "nats an answer")
    shown = (*LEARNING, *([DRIFT] if kto else []), divergence)
    learning = {chart.title: made for chart in shown if (made := _chart(run, chart))}
    machine = {chart.title: made for chart in MACHINE if (made := _chart(run, chart))}
    if time := phases(run.metrics):
        machine["Time"] = time
    known = {name for chart in (*shown, *MACHINE) for name in chart.metrics}
    names = dict.fromkeys(name.removeprefix("eval/") for record in run.metrics for name in record)
    rest = [
        n for n in names if n not in known | COUNTERS and not n.startswith(("seconds/", "test/"))
    ]
    more = {
        name: made
        for name in sorted(rest)
        if (made := _chart(run, Chart(name, (name,)))) and _varies(made)
    }
    return {"Learning": learning, "Machine": machine, "More": more}


def _varies(made: Json) -> bool:
    return len({y for trace in made["data"] for y in trace["y"] if y is not None}) > 1


def _chart(run: RunData, chart: Chart) -> Json | None:
    traces: list[Json] = []
    present = [
        name for name in chart.metrics if any(name in r or f"eval/{name}" in r for r in run.metrics)
    ]
    for place, name in enumerate(present):
        colour = COLOURS[2] if name == "rewards/margins" else COLOURS[place]
        traces += _traces(run, name, colour, chart.extremes)
    if not traces:
        return None
    banded = any(trace.get("fill") for trace in traces)
    return figure(traces, note=_note(chart, banded and not chart.extremes), yaxis=chart.axis or {})


def _note(chart: Chart, quantiles: bool) -> str:
    if not quantiles:
        return chart.note
    return f"{chart.note}; band: 10 to 90 % of the evaluation's rows"


def _traces(run: RunData, name: str, colour: str, extremes: bool) -> list[Json]:
    """The line of a training metric, and the dots of the same metric on held-out rows, with the
    bands that belong to them.
    """
    label = name.rpartition("/")[2] if name.startswith(("rewards/", "rollout/", "logps/")) else name
    made: list[Json] = []
    points = _points(run.metrics, name)
    held_out = _points(run.metrics, f"eval/{name}")
    if points:
        means, low, high = thinned(points)
        if extremes and mean_width(len(points)) > 1:
            made.append(_band([x for x, _ in means], low, high, colour, label))
        made.append(_line(means, label, colour, faint=bool(held_out)))
    if (known := BAND.get(name)) and (
        bands := {s: b[known] for s, b in run.bands.items() if known in b}
    ):
        lows, highs = zip(*bands.values(), strict=True)
        if len(bands) > 1:
            made.append(_band(list(bands), lows, highs, colour, f"{label}, held out"))
    if held_out:
        made.append(_line(thinned(held_out)[0], f"{label}, held out", colour, dots=True))
    return made


def _points(records: Iterable[Json], name: str) -> list[tuple[int, float | None]]:
    """Steps and values; None where a value is not finite, which breaks the line."""
    return [
        (r["step"], r[name] if finite(r[name]) else None)
        for r in records
        if r.get(name) is not None
    ]


def _line(
    points: Sequence[tuple[float, float | None]],
    label: str,
    colour: str,
    *,
    dots: bool = False,
    faint: bool = False,
) -> Json:
    return {
        "type": "scatter",
        "mode": "lines+markers" if dots or len(points) == 1 else "lines",
        "name": esc(label),
        "legendgroup": esc(label),
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": colour, "width": 2 if dots else 1.5},
        "opacity": 0.65 if faint else 1,
        "marker": {"size": 6, "color": colour},
    }


def _band(
    steps: Sequence[float],
    low: Sequence[float | None],
    high: Sequence[float | None],
    colour: str,
    label: str,
) -> Json:
    known = [each for each in zip(steps, low, high, strict=True) if each[1] is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "fillcolor": translucent(colour, 0.18),
        "line": {"width": 0},
        "x": [x for x, _, _ in known] + [x for x, _, _ in known[::-1]],
        "y": [short(a) for _, a, _ in known if a is not None]
        + [short(b) for _, _, b in known[::-1] if b is not None],
        "legendgroup": esc(label),
        "showlegend": False,
        "hoverinfo": "skip",
    }


Thinned = tuple[list[tuple[float, float | None]], list[float | None], list[float | None]]


def thinned(points: Sequence[tuple[int, float | None]]) -> Thinned:
    """At most ``POINTS`` points: means of neighbouring ones; and the smallest and the largest of
    each. None: not known.
    """
    width = mean_width(len(points))
    means: list[tuple[float, float | None]] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for start in range(0, len(points), width):
        group = points[start : start + width]
        values = [y for _, y in group if y is not None]
        means.append(
            (group[len(group) // 2][0], short(math.fsum(values) / len(values)) if values else None)
        )
        low.append(min(values, default=None))
        high.append(max(values, default=None))
    return means, low, high


def mean_width(points: int) -> int:
    """How many neighbouring steps make one point of a curve."""
    return math.ceil(points / POINTS)


def spent(records: Sequence[Json]) -> list[dict[str, float]]:
    """Of each record the seconds of each phase since the one before it, in all of the rounds that
    were made meanwhile.
    """
    found: list[dict[str, float]] = []
    before = 0
    for record in records:
        seconds = {
            name: v
            for name, v in record.items()
            if (name == "seconds" or name.startswith("seconds/")) and finite(v)
        }
        if isinstance(now := record.get("rounds"), int):
            seconds |= {
                name: seconds[name] * max(0, now - before) for name in OF_A_ROUND if name in seconds
            }
            before = now
        found.append(seconds)
    return found


def phases(records: Sequence[Json]) -> Json | None:
    """Where the time went: seconds of each phase, stacked, of so many neighbouring records as make
    at most ``BARS`` bars.
    """
    timed = [
        (r["step"], seconds) for r, seconds in zip(records, spent(records), strict=True) if seconds
    ]
    names = dict.fromkeys(name for _, seconds in timed for name in seconds)
    if not timed:
        return None
    width = math.ceil(len(timed) / BARS)
    groups = [timed[i : i + width] for i in range(0, len(timed), width)]
    colours = [*COLOURS, "#b8577f", "#7a7f87", "#c2a13a", "#4fa3b5"]
    traces: list[Json] = []
    for place, name in enumerate(names):
        sums = [math.fsum(seconds.get(name, 0.0) for _, seconds in group) for group in groups]
        label = "training" if name == "seconds" else name.removeprefix("seconds/")
        traces.append(
            {
                "type": "bar",
                "name": f"{esc(label)} ({duration(math.fsum(sums))})",
                "x": [group[-1][0] for group in groups],
                "y": [short(value) for value in sums],
                "marker": {"color": colours[place % len(colours)]},
            }
        )
    each = f"seconds of {width} records each" if width > 1 else "seconds of each record"
    return figure(
        traces,
        note=f"{each}; in brackets: all of the run",
        legend=True,
        barmode="stack",
        bargap=0.1,
    )
