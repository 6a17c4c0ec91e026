"""Losses of single tokens and advantages, against the formula book in plain Python numbers."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch

from tests.golden.plain import check, check_finite, column
from valence.losses.advantage import group_norm, over_step, whiten, within_group
from valence.losses.imitation import dft, sft
from valence.losses.policy import k1, k2, k3, ppo_clip, reinforce


def ppo_formula(
    logp_t: float, old_t: float, adv_t: float, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None
) -> float:
    rho = math.exp(logp_t - old_t)
    gain = min(rho * adv_t, min(max(rho, 1 - eps_low), 1 + eps_high) * adv_t)
    return -(max(gain, dual_clip * adv_t) if dual_clip is not None and adv_t < 0 else gain)


TOKENS = [
    {"logp_t": logp, "old_t": logp - ratio, "adv_t": adv, "ref_t": logp - ratio}
    for logp, ratio in [(-1.0, 0.0), (-2.0, 0.1), (-0.5, -0.1), (-3.0, 0.9), (-4.0, -1.5), (-1.5, 1.4)]
    for adv in (1.3, -0.7, 0.0)
]


@pytest.mark.parametrize("settings", [{}, {"eps_low": 0.05, "eps_high": 0.28}, {"dual_clip": 3.0}])
def test_ppo_clip(settings: dict[str, float]) -> None:
    check(ppo_clip, ppo_formula, TOKENS, **settings)


def test_ppo_clip_by_hand() -> None:
    """Ratios 2 and 1/2: a gain is capped, a loss is not, unless by the dual clip."""
    logp, old = column(math.log(2), math.log(2), -math.log(2), -math.log(2)), column(0.0, 0.0, 0.0, 0.0)
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


@pytest.mark.parametrize("fn", [ppo_clip, reinforce, k1, k2, k3, sft, dft])
def test_far_away(fn: object) -> None:
    ends = [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4)]
    points = [{"logp_t": a, "old_t": b, "ref_t": b, "adv_t": adv} for a, b in ends for adv in (1.0, -1.0, 0.0)]
    check_finite(fn, points)  # type: ignore[arg-type]


def test_estimates_of_the_divergence_agree_with_it() -> None:
    """On average over tokens drawn from the policy, k1 and k3 are its divergence from the reference."""
    policy, reference = column(0.5, 0.3, 0.2), column(0.2, 0.2, 0.6)
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    for estimate in (k1, k3):
        assert (policy * estimate(policy.log(), reference.log())).sum().item() == pytest.approx(exact)


SCORES = [1.0, 0.0, 0.25, 7.0, 2.0, 2.5, -1.0]
GROUPS = [4, 9, 4, 0, 9, 4, 9]


def test_group_norm() -> None:
    found = group_norm(column(*SCORES), torch.tensor(GROUPS)).tolist()
    for score, group, advantage in zip(SCORES, GROUPS, found, strict=True):
        peers = [s for s, g in zip(SCORES, GROUPS, strict=True) if g == group]
        wanted = (score - fmean(peers)) / (stdev(peers) + 1e-4) if len(peers) > 1 else 0.0
        assert advantage == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_exactly_no_advantage(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.1] * 3 + [1e6 + 0.3] * 7 + [5.0], dtype=dtype)
    found = group_norm(scores, torch.tensor([0] * 3 + [1] * 7 + [2]))
    assert found.dtype == dtype
    assert found.tolist() == [0.0] * 11


def test_a_failed_score_stays_in_its_group() -> None:
    found = group_norm(column(1.0, 2.0, math.nan, 4.0), torch.tensor([0, 0, 1, 1]))
    assert found.isnan().tolist() == [False, False, True, True]


def test_whiten() -> None:
    scores, mean, std = column(*SCORES), column(fmean(SCORES)).squeeze(), column(stdev(SCORES)).squeeze()
    wanted = [(s - fmean(SCORES)) / (stdev(SCORES) + 1e-4) for s in SCORES]
    assert whiten(scores, mean, std).tolist() == pytest.approx(wanted)
    assert over_step(scores, torch.tensor(GROUPS), torch.stack([mean, std])).tolist() == pytest.approx(wanted)
    assert whiten(column(2.0, 2.0), column(2.0), column(0.0)).tolist() == [0.0, 0.0]


def test_credit_within_a_group_needs_no_moments() -> None:
    scores, groups = column(*SCORES), torch.tensor(GROUPS)
    assert within_group(scores, groups, column(3.0, 4.0)).tolist() == group_norm(scores, groups).tolist()
