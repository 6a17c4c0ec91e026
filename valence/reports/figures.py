"""How values are spread, as plain dictionaries that plotly.js draws; and what all charts share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from valence.reports.console import esc
from valence.reports.formatting import number
from valence.reports.rows import Json, groups, margin, rewards_by_class, source, value, verdict
from valence.reports.stats import finite, quantile, short, sigmoid, wilson

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
