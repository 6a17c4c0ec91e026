"""Charts of one run as plain dictionaries for plotly.js: distributions, calibration, and curves."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from valence.reports.formatting import duration, number, text
from valence.reports.rows import Json, groups, margin, rewards_by_class, source, value, verdict
from valence.reports.run_record import RunRecord
from valence.statistics import finite, quantile, sigmoid, wilson

COLOURS = ("#3b7ddd", "#d9661f", "#8b62d6", "#2a9d74")
"""Colours of lines and bars; readable on white and on black, and by colour-blind people."""

NUM_BINS = 24
"""Bins of a histogram."""

MAX_SOURCES = 6
"""Maximum number of sources with a separate histogram. Other sources share one."""

ZERO_REWARD = 1e-6
"""If no reward is larger than this, the policy equals its reference."""

MIN_ROWS_PER_BIN, MAX_CALIBRATION_BINS = 10, 10
"""A share of fewer rows says little, and more bins are hard to read."""

SHARE_AXIS = {"range": [-0.03, 1.03], "tickformat": ".0%"}


def esc(value: object) -> str:
    """A label for plotly, which interprets HTML tags."""
    return html.escape(text(value))


def figure(
    traces: Sequence[Json],
    *,
    note: str = "",
    legend: bool | None = None,
    height: float | None = None,
    **layout: Any,
) -> Json:
    """A chart for ``rendering.Charts``.

    note: a line under its title. legend: by default if it distinguishes lines. height: in rem.
    """
    has_legend = (
        sum(trace.get("showlegend", True) for trace in traces) > 1 if legend is None else legend
    )
    layout = {"showlegend": has_legend, **layout}
    return {"data": list(traces), "layout": layout, "note": note, "height": height}


def translucent(colour: str, opacity: float) -> str:
    """A colour as ``#rrggbb`` with this opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def short(value: float) -> float:
    """At six significant digits, which is more than a chart shows and half the bytes."""
    return float(f"{value:.6g}")


# Histograms

Strips = Mapping[str, Mapping[str, Sequence[float]]]
"""Values by the strip that they are drawn in and by colour."""


def histograms(values: Strips, axis: str, unit: str = "rows") -> Json | None:
    """Histograms one above the other with the same bins, or None without values."""
    flat = [v for by_colour in values.values() for group in by_colour.values() for v in group]
    if not flat:
        return None
    low, high = min(flat), max(flat)
    size = (high - low) / NUM_BINS or 1.0
    counts = {
        name: {colour: _bin_counts(group, low, size) for colour, group in by_colour.items()}
        for name, by_colour in values.items()
    }
    return bars([low + size * i for i in range(NUM_BINS + 1)], counts, axis, unit)


def _bin_counts(values: Iterable[float], low: float, size: float) -> list[int]:
    counts = [0] * NUM_BINS
    for v in values:
        counts[min(NUM_BINS - 1, int((v - low) / size))] += 1
    return counts


def bars(edges: Sequence[float], counts: Strips, axis: str, unit: str = "rows") -> Json:
    """Histograms from the counts of each bin, by strip and colour. edges: one more than bins."""
    colours = list(dict.fromkeys(colour for by_colour in counts.values() for colour in by_colour))
    middles = [short((a + b) / 2) for a, b in pairwise(edges)]
    layout: dict[str, Any] = {"barmode": "overlay", "bargap": 0, "annotations": []}
    traces: list[Json] = []
    for place, (name, by_colour) in enumerate(counts.items()):
        suffix = "" if place == 0 else str(place + 1)
        top = 1 - place / len(counts)
        gap = 0.3 / len(counts) if len(counts) > 1 else 0
        layout[f"yaxis{suffix}"] = {
            "domain": [max(0, top - 1 / len(counts)), top - gap],
            "nticks": 4,
            "rangemode": "tozero",
        }
        if len(counts) > 1:
            total = sum(map(sum, by_colour.values()))
            layout["annotations"].append(_strip_title(name, top - gap, total, unit))
        for colour, bin_counts in by_colour.items():
            label = esc(colour)
            traces.append(
                {
                    "type": "bar",
                    "name": label,
                    "legendgroup": label,
                    "showlegend": label not in [trace["legendgroup"] for trace in traces],
                    "x": middles,
                    "y": list(bin_counts),
                    "width": short(edges[1] - edges[0]),
                    "opacity": 0.6,
                    "marker": {"color": COLOURS[colours.index(colour) % len(COLOURS)]},
                    "yaxis": f"y{suffix}",
                    "xaxis": "x",
                }
            )
    layout["xaxis"] = {
        "title": {"text": esc(axis)},
        "anchor": f"y{len(counts)}" if len(counts) > 1 else "y",
        "range": [edges[0], edges[-1]],
    }
    return figure(traces, legend=len(colours) > 1, height=max(15, 5 + 5 * len(counts)), **layout)


