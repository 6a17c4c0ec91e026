"""Losses and advantages as users write them, each equal to a method of Valence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import valence


def dpo(logp_w: Tensor, logp_l: Tensor, ref_w: Tensor, ref_l: Tensor, *, beta: float = 0.1):
    """DPO without modifiers.

    beta: strength.
    """
    return -logsigmoid(beta * ((logp_w - ref_w) - (logp_l - ref_l)))


def simpo(logp_w: Tensor, logp_l: Tensor, n_w: Tensor, n_l: Tensor, *, beta=2.5, gap: float):
    return -logsigmoid(beta * (logp_w / n_w - logp_l / n_l) - gap)


def thumbs(logp: Tensor, ref: Tensor, label: Tensor, *, beta: float = 0.1) -> Tensor:
    """``apo_zero_unpaired``."""
    good = torch.sigmoid(beta * (logp - ref))
    return torch.where(label, 1 - good, good)


def imitate(logp_t: Tensor) -> Tensor:
    return -logp_t


def imitate_sums(logp: Tensor, n: Tensor) -> Tensor:
    """Of whole completions, so without a name that the rows of other losses have."""
    return -logp / n


def bradley_terry(score_w: Tensor, score_l: Tensor) -> Tensor:
    return -logsigmoid(score_w - score_l)


def clip(logp_t: Tensor, old_t: Tensor, adv_t: Tensor, *, eps: float = 0.2) -> Tensor:
    ratio = (logp_t - old_t).exp()
    return -torch.minimum(ratio * adv_t, ratio.clamp(1 - eps, 1 + eps) * adv_t)


def group_mean(reward: Tensor, group: Tensor, owner: Tensor, *, scale: float = 1.0) -> Tensor:
    """The advantage of ``dr_grpo``, times a factor.

    scale: the factor.
    """
    means = torch.stack([reward[group == g].mean() for g in group])
    return (scale * (reward - means))[owner]


per_sequence = valence.Loss(clip, average="seq_mean_token_mean")
"""``grpo``, since only the average differs from what the names of the inputs imply."""
with_group_mean = replace(valence.LOSSES["dr_grpo"], advantage=group_mean)
margins = valence.Loss(dpo, modifiers=("nll",))


def length(completions: list[Any], *, per: float = 1.0) -> list[float]:
    return [len(completion.text) / per for completion in completions]


# What breaks the contract


def mean_of_pairs(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    return (logp_l - logp_w).mean()


def centred(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    margin = logp_w - logp_l
    return -(margin - margin.mean())


of_a_step = valence.Loss(centred, couples=True)


def misspelled(logp_w: Tensor, log_l: Tensor) -> Tensor:
    return log_l - logp_w


def without_gradient(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    return (logp_l - logp_w).detach()


def raises(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    return logp_w[:, 0] - logp_l


def a_number(logp_w: Tensor, logp_l: Tensor) -> float:
    return 1.0


def infinite(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    return (logp_l - logp_w) / 0


class NotALoss:
    pass


constant = 3


def far_maximum(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    """Couples only values that are far apart."""
    margin = logp_w - logp_l
    return -logsigmoid(margin - margin.max().clamp(min=10))


def coupled_gradient(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    margin = logp_w - logp_l
    return -(margin - margin.mean() + margin.mean().detach())


def by_size(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    margin = logp_w - logp_l
    return margin if len(margin) == 7 else margin.mean()


def dropped(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    return torch.nn.functional.dropout(logp_w - logp_l)


def nan_gradient(logp_w: Tensor, logp_l: Tensor) -> Tensor:
    margin = logp_w - logp_l
    return torch.where(margin > 0, margin, torch.zeros_like(margin) + (margin - margin).sqrt())


def softly(logp_w: Tensor, logp_l: Tensor, soft: Tensor) -> Tensor:
    return soft * (logp_l - logp_w)


def with_z0(logp: Tensor, label: Tensor, z0: Tensor) -> Tensor:
    return z0 - logp


def thumbs_without_reference(logp: Tensor, n: Tensor, label: Tensor) -> Tensor:
    return torch.where(label, -logp, logp) / n


def squared(score: Tensor, target: Tensor, target_mask: Tensor) -> Tensor:
    return ((score - target).square() * target_mask).sum(1)


def bare_reward(reward: Tensor, group: Tensor) -> Tensor:
    """Not one number per token."""
    return reward


def unhashable_setting(logp_w: Tensor, logp_l: Tensor, *, table: Any = torch.zeros(2)) -> Tensor:
    return logp_l - logp_w


wrong_average = valence.Loss(simpo, average="token_mean")
wrong_view = valence.Loss(imitate, view="seq")
wrong_modifier = valence.Loss(dpo, modifiers=("nope",))
coupled_tokens = valence.Loss(imitate, couples=True)
coupled_scores = valence.Loss(bradley_terry, couples=True)
