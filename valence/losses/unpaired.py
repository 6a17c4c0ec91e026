"""Losses that read one completion and its label.

All return the unreduced loss of each sequence [S].
"""

from __future__ import annotations

from valence.losses.lazy import Tensor, logsigmoid, torch
from valence.losses.preference import Beta, Weight


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
    """Kahneman-Tversky optimization: raise r = logp - ref above the reference point z0 for thumbs
    up, lower it below for thumbs down.

    desirable: w_D * (1 - s(beta*(r - z0))); undesirable: w_U * (1 - s(beta*(z0 - r))).
    Ethayarajh et al. 2024, arXiv 2402.01306, Eq. 7-8, with the weight w factored out.

    logp[S], ref[S]: summed log-probabilities of the completion (nats); label[S]: True is thumbs up;
    z0[S]: the reference point (nats), no gradient.

    beta: regularization towards the reference; small values let the policy move further.
    desirable_weight: weight of thumbs up.
    undesirable_weight: weight of thumbs down.
    """
    margin = beta * (logp - ref - z0)
    return torch.where(
        label, desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin)
    )


def apo_zero_unpaired(logp: Tensor, ref: Tensor, label: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """Anchored preference optimization without pairs: raise thumbs up and lower thumbs down,
    relative to the reference.

    desirable: 1 - s(beta*r); undesirable: s(beta*r), r = logp - ref.
    D'Oosterlinck et al. 2024, arXiv 2408.06266, Eq. 7, split into its two halves.

    logp[S], ref[S]: summed log-probabilities of the completion (nats); label[S]: True is thumbs up.

    beta: scale of the log-ratio; larger: the loss saturates earlier.
    """
    reward = beta * (logp - ref)
    return torch.where(label, torch.sigmoid(-reward), torch.sigmoid(reward))


def bco(logp: Tensor, ref: Tensor, label: Tensor, delta: Tensor, *, beta: Beta = 0.1) -> Tensor:
    """Binary classifier optimization: the implicit reward separates thumbs up and thumbs down at
    the threshold delta.

    desirable: -log s(beta*r - delta); undesirable: -log s(-(beta*r - delta)), r = logp - ref. Jung
    et al. 2024, arXiv 2404.04656, without its density-ratio weight of thumbs down, p(prompt is
    liked)/p(prompt is disliked), which needs a classifier.

    logp[S], ref[S]: summed log-probabilities of the completion (nats); label[S]: True is thumbs up;
    delta[]: running mean of the implicit rewards of both classes (units of beta*r), no gradient.

    beta: scale of the implicit reward.
    """
    x = beta * (logp - ref) - delta
    return -logsigmoid(torch.where(label, x, -x))