def _strip_title(name: str, y: float, total: float, unit: str) -> Json:
    return {
        "text": f"{esc(name)}  ({number(total)} {unit})",
        "showarrow": False,
        "font": {"size": 11},
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": y,
        "yref": "paper",
        "yanchor": "bottom",
    }


def reward_histograms(first: Json, last: Json, axis: str = "reward") -> dict[str, Json]:
    """Histograms of the rewards of two evaluations (which may be the same): by class, by length and
    by source. axis: what the rewards are.
    """
    rows = {f"step {e['step']}": e["rows"] for e in (first, last) if not has_zero_rewards(e)}
    by_class = {step: rewards_by_class(evaluation) for step, evaluation in rows.items()}
    figures = {"By class": histograms(by_class, axis, "answers")}
    for title, split in (("By length of the answer", by_length), ("By source", by_source)):
        for step, evaluation in rows.items():
            strips = split(evaluation)
            chart = histograms(strips, axis, "answers") if len(strips) > 1 else None
            figures[f"{title}, {step}" if len(rows) > 1 else title] = chart
    return {title: chart for title, chart in figures.items() if chart}


def has_zero_rewards(evaluation: Json) -> bool:
    """Whether all rewards are 0, because the policy equals its reference; also without rewards."""
    rewards = rewards_by_class(evaluation["rows"])
    return all(abs(v) <= ZERO_REWARD for values in rewards.values() for v in values)


def equals_reference(evaluation: Json) -> bool:
    """Whether the evaluation has rewards, all of which are 0."""
    return bool(rewards_by_class(evaluation["rows"])) and has_zero_rewards(evaluation)


def by_length(rows: Sequence[Json]) -> dict[str, dict[str, list[float]]]:
    """Rewards by quarter of the answers' lengths and by class."""
    answers = [
        (tokens, name, reward)
        for name, group in groups(rows).items()
        for row, side in group
        if finite(tokens := row.get(f"tokens{side}")) and (reward := value(row, side)) is not None
    ]
    if not answers:
        return {}
    lengths = [tokens for tokens, _, _ in answers]
    cuts = list(dict.fromkeys(quantile(lengths, share) for share in (0.25, 0.5, 0.75, 1.0)))
    rewards: dict[str, dict[str, list[float]]] = {}
    low = min(lengths)
    for cut in cuts:
        title = f"{number(math.ceil(low))} to {number(math.floor(cut))} tokens"
        for tokens, name, reward in answers:
            if low <= tokens <= cut:
                rewards.setdefault(title, {}).setdefault(name, []).append(reward)
        answers = [answer for answer in answers if answer[0] > cut]
        low = min((answer[0] for answer in answers), default=cut)
    return rewards


def by_source(rows: Sequence[Json]) -> dict[str, dict[str, list[float]]]:
    """Rewards by class for each of the largest sources, and for the others together."""
    rows_of: dict[str, list[Json]] = {}
    for row in rows:
        rows_of.setdefault(source(row), []).append(row)
    ordered = sorted(rows_of.items(), key=lambda item: -len(item[1]))
    drawn_sources = dict(ordered[:MAX_SOURCES])
    if rest := [row for _, group in ordered[MAX_SOURCES:] for row in group]:
        drawn_sources[f"{len(ordered) - MAX_SOURCES} other sources"] = rest
    titles = _short_titles(list(drawn_sources))
    rewards = (rewards_by_class(group) for group in drawn_sources.values())
    return {title: by_class for title, by_class in zip(titles, rewards, strict=True) if by_class}


def _short_titles(names: Sequence[str]) -> list[str]:
    """The ends of long names; complete names where the ends are equal."""
    ends = [name if len(name) <= 40 else f"…{name[-40:]}" for name in names]
    return [name if ends.count(end) > 1 else end for name, end in zip(names, ends, strict=True)]


