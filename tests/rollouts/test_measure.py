"""The statistics of the demo and of the report, against those of scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from examples.demo.measure import mcnemar, share
from valence.reports.stats import auc, auc_interval


@pytest.mark.parametrize(("ups", "n"), [(0, 10), (3, 60), (37, 100), (60, 60)])
def test_share_is_wilsons(ups: int, n: int) -> None:
    result = share([True] * ups + [False] * (n - ups))
    expected = stats.binomtest(ups, n).proportion_ci(method="wilson")
    assert (result.value, result.low, result.high) == pytest.approx(
        (ups / n, expected.low, expected.high), abs=1e-6
    )


def test_auc_is_mann_whitneys_u() -> None:
    rng = np.random.default_rng(0)
    ups, downs = rng.integers(2, 9, 30).tolist(), rng.integers(0, 7, 40).tolist()
    u = stats.mannwhitneyu(ups, downs).statistic
    assert auc(ups, downs) == pytest.approx(u / (30 * 40))
    assert auc([0.0] * 5, [0.0] * 5) == 0.5
    assert auc([2.0, 3.0], [0.0, 1.0]) == 1.0


def test_auc_interval_covers() -> None:
    rng = np.random.default_rng(1)
    truth = stats.norm.cdf(1 / np.sqrt(2))
    results = [
        auc_interval(auc(rng.normal(1, 1, 40).tolist(), rng.normal(0, 1, 50).tolist()), 40, 50)
        for _ in range(300)
    ]
    covered = np.mean([low <= truth <= high for low, high in results])
    assert 0.9 <= covered <= 0.98


@pytest.mark.parametrize(
    ("better", "worse", "same"), [(0, 0, 10), (9, 2, 30), (2, 9, 30), (40, 0, 0), (5, 5, 5)]
)
def test_mcnemar_is_an_exact_sign_test(better: int, worse: int, same: int) -> None:
    before = [False] * better + [True] * worse + [True] * same
    after = [True] * better + [False] * worse + [True] * same
    n = better + worse
    expected = stats.binomtest(better, n).pvalue if n else 1.0
    assert mcnemar(before, after) == pytest.approx(expected)
