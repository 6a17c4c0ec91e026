"""Losses that read one completion and its verdict. All return one number per sequence [S], not reduced."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

Beta = Annotated[float, Gt(0)]
Weight = Annotated[float, Ge(0)]


def kto(
    logp: Tensor,
    ref: Tensor,
    label: Tensor,
    z0: Tensor,
    *,
    beta: Beta = 0.1,
    desirable_weight: Weight = 1.0,
    undesirable_weight: Weight = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation: push r = logp - ref above (thumbs up) or below (thumbs down) the reference point z0.

    desirable: w_D * (1 - s(beta*(r - z0))); undesirable: w_U * (1 - s(beta*(z0 - r))).
    Ethayarajh et al. 2024, arXiv 2402.01306, Eq. 7-8, with the constant w subtracted out.

    logp[S], ref[S]: summed log-probabilities of the completion (nats); label[S]: True is thumbs up;
    z0[S]: the reference point (nats), no gradient.

    beta: how sharply the loss saturates; small values let the policy move further from the reference.
    desirable_weight: weight of thumbs up.
    undesirable_weight: weight of thumbs down.
    """
    margin = beta * (logp - ref - z0)
    return torch.where(label, desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin))


def apo_zero_unpaired(logp: Tensor, ref: Tensor, label: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """Anchored preference optimisation without pairs: r up for thumbs up, down for thumbs down, anchored at the reference.

    desirable: 1 - s(beta*r); undesirable: s(beta*r), r = logp - ref.
    D'Oosterlinck et al. 2024, arXiv 2408.06266, Eq. 7, split into its two halves.

    logp[S], ref[S]: summed log-probabilities of the completion (nats); label[S]: True is thumbs up.

    beta: how sharply the loss saturates.
    """
    reward = beta * (logp - ref)
    return torch.where(label, torch.sigmoid(-reward), torch.sigmoid(reward))
