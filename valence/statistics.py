"""Statistics of lists of numbers: quantiles, ranks, correlations, intervals.

numpy is imported where it is used, because commands import this module before they read a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

LARGEST = 1e100
"""Larger numbers are no measurements, and their sums and squares may overflow."""

Z95, Z99 = 1.959964, 2.575829
"""Standard errors on either side that contain 95 %, and 99 %, of a normal distribution."""


FOLDS = 5
"""Parts into which a cross-fit divides the rows."""
MIN_CLASS_ROWS = 2 * FOLDS
"""Minimum number of rows of each class in a cross-fit: two in each fold."""


def finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn: no bool, nan, infinity or huge number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def mean(values: Iterable[float]) -> float | None:
    """None without values."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation of two or more values."""
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def quantile(values: Sequence[float], share: float, *, is_observed: bool = False) -> float:
    """The value below which this share of the values lies. values: at least one.

    Interpolates between the two nearest values (definition 7 of Hyndman and Fan 1996). is_observed:
    return the smallest of the values that at least this share does not exceed (definition 1).
    """
    import numpy as np

    return float(np.quantile(values, share, method="inverted_cdf" if is_observed else "linear"))


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, 0 for the smallest; equal values have the mean of their ranks."""
    import numpy as np

    numbers = np.asarray(values, dtype=np.float64)
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[places].tolist()


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Linear correlation; None without values, or if one of the two is constant."""
    import numpy as np

    x, y = (np.asarray(column, dtype=np.float64) for column in (one, other))
    if not len(x) or any(column.min() == column.max() for column in (x, y)):
        return None
    with np.errstate(invalid="ignore"):  # nan for values that are not finite
        x, y = x - x.mean(), y - y.mean()
        return float(np.clip(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), -1, 1))


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation; None without values, or if one of the two is constant."""
    return pearson(ranks(one), ranks(other))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927), also for few rows and shares of 0 and 1.

    count: at least 1.
    """
    share, spread = hits / count, Z95 * Z95 / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean, from the standard error of two or more independent values."""
    middle = math.fsum(values) / len(values)
    half = Z95 * deviation(values) / math.sqrt(len(values))
    return middle - half, middle + half


def student_share(value: float, freedom: int) -> float:
    """Share of Student's t distribution between ``-value`` and ``value``, for a whole number of
    degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2 == 1
    term = total = cosine if is_odd else 1.0
    for k in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if not is_odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


def student_quantile(share: float, freedom: int) -> float:
    """The value that has this share of Student's t distribution between its negative and itself."""
    low, high = 0.0, 1.0
    while student_share(high, freedom) < share and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def student_interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of two or more independent normal values (Student's t), for few of
    them.
    """
    middle = math.fsum(values) / len(values)
    half = student_quantile(share, len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return middle - half, middle + half


def auc(ups: Sequence[float], downs: Sequence[float]) -> float:
    """Probability that one of ups is above one of downs; ties count half. Both: at least one."""
    places = ranks([*ups, *downs])[: len(ups)]
    return (math.fsum(places) - len(ups) * (len(ups) - 1) / 2) / len(ups) / len(downs)


def placements(scores: Sequence[float], labels: Sequence[bool]) -> list[float]:
    """For each row the share of the rows of the other class that it is on the right side of: an up
    row above them, a down row below; ties count half. The mean of either class is the AUC.
    """
    num_ups = sum(labels)
    places, among = ranks(scores), [0.0] * len(scores)
    for label in (True, False):
        rows = [i for i, other in enumerate(labels) if other == label]
        for i, place in zip(rows, ranks([scores[i] for i in rows]), strict=True):
            among[i] = place
    counts = {True: len(labels) - num_ups, False: num_ups}
    below = [(a - b) / counts[label] for a, b, label in zip(places, among, labels, strict=True)]
    return [share if label else 1 - share for share, label in zip(below, labels, strict=True)]


def auc_influences(scores: Sequence[float], labels: Sequence[bool]) -> tuple[float, list[float]]:
    """The AUC, and how much each row moves it (DeLong et al. 1988). Both classes: at least one."""
    shares, num_ups = placements(scores, labels), sum(labels)
    counts = {True: num_ups, False: len(labels) - num_ups}
    value = math.fsum(share for share, up in zip(shares, labels, strict=True) if up) / num_ups
    return value, [(s - value) / counts[up] for s, up in zip(shares, labels, strict=True)]


def right_share(margins: Sequence[float]) -> tuple[float, list[float]]:
    """The share of margins above 0, where 0 counts half, and how much each row moves it."""
    right = [(margin > 0) + (margin == 0) / 2 for margin in margins]
    value = math.fsum(right) / len(right)
    return value, [(item - value) / len(right) for item in right]


def grouped_error(influences: Sequence[float], groups: Sequence[str]) -> float:
    """The standard error of an estimate from the influences of its rows, of which those of one
    group depend on each other (Obuchowski 1997). Infinite for a single group.
    """
    sums: dict[str, float] = {}
    for influence, group in zip(influences, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + influence
    if len(sums) < 2:
        return math.inf
    return math.sqrt(math.fsum(s * s for s in sums.values()) * len(sums) / (len(sums) - 1))


def auc_interval(value: float, num_ups: float, num_downs: float) -> tuple[float, float]:
    """95 % interval of an AUC (Newcombe 2006, method 5), also for few rows and for 0 and 1.

    The bounds are the values a at which ``|value - a| = 1.96 * sqrt(V(a))``, with Hanley and
    McNeil's variance ``V(a) = a (1-a) (1 + (n-1) ((1-a)/(2-a) + a/(1+a))) / (num_ups * num_downs)``
    and ``n = (num_ups + num_downs) / 2``.
    """
    size = (num_ups + num_downs) / 2

    def distance(a: float) -> float:
        variance = (
            a
            * (1 - a)
            * (1 + (size - 1) * ((1 - a) / (2 - a) + a / (1 + a)))
            / (num_ups * num_downs)
        )
        return abs(value - a) - Z95 * math.sqrt(max(0.0, variance))

    def bound(far: float) -> float:
        near = value  # the distance is at most 0 here, and at least 0 at 0 and 1
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (middle, far) if distance(middle) <= 0 else (near, middle)
        return (near + far) / 2

    return bound(0.0), bound(1.0)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
