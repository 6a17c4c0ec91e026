"""Win rates against computations that are written again: a loop of resamples, and a general
minimizer for the regression.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import minimize

from valence.evaluation import win_rate as module
from valence.evaluation.win_rate import length_controlled_rate, length_terms, win_rate
from valence.statistics import wilson


def outcomes(
    count: int, seed: int, *, of_length: float, ability: float
) -> tuple[list[float], list[int]]:
    """Preferences of a judge who likes long answers, with ties, and the differences in length."""
    draw = random.Random(seed)
    lengths = [round(draw.gauss(150, 300)) for _ in range(count)]
    preferences: list[float] = []
    for length in lengths:
        chance = 1 / (1 + math.exp(-ability - of_length * math.tanh(length / 300)))
        preferences.append(0.5 if draw.random() < 0.1 else float(draw.random() < chance))
    return preferences, lengths


def minimized(preferences: Sequence[float], lengths: Sequence[float]) -> tuple[float, float]:
    """theta and phi of equation 2, by a minimizer that knows only the loss."""
    scale = np.std(lengths, ddof=1)

    def loss(weights: Sequence[float]) -> float:
        theta, phi = weights
        total = 0.5 * module.PENALTY * phi**2
        for p, d in zip(preferences, lengths, strict=True):
            q = 1 / (1 + math.exp(-(theta + phi * math.tanh(d / scale))))
            total -= p * math.log(q) + (1 - p) * math.log(1 - q)
        return total

    result = minimize(
        loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    return tuple(result.x)


def test_the_win_rate_is_the_mean_with_ties_as_half() -> None:
    assert win_rate([1, 1, 0, 0.5]).value == 0.625


def test_the_interval_is_that_of_resampled_prompts() -> None:
    preferences, _ = outcomes(80, 1, of_length=0, ability=0.6)
    draw = random.Random(7)
    means = sorted(
        sum(draw.choice(preferences) for _ in preferences) / len(preferences) for _ in range(8000)
    )
    rate = win_rate(preferences)
    # Monte Carlo error of a percentile from 2,000 resamples: about 0.004
    assert rate.low == pytest.approx(means[200], abs=0.015)
    assert rate.high == pytest.approx(means[7800], abs=0.015)
    assert rate.low < rate.value < rate.high


def test_the_interval_contains_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(150):
        draw = random.Random(seed)
        rate = win_rate([float(draw.random() < 0.6) for _ in range(100)], seed=seed)
        hits += rate.low <= 0.6 <= rate.high
    assert 133 <= hits <= 149


def test_equal_preferences_have_an_interval_by_their_number() -> None:
    assert win_rate([1.0] * 5).low == wilson(5, 5)[0] < 0.6
    assert win_rate([0.0] * 5).high == pytest.approx(wilson(0, 5)[1])
    assert (win_rate([1.0] * 5).high, win_rate([0.0] * 5).low) == (1.0, 0.0)
    for preference in (0.0, 0.25, 0.5, 1.0):
        controlled = length_controlled_rate([preference] * 5, [1, 2, 3, 4, 5])
        assert controlled == win_rate([preference] * 5)


def test_ties_alone_do_not_make_a_rate_certain() -> None:
    one, nine, many = (win_rate([0.5] * count) for count in (1, 9, 1000))
    assert one.low < 0.15 < 0.85 < one.high
    assert one.low < nine.low < many.low < 0.5 < many.high < nine.high < one.high
    assert many.high - many.low < 0.005
    # a rate of ties at which nine of nine are still likely, and all others are wins
    assert nine.high > 1 - 0.05 ** (1 / 9) / 2


@pytest.mark.parametrize(
    ("of_length", "ability"), [(0.0, 0.0), (2.0, 0.0), (-1.5, 1.0), (3.0, -1.0)]
)
def test_the_controlled_rate_is_that_of_the_fitted_model(of_length: float, ability: float) -> None:
    preferences, lengths = outcomes(120, 3, of_length=of_length, ability=ability)
    theta, _ = minimized(preferences, lengths)
    rate = length_controlled_rate(preferences, lengths)
    assert rate.value == pytest.approx(1 / (1 + math.exp(-theta)), abs=1e-6)
    assert rate.low < rate.value < rate.high


def test_control_removes_the_preference_for_length() -> None:
    preferences, lengths = outcomes(3000, 5, of_length=2.0, ability=0.0)
    assert win_rate(preferences).low > 0.55
    rate = length_controlled_rate(preferences, lengths)
    assert rate.low < 0.5 < rate.high


def test_swapped_models_have_the_rest() -> None:
    preferences, lengths = outcomes(60, 8, of_length=1.0, ability=0.4)
    swapped = length_controlled_rate([1 - p for p in preferences], [-d for d in lengths])
    assert swapped.value == pytest.approx(
        1 - length_controlled_rate(preferences, lengths).value, abs=1e-9
    )


def test_equal_lengths_leave_the_win_rate() -> None:
    preferences, _ = outcomes(50, 2, of_length=0.0, ability=0.5)
    assert length_terms([7] * 50).tolist() == [0] * 50
    rate = length_controlled_rate(preferences, [7] * 50)
    assert rate.value == pytest.approx(win_rate(preferences).value, abs=1e-9)


def test_lengths_that_decide_every_prompt_have_a_finite_fit() -> None:
    lengths = [-300, -200, -100, 100, 200, 300]
    rate = length_controlled_rate([0, 0, 0, 1, 1, 1], lengths)
    assert rate.value == pytest.approx(0.5, abs=1e-6)
    assert 0 <= rate.low <= 0.5 <= rate.high <= 1


def test_many_prompts_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    preferences, lengths = outcomes(40, 4, of_length=1.0, ability=0.2)
    estimates = win_rate(preferences), length_controlled_rate(preferences, lengths)
    monkeypatch.setattr(module, "MAX_ELEMENTS", 4000)
    parts = win_rate(preferences), length_controlled_rate(preferences, lengths)
    for part, estimate in zip(parts, estimates, strict=True):
        assert part.to_dict() == pytest.approx(estimate.to_dict(), abs=1e-9)
