"""What the runs say: reward within a KL divergence or a time, with t-intervals over seeds.

The statistics were fixed before the runs. The frontier of a method and a seed is the largest mean
reward among the reference and all points of all penalties with at most k nats, linear between
those points where it rises. Its area is the mean over 0 to 10 nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from operator import attrgetter
from statistics import fmean, median
from typing import Any, Literal

from benchmarks.align.measures import Point
from valence.statistics import student_interval

MAX_KL = 10.0
GRID = 200
TOLERANCE = 1e-3
"""Largest difference between the losses of both sides, relative to their mean size."""

Row = dict[str, Any]


def frontier(
    points: Sequence[Point], start: Point, cost: Literal["kl", "seconds"] = "kl"
) -> list[tuple[float, float]]:
    """Cost and reward of the points with a larger reward than all points with a smaller cost."""
    records = [(0.0, start.reward)]
    for point in sorted(points, key=attrgetter(cost)):
        if point.reward > records[-1][1]:
            records.append((getattr(point, cost), point.reward))
    return records


def within(records: Sequence[tuple[float, float]], cost: float) -> float:
    """The reward of a frontier at a cost, interpolated; constant after its end."""
    for (c0, r0), (c1, r1) in pairwise(records):
        if cost < c1:
            return r0 + (r1 - r0) * max(0.0, (cost - c0) / (c1 - c0))
    return records[-1][1]


def area(records: Sequence[tuple[float, float]]) -> float:
    """Mean reward of a frontier over 0 to MAX_KL nats."""
    return fmean(within(records, (i + 0.5) * MAX_KL / GRID) for i in range(GRID))


def runs_of(results: Mapping[str, Row], library: str, method: str) -> list[Row]:
    """The runs of a method with the penalties that all its seeds have: a frontier of more penalties
    is no lower, so seeds with others could not be averaged.
    """
    runs = [r for r in results.values() if (r["library"], r["method"]) == (library, method)]
    seeds = {run["seed"] for run in runs}
    return [
        run
        for run in runs
        if {other["seed"] for other in runs if other["penalty"] == run["penalty"]} == seeds
    ]


def by_seed(runs: Sequence[Row]) -> list[list[Row]]:
    """The runs of all penalties, for each seed."""
    groups: dict[int, list[Row]] = {}
    for run in runs:
        groups.setdefault(run["seed"], []).append(run)
    return list(groups.values())


def points_by_seed(runs: Sequence[Row]) -> list[list[Point]]:
    """The points of all penalties, for each seed."""
    return [[Point(**p) for run in group for p in run["points"]] for group in by_seed(runs)]


def kinds(results: Mapping[str, Row]) -> list[tuple[str, str]]:
    """Library and method of the runs, Valence first."""
    methods = dict.fromkeys(run["method"] for run in results.values())
    there = {(run["library"], run["method"]) for run in results.values()}
    pairs = [(library, method) for method in methods for library in ("valence", "trl")]
    return [pair for pair in pairs if pair in there]


def disagreement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference between the losses of the same steps, relative to their mean size."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} losses")
    scale = fmean(map(abs, ours))
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / scale


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % t-interval, which one seed does not have."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        return student_interval(self.values) if len(self.values) > 1 else (nan, nan)

    def text(self, digits: int = 3) -> str:
        """The mean, and the interval if there is one."""
        low, high = self.interval
        between = "" if low != low else f" [{low:.{digits}f}, {high:.{digits}f}]"
        return f"{self.mean:.{digits}f}{between}"

    __str__ = text


def in_both(results: Mapping[str, Row]) -> dict[str, Row]:
    """The runs that both libraries have made."""
    return {
        name: run
        for name, run in results.items()
        if len({other["library"] for other in results.values() if is_same(run, other)}) > 1
    }


@dataclass(frozen=True)
class MethodSummary:
    """A method of a library.

    area, at_5, at_10: rewards. in_time: the largest reward of a run within the time that the faster
    library needs for it, linear between measurements, mean of the penalties of a seed. other: the
    reward that was not trained on, at the point with the largest reward within 10 nats. seconds: of
    training, median of the runs. disagreement: of the losses of both libraries; None where the rows
    are sampled. num_runs: of all penalties and seeds. tokens: of the answers in a run, mean of the
    runs that counted them.
    """

    library: str
    method: str
    num_runs: int
    area: Estimate
    at_5: Estimate
    at_10: Estimate
    in_time: Estimate
    other: Estimate
    seconds: float
    disagreement: float | None
    tokens: float


def summarize(results: Mapping[str, Row], start: Point) -> list[MethodSummary]:
    """results: of runs, each with its library, method, penalty and seed."""
    summaries: list[MethodSummary] = []
    for library, method in kinds(results):
        runs = runs_of(results, library, method)
        seeds = points_by_seed(runs)
        frontiers = [frontier(points, start) for points in seeds]

        def estimate(
            value: Callable[[list[tuple[float, float]]], float],
            frontiers: Sequence[list[tuple[float, float]]] = frontiers,
        ) -> Estimate:
            return Estimate(tuple(map(value, frontiers)))

        best = [
            max([start, *(p for p in points if p.kl <= MAX_KL)], key=lambda p: p.reward)
            for points in seeds
        ]

        def best_in_time(run: Row) -> float:
            fastest = min(r["seconds"] for r in results.values() if is_same(r, run))
            points = [Point(**p) for p in run["points"]]
            return within(frontier(points, start, "seconds"), fastest)

        in_time = tuple(fmean(map(best_in_time, group)) for group in by_seed(runs))
        summaries.append(
            MethodSummary(
                library, method, len(runs), estimate(area),
                estimate(lambda records: within(records, 5.0)),
                estimate(lambda records: within(records, 10.0)),
                Estimate(in_time),
                Estimate(tuple(point.other for point in best)),
                median(run["seconds"] for run in runs),
                _largest_disagreement(runs, results) if library == "trl" else None,
                fmean([run["tokens"] for run in runs if "tokens" in run] or [nan]),
            )
        )  # fmt: skip
    return summaries


def is_same(run: Row, other: Row) -> bool:
    """Whether two runs differ at most in their library."""
    return all(run[name] == other[name] for name in ("method", "penalty", "seed"))


def _largest_disagreement(runs: Sequence[Row], results: Mapping[str, Row]) -> float | None:
    values = [
        disagreement(ours["losses"], run["losses"])
        for run in runs
        for ours in results.values()
        if ours["library"] == "valence" and not run["samples"]
        and is_same(ours, run)
    ]  # fmt: skip
    return max(values, default=None)
