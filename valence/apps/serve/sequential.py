"""Compare two rates of thumbs up with a test that is valid however often one looks at it.

Votes are cut into blocks in the order of their arrival. A block ends with the first vote by which
both sides have one, so it depends on the sides of the votes and not on the thumbs. With n_a and n_b
votes in a block, and any rates p_a and p_b that were chosen before it,

    S = prod over votes of A of p_a(y) / p_0(y)  *  prod over votes of B of p_b(y) / p_0(y),
    p_0 = (n_a p_a + n_b p_b) / (n_a + n_b),

has an expectation of at most 1 if both sides have the same rate, whatever it is (Turner, Ly and
Grünwald 2024, "Generic E-variables for exact sequential k-sample tests that allow for optional
stopping", J. Stat. Plan. Inference 230, Theorem 1). If p_b > p_a, the same holds wherever the rate
of B is at most that of A, since S decreases in the thumbs up of A and increases in those of B. The
product of S over all blocks is a nonnegative supermartingale, so the probability that it ever
reaches 1 / a is at most a (Ville's inequality). The rate may change from block to block, and one
side may get more votes than the other.

For "B is better", p_a and p_b are the rate of all votes of earlier blocks, moved apart by a fixed
log odds ratio. The statistic is the mean of the products over several ratios, and each direction
has half of the error probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALPHA = 0.05
"""Probability that a test of two equally good sides ever calls one of them better, at most."""

MIN_VOTES = 10
"""Votes that each side needs before a difference is established."""

LOG_ODDS_RATIOS = (0.2, 0.4, 0.8, 1.6)
"""Effects that the test bets on: odds ratios of 1.2, 1.5, 2.2 and 5."""

MAX_LEFT = 1_000_000
"""Estimates of further votes above this are not given."""

Array = Any


@dataclass(frozen=True)
class SequentialResult:
    """The state of a test.

    better: the side (0 or 1) that is better; None while this is not established. established_at:
    number of votes by then. e_values: present evidence for each side, which never shrinks what was
    established. threshold: e-value that establishes a difference. votes_left: estimate at the
    present rates; None when it is established, when the rates do not differ enough, or while a side
    has fewer than ``MIN_VOTES`` votes.
    """

    better: int | None
    established_at: int | None
    e_values: tuple[float, float]
    threshold: float
    votes_left: int | None


def block_ends(sides: Array) -> Array:
    """The index of the last vote of each block. sides[N]: 0 or 1."""
    ends: list[int] = []
    changes = np.flatnonzero(np.diff(sides)) + 1
    start = 0
    for change in changes.tolist():
        if change > start:
            ends.append(change)
            start = change + 1
    return np.array(ends, dtype=np.int64)


def log_e_values(sides: Array, labels: Array, ends: Array) -> Array:
    """Logarithms of the products of S up to each block [2, ratios, J].

    The first axis is the side that would be better. sides[N], labels[N]: 0 or 1. ends[J].
    """
    counts = [
        _per_block(values, ends)
        for side in (0, 1)
        for values in (sides == side, (sides == side) & (labels == 1))
    ]
    num_a, ups_a, num_b, ups_b = counts
    num, ups = _before(num_a + num_b), _before(ups_a + ups_b)
    rate, share = (ups + 1) / (num + 2), (_before(num_b) + 1) / (num + 2)
    ratios = np.array(LOG_ODDS_RATIOS)[:, None]
    results: list[Array] = []
    for sign in (-1, 1):
        p_a, p_b = _rates_around(rate, share, sign * ratios)
        p_0 = (num_a * p_a + num_b * p_b) / (num_a + num_b)
        log_s = (
            ups_a * np.log(p_a / p_0)
            + (num_a - ups_a) * np.log((1 - p_a) / (1 - p_0))
            + ups_b * np.log(p_b / p_0)
            + (num_b - ups_b) * np.log((1 - p_b) / (1 - p_0))
        )
        results.append(np.cumsum(log_s, axis=1))
    return np.stack(results)


def sequential_test(
    sides: Sequence[int], labels: Sequence[bool], alpha: float = ALPHA
) -> SequentialResult:
    """Test votes in the order of their arrival. sides: 0 or 1 of each vote."""
    side, label = np.asarray(sides, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    ends, threshold = block_ends(side), 2 / alpha
    if not len(ends):
        return SequentialResult(None, None, (1.0, 1.0), threshold, None)
    logs = log_e_values(side, label, ends)
    mixed = _log_mean(logs)
    num_b = np.cumsum(side)[ends]
    is_enough = np.minimum(num_b, ends + 1 - num_b) >= MIN_VOTES
    reached = (mixed >= math.log(threshold)) & is_enough
    e_a, e_b = (math.exp(min(value, 700.0)) for value in mixed[:, -1])
    if reached.any():
        block = int(np.flatnonzero(reached.any(0))[0])
        better = int(np.argmax(mixed[:, block]))
        return SequentialResult(better, int(ends[block]) + 1, (e_a, e_b), threshold, None)
    has_estimate = min(np.sum(side == 0), np.sum(side == 1)) >= MIN_VOTES
    left = _votes_left(side, label, logs[:, :, -1], threshold) if has_estimate else None
    return SequentialResult(None, None, (e_a, e_b), threshold, left)


def rate_interval(ups: int, num: int, alpha: float = ALPHA) -> tuple[float, float]:
    """A confidence interval of a rate that is valid at any number of votes.

    It contains the rates p with BetaBinomial(ups, num; 1/2, 1/2) < p^ups (1-p)^(num-ups) / alpha
    (Robbins 1970, "Statistical methods related to the law of the iterated logarithm").
    """
    if not num:
        return 0.0, 1.0
    downs = num - ups
    log_mixture = _log_beta(ups + 0.5, downs + 0.5) - _log_beta(0.5, 0.5)
    bound = log_mixture + math.log(alpha)

    def is_inside(rate: float) -> bool:
        return _log_power(rate, ups) + _log_power(1 - rate, downs) > bound

    def end(outside: float) -> float:
        if is_inside(outside):
            return outside
        inside = ups / num
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
        return outside

    return end(0.0), end(1.0)


def _votes_left(sides: Array, labels: Array, logs: Array, threshold: float) -> int | None:
    """How many more votes at the present rates would bring the evidence to the threshold.

    logs[2, ratios]: present logarithms of the products.
    """
    num = np.array([np.sum(sides == side) for side in (0, 1)])
    rates = [float(np.mean(labels[sides == side])) for side in (0, 1)]
    if rates[0] == rates[1]:
        return None
    better = int(rates[1] > rates[0])
    share = float(num[1] / num.sum())
    pooled = (float(labels.sum()) + 1) / (len(labels) + 2)
    sign = 1 if better else -1
    p_a, p_b = _rates_around(pooled, share, sign * np.array(LOG_ODDS_RATIOS))
    p_0 = (1 - share) * p_a + share * p_b
    growth = (1 - share) * _mean_log_ratio(rates[0], p_a, p_0)
    growth = growth + share * _mean_log_ratio(rates[1], p_b, p_0)
    needed = math.log(threshold * len(LOG_ODDS_RATIOS)) - logs[better]
    estimates = [need / gain for need, gain in zip(needed, growth, strict=True) if gain > 0]
    if not estimates or min(estimates) > MAX_LEFT:
        return None
    return math.ceil(max(min(estimates), 1.0))


def _per_block(values: Array, ends: Array) -> Array:
    """The sum of values[N] in each block [J]."""
    return np.diff(np.cumsum(values)[ends], prepend=0)


def _before(values: Array) -> Array:
    """The sum of all earlier values."""
    return np.cumsum(values) - values


def _rates_around(rate: Array, share: Array, log_odds_ratio: Array) -> tuple[Array, Array]:
    """Rates of both sides with a ratio of their odds, around a common rate. share: of B."""
    logit = np.log(rate / (1 - rate))
    p_a = 1 / (1 + np.exp(-(logit - log_odds_ratio * share)))
    p_b = 1 / (1 + np.exp(-(logit + log_odds_ratio * (1 - share))))
    return p_a, p_b


def _mean_log_ratio(rate: float, p: Array, p_0: Array) -> Array:
    """The expectation of log(p(y) / p_0(y)) for a vote with this rate."""
    return rate * np.log(p / p_0) + (1 - rate) * np.log((1 - p) / (1 - p_0))


def _log_mean(logs: Array) -> Array:
    """The logarithm of the mean of exp(logs) over the second axis."""
    highest = logs.max(1)
    return highest + np.log(np.exp(logs - highest[:, None]).mean(1))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_power(rate: float, count: int) -> float:
    """count * log(rate), which is 0 for no votes."""
    return count * math.log(rate) if count and rate > 0 else (0.0 if not count else -math.inf)
