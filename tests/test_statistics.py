"""Statistics against scipy, and against values worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from valence.statistics import (
    auc,
    deviation,
    finite,
    pearson,
    quantile,
    ranks,
    sigmoid,
    spearman,
    student_interval,
    student_quantile,
    student_share,
    wilson,
)

small = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 1.0])
@given(values=small)
def test_quantiles(share: float, values: list[float]) -> None:
    """The two definitions differ: only the interpolated one may lie between two values."""
    interpolated, observed = (
        scipy_stats.mstats.mquantiles(values, share, alphap=1, betap=1)[0],
        next(v for v in sorted(values) if sum(w <= v for w in values) >= share * len(values)),
    )
    assert quantile(values, share) == pytest.approx(interpolated)
    assert quantile(values, share, is_observed=True) == observed


def test_quantiles_by_hand() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.25) == 1.5
    assert quantile([4.0], 0.9) == 4.0
    # 95 % of the rows are no longer than this
    assert quantile(range(1, 41), 0.95, is_observed=True) == 38
    assert quantile(range(1, 41), 0.95) == pytest.approx(38.05)


@given(small)
def test_ranks(values: list[float]) -> None:
    assert ranks(values) == [rank - 1 for rank in scipy_stats.rankdata(values)]
    assert ranks([]) == []


@given(small, small)
def test_auc(ups: list[float], downs: list[float]) -> None:
    statistic = scipy_stats.mannwhitneyu(ups, downs).statistic
    assert auc(ups, downs) == pytest.approx(statistic / (len(ups) * len(downs)))


def test_correlations() -> None:
    rng = random.Random(0)
    a = [rng.randint(0, 9) + 0.0 for _ in range(50)]
    b = [x + rng.gauss(0, 4) for x in a]
    assert spearman(a, b) == pytest.approx(scipy_stats.spearmanr(a, b).statistic)
    assert pearson(a, b) == pytest.approx(scipy_stats.pearsonr(a, b).statistic)
    assert pearson(a, a) == 1.0
    assert math.isnan(pearson([1.0, math.inf], [1.0, 2.0]) or 0.0)


@pytest.mark.parametrize("statistic", [pearson, spearman])
def test_a_constant_has_no_correlation(statistic: Callable[..., float | None]) -> None:
    """Also if its mean is rounded: that of three times 0.1 is not 0.1."""
    assert statistic([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]) is None
    assert statistic([1.0, 2.0], [1.0, 1.0]) is None
    assert statistic([], []) is None


def test_intervals() -> None:
    values = [0.5, 2.0, -1.0, 4.0]
    assert deviation(values) == pytest.approx(scipy_stats.tstd(values))
    expected = scipy_stats.t.interval(0.9, 3, sum(values) / 4, scipy_stats.sem(values))
    assert student_interval(values, 0.9) == pytest.approx(expected)
    assert wilson(7, 9) == pytest.approx(
        tuple(scipy_stats.binomtest(7, 9).proportion_ci(method="wilson")), rel=1e-4
    )
    assert wilson(0, 10)[0] == 0.0


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30])
def test_students_distribution(freedom: int) -> None:
    for share in (0.5, 0.9, 0.95, 0.99, 1 - 0.05 / 8):
        expected = scipy_stats.t.ppf((1 + share) / 2, freedom)
        assert student_quantile(share, freedom) == pytest.approx(expected, rel=1e-9)
        assert student_share(expected, freedom) == pytest.approx(share, abs=1e-12)


def test_extreme_numbers() -> None:
    assert sigmoid(-800.0) == 0.0
    assert sigmoid(800.0) == 1.0
    assert [finite(item) for item in (1, 1.5, True, "1", math.nan, math.inf, 10**400, None)] == [
        True,
        True,
        *[False] * 6,
    ]
