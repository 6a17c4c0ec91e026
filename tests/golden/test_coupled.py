"""Losses that rank a whole step, against sorted lists of plain Python numbers."""

from __future__ import annotations

import random

import pytest
import torch

from tests.golden.plain import check_finite, column, log_sigmoid
from valence.losses.coupled import aot, aot_unpaired


def smoothed(x: float, e: float) -> float:
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def aot_formula(
    gaps: list[float], refs: list[float], wrong: list[float], beta: float
) -> list[float]:
    """The loss at each pair: that of its rank among the policy's gaps."""
    ranked = sorted(range(len(gaps)), key=lambda j: (gaps[j], j))
    losses = [0.0] * len(gaps)
    for j, ref in zip(ranked, sorted(refs), strict=True):
        losses[j] = smoothed(beta * (gaps[j] - ref), wrong[j])
    return losses


def unpaired_formula(rs: list[float], label: list[bool], beta: float, e: float) -> list[float]:
    sides = [sorted((r, i) for i, r in enumerate(rs) if label[i] == up) for up in (True, False)]
    k = min(len(side) for side in sides)
    remaining = [[side[int((i + 0.5) * len(side) / k)] for i in range(k)] for side in sides]
    losses = [0.0] * len(rs)
    for (up, i), (down, j) in zip(*remaining, strict=True):
        losses[i] = losses[j] = smoothed(beta * (up - down), e) / 2
    return losses


def draws(seed: int, count: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(-20, -1) for _ in range(count)]


W, L, REF_W, REF_L = (draws(seed, 7) for seed in range(4))
WRONG = [0.0, 0.1, 0.2, 0.0, 0.3, 0.05, 0.4]
LABELS = [
    [True, False, True, False, True, False],
    [True, True, True, False, True, True, False],
    [False, False, True, False, False, False, False, True, True],
    [True, False],
]


def numeric(formula: object, values: list[float], step: float = 1e-6) -> list[float]:
    """Derivative of the sum of a list of losses with respect to each value."""
    results = []
    for i in range(len(values)):
        ends = [
            sum(formula([v + h * (i == j) for j, v in enumerate(values)])) for h in (step, -step)
        ]  # type: ignore[operator]
        results.append((ends[0] - ends[1]) / (2 * step))
    return results


@pytest.mark.parametrize("beta", [0.1, 0.6])
def test_aot(beta: float) -> None:
    logp_w = column(*W).requires_grad_()
    result = aot(logp_w, column(*L), column(*REF_W), column(*REF_L), column(*WRONG), beta=beta)
    refs = [w - v for w, v in zip(REF_W, REF_L, strict=True)]

    def losses(ws: list[float]) -> list[float]:
        return aot_formula([w - v for w, v in zip(ws, L, strict=True)], refs, WRONG, beta)

    assert result.tolist() == pytest.approx(losses(W), rel=1e-12)
    result.sum().backward()
    assert logp_w.grad is not None
    assert logp_w.grad.tolist() == pytest.approx(numeric(losses, W), rel=1e-6, abs=1e-9)


def test_aot_by_hand() -> None:
    """Gaps 3, 1, 2 against the reference's 0, 10, 5: ranks 2, 0, 1 meet 10, 0, 5."""
    zero = column(0.0, 0.0, 0.0)
    result = aot(column(3.0, 1.0, 2.0), zero, column(0.0, 10.0, 5.0), zero, zero, beta=1.0)
    assert result.tolist() == pytest.approx([-log_sigmoid(x) for x in (-7.0, 1.0, -3.0)])


def test_aot_follows_its_pairs() -> None:
    """Other orders of the pairs give the same loss to each; which reference belongs to which pair
    does not matter.
    """
    order, other = torch.tensor([3, 1, 6, 0, 5, 2, 4]), torch.tensor([6, 5, 4, 3, 2, 1, 0])
    logp_w, logp_l, ref_w, ref_l, wrong = (
        column(*values) for values in (W, L, REF_W, REF_L, WRONG)
    )
    result = aot(logp_w, logp_l, ref_w, ref_l, wrong)
    moved = aot(logp_w[order], logp_l[order], ref_w[other], ref_l[other], wrong[order])
    assert moved.tolist() == result[order].tolist()


