"""Charts of one run for plotly.js: distributions, calibration, and curves."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from valence.reports.formatting import duration, number, text
from valence.reports.rows import Json, groups, margin, rewards_by_class, source, value, verdict
from valence.reports.rundata import RunData
from valence.reports.stats import finite, quantile, short, sigmoid, wilson


def esc(value: object) -> str:
    """A label for plotly, which reads HTML tags in it."""
    return html.escape(text(value))


COLOURS = ("#3b7ddd", "#d9661f", "#8b62d6", "#2a9d74")
"""Lines and bars; each readable on white and on black, and by colour-blind people."""

BINS = 24
"""Bins of a histogram."""

SOURCES = 6
"""Most sources that have a histogram of their own; the rows of the others are shown together."""

STILL = 1e-6
"""Rewards whose largest is no further from 0 are those of a policy that is its reference."""

ROWS_OF_A_BIN, BINS_OF_CALIBRATION = 10, 10
"""A share of fewer rows than this says little; more bins than this are hard to read."""


def figure(
    traces: Sequence[Json],
    *,
    note: str = "",
    legend: bool | None = None,
    height: float | None = None,
    **layout: Any,
) -> Json:
    """A chart for ``chart_grid``. note: a line under its title. legend: by default where it tells
    lines apart. height: in rem.
    """
    shown = sum(trace.get("showlegend", True) for trace in traces) > 1 if legend is None else legend
    return {
        "data": list(traces),
        "layout": {"showlegend": shown, **layout},
        "note": note,
        "height": height,
    }


def translucent(colour: str, opacity: float) -> str:
    """A colour as ``#rrggbb`` that lets through what is below it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


# Histograms

Stacked = Mapping[str, Mapping[str, Sequence[float]]]
"""Values by the strip that they are drawn in and by what they are coloured by."""


def strips(values: Stacked, what: str, unit: str = "rows") -> Json | None:
    """Histograms one above the other with the same bins, or None without values. what: the values'
    name.
    """
    every = [v for by_colour in values.values() for held in by_colour.values() for v in held]
    if not every:
        return None
    low, high = min(every), max(every)
    size = (high - low) / BINS or 1.0
    edges = [low + size * i for i in range(BINS + 1)]
    counts = {
        name: {colour: _counts(held, low, size) for colour, held in by_colour.items()}
        for name, by_colour in values.items()
    }
    return bars(edges, counts, what, unit)


def _counts(values: Iterable[float], low: float, size: float) -> list[int]:
    found = [0] * BINS
    for each in values:
        found[min(BINS - 1, int((each - low) / size))] += 1
    return found


def bars(
    edges: Sequence[float],
    counts: Mapping[str, Mapping[str, Sequence[float]]],
    what: str,
    unit: str = "rows",
) -> Json:
    """Histograms that were counted already: counts of each bin by strip and colour. edges: one more
    than bins.
    """
    colours = list(dict.fromkeys(colour for by_colour in counts.values() for colour in by_colour))
    middles = [short((a + b) / 2) for a, b in pairwise(edges)]
    width = short(edges[1] - edges[0])
    layout: dict[str, Any] = {"barmode": "overlay", "bargap": 0, "annotations": []}
    traces: list[Json] = []
    for place, (name, by_colour) in enumerate(counts.items()):
        axis = "" if place == 0 else str(place + 1)
        top = 1 - place / len(counts)
        gap = 0.3 / len(counts) if len(counts) > 1 else 0
        layout[f"yaxis{axis}"] = {
            "domain": [max(0, top - 1 / len(counts)), top - gap],
            "nticks": 4,
            "rangemode": "tozero",
        }
        if len(counts) > 1:
            layout["annotations"].append(
                _heading(name, top - gap, sum(map(sum, by_colour.values())), unit)
            )
        for colour, held in by_colour.items():
            first = colour not in [trace["legendgroup"] for trace in traces]
            trace = {
                "type": "bar",
                "name": esc(colour),
                "legendgroup": colour,
                "showlegend": first,
                "x": middles,
                "y": list(held),
                "width": width,
                "opacity": 0.6,
                "marker": {"color": COLOURS[colours.index(colour) % len(COLOURS)]},
                "yaxis": f"y{axis}",
                "xaxis": "x",
            }
            traces.append(trace)
    traces = [{**trace, "legendgroup": esc(trace["legendgroup"])} for trace in traces]
    anchor = f"y{len(counts)}" if len(counts) > 1 else "y"
    layout["xaxis"] = {
        "title": {"text": esc(what)},
        "anchor": anchor,
        "range": [edges[0], edges[-1]],
    }
    return figure(traces, legend=len(colours) > 1, height=max(15, 5 + 5 * len(counts)), **layout)


