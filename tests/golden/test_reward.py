"""Losses and metrics of reward models against plain Python, and their slopes against
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from valence.distributed.process_group import SingleProcess
from valence.losses.metrics import Metrics
from valence.losses.reward import bradley_terry, ordinal, paired_scores, pointwise, single_scores
from valence.training.metrics import (
    STATISTICS,
    Meter,
    calibration_error,
    explained,
    pearson,
    spearman,
)
from valence.types import Ranked


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


SCORES = column(-2.0, -0.3, 0.0, 0.7, 3.0)
TARGET_MASK = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
SCORE = torch.tensor([[0.5, -1.5], [2.0, 9.0], [-3.0, 0.1], [1.0, 1.0]], dtype=torch.float64)


def mean_of_targets(item: Callable[[float, float], float], target: Tensor) -> list[float]:
    """The mean over what a row gives, in plain numbers."""
    results: list[float] = []
    for scores, targets, value in zip(
        SCORE.tolist(), target.tolist(), TARGET_MASK.tolist(), strict=True
    ):
        terms = [item(x, t) for x, t, flag in zip(scores, targets, value, strict=True) if flag]
        results.append(sum(terms) / len(terms) if terms else 0.0)
    return results


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("margin", [0.0, 0.8])
def test_bradley_terry(center: float, margin: float) -> None:
    pairs = list(product(SCORES.tolist(), repeat=2))
    better, worse = (column(*side) for side in zip(*pairs, strict=True))
    result = bradley_terry(better, worse, torch.full_like(better, margin), center_coef=center)
    wanted = [-math.log(s(a - b - margin)) + center * (a + b) ** 2 for a, b in pairs]
    assert result.tolist() == pytest.approx(wanted, rel=1e-12)


def test_bradley_terry_by_hand() -> None:
    zero = column(0.0)
    assert bradley_terry(zero, zero, zero).item() == pytest.approx(math.log(2))
    assert bradley_terry(column(-1e4), zero, zero).item() == pytest.approx(1e4)
    assert bradley_terry(column(1e4), zero, zero).item() == 0
    assert bradley_terry(
        column(2.0), column(3.0), column(-1.0), center_coef=0.5
    ).item() == pytest.approx(math.log(2) + 12.5)


@pytest.mark.parametrize("error", ["cross_entropy", "squared", "huber"])
def test_pointwise(error: str) -> None:
    target = torch.tensor(
        [[1.0, 0.0], [0.0, torch.nan], [torch.nan, 0.4], [torch.nan, torch.nan]],
        dtype=torch.float64,
    )

    def loss_of(x: float, t: float) -> float:
        if error == "cross_entropy":
            return -t * math.log(s(x)) - (1 - t) * math.log(s(-x))
        e = abs(x - t)
        return e**2 if error == "squared" else e**2 / 2 if e <= 0.8 else 0.8 * (e - 0.4)

    result = pointwise(SCORE, target.nan_to_num(), TARGET_MASK, error=error, huber_delta=0.8)  # type: ignore[arg-type]
    assert result.tolist() == pytest.approx(mean_of_targets(loss_of, target), rel=1e-12)


def test_pointwise_by_hand() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    assert pointwise(column(0.0)[:, None], column(1.0)[:, None], one).item() == pytest.approx(
        math.log(2)
    )
    assert pointwise(column(-1e4)[:, None], column(1.0)[:, None], one).item() == pytest.approx(1e4)


THETA = column(-1.5, -0.2, 0.4, 2.0)


def test_ordinal() -> None:
    target = torch.tensor([[1, 5], [2, 0], [0, 3], [0, 0]], dtype=torch.float64)

    def loss_of(x: float, t: float) -> float:
        cumulative = [0.0, *(s(theta - x) for theta in THETA.tolist()), 1.0]
        return -math.log(cumulative[int(t)] - cumulative[int(t) - 1])

    assert ordinal(SCORE, target, TARGET_MASK, THETA).tolist() == pytest.approx(
        mean_of_targets(loss_of, target), rel=1e-9
    )


def test_levels_are_a_distribution_and_far_scores_stay_finite() -> None:
    levels = column(1, 2, 3, 4, 5)[:, None]
    for x in (0.3, -60.0, 60.0):
        score = torch.full_like(levels, x).requires_grad_()
        loss = ordinal(score, levels, torch.ones_like(levels, dtype=torch.bool), THETA)
        assert (-loss).exp().sum().item() == pytest.approx(1)
        (slope,) = torch.autograd.grad(loss.sum(), score)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(slope).all()


def test_two_levels_are_thumbs() -> None:
    inputs = torch.ones(5, 1, dtype=torch.bool)
    up = column(1, 0, 1, 1, 0)[:, None]
    two = ordinal(SCORES[:, None], up + 1, inputs, column(0.0), levels=2)
    torch.testing.assert_close(two, pointwise(SCORES[:, None], up, inputs))


@pytest.mark.parametrize(
    "name", ["bradley_terry", "cross_entropy", "squared", "huber", "ordinal", "thresholds"]
)
def test_slopes_are_those_of_differences(name: str) -> None:
    target = column(1, 2, 3, 5)[:, None].expand(4, 2)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "bradley_terry": lambda x: bradley_terry(
            x[:, 0], x[:, 1], x[:, 1].detach() * 0 + 0.3, center_coef=0.1
        ),
        "ordinal": lambda x: ordinal(x, target, TARGET_MASK, THETA),
        "thresholds": lambda x: ordinal(SCORE, target, TARGET_MASK, x.flatten()[:4].cumsum(0)),
    }
    error = lambda x: pointwise(x, (target - 1) / 4, TARGET_MASK, error=name)  # type: ignore[arg-type]  # noqa: E731
    start = SCORE.abs() if name == "thresholds" else SCORE
    assert torch.autograd.gradcheck(losses.get(name, error), start.clone().requires_grad_())


# ------------------------------------------------------------------ metrics


def test_correlations() -> None:
    x, y = column(1, 2, 2, 5, 9), column(3, 1, 1, 8, 7)
    xs, ys = ([v - sum(column.tolist()) / 5 for v in column.tolist()] for column in (x, y))
    products = [
        sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((xs, ys), (xs, xs), (ys, ys))
    ]
    assert pearson(x, y) == pytest.approx(products[0] / math.sqrt(products[1] * products[2]))
    assert spearman(x, y) == pytest.approx(
        pearson(column(1, 2.5, 2.5, 4, 5), column(3, 1.5, 1.5, 5, 4))
    )
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert spearman(x, -x) == pytest.approx(-1)
    for statistic in (pearson, spearman):
        assert statistic(x, torch.full_like(x, 0.1)) is None
        assert statistic(x[:0], y[:0]) is None
        assert statistic(x[:1], y[:1]) is None
        assert math.isnan(statistic(column(1, torch.nan), column(1, 2)) or 0)


def test_calibration_error() -> None:
    p = column(0.05, 0.05, 0.55, 0.55, 1.0)
    up = column(0, 1, 1, 1, 1)
    assert calibration_error(p, up) == pytest.approx(
        (2 * abs(0.5 - 0.05) + 2 * abs(1 - 0.55) + 0) / 5
    )
    assert calibration_error(p[:0], up[:0]) is None
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(20_000, generator=generator)
    assert (calibration_error(many, torch.rand(20_000, generator=generator) < many) or 0) < 0.02


def reduced(numbers: Metrics) -> dict[str, float]:
    meter = Meter()
    meter.add(numbers)
    return meter.reduce(SingleProcess())


def test_metrics_of_pairs() -> None:
    result = reduced(
        paired_scores(
            {"score_w": column(1.0, 0.0, -2.0), "score_l": column(0.0, 0.0, 1.0)}, None, {}
        )
    )
    assert result["rewards/accuracies"] == pytest.approx(0.5)
    assert result["rewards/margins"] == pytest.approx((1 + 0 - 3) / 3)
    assert result["rewards/brier"] == pytest.approx((s(-1) ** 2 + 0.25 + s(3) ** 2) / 3)
    # a tie is half won, as it says
    assert result["rewards/calibration_error"] == pytest.approx((s(-1) + 0.0 + s(3)) / 3)


def test_metrics_of_thumbs_omit_missing_targets() -> None:
    view = {
        "score": SCORE,
        "target": torch.tensor([[1.0, 0], [0, 7], [7, 1], [7, 7]]).double(),
        "target_mask": TARGET_MASK,
    }
    result = reduced(single_scores(view, None, {"error": "cross_entropy"}))
    assert result["rewards/accuracies/0"] == pytest.approx(0.5)  # 0.5 up, 2.0 down
    assert result["rewards/auc/0"] == 0
    assert result["rewards/accuracies/1"] == 1
    assert result["rewards/brier/1"] == pytest.approx((s(-1.5) ** 2 + s(-0.1) ** 2) / 2)
    assert result["rewards/chosen/1"] == pytest.approx(0.1)


def test_metrics_of_scores_and_levels() -> None:
    mask = torch.tensor([[True]] * 4 + [[False]])
    view = {
        "score": SCORES[:, None],
        "target": column(1, 2, 3, 3, 99)[:, None],
        "target_mask": mask,
    }
    result = reduced(single_scores(view, None, {"error": "squared"}))
    assert result["rewards/error"] == pytest.approx((3 + 2.3 + 3 + 2.3) / 4)
    assert result["rewards/spearman"] == spearman(SCORES[:4], column(1, 2, 3, 3))
    assert result["rewards/pearson"] == pearson(SCORES[:4], column(1, 2, 3, 3))
    assert result["rewards/mean"] == pytest.approx(SCORES[:4].mean().item())
    # levels 1, 2, 3, 4
    result = reduced(single_scores(view | {"thresholds": THETA}, None, {"levels": 5}))
    assert result["rewards/accuracies"] == 0.75
    assert result["rewards/error"] == 0.25


def test_every_statistic_has_a_name() -> None:
    assert set(STATISTICS) == {"auc", "calibration_error", "pearson", "spearman", "explained"}
    assert Ranked(column(1.0), column(1.0)).statistic == "auc"


def test_explained_variance() -> None:
    others = column(1.0, 2.0, 4.0)
    results = [
        explained(values, others) for values in (others + 3, others * 0, -others, others * 0.5)
    ]
    assert results == pytest.approx([1.0, 0.0, -3.0, 0.75])
    assert explained(others, column(2.0, 2.0, 2.0)) is None
    assert explained(others[:0], others[:0]) is None
