"""Losses of single completions, compared with reference formulas in Python numbers: values,
gradients, fixed points.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.golden.plain import check, check_finite, columns, log_sigmoid, sigmoid
from valence.losses.unpaired import apo_zero_unpaired, bco, kto


def kto_formula(
    logp: float, ref: float, label: bool, z0: float,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> float:  # fmt: skip
    r = logp - ref
    return (
        desirable_weight * (1 - sigmoid(beta * (r - z0)))
        if label
        else undesirable_weight * (1 - sigmoid(beta * (z0 - r)))
    )


def apo_formula(logp: float, ref: float, label: bool, beta: float) -> float:
    return 1 - sigmoid(beta * (logp - ref)) if label else sigmoid(beta * (logp - ref))


def bco_formula(logp: float, ref: float, label: bool, delta: float, beta: float) -> float:
    x = beta * (logp - ref) - delta
    return -log_sigmoid(x) if label else -log_sigmoid(-x)


POINTS = [
    {"logp": logp, "ref": ref, "label": label, "z0": shift, "delta": shift}
    for logp, ref, shift in [
        (-12.0, -10.0, 0.0),
        (-7.5, -9.0, 0.7),
        (-30.0, -29.5, -1.3),
        (-3.0, -8.0, 2.0),
    ]
    for label in (True, False)
]
SAME = [
    {"logp": -10.0, "ref": -10.0, "label": label, "z0": 0.0, "delta": 0.0}
    for label in (True, False)
]
EXTREMES = [point | {"logp": -1e4} for point in POINTS] + [
    point | {"ref": -1e4} for point in POINTS
]


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_value_and_gradient(beta: float) -> None:
    check(kto, kto_formula, POINTS, beta=beta, desirable_weight=1.3, undesirable_weight=0.6)
    check(apo_zero_unpaired, apo_formula, POINTS, beta=beta)
    check(bco, bco_formula, POINTS, beta=beta)


@pytest.mark.parametrize("fn", [kto, apo_zero_unpaired, bco])
def test_far_away(fn: object) -> None:
    check_finite(fn, EXTREMES, beta=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fn", "at_rest"), [(kto, 0.5), (apo_zero_unpaired, 0.5), (bco, math.log(2))]
)
def test_at_rest(fn: object, at_rest: float) -> None:
    """Where policy and reference agree, thumbs up pulls up and thumbs down pulls down."""
    inputs = columns(fn, SAME)  # type: ignore[arg-type]
    loss = fn(*inputs.values())  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(loss.sum(), [inputs["logp"]])
    assert loss.tolist() == pytest.approx([at_rest, at_rest])
    assert (-gradient.sign()).tolist() == [1, -1]


def test_kto_by_hand() -> None:
    """r = z0 gives one half; r far above z0 gives 0 for thumbs up and the weight for thumbs
    down.
    """
    at, far = (
        [{"logp": r, "ref": 0.0, "label": up, "z0": z0} for up in (True, False)]
        for r, z0 in ((1.0, 1.0), (900.0, 0.0))
    )
    assert kto(*columns(kto, at).values(), beta=1.0).tolist() == [0.5, 0.5]
    assert kto(*columns(kto, far).values(), beta=1.0, undesirable_weight=0.7).tolist() == [0.0, 0.7]


def test_bco_far_away_by_hand() -> None:
    far = {"logp": -1e4, "ref": 0.0, "delta": 5.0}
    assert check_finite(bco, [far | {"label": True}, far | {"label": False}], beta=1.0) == [
        10005.0,
        0.0,
    ]


def test_bco_threshold() -> None:
    """At beta*r = delta either verdict costs log 2."""
    at = {"logp": -7.0, "ref": -10.0, "delta": 0.3}
    loss = bco(*columns(bco, [at | {"label": True}, at | {"label": False}]).values(), beta=0.1)
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
