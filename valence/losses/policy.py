"""Policy-gradient losses and estimators of KL(policy, reference).

All return unreduced values: one per token [T], or per completion [S] if the probability ratio is
that of the whole completion.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from valence.losses.lazy import Tensor, torch

_MAX_EXPONENT = 20.0  # exp overflows float32 at 88; ratios above exp(20) carry no information


def _exp(exponent: Tensor) -> Tensor:
    """exp(x), clamped to exp(20) without gradient above."""
    return exponent.clamp(max=_MAX_EXPONENT).exp()


def reinforce(logp_t: Tensor, adv_t: Tensor) -> Tensor:
    """Score-function gradient: raise the likelihood of tokens in proportion to their advantage.

    -A_t*logp_t. Williams 1992, doi 10.1007/BF00992696.

    logp_t[T]: log-probability of each trained token (nats); adv_t[T]: its advantage (units of
    reward).
    """
    return -adv_t * logp_t


def ppo_clip(
    logp_t: Tensor, old_t: Tensor, adv_t: Tensor, *,
    eps_low: Annotated[float, Ge(0), Le(1)] = 0.2, eps_high: Annotated[float, Ge(0)] = 0.2,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> Tensor:  # fmt: skip
    """Proximal policy optimization: maximize the advantage, weighted by the probability ratio,
    until the ratio leaves the clipping interval.

    -min(rho*A, clip(rho, 1-eps_low, 1+eps_high)*A), rho = exp(logp_t - old_t). Schulman et al.
    2017, arXiv 1707.06347, Eq. 7. With dual_clip = c, the loss where A < 0 is -max(min(...),
    c*A): Ye et al. 2019, arXiv 1912.09729. A rho above exp(20) has no gradient.

    logp_t[T]: log-probability of each trained token (nats); old_t[T]: that of the sampling policy;
    adv_t[T]: its advantage (units of reward, usually normalized).

    eps_low: distance of the ratio's lower clipping bound from 1.
    eps_high: distance of the ratio's upper clipping bound from 1.
    dual_clip: cap of the ratio for negative advantages, above 1 + eps_high. null: none.
    """
    rho = _exp(logp_t - old_t)
    gain = torch.minimum(rho * adv_t, rho.clamp(1 - eps_low, 1 + eps_high) * adv_t)
    if dual_clip is not None:
        gain = torch.where(adv_t < 0, torch.maximum(gain, dual_clip * adv_t), gain)
    return -gain


def gspo(
    logp: Tensor, old: Tensor, n: Tensor, adv: Tensor, *,
    eps_low: Annotated[float, Ge(0), Le(1)] = 3e-4, eps_high: Annotated[float, Ge(0)] = 4e-4,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> Tensor:  # fmt: skip
    """Group sequence policy optimization: the clipped surrogate with one ratio per completion, the
    geometric mean over its tokens.

    -min(rho*A, clip(rho, 1-eps_low, 1+eps_high)*A), rho = exp((logp - old)/n). Zheng et al. 2025,
    arXiv 2507.18071, Eq. 5-7. dual_clip works as for grpo.

    logp[S]: summed log-probability of the completion (nats); old[S]: that of the sampling policy;
    n[S]: number of tokens; adv[S]: advantage (usually normalized), the mean over tokens if it
    varies.

    eps_low: distance of the ratio's lower clipping bound from 1.
    eps_high: distance of the ratio's upper clipping bound from 1.
    dual_clip: cap of the ratio for negative advantages, above 1 + eps_high. null: none.
    """
    return ppo_clip(logp / n, old / n, adv, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)


def cispo(
    logp_t: Tensor, old_t: Tensor, adv_t: Tensor, *, eps_high: Annotated[float, Gt(0)] = 5.0
) -> Tensor:
    """Clipped importance-sampling weights: weights are capped, but no token loses its gradient.

    -sg(min(rho, eps_high))*A*logp_t, rho = exp(logp_t - old_t), sg = stop-gradient. MiniMax 2025,
    arXiv 2506.13585, Eq. 4-5, which writes the cap as 1 + eps_high.

    logp_t[T]: log-probability of each trained token (nats); old_t[T]: that of the sampling policy;
    adv_t[T]: its advantage (units of reward, usually normalized).

    eps_high: cap of the ratio itself.
    """
    return -_exp(logp_t - old_t).detach().clamp(max=eps_high) * adv_t * logp_t


def rloo(logp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    """REINFORCE leave-one-out: maximize the advantage of whole completions, weighted by their
    probability ratio.

    -rho*A, rho = exp(logp - old). Ahmadian et al. 2024, arXiv 2402.14740. The paper's loss,
    -A*logp, has the same gradient while policy and sampling policy are equal. A rho above exp(20)
    has none.

    logp[S]: summed log-probability of the completion (nats); old[S]: that of the sampling policy;
    adv[S]: advantage (units of reward).
    """
    return -_exp(logp - old) * adv


def k1(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy, reference) from tokens of the policy: logp_t - ref_t.

    Schulman 2020, "Approximating KL divergence". As a loss, its gradient averages to 0, so use it
    only in the reward.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return logp_t - ref_t


def k2(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Half the squared log-ratio, 0.5*(logp_t - ref_t)^2: biased, with the right gradient on tokens
    of the policy.

    Schulman 2020, "Approximating KL divergence".

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return 0.5 * (logp_t - ref_t).square()


def k3(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy, reference): exp(x) - x - 1, x = ref_t - logp_t.

    Schulman 2020, "Approximating KL divergence". As a loss it follows KL(reference, policy). An x
    above 20 counts as 20, without gradient.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    x = (ref_t - logp_t).clamp(max=_MAX_EXPONENT)
    return torch.expm1(x) - x