def test_aot_breaks_ties_by_order() -> None:
    same, zero = column(1.0, 1.0, 1.0), column(0.0, 0.0, 0.0)
    result = aot(same, zero, column(2.0, -1.0, 1.0), zero, zero, beta=1.0)
    assert result.tolist() == pytest.approx([-log_sigmoid(x) for x in (2.0, 0.0, -1.0)])


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("beta", "e"), [(0.1, 0.0), (0.6, 0.2)])
def test_aot_unpaired(label: list[bool], beta: float, e: float) -> None:
    rows, refs = draws(10, len(label)), draws(11, len(label))
    logp = column(*rows).requires_grad_()
    result = aot_unpaired(logp, column(*refs), torch.tensor(label), beta=beta, label_smoothing=e)

    def losses(values: list[float]) -> list[float]:
        return unpaired_formula(
            [v - ref for v, ref in zip(values, refs, strict=True)], label, beta, e
        )

    assert result.tolist() == pytest.approx(losses(rows), rel=1e-12)
    result.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(numeric(losses, rows), rel=1e-6, abs=1e-9)


def test_aot_unpaired_by_hand() -> None:
    """Five thumbs up thinned to two: shares of 2.5, whose midpoints 1.25 and 3.75 fall on the
    second and the fourth.
    """
    logp = column(5.0, 1.0, 4.0, 2.0, 3.0, 0.5, -0.5)
    result = aot_unpaired(
        logp, torch.zeros_like(logp), torch.tensor([True] * 5 + [False] * 2), beta=1.0
    )
    low, high = -log_sigmoid(2.0 + 0.5) / 2, -log_sigmoid(4.0 - 0.5) / 2
    assert result.tolist() == pytest.approx([0, 0, high, low, 0, high, low])


@pytest.mark.parametrize("label", [True, False])
def test_aot_unpaired_without_a_class(label: bool) -> None:
    logp = column(-1.0, -2.0, -3.0).requires_grad_()
    result = aot_unpaired(logp, column(0.0, 0.0, 0.0), torch.tensor([label] * 3))
    result.sum().backward()
    assert result.tolist() == [0, 0, 0]
    assert logp.grad is not None
    assert logp.grad.tolist() == [0, 0, 0]


def test_where_a_first_step_goes() -> None:
    logp_w, logp_l = column(-3.0, -9.0).requires_grad_(), column(-8.0, -2.0).requires_grad_()
    aot(logp_w, logp_l, logp_w.detach(), logp_l.detach(), column(0.0, 0.0)).sum().backward()
    assert logp_w.grad is not None
    assert logp_l.grad is not None
    assert (-logp_w.grad.sign()).tolist() == [1, 1]
    assert (-logp_l.grad.sign()).tolist() == [-1, -1]
    logp = column(-3.0, -9.0).requires_grad_()
    aot_unpaired(logp, logp.detach(), torch.tensor([True, False])).sum().backward()
    assert logp.grad is not None
    assert (-logp.grad.sign()).tolist() == [1, -1]


def test_far_away() -> None:
    low = {
        "logp_w": -1e4,
        "logp_l": 0.0,
        "ref_w": 0.0,
        "ref_l": -1e4,
        "wrong": 0.1,
        "logp": -1e4,
        "ref": 0.0,
        "label": True,
    }
    high = low | {"logp_w": 0.0, "logp_l": -1e4, "logp": 0.0, "ref": -1e4, "label": False}
    check_finite(aot, [low, high, low], beta=1.0)
    check_finite(aot_unpaired, [low, high, low], beta=1.0)
