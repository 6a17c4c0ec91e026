"""Losses of single tokens and advantages, compared with reference formulas in Python numbers."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch

from tests.golden.plain import check, check_finite, column
from valence.losses.advantage import (
    above_group,
    above_others,
    group_centre,
    group_norm,
    leave_one_out,
    over_step,
    whiten,
    within_group,
)
from valence.losses.distillation import from_teacher
from valence.losses.imitation import dft, sft
from valence.losses.policy import cispo, gspo, k1, k2, k3, ppo_clip, reinforce, rloo


def ppo_formula(
    logp_t: float,
    old_t: float,
    adv_t: float,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> float:
    rho = math.exp(logp_t - old_t)
    gain = min(rho * adv_t, min(max(rho, 1 - eps_low), 1 + eps_high) * adv_t)
    return -(max(gain, dual_clip * adv_t) if dual_clip is not None and adv_t < 0 else gain)


def gspo_formula(
    logp: float,
    old: float,
    n: float,
    adv: float,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    dual_clip: float | None = None,
) -> float:
    return ppo_formula(logp / n, old / n, adv, eps_low, eps_high, dual_clip)


def cispo_formula(
    logp_t: float, old_t: float, adv_t: float, held_t: float, eps_high: float = 5.0
) -> float:
    """held_t: the log-probability as a number that is not differentiated."""
    return -min(math.exp(held_t - old_t), eps_high) * adv_t * logp_t


def rloo_formula(logp: float, old: float, adv: float) -> float:
    return -math.exp(logp - old) * adv


TOKENS = [
    {"logp_t": logp, "old_t": logp - ratio, "adv_t": adv, "ref_t": logp - ratio}
    for logp, ratio in [
        (-1.0, 0.0),
        (-2.0, 0.1),
        (-0.5, -0.1),
        (-3.0, 0.9),
        (-4.0, -1.5),
        (-1.5, 1.4),
    ]
    for adv in (1.3, -0.7, 0.0)
]


@pytest.mark.parametrize("settings", [{}, {"eps_low": 0.05, "eps_high": 0.28}, {"dual_clip": 3.0}])
def test_ppo_clip(settings: dict[str, float]) -> None:
    check(ppo_clip, ppo_formula, TOKENS, **settings)


def test_ppo_clip_by_hand() -> None:
    """Ratios 2 and 1/2: a gain is capped, a loss is not, unless by the dual clip."""
    logp, old = (
        column(math.log(2), math.log(2), -math.log(2), -math.log(2)),
        column(0.0, 0.0, 0.0, 0.0),
    )
    adv = column(1.0, -1.0, 1.0, -1.0)
    assert ppo_clip(logp, old, adv).tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8])
    assert ppo_clip(logp, old, adv, dual_clip=1.5).tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])


def test_ppo_clip_starts_as_the_plain_gradient() -> None:
    logp = column(-1.0, -2.0).requires_grad_()
    ppo_clip(logp, logp.detach(), column(0.5, -2.0)).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.5, 2.0])


def test_other_token_losses() -> None:
    check(reinforce, lambda logp_t, adv_t: -adv_t * logp_t, TOKENS)
    check(k1, lambda logp_t, ref_t: logp_t - ref_t, TOKENS)
    check(k2, lambda logp_t, ref_t: 0.5 * (logp_t - ref_t) ** 2, TOKENS)
    check(k3, lambda logp_t, ref_t: math.exp(ref_t - logp_t) - (ref_t - logp_t) - 1, TOKENS)
    check(sft, lambda logp_t: -logp_t, TOKENS)


def test_dft() -> None:
    """The weight, a probability, is a number and not something to differentiate."""
    logp = column(-0.5, -2.0, -1e4, 0.0).requires_grad_()
    loss = dft(logp)
    assert loss.tolist() == pytest.approx([0.5 * math.exp(-0.5), 2 * math.exp(-2), 0.0, 0.0])
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-math.exp(-0.5), -math.exp(-2), 0.0, -1.0])


def test_sampled_tokens_of_a_teacher() -> None:
    """The signal, its limit and the weight of a sampled token are not differentiated."""
    logp = column(-0.5, -2.0, -3.0, -1.0, -9.0).requires_grad_()
    teacher, old = column(-0.4, -4.0, -3.0, -9.0, -0.1), column(-0.5, -1.0, -3.0, -2.5, -9.0)
    signals, ratios = [0.1, -2.0, 0.0, -5.0, 5.0], [1, math.exp(-1), 1, 2.0, 1]
    loss = from_teacher(logp, teacher, old, logp)
    slopes = [-a * w for a, w in zip(signals, ratios, strict=True)]
    wanted = [slope * x for slope, x in zip(slopes, logp.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(wanted, rel=1e-6)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(slopes, rel=1e-6)
    unlimited = from_teacher(logp, teacher, logp, logp, clip=None)
    assert unlimited.tolist()[-2:] == pytest.approx([-8.0, 8.9 * 9.0])


ANSWERS = [
    {"logp": logp, "old": logp - n * ratio, "n": float(n), "adv": adv}
    for logp, ratio, n in [
        (-1.0, 0.0, 3),
        (-9.0, 1e-4, 20),
        (-5.0, 6e-4, 7),
        (-3.0, -2.5e-4, 4),
        (-4.0, -0.01, 30),
        (-1.5, 0.4, 1),
    ]
    for adv in (1.3, -0.7, 0.0)
]


@pytest.mark.parametrize("settings", [{}, {"eps_low": 0.005, "eps_high": 0.2}, {"dual_clip": 1.2}])
def test_gspo(settings: dict[str, float]) -> None:
    check(gspo, gspo_formula, ANSWERS, **settings)


def test_rloo() -> None:
    check(rloo, rloo_formula, ANSWERS)


def test_rloo_starts_as_reinforce_of_whole_answers() -> None:
    logp = column(-7.0, -2.0).requires_grad_()
    rloo(logp, logp.detach(), column(0.5, -2.0)).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.5, 2.0])


@pytest.mark.parametrize("cap", [5.0, 1.0])
def test_cispo_has_a_gradient_beyond_its_cap(cap: float) -> None:
    names = ("logp_t", "old_t", "adv_t")
    logp, old, adv = (column(*(token[name] for token in TOKENS)) for name in names)
    logp.requires_grad_()
    loss = cispo(logp, old, adv, eps_high=cap)
    loss.sum().backward()
    read = [{name: token[name] for name in names} for token in TOKENS]
    wanted = [cispo_formula(**token, held_t=token["logp_t"], eps_high=cap) for token in read]
    assert loss.tolist() == pytest.approx(wanted, rel=1e-12)
    assert logp.grad is not None
    slopes = [-min(math.exp(t["logp_t"] - t["old_t"]), cap) * t["adv_t"] for t in TOKENS]
    assert logp.grad.tolist() == pytest.approx(slopes, rel=1e-12)


@pytest.mark.parametrize("fn", [ppo_clip, reinforce, cispo, gspo, rloo, k1, k2, k3, sft, dft])
def test_far_away(fn: object) -> None:
    ends = [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4)]
    points = [
        {
            "logp_t": a,
            "old_t": b,
            "ref_t": b,
            "adv_t": adv,
            "logp": a,
            "old": b,
            "adv": adv,
            "n": 2.0,
        }
        for a, b in ends
        for adv in (1.0, -1.0, 0.0)
    ]
    check_finite(fn, points)  # type: ignore[arg-type]


def test_estimates_of_the_divergence_agree_with_it() -> None:
    """On average over tokens drawn from the policy, k1 and k3 are its divergence from the
    reference.
    """
    policy, reference = column(0.5, 0.3, 0.2), column(0.2, 0.2, 0.6)
    exact = sum(
        p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True)
    )
    for estimate in (k1, k3):
        assert (policy * estimate(policy.log(), reference.log())).sum().item() == pytest.approx(
            exact
        )


SCORES = [1.0, 0.0, 0.25, 7.0, 2.0, 2.5, -1.0]
GROUPS = [4, 9, 4, 0, 9, 4, 9]


def test_group_norm() -> None:
    result = group_norm(column(*SCORES), torch.tensor(GROUPS)).tolist()
    for score, group, advantage in zip(SCORES, GROUPS, result, strict=True):
        peers = [s for s, g in zip(SCORES, GROUPS, strict=True) if g == group]
        wanted = (score - fmean(peers)) / (stdev(peers) + 1e-4) if len(peers) > 1 else 0.0
        assert advantage == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("groups", [GROUPS, [7] * 7, list(range(7))], ids=str)
def test_scores_above_those_of_the_others(groups: list[int]) -> None:
    centred, left_out = (
        fn(column(*SCORES), torch.tensor(groups)).tolist() for fn in (group_centre, leave_one_out)
    )
    for i, (score, group) in enumerate(zip(SCORES, groups, strict=True)):
        others = [
            s for j, (s, g) in enumerate(zip(SCORES, groups, strict=True)) if g == group and i != j
        ]
        assert centred[i] == pytest.approx(score - fmean([score, *others]), rel=1e-12)
        assert left_out[i] == pytest.approx(score - fmean(others) if others else 0.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fn", [group_norm, group_centre, leave_one_out])
def test_equal_scores_and_groups_of_one_have_exactly_no_advantage(
    fn: object, dtype: torch.dtype
) -> None:
    scores = torch.tensor([0.1] * 3 + [1e6 + 0.3] * 7 + [5.0], dtype=dtype)
    result = fn(scores, torch.tensor([0] * 3 + [1] * 7 + [2]))  # type: ignore[operator]
    assert result.dtype == dtype
    assert result.tolist() == [0.0] * 11
    assert fn(scores[:0], torch.zeros(0, dtype=torch.long)).tolist() == []  # type: ignore[operator]


@pytest.mark.parametrize("fn", [group_norm, group_centre, leave_one_out])
def test_a_failed_score_stays_in_its_group(fn: object) -> None:
    result = fn(column(1.0, 2.0, math.nan, 4.0), torch.tensor([0, 0, 1, 1]))  # type: ignore[operator]
    assert result.isnan().tolist() == [False, False, True, True]


def test_whiten() -> None:
    scores, mean, std = (
        column(*SCORES),
        column(fmean(SCORES)).squeeze(),
        column(stdev(SCORES)).squeeze(),
    )
    wanted = [(s - fmean(SCORES)) / (stdev(SCORES) + 1e-4) for s in SCORES]
    assert whiten(scores, mean, std).tolist() == pytest.approx(wanted)
    assert over_step(
        scores, torch.tensor(GROUPS), torch.stack([mean, std])
    ).tolist() == pytest.approx(wanted)
    assert whiten(column(2.0, 2.0), column(2.0), column(0.0)).tolist() == [0.0, 0.0]


def test_credit_within_a_group_needs_no_moments() -> None:
    scores, groups = column(*SCORES), torch.tensor(GROUPS)
    for credit, plain in (
        (within_group, group_norm),
        (above_group, group_centre),
        (above_others, leave_one_out),
    ):
        assert credit(scores, groups, column(3.0, 4.0)).tolist() == plain(scores, groups).tolist()