def _heading(name: str, y: float, rows: float, unit: str) -> Json:
    text = f"{esc(name)}  ({number(rows)} {unit})"
    place = {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": y,
        "yref": "paper",
        "yanchor": "bottom",
    }
    return {"text": text, "showarrow": False, "font": {"size": 11}, **place}


def spreads(first: Json, last: Json) -> dict[str, Json]:
    """Histograms of the rewards of two evaluations' rows (which may be the same): by class, by
    length and by source.
    """
    ends = {f"step {each['step']}": each["rows"] for each in (first, last)}
    ends = {name: rows for name, rows in ends.items() if not _still(rows)}
    what = "reward"
    found = {
        "By class": strips(
            {name: rewards_by_class(rows) for name, rows in ends.items()}, what, "answers"
        )
    }
    for title, split in (("By length of the answer", by_length), ("By source", by_source)):
        for name, rows in ends.items():
            of = f"{title}, {name}" if len(ends) > 1 else title
            found[of] = strips(held, what, "answers") if len(held := split(rows)) > 1 else None
    return {title: made for title, made in found.items() if made}


def _still(rows: Sequence[Json]) -> bool:
    return all(abs(v) <= STILL for values in rewards_by_class(rows).values() for v in values)


def still(evaluation: Json) -> bool:
    """Whether it has rewards, all of which are 0: policy and reference are the same."""
    return bool(rewards_by_class(evaluation["rows"])) and _still(evaluation["rows"])


def by_length(rows: Sequence[Json]) -> dict[str, dict[str, list[float]]]:
    """Rewards by quarter of the answers' lengths and by class."""
    answers = [
        (tokens, name, reward)
        for name, each in groups(rows).items()
        for row, side in each
        if finite(tokens := row.get(f"tokens{side}")) and (reward := value(row, side)) is not None
    ]
    if not answers:
        return {}
    lengths = [tokens for tokens, _, _ in answers]
    cuts = list(dict.fromkeys(quantile(lengths, share) for share in (0.25, 0.5, 0.75, 1.0)))
    found: dict[str, dict[str, list[float]]] = {}
    low = min(lengths)
    for cut in cuts:
        held = [each for each in answers if low <= each[0] <= cut]
        title = f"{number(math.ceil(low))} to {number(math.floor(cut))} tokens"
        for _, name, reward in held:
            found.setdefault(title, {}).setdefault(name, []).append(reward)
        answers = [each for each in answers if each[0] > cut]
        low = min((each[0] for each in answers), default=cut)
    return found


def by_source(rows: Sequence[Json]) -> dict[str, dict[str, list[float]]]:
    """Rewards by source and by class; of the largest sources, and of the others together."""
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(source(row), []).append(row)
    ordered = sorted(found.items(), key=lambda kv: -len(kv[1]))
    kept = dict(ordered[:SOURCES])
    if rest := [row for _, each in ordered[SOURCES:] for row in each]:
        kept[f"{len(ordered) - SOURCES} other sources"] = rest
    shown = dict(zip(kept, _tails(list(kept)), strict=True))
    held = {shown[name]: rewards_by_class(each) for name, each in kept.items()}
    return {name: by_class for name, by_class in held.items() if by_class}


def _tails(names: Sequence[str]) -> list[str]:
    """The ends of long names; whole names where the ends do not tell files apart."""
    ends = [name if len(name) <= 40 else f"…{name[-40:]}" for name in names]
    return [name if ends.count(end) > 1 else end for name, end in zip(names, ends, strict=True)]


