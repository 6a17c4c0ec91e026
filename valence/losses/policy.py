"""Policy-gradient losses and estimators of the divergence from the reference, not reduced: one
number per token [T], or per answer [S] where the ratio of probabilities is that of a whole answer.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from valence.losses.lazy import Tensor, torch

_LARGEST_EXPONENT = (
    20.0  # exp overflows float32 at 88, and its gradient long before it means anything
)


def _exp(exponent: Tensor) -> Tensor:
    """exp(x), held at exp(20) with no gradient beyond, where a probability ratio is no estimate of
    anything.
    """
    return exponent.clamp(max=_LARGEST_EXPONENT).exp()


def reinforce(logp_t: Tensor, adv_t: Tensor) -> Tensor:
    """Score-function gradient: make tokens likelier in proportion to their advantage.

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
    """Proximal policy optimisation: follow the advantage until the probability ratio has left the
    trusted interval.

    -min(rho*A, clip(rho, 1-eps_low, 1+eps_high)*A), rho = exp(logp_t - old_t). Schulman et al.
    2017, arXiv 1707.06347, Eq. 7. With dual_clip = c, where A < 0, -max(min(...), c*A): Ye et al.
    2019, arXiv 1912.09729. A rho above exp(20) counts as exp(20), without gradient.

    logp_t[T]: log-probability of each trained token (nats); old_t[T]: the same when the completion
    was produced;
    adv_t[T]: its advantage (units of reward, usually standardised).

    eps_low: how far below 1 the ratio may move.
    eps_high: how far above 1 the ratio may move.
    dual_clip: cap of the ratio where the advantage is negative, above 1 + eps_high; null is no cap.
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
    """Group sequence policy optimisation: the clipped surrogate with one ratio for a whole answer,
    the mean one of its tokens.

    -min(rho*A, clip(rho, 1-eps_low, 1+eps_high)*A), rho = exp((logp - old)/n). Zheng et al. 2025,
    arXiv 2507.18071, Eq. 5-7. With dual_clip as in ppo_clip.

    logp[S]: summed log-probability of the answer (nats); old[S]: the same when it was produced;
    n[S]: its tokens; adv[S]: its advantage (usually standardised), the mean where its tokens have
    different ones.

    eps_low: how far below 1 the ratio may move; small, as it is a mean over tokens.
    eps_high: how far above 1 the ratio may move.
    dual_clip: cap of the ratio where the advantage is negative, above 1 + eps_high; null is no cap.
    """
    return ppo_clip(logp / n, old / n, adv, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)


def cispo(
    logp_t: Tensor, old_t: Tensor, adv_t: Tensor, *, eps_high: Annotated[float, Gt(0)] = 5.0
) -> Tensor:
    """Clipped importance-sampling weights: the weight of a token is capped, and no token loses its
    gradient.

    -sg(min(rho, eps_high))*A*logp_t, rho = exp(logp_t - old_t), sg = no gradient. MiniMax 2025,
    arXiv 2506.13585, Eq. 4-5, which writes the cap as 1 + eps_high, and has a lower bound too that
    it leaves without effect.

    logp_t[T]: log-probability of each trained token (nats); old_t[T]: the same when the completion
    was produced;
    adv_t[T]: its advantage (units of reward, usually standardised).

    eps_high: cap of the ratio itself.
    """
    return -_exp(logp_t - old_t).detach().clamp(max=eps_high) * adv_t * logp_t


def rloo(logp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    """Reinforce leave-one-out: follow the advantage of whole answers, weighted by how much likelier
    they have become.

    -rho*A, rho = exp(logp - old). Ahmadian et al. 2024, arXiv 2402.14740, whose -A*logp is its
    gradient while policy and old agree. A rho above exp(20) counts as exp(20), without gradient.

    logp[S]: summed log-probability of the answer (nats); old[S]: the same when it was produced;
    adv[S]: its advantage (units of reward).
    """
    return -_exp(logp - old) * adv


def k1(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy, reference) from tokens of the policy: logp_t - ref_t.

    Schulman 2020, "Approximating KL divergence". Its value is right on average, but as a loss its
    gradient averages to 0: it belongs into the reward.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return logp_t - ref_t


def k2(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Half the squared log-ratio, 0.5*(logp_t - ref_t)^2: biased in value, right in its gradient on
    tokens of the policy.

    Schulman 2020, "Approximating KL divergence".

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return 0.5 * (logp_t - ref_t).square()


def k3(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased and never negative estimate of KL(policy, reference): exp(x) - x - 1, x = ref_t -
    logp_t.

    Schulman 2020, "Approximating KL divergence". As a loss it follows KL(reference, policy). An x
    above 20 counts as 20, without gradient.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    x = (ref_t - logp_t).clamp(max=_LARGEST_EXPONENT)
    return torch.expm1(x) - x
