"""Losses against formulas written out again in plain Python numbers, and fixed points worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from valence.losses.imitation import sft
from valence.losses.preference import dpo
from valence.losses.unpaired import apo_zero_unpaired, kto


def s(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def kto_formula(r: float, up: bool, z0: float, beta: float, w_up: float, w_down: float) -> float:
    return w_up * (1 - s(beta * (r - z0))) if up else w_down * (1 - s(beta * (z0 - r)))


def apo_formula(r: float, up: bool, beta: float) -> float:
    return 1 - s(beta * r) if up else s(beta * r)


def dpo_formula(d: float, beta: float, e: float, m: float) -> float:
    return -(1 - e) * math.log(s(beta * d - m)) - e * math.log(s(-beta * d))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGP, REF = column(-12.0, -7.5, -30.0, -3.0), column(-10.0, -9.0, -29.0, -8.0)
UP = torch.tensor([True, True, False, False])


@pytest.mark.parametrize("z0", [0.0, 0.7])
@pytest.mark.parametrize(("beta", "w_up", "w_down"), [(0.1, 1.0, 1.0), (0.5, 1.33, 0.25)])
def test_kto(z0: float, beta: float, w_up: float, w_down: float) -> None:
    found = kto(
        LOGP, REF, UP, torch.full((4,), z0, dtype=torch.float64), beta=beta, desirable_weight=w_up, undesirable_weight=w_down
    )
    wanted = [kto_formula(r, up, z0, beta, w_up, w_down) for r, up in zip((LOGP - REF).tolist(), UP.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_kto_by_hand() -> None:
    """r = z0 gives one half; r far above z0 gives 0 for thumbs up and the weight for thumbs down."""
    at = kto(column(1.0, 1.0), column(0.0, 0.0), torch.tensor([True, False]), column(1.0, 1.0), beta=1.0)
    assert at.tolist() == [0.5, 0.5]
    far = kto(column(900.0, 900.0), column(0.0, 0.0), torch.tensor([True, False]), column(0.0, 0.0), beta=1.0)
    assert far.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_apo_zero_unpaired(beta: float) -> None:
    wanted = [apo_formula(r, up, beta) for r, up in zip((LOGP - REF).tolist(), UP.tolist(), strict=True)]
    assert apo_zero_unpaired(LOGP, REF, UP, beta=beta).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("margin", [0.0, 0.4])
@pytest.mark.parametrize(("beta", "e"), [(0.1, 0.0), (0.3, 0.2)])
def test_dpo(beta: float, e: float, margin: float) -> None:
    other, other_ref = LOGP.flip(0), REF.flip(0) + 0.5
    margins, wrong = (torch.full((4,), x, dtype=torch.float64) for x in (margin, e))
    found = dpo(LOGP, other, REF, other_ref, margins, wrong, beta=beta)
    ds = ((LOGP - REF) - (other - other_ref)).tolist()
    assert found.tolist() == pytest.approx([dpo_formula(d, beta, e, margin) for d in ds], rel=1e-12)


def test_dpo_by_hand() -> None:
    zero = column(0.0)
    assert dpo(zero, zero, zero, zero, zero, zero).item() == pytest.approx(math.log(2))
    assert dpo(column(-1e4), zero, zero, zero, zero, zero, beta=1.0).item() == pytest.approx(1e4)  # no overflow


def test_sft() -> None:
    assert sft(column(-0.5, -2.0)).tolist() == [0.5, 2.0]