def length_histograms(distributions: Json) -> dict[str, Json]:
    """The audit's histograms of tokens by title. Incomplete ones are left out."""
    figures: dict[str, Json] = {}
    for title, content in distributions.items():
        edges, counts = (
            (content.get(name) for name in ("edges", "counts"))
            if isinstance(content, Mapping)
            else (None, None)
        )
        if not (
            isinstance(edges, list)
            and isinstance(counts, dict)
            and len(edges) > 1
            and all(map(finite, edges))
        ):
            continue
        complete = {
            str(name): [n if finite(n) else 0 for n in bin_counts]
            for name, bin_counts in counts.items()
            if isinstance(bin_counts, list) and len(bin_counts) == len(edges) - 1
        }
        if complete:  # in the order of the classes in other charts, for the same colours
            in_order = sorted(complete.items(), key=lambda item: item[0] in ("down", "rejected"))
            figures[str(title)] = bars(edges, {"": dict(in_order)}, "tokens")
    return figures


# Calibration


def calibration(rows: Sequence[Json]) -> Json | None:
    """Predicted probabilities against observed frequencies, in bins of equally many rows; None with
    too few rows.

    Thumbs: sigmoid of the reward against the share of thumbs up. Pairs: sigmoid of the margin's
    size against the share whose chosen answer has the larger reward.
    """
    margins = [m for row in rows if (m := margin(row)) is not None]
    if margins:
        pairs = [(sigmoid(abs(m)), m > 0) for m in margins]
        titles = "sigmoid of the absolute margin", "fraction ranked as in the data"
    else:
        known = [(value(row), verdict(row)) for row in rows]
        pairs = [(sigmoid(r), label) for r, label in known if r is not None and label is not None]
        titles = "sigmoid of the reward", "fraction of thumbs up"
    num_bins = min(MAX_CALIBRATION_BINS, len(pairs) // MIN_ROWS_PER_BIN)
    if num_bins < 2 or len({p for p, _ in pairs}) < num_bins:
        return None
    pairs.sort(key=lambda pair: pair[0])
    cuts = [len(pairs) * i // num_bins for i in range(num_bins + 1)]
    bins = [pairs[start:end] for start, end in pairwise(cuts)]
    x = [math.fsum(p for p, _ in group) / len(group) for group in bins]
    hits = [sum(hit for _, hit in group) for group in bins]
    y = [hit / len(group) for hit, group in zip(hits, bins, strict=True)]
    spans = [wilson(hit, len(group)) for hit, group in zip(hits, bins, strict=True)]
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
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "rows",
        "x": [short(v) for v in x],
        "y": [short(v) for v in y],
        "marker": {"color": COLOURS[0], "size": 8},
        "text": [f"{len(group)} rows" for group in bins],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "color": translucent(COLOURS[0], 0.5),
            "thickness": 1.5,
            "width": 3,
            "array": [short(high - v) for v, (_, high) in zip(y, spans, strict=True)],
            "arrayminus": [short(v - low) for v, (low, _) in zip(y, spans, strict=True)],
        },
    }
    note = (
        f"bins of about {len(bins[0])} answers or pairs, with 95 % intervals; on the dashed line, "
        f"predicted probabilities equal observed frequencies"
    )
    axes: dict[str, Any] = {
        "xaxis": {"title": {"text": titles[0]}, "range": ends},
        "yaxis": {"title": {"text": titles[1]}, **SHARE_AXIS},
    }
    return figure([diagonal, points], note=note, legend=False, hovermode="closest", **axes)


# Curves

MAX_POINTS = 1000
"""Maximum points of a curve, about one per pixel. Each point of a longer curve is the mean of
several neighbouring steps.
"""

MAX_BARS = 60
"""Bars of the chart of the time."""

SHARE = {"range": [-0.02, 1.02], "tickformat": ".0%"}


@dataclass(frozen=True)
class Chart:
    """Metrics that are drawn together. note: a line about the chart. extremes: also draw the
    smallest and the largest step that a point stands for. axis: settings of the y-axis.
    """

    title: str
    metrics: tuple[str, ...]
    note: str = ""
    extremes: bool = False
    axis: Mapping[str, object] | None = None


