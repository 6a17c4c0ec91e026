"""Losses of pairs, compared with reference formulas in Python numbers and known fixed points."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.golden.plain import (
    Formula,
    check,
    check_finite,
    column,
    columns,
    log_sigmoid,
    positional,
    sigmoid,
)
from valence.losses import preference


def smoothed(x: float, m: float, e: float) -> float:
    return -(1 - e) * log_sigmoid(x - m) - e * log_sigmoid(-x)


def dpo(
    logp_w: float,
    logp_l: float,
    ref_w: float,
    ref_l: float,
    margin: float,
    wrong: float,
    beta: float,
) -> float:
    return smoothed(beta * (logp_w - ref_w - logp_l + ref_l), margin, wrong)


def dpo_norm(
    logp_w: float,
    logp_l: float,
    ref_w: float,
    ref_l: float,
    n_w: float,
    n_l: float,
    margin: float,
    wrong: float,
    beta: float,
) -> float:
    return smoothed(beta * ((logp_w - ref_w) / n_w - (logp_l - ref_l) / n_l), margin, wrong)


def robust_dpo(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, wrong: float, beta: float
) -> float:
    x = beta * (logp_w - ref_w - logp_l + ref_l)
    return (-(1 - wrong) * log_sigmoid(x) + wrong * log_sigmoid(-x)) / (1 - 2 * wrong)


def ipo(
    logp_w: float,
    logp_l: float,
    ref_w: float,
    ref_l: float,
    n_w: float,
    n_l: float,
    tau: float,
    normalize: bool = True,
) -> float:
    n_w, n_l = (n_w, n_l) if normalize else (1, 1)
    return ((logp_w - ref_w) / n_w - (logp_l - ref_l) / n_l - 1 / (2 * tau)) ** 2


def hinge(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, margin: float, beta: float
) -> float:
    return max(0.0, 1 - (beta * (logp_w - ref_w - logp_l + ref_l) - margin))


def slic(logp_w: float, logp_l: float, margin: float = 1.0, nll_weight: float = 0.1) -> float:
    return max(0.0, margin - logp_w + logp_l) + nll_weight * -logp_w


def simpo(
    logp_w: float, logp_l: float, n_w: float, n_l: float, margin: float, wrong: float,
    beta: float = 2.0, gamma_beta_ratio: float = 0.5,
) -> float:  # fmt: skip
    return smoothed(beta * (logp_w / n_w - logp_l / n_l) - gamma_beta_ratio * beta, margin, wrong)


def cpo(logp_w: float, logp_l: float, beta: float) -> float:
    return -log_sigmoid(beta * (logp_w - logp_l))


def log_odds(a: float) -> float:
    return a - math.log(-math.expm1(a))


def orpo(logp_w: float, logp_l: float, n_w: float, n_l: float, beta: float) -> float:
    odds = log_odds(min(logp_w / n_w, -1e-6)) - log_odds(min(logp_l / n_l, -1e-6))
    return -logp_w / n_w - beta * log_sigmoid(odds)


def apo_zero(logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float) -> float:
    return 1 - sigmoid(beta * (logp_w - ref_w)) + sigmoid(beta * (logp_l - ref_l))


def apo_down(logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float) -> float:
    return sigmoid(beta * (logp_w - ref_w)) + 1 - sigmoid(beta * (logp_w - ref_w - logp_l + ref_l))


def exo(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, wrong: float, beta: float
) -> float:
    x = beta * (logp_w - ref_w - logp_l + ref_l)
    q, not_q = sigmoid(x), sigmoid(-x)
    return q * (log_sigmoid(x) - math.log(1 - wrong)) + not_q * (log_sigmoid(-x) - math.log(wrong))


def nca(logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float) -> float:
    x_w, x_l = beta * (logp_w - ref_w), beta * (logp_l - ref_l)
    return -log_sigmoid(x_w) - 0.5 * log_sigmoid(-x_w) - 0.5 * log_sigmoid(-x_l)


def bco_pair(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, delta: float, beta: float
) -> float:
    return -log_sigmoid(beta * (logp_w - ref_w) - delta) - log_sigmoid(
        -(beta * (logp_l - ref_l) - delta)
    )


def sppo(logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float) -> float:
    return (logp_w - ref_w - 1 / (2 * beta)) ** 2 + (logp_l - ref_l + 1 / (2 * beta)) ** 2


def dpop(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float, penalty: float = 50.0
) -> float:
    return -log_sigmoid(
        beta * (logp_w - ref_w - logp_l + ref_l - penalty * max(0.0, ref_w - logp_w))
    )


def discopop(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, beta: float, tau: float = 0.05
) -> float:
    x = beta * (logp_w - ref_w - logp_l + ref_l)
    return sigmoid(-x / tau) * -log_sigmoid(x) + math.exp(log_sigmoid(x / tau) - x)


FORMULAS: dict[str, tuple[Formula, list[dict[str, Any]]]] = {
    "dpo": (dpo, [{"beta": 0.1}, {"beta": 0.7}]),
    "dpo_norm": (dpo_norm, [{"beta": 5.0}, {"beta": 0.7}]),
    "robust_dpo": (robust_dpo, [{"beta": 0.1}, {"beta": 0.7}]),
    "ipo": (ipo, [{"tau": 0.1}, {"tau": 0.5, "normalize": False}]),
    "hinge": (hinge, [{"beta": 0.1}, {"beta": 0.65}]),
    "slic": (slic, [{}, {"margin": 3.0, "nll_weight": 0.7}]),
    "simpo": (simpo, [{}, {"beta": 0.7, "gamma_beta_ratio": 1.5}]),
    "cpo": (cpo, [{"beta": 0.1}, {"beta": 0.7}]),
    "orpo": (orpo, [{"beta": 0.1}, {"beta": 0.7}]),
    "apo_zero": (apo_zero, [{"beta": 0.1}, {"beta": 0.7}]),
    "apo_down": (apo_down, [{"beta": 0.1}, {"beta": 0.7}]),
    "exo": (exo, [{"beta": 0.1}, {"beta": 0.7}]),
    "nca": (nca, [{"beta": 0.1}, {"beta": 0.7}]),
    "bco_pair": (bco_pair, [{"beta": 0.1}, {"beta": 0.7}]),
    "sppo": (sppo, [{"beta": 0.1}, {"beta": 0.7}]),
    "dpop": (dpop, [{"beta": 0.1}, {"beta": 0.7, "penalty": 2.0}]),
    "discopop": (discopop, [{"beta": 0.1}, {"beta": 0.05, "tau": 0.3}]),
}
CASES = [
    (name, formula, settings)
    for name, (formula, several) in FORMULAS.items()
    for settings in several
]


def point(
    logp_w: float, logp_l: float, ref_w: float, ref_l: float, **more: float
) -> dict[str, float]:
    rest = {"n_w": 7.0, "n_l": 4.0, "margin": 0.0, "wrong": 1e-3, "delta": 0.0}
    return {"logp_w": logp_w, "logp_l": logp_l, "ref_w": ref_w, "ref_l": ref_l} | rest | more


POINTS = [
    point(-12.0, -9.5, -10.0, -8.25),
    point(-7.5, -11.0, -9.0, -10.5, margin=0.4, wrong=0.2, delta=0.3),
    point(-30.0, -3.0, -29.0, -8.0, n_w=20.0, n_l=1.0, margin=0.1, wrong=0.3, delta=-0.5),
    point(-3.0, -40.0, -9.0, -20.0, n_w=3.0, n_l=31.0, wrong=0.01, margin=1.5, delta=2.0),
    point(-0.01, -6.0, -0.5, -5.0, n_w=9.0, wrong=0.6),
]
SAME = point(-10.0, -10.0, -10.0, -10.0, n_w=5.0, n_l=5.0)
EXTREMES = [
    point(a, b, c, d, n_w=1.0, n_l=1.0)
    for a, b, c, d in [
        (-1e4, -1.0, -1.0, -1.0),
        (-1.0, -1e4, -1.0, -1.0),
        (-1.0, -1.0, -1e4, -1.0),
        (-1.0, -1.0, -1.0, -1e4),
        (-1e4, -1.0, -1.0, -1e4),
        (-1.0, -1e4, -1e4, -1.0),
        (0.0, -1e4, 0.0, 0.0),
        (-1e4, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0),
    ]
]


@pytest.mark.parametrize(("name", "formula", "settings"), CASES)
def test_value_and_gradient(name: str, formula: Formula, settings: dict[str, Any]) -> None:
    check(getattr(preference, name), formula, POINTS, **settings)


@pytest.mark.parametrize(("name", "formula", "settings"), CASES)
def test_far_away(name: str, formula: Formula, settings: dict[str, Any]) -> None:
    fn = getattr(preference, name)
    result = check_finite(fn, EXTREMES, **settings)
    wanted = [formula(**{k: p[k] for k in positional(fn)}, **settings) for p in EXTREMES]
    assert result == pytest.approx(wanted, rel=1e-4, abs=1e-5)


DIRECTIONS = dict.fromkeys(FORMULAS, (1, -1)) | {"apo_down": (0, -1), "discopop": (-1, 1)}


@pytest.mark.parametrize("name", FORMULAS)
def test_where_a_first_step_goes(name: str) -> None:
    fn = getattr(preference, name)
    inputs = columns(fn, [SAME])
    gradients = torch.autograd.grad(
        fn(*inputs.values()).sum(), [inputs["logp_w"], inputs["logp_l"]]
    )
    assert tuple(int(-g.sign()) for g in gradients) == DIRECTIONS[name]


LOG2 = math.log(2)
BY_HAND = [
    ("dpo", SAME, {}, LOG2),
    ("dpo", SAME | {"margin": math.log(3), "wrong": 0.0}, {}, math.log(4)),
    ("dpo_norm", SAME, {}, LOG2),
    ("robust_dpo", SAME | {"wrong": 0.2}, {}, LOG2),
    ("ipo", SAME, {"tau": 0.5}, 1.0),
    ("ipo", SAME | {"logp_w": -5.0}, {"tau": 0.5}, 0.0),
    ("ipo", SAME | {"logp_w": -5.0}, {"tau": 0.1, "normalize": False}, 0.0),
    ("hinge", SAME | {"margin": 0.25}, {}, 1.25),
    ("hinge", SAME | {"logp_w": 0.0}, {}, 0.0),
    ("slic", SAME, {}, 1.0 + 0.1 * 10),
    ("simpo", SAME | {"wrong": 0.0}, {}, math.log(1 + math.e)),
    ("cpo", SAME, {}, LOG2),
    ("orpo", SAME, {"beta": 0.5}, 2 + 0.5 * LOG2),
    # odds 1 and 1/3
    (
        "orpo",
        SAME | {"logp_w": -5 * LOG2, "logp_l": -10 * LOG2},
        {"beta": 1.0},
        LOG2 + math.log(4 / 3),
    ),
    ("apo_zero", SAME, {}, 1.0),
    ("apo_down", SAME, {}, 1.0),
    ("exo", SAME | {"wrong": 0.5}, {}, 0.0),
    ("exo", SAME | {"logp_w": -10 + math.log(3), "wrong": 0.25}, {"beta": 1.0}, 0.0),
    ("nca", SAME, {}, 2 * LOG2),
    ("bco_pair", SAME, {}, 2 * LOG2),
    ("sppo", SAME, {}, 50.0),
    ("sppo", SAME | {"logp_w": -5.0, "logp_l": -15.0}, {}, 0.0),
    ("dpop", SAME, {}, LOG2),
    # half a nat of penalty
    (
        "dpop",
        SAME | {"ref_w": -9.99, "ref_l": -9.99},
        {"beta": 2.0},
        math.log(1 + math.e),
    ),
    ("discopop", SAME, {}, 0.5 * LOG2 + 0.5),
]


@pytest.mark.parametrize(("name", "at", "settings", "wanted"), BY_HAND)
def test_by_hand(name: str, at: dict[str, float], settings: dict[str, Any], wanted: float) -> None:
    fn = getattr(preference, name)
    assert fn(*columns(fn, [at]).values(), **settings).item() == pytest.approx(
        wanted, rel=1e-12, abs=1e-12
    )


def test_robust_dpo_is_right_on_average_under_the_noise_that_it_assumes() -> None:
    one, zero, wrong = column(1.7), column(0.0), column(0.3)
    message, flipped = (
        preference.robust_dpo(*pair, zero, zero, wrong, beta=1.0)
        for pair in ((one, zero), (zero, one))
    )
    assert (0.7 * message + 0.3 * flipped).item() == pytest.approx(-log_sigmoid(1.7), rel=1e-12)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_exo_is_finite_for_a_certain_verdict(wrong: float) -> None:
    check_finite(preference.exo, [at | {"wrong": wrong} for at in EXTREMES])


def test_orpo_of_a_certain_completion_still_imitates_it() -> None:
    """Beyond the clamp the odds have no gradient, the likelihood has."""
    inputs = columns(preference.orpo, [SAME | {"logp_w": -1e-9}])
    (gradient,) = torch.autograd.grad(preference.orpo(*inputs.values()).sum(), [inputs["logp_w"]])
    assert gradient.item() == pytest.approx(-0.2)


def test_one_delta_for_all_pairs() -> None:
    several = columns(preference.bco_pair, POINTS[:2])
    several["delta"] = column(0.3).squeeze()
    result = preference.bco_pair(*several.values())
    assert result.tolist() == pytest.approx([
        bco_pair(p["logp_w"], p["logp_l"], p["ref_w"], p["ref_l"], 0.3, 0.1) for p in POINTS[:2]
    ])  # fmt: skip
