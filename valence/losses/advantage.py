"""How good a completion was, compared with others: from scores to advantages.

The credit of a method has the signature (score[S], group[S], moments[2]): mean and standard deviation of the step's scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-4  # added to every standard deviation, so that equal scores divide by something


def group_norm(score: Tensor, group: Tensor) -> Tensor:
    """Scores standardised within their group: (R - mean_g)/(std_g + 1e-4), the sample standard deviation.

    Shao et al. 2024, arXiv 2402.03300, Sec. 4.1. Exactly 0 in a group of one and in a group of equal scores.

    score[S]: reward of each completion; group[S]: integer that completions of one prompt share. Returns [S], no unit.
    """
    same = group[:, None] == group
    count = same.sum(1)
    lowest = torch.where(same, score, torch.inf).amin(1)
    above = torch.where(same, score - lowest[:, None], 0.0)  # equal scores are 0 here, and so is their mean, without rounding
    centred = torch.where(same, above - (above.sum(1) / count)[:, None], 0.0)
    std = (centred.square().sum(1) / (count - 1).clamp(min=1)).sqrt()
    return centred.diagonal() / (std + _FLOOR)


def whiten(score: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Scores (or advantages) standardised by the mean and standard deviation of a larger set: (score - mean)/(std + 1e-4).

    score[...]: any shape; mean[], std[]: same unit as the score. Returns the shape of the score, no unit.
    """
    return (score - mean) / (std + _FLOOR)


def within_group(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score against those of the same prompt: (R - mean_g)/(std_g + 1e-4). Shao et al. 2024, arXiv 2402.03300 (GRPO)."""
    del moments
    return group_norm(score, group)


def over_step(score: Tensor, group: Tensor, moments: Tensor) -> Tensor:
    """The score against all of the optimizer step: (R - mean)/(std + 1e-4), with moments[2] = (mean, std)."""
    del group
    return whiten(score, *moments.to(score.dtype).unbind())
