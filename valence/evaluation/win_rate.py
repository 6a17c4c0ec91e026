"""Win rates of one model over another, with intervals, and controlled for the length of answers.

A preference is 1 for a prompt on which the candidate's answer is better, 0 for one on which the
baseline's is, and 0.5 for a tie; a mean of several verdicts is in between. Arrays are ``[N]`` for N
prompts, and ``[R, N]`` for R resamples of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from valence.reports.regression import fit_logistic
from valence.statistics import quantile, wilson

NUM_RESAMPLES = 2000
PENALTY = 0.01
"""Weight of half the squared length coefficient in the loss, which makes the fit unique where the
longer answer always wins. It is 1 / C with the C = 100 of AlpacaEval.
"""
MAX_ELEMENTS = 2**22
"""Elements of the largest array; more resamples are computed in parts."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def win_rate(preferences: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean preference with the percentile interval of a paired bootstrap.

    The resampled units are prompts, each with the answers of both models. preferences: at least
    one. If all are equal, resamples do not differ: Wilson's lower bound L is then that of the share
    of prompts with this preference, and the interval covers the rates if the candidate won, or
    lost, on the share 1 - L.
    """
    values = np.asarray(preferences, dtype=np.float64)
    if values.min() == values.max():
        rate, (share, _) = float(values[0]), wilson(len(values), len(values))
        return Estimate(rate, rate * share, rate * share + 1 - share)
    rate = float(values.mean())
    rates = np.concatenate([c @ values / len(values) for c in _resamples(len(values), seed)])
    return _estimate(rate, rates)


def length_controlled_rate(
    preferences: Sequence[float], length_differences: Sequence[float], *, seed: int = 0
) -> Estimate:
    """The win rate if the answers of both models were equally long, with its bootstrap interval.

    Length-controlled AlpacaEval (Dubois et al. 2024, equation 2) fits

        P(candidate wins) = sigmoid(theta + phi * tanh(d / std(d)))

    with d the candidate's length minus the baseline's, and sets the term of d to 0: the rate is
    sigmoid(theta). Its third term, the difficulty of an instruction, is estimated from the results
    of many models and left out here. theta is not penalized, so that the rate equals the win rate
    where all answers are equally long; swapping the models gives 1 minus the rate.

    length_differences: in characters, one for each preference. The scale std(d) is that of all
    prompts in every resample.
    """
    values = np.asarray(preferences, dtype=np.float64)
    if values.min() == values.max():
        return win_rate(preferences)
    terms = length_terms(length_differences)
    ones = np.ones((1, len(values)))
    rate = float(_controlled_rates(values, terms, ones)[0])
    rates = [_controlled_rates(values, terms, c) for c in _resamples(len(values), seed)]
    return _estimate(rate, np.concatenate(rates))


def length_terms(length_differences: Sequence[float]) -> Array:
    """tanh(d / std(d)) of each prompt; 0 if all differences are the same."""
    differences = np.asarray(length_differences, dtype=np.float64)
    std = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    return np.tanh(differences / std) if std else np.zeros_like(differences)


def _resamples(num_prompts: int, seed: int) -> Iterator[Array]:
    """``[R, N]``: how often each prompt is in each resample."""
    draw, rest = np.random.default_rng(seed), NUM_RESAMPLES
    shares = np.full(num_prompts, 1 / num_prompts)
    while rest:
        size = min(rest, max(1, MAX_ELEMENTS // num_prompts))
        yield draw.multinomial(num_prompts, shares, size=size).astype(np.float64)
        rest -= size


def _estimate(rate: float, rates: Array) -> Estimate:
    low, high = (quantile(rates.tolist(), share) for share in (0.025, 0.975))
    return Estimate(rate, low, high)


def _controlled_rates(preferences: Array, terms: Array, counts: Array) -> Array:
    """sigmoid(theta) of each resample ``[R]``."""
    means = counts @ preferences / counts.sum(axis=1)
    rates = means.copy()
    # where all preferences are 0 or 1, theta is infinite, and the rate their mean
    fitted = (means > 0) & (means < 1)
    if fitted.any():
        _, thetas = fit_logistic(
            torch.from_numpy(terms)[:, None],
            torch.from_numpy(preferences),
            torch.from_numpy(counts[fitted].T),
            1 / PENALTY,
        )
        rates[fitted] = torch.sigmoid(thetas).numpy()
    return rates