# Calibration


def calibration(rows: Sequence[Json]) -> Json | None:
    """Probabilities that the rewards stand for against how often they came true, in bins of equally
    many rows; None with too few.

    Thumbs: sigmoid of the reward against the share of thumbs up. Pairs: sigmoid of the margin's
    size against the share whose chosen answer has the larger reward.
    """
    margins = [found for row in rows if (found := margin(row)) is not None]
    if margins:
        held, words = (
            [(sigmoid(abs(m)), m > 0) for m in margins],
            ("sigmoid of the margin's size", "share ranked as in the data"),
        )
    else:
        known = [(value(row), verdict(row)) for row in rows]
        held = [
            (sigmoid(reward), label)
            for reward, label in known
            if reward is not None and label is not None
        ]
        words = ("sigmoid of the reward", "share of thumbs up")
    bins = min(BINS_OF_CALIBRATION, len(held) // ROWS_OF_A_BIN)
    if bins < 2 or len({p for p, _ in held}) < bins:
        return None
    held.sort(key=lambda each: each[0])
    points = [
        _point(held[len(held) * i // bins : len(held) * (i + 1) // bins]) for i in range(bins)
    ]
    return _calibrated(points, words)


def _point(held: Sequence[tuple[float, bool]]) -> tuple[float, float, float, float, int]:
    """Mean probability, share, both ends of its interval, rows."""
    hits = sum(hit for _, hit in held)
    low, high = wilson(hits, len(held))
    return math.fsum(p for p, _ in held) / len(held), hits / len(held), low, high, len(held)


def _calibrated(
    points: Sequence[tuple[float, float, float, float, int]], words: tuple[str, str]
) -> Json:
    x, y, low, high, rows = (list(each) for each in zip(*points, strict=True))
    ends = [max(0.0, min(x) - 0.03), min(1.0, max(x) + 0.03)]
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "x": ends,
        "y": ends,
        "line": {"color": "#7a7f87", "width": 1, "dash": "dash"},
        "hoverinfo": "skip",
        "name": "calibrated",
    }
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "rows",
        "x": [short(v) for v in x],
        "y": [short(v) for v in y],
        "marker": {"color": COLOURS[0], "size": 8},
        "text": [f"{n} rows" for n in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "color": translucent(COLOURS[0], 0.5),
            "thickness": 1.5,
            "width": 3,
            "array": [short(b - v) for v, b in zip(y, high, strict=True)],
            "arrayminus": [short(v - a) for v, a in zip(y, low, strict=True)],
        },
    }
    note = (
        f"bins of about {rows[0]} answers or pairs each, with 95 % intervals; on the dashed "
        f"line a probability says how often"
    )
    titles: dict[str, Any] = {
        "xaxis": {"title": {"text": words[0]}, "range": ends},
        "yaxis": {"title": {"text": words[1]}, **SHARE_AXIS},
    }
    return figure([diagonal, dots], note=note, legend=False, hovermode="closest", **titles)


SHARE_AXIS = {"range": [-0.03, 1.03], "tickformat": ".0%"}


def lengths(distributions: Json) -> dict[str, Json]:
    """The audit's histograms of tokens by title; what is not whole is left out."""
    made: dict[str, Json] = {}
    for title, found in distributions.items():
        edges, counts = (
            (found.get(name) for name in ("edges", "counts"))
            if isinstance(found, Mapping)
            else (None, None)
        )
        if not (
            isinstance(edges, list)
            and isinstance(counts, dict)
            and len(edges) > 1
            and all(map(finite, edges))
        ):
            continue
        whole = {
            str(name): held
            for name, held in counts.items()
            if isinstance(held, list) and len(held) == len(edges) - 1
        }
        whole = {name: [n if finite(n) else 0 for n in held] for name, held in whole.items()}
        if whole:
            # the colours of other charts
            ordered = dict(sorted(whole.items(), key=lambda each: each[0] in ("down", "rejected")))
            made[str(title)] = bars(edges, {"": ordered}, "tokens")
    return made


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
