"""A proportion with its 95 % confidence interval, and an exact paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from valence.reports import stats


@dataclass(frozen=True)
class Estimate:
    """A number between 0 and 1 with its 95 % interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%})"


def share(labels: Sequence[bool]) -> Estimate:
    """The share of True, with Wilson's score interval."""
    return Estimate(sum(labels) / len(labels), *stats.wilson(sum(labels), len(labels)))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Two-sided exact p-value that before and after, paired by prompt, do equally well (McNemar's
    test).
    """
    better = sum(b < a for b, a in zip(before, after, strict=True))
    worse = sum(b > a for b, a in zip(before, after, strict=True))
    n = better + worse
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)