LEARNING = (
    Chart("Loss", ("loss",), "", extremes=True),
    Chart(
        "Reward of sampled answers",
        ("reward/mean",),
        "mean per round, and on held-out prompts",
    ),
    Chart(
        "Rewards by class",
        ("rewards/chosen", "rewards/rejected"),
        "mean implicit reward per class",
    ),
    Chart(
        "Margin",
        ("rewards/margins",),
        "mean reward of chosen answers (thumbs up) minus that of rejected ones (thumbs down)",
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
    Chart("Log-probability per token", ("logps/token",), "nats"),
    Chart(
        "Signal of the teacher",
        ("signal/mean", "signal/size"),
        "log p of the teacher minus log p of the policy: mean, and mean size (nats per token)",
    ),
    Chart("Entropy of the policy", ("entropy",), "nats per token"),
    Chart(
        "Load-balancing loss of the routers",
        ("router_aux_loss",),
        "equals the number of experts per token at uniform load",
    ),
    Chart("Length of answers", ("rollout/length",), "tokens"),
    Chart(
        "Truncated, failed and tied answers",
        ("rollout/truncated", "rollout/failed", "rollout/tied"),
        "fractions; tied: prompts with equal rewards of all answers",
        axis=SHARE,
    ),
    Chart("Turns and tool calls", ("rollout/turns", "rollout/tool_calls"), "per answer"),
    Chart(
        "Failed calls, and answers at the limit of turns",
        ("rollout/tool_errors", "rollout/max_turns"),
        "fractions of the calls and of the answers",
        axis=SHARE,
    ),
)
KTO = "kl/raw"
"""A metric of kto and similar methods: their ``kl`` is the reference point, not a divergence."""
DRIFT = Chart(
    "Drift on mismatched answers",
    (KTO, "kl"),
    "mean log-ratio (nats): measured (kl/raw), and clamped at 0 (kl)",
)
DIVERGENCE = "Divergence from the reference"
MACHINE = (
    Chart("Gradient norm", ("grad_norm",), "before clipping", extremes=True),
    Chart(
        "Learning rate", ("lr",), axis={"rangemode": "tozero"}
    ),  # otherwise a constant would be drawn at 0
    Chart("Tokens per second", ("tokens/s",), "since the previous record"),
    Chart(
        "Memory", ("memory", "memory_reserved"), "GB, maximum so far", axis={"rangemode": "tozero"}
    ),
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
"""Metrics without a curve: counters of steps, and times of logging."""

OF_A_ROUND = ("seconds/rollout", "seconds/reward", "seconds/measuring")
"""Seconds of an online round, which ``seconds`` does not include. A record has their means over its
rounds.
"""

BANDS = {
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "rewards/margins": "margins",
    "reward/mean": "answers",
}
"""Metrics for which ``RunRecord.bands`` has a band, with its name there."""


def title_of(name: str) -> str:
    """The title of a chart of one metric."""
    bare = name.removeprefix("eval/")
    suffix = ", held out" if bare != name else ""
    for chart in (*LEARNING, *MACHINE):
        if bare in chart.metrics:
            detail = f": {bare.rpartition('/')[2]}" if len(chart.metrics) > 1 else ""
            return f"{chart.title}{detail}{suffix}"
    return bare + suffix


def curves(run: RunRecord) -> dict[str, dict[str, Json]]:
    """Charts by title in three groups: Learning, Machine, and More for every other metric that
    varies.
    """
    is_kto = any(KTO in record or f"eval/{KTO}" in record for record in run.metrics)
    divergence = Chart(DIVERGENCE, ("rollout/kl" if is_kto else "kl",), "nats per answer")
    learning_charts = (*LEARNING, *([DRIFT] if is_kto else []), divergence)
    learning = {c.title: drawn for c in learning_charts if (drawn := _draw(run, c))}
    machine = {c.title: drawn for c in MACHINE if (drawn := _draw(run, c))}
    if time := phases(run.metrics):
        machine["Time"] = time
    known = {name for chart in (*learning_charts, *MACHINE) for name in chart.metrics} | COUNTERS
    names = {name.removeprefix("eval/") for record in run.metrics for name in record} - known
    more = {
        name: drawn
        for name in sorted(names)
        if not name.startswith(("seconds/", "test/"))
        and (drawn := _draw(run, Chart(name, (name,))))
        and _varies(drawn)
    }
    return {"Learning": learning, "Machine": machine, "More": more}


def _varies(chart: Json) -> bool:
    return len({y for trace in chart["data"] for y in trace["y"] if y is not None}) > 1


def _draw(run: RunRecord, chart: Chart) -> Json | None:
    present = [
        name for name in chart.metrics if any(name in r or f"eval/{name}" in r for r in run.metrics)
    ]
    traces: list[Json] = []
    for place, name in enumerate(present):
        colour = COLOURS[2] if name == "rewards/margins" else COLOURS[place]
        traces += _traces(run, name, colour, chart.extremes)
    if not traces:
        return None
    note = chart.note
    if not chart.extremes and any(trace.get("fill") for trace in traces):
        note = f"{note}; band: 10th to 90th percentile of the evaluation's rows"
    return figure(traces, note=note, yaxis=chart.axis or {})


def _traces(run: RunRecord, name: str, colour: str, extremes: bool) -> list[Json]:
    """The line of a training metric, and the dots of the same metric on held-out rows, with their
    bands.
    """
    label = name.rpartition("/")[2] if name.startswith(("rewards/", "rollout/", "logps/")) else name
    traces: list[Json] = []
    points, eval_points = _points(run.metrics, name), _points(run.metrics, f"eval/{name}")
    if points:
        means, low, high = thinned(points)
        if extremes and mean_width(len(points)) > 1:
            traces.append(_band([x for x, _ in means], low, high, colour, label))
        traces.append(_line(means, label, colour, faint=bool(eval_points)))
    band = BANDS.get(name, "")
    spans = {step: bands[band] for step, bands in run.bands.items() if band in bands}
    if len(spans) > 1:
        lows, highs = zip(*spans.values(), strict=True)
        traces.append(_band(list(spans), lows, highs, colour, f"{label}, held out"))
    if eval_points:
        traces.append(_line(thinned(eval_points)[0], f"{label}, held out", colour, dots=True))
    return traces


def _points(records: Iterable[Json], name: str) -> list[tuple[int, float | None]]:
    """Steps and values; None for a non-finite value, which interrupts the line."""
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
    known = [
        (step, short(a), short(b))
        for step, a, b in zip(steps, low, high, strict=True)
        if a is not None and b is not None
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "fillcolor": translucent(colour, 0.18),
        "line": {"width": 0},
        "x": [x for x, _, _ in known] + [x for x, _, _ in known[::-1]],
        "y": [a for _, a, _ in known] + [b for _, _, b in known[::-1]],
        "legendgroup": esc(label),
        "showlegend": False,
        "hoverinfo": "skip",
    }


Thinned = tuple[list[tuple[float, float | None]], list[float | None], list[float | None]]


def thinned(points: Sequence[tuple[int, float | None]]) -> Thinned:
    """At most ``MAX_POINTS`` means of neighbouring points, with the smallest and the largest value
    of each. None: unknown.
    """
    width = mean_width(len(points))
    means: list[tuple[float, float | None]] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for start in range(0, len(points), width):
        group = points[start : start + width]
        values = [y for _, y in group if y is not None]
        average = short(math.fsum(values) / len(values)) if values else None
        means.append((group[len(group) // 2][0], average))
        low.append(min(values, default=None))
        high.append(max(values, default=None))
    return means, low, high


def mean_width(num_points: int) -> int:
    """The number of neighbouring steps in one point of a curve."""
    return math.ceil(num_points / MAX_POINTS)


def spent(records: Sequence[Json]) -> list[dict[str, float]]:
    """For each record the seconds of each phase since the record before it, over all of its
    rounds.
    """
    spans: list[dict[str, float]] = []
    before = 0
    for record in records:
        seconds = {
            name: v
            for name, v in record.items()
            if (name == "seconds" or name.startswith("seconds/")) and finite(v)
        }
        if isinstance(rounds := record.get("rounds"), int):
            num_rounds = max(0, rounds - before)
            seconds |= {n: seconds[n] * num_rounds for n in OF_A_ROUND if n in seconds}
            before = rounds
        spans.append(seconds)
    return spans


def phases(records: Sequence[Json]) -> Json | None:
    """Seconds of each phase, stacked, in at most ``MAX_BARS`` bars of neighbouring records."""
    timed = [
        (r["step"], seconds) for r, seconds in zip(records, spent(records), strict=True) if seconds
    ]
    if not timed:
        return None
    names = dict.fromkeys(name for _, seconds in timed for name in seconds)
    width = math.ceil(len(timed) / MAX_BARS)
    bars = [timed[i : i + width] for i in range(0, len(timed), width)]
    colours = [*COLOURS, "#b8577f", "#7a7f87", "#c2a13a", "#4fa3b5"]
    traces: list[Json] = []
    for place, name in enumerate(names):
        sums = [math.fsum(seconds.get(name, 0.0) for _, seconds in group) for group in bars]
        label = "training" if name == "seconds" else name.removeprefix("seconds/")
        traces.append(
            {
                "type": "bar",
                "name": f"{esc(label)} ({duration(math.fsum(sums))})",
                "x": [group[-1][0] for group in bars],
                "y": [short(seconds) for seconds in sums],
                "marker": {"color": colours[place % len(colours)]},
            }
        )
    unit = f"seconds per {width} records" if width > 1 else "seconds per record"
    note = f"{unit}; in brackets: total of the run"
    return figure(traces, note=note, legend=True, barmode="stack", bargap=0.1)
