"""Numbers with their uncertainty: 95 % intervals and an exact paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A number between 0 and 1 with its 95 % interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})"

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def share(verdicts: Sequence[bool]) -> Estimate:
    """The share of True, with Wilson's score interval."""
    n, p = len(verdicts), sum(verdicts) / len(verdicts)
    middle = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def auc(ups: Sequence[float], downs: Sequence[float]) -> Estimate:
    """The probability that a random thumbs-up scores higher than a random thumbs-down (ties count half).

    The interval is the normal one on DeLong's variance. Needs at least two of each.
    """

    def wins(a: float, b: float) -> float:
        return 1.0 if a > b else 0.5 if a == b else 0.0

    def variance(values: Sequence[float]) -> float:
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / (len(values) - 1)

    of_ups = [sum(wins(a, b) for b in downs) / len(downs) for a in ups]
    of_downs = [sum(wins(a, b) for a in ups) / len(ups) for b in downs]
    value = sum(of_ups) / len(ups)
    half = Z95 * math.sqrt(variance(of_ups) / len(ups) + variance(of_downs) / len(downs))
    return Estimate(value, max(0.0, value - half), min(1.0, value + half))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Two-sided exact p-value that before and after, paired by prompt, do equally well (McNemar's test)."""
    better = sum(b < a for b, a in zip(before, after, strict=True))
    worse = sum(b > a for b, a in zip(before, after, strict=True))
    n = better + worse
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)
