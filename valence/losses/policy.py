"""Policy-gradient losses and estimators of the divergence from the reference. One number per token [T], not reduced."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

_LARGEST_EXPONENT = 20.0  # exp overflows float32 at 88, and its gradient long before it means anything


def _exp(exponent: Tensor) -> Tensor:
    """exp(x), held at exp(20) with no gradient beyond, where a probability ratio is no estimate of anything."""
    return exponent.clamp(max=_LARGEST_EXPONENT).exp()


def reinforce(logp_t: Tensor, adv_t: Tensor) -> Tensor:
    """Score-function gradient: make tokens likelier in proportion to their advantage.

    -A_t*logp_t. Williams 1992, doi 10.1007/BF00992696.

    logp_t[T]: log-probability of each trained token (nats); adv_t[T]: its advantage (units of reward).
    """
    return -adv_t * logp_t


def ppo_clip(
    logp_t: Tensor, old_t: Tensor, adv_t: Tensor, *,
    eps_low: Annotated[float, Ge(0), Le(1)] = 0.2, eps_high: Annotated[float, Ge(0)] = 0.2,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> Tensor:  # fmt: skip
    """Proximal policy optimisation: follow the advantage until the probability ratio has left the trusted interval.

    -min(rho*A, clip(rho, 1-eps_low, 1+eps_high)*A), rho = exp(logp_t - old_t). Schulman et al. 2017, arXiv 1707.06347,
    Eq. 7. With dual_clip = c, where A < 0, -max(min(...), c*A): Ye et al. 2019, arXiv 1912.09729.
    A rho above exp(20) counts as exp(20), without gradient.

    logp_t[T]: log-probability of each trained token (nats); old_t[T]: the same when the completion was produced;
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


def k1(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy, reference) from tokens of the policy: logp_t - ref_t.

    Schulman 2020, "Approximating KL divergence". Its value is right on average, but as a loss its gradient averages to 0:
    it belongs into the reward.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return logp_t - ref_t


def k2(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Half the squared log-ratio, 0.5*(logp_t - ref_t)^2: biased in value, right in its gradient on tokens of the policy.

    Schulman 2020, "Approximating KL divergence".

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    return 0.5 * (logp_t - ref_t).square()


def k3(logp_t: Tensor, ref_t: Tensor) -> Tensor:
    """Unbiased and never negative estimate of KL(policy, reference): exp(x) - x - 1, x = ref_t - logp_t.

    Schulman 2020, "Approximating KL divergence". As a loss it follows KL(reference, policy). An x above 20 counts as 20,
    without gradient.

    logp_t[T], ref_t[T]: log-probabilities (nats). [T], nats.
    """
    x = (ref_t - logp_t).clamp(max=_LARGEST_EXPONENT)
    return torch.expm1(x) - x
