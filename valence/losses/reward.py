"""Losses of reward models, which score a whole sequence instead of its tokens.

One number per pair [P] or sequence [S].

score[S, A]: of each sequence and attribute; target[S, A]: its label or score; target_mask[S, A]:
whether the row has one. A sequence's loss is the mean over the attributes that its row has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from valence.losses.lazy import Tensor, logsigmoid, torch
from valence.losses.metrics import Metrics, mean, mean_of, won
from valence.types import Ranked


def bradley_terry(
    score_w: Tensor, score_l: Tensor, margin: Tensor, *, center_coef: Annotated[float, Ge(0)] = 0.0
) -> Tensor:
    """Reward model for pairs: the chosen completion wins with probability s(score_w - score_l).

    -log s(score_w - score_l - margin) + center_coef*(score_w + score_l)^2. Bradley and Terry 1952;
    Ouyang et al. 2022, arXiv 2203.02155, Eq. 1; margin: Touvron et al. 2023, arXiv 2307.09288,
    Eq. 2; centering: Eisenstein et al. 2023, arXiv 2312.09244.

    score_w, score_l [P]: scores of the chosen and the rejected completion; margin[P]: required
    difference of the two scores.

    center_coef: pulls the mean score of each pair, which is otherwise arbitrary, towards 0. 0.01 is
        usual.
    """
    return center_coef * (score_w + score_l).square() - logsigmoid(score_w - score_l - margin)


def pointwise(
    score: Tensor,
    target: Tensor,
    target_mask: Tensor,
    *,
    error: Literal["cross_entropy", "squared", "huber"] = "cross_entropy",
    huber_delta: Annotated[float, Gt(0)] = 1.0,
    verdict: Literal["auto", "label", "score", "attributes"] = "auto",
) -> Tensor:
    """Reward model for single completions: thumbs, or scores of one or several attributes.

    cross_entropy: -t log s(score) - (1-t) log s(-score), with the target t in 0..1;
    squared: e^2, with e = score - target;
    huber: e^2/2 up to |e| = huber_delta, above it huber_delta*(|e| - huber_delta/2).
    Huber 1964 (huber); Wang et al. 2024, arXiv 2406.12845 (several attributes at once).

    score[S, A]: score of each sequence and attribute; target[S, A]: label or score in the row;
    target_mask[S, A]: whether the row has one.

    error: cross_entropy for thumbs (1 up, 0 down) or probabilities; squared for other scores, huber
        with outliers.
    huber_delta: error (units of the score) above which the huber loss is linear.
    verdict: the target. auto: the first field that all training rows have of label, score,
        attributes for cross_entropy, or of score, attributes, label for the others.
    """
    del verdict  # the targets were chosen by it before
    match error:
        case "cross_entropy":
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                score, target, reduction="none"
            )
        case "squared":
            loss = (score - target).square()
        case "huber":
            loss = torch.nn.functional.huber_loss(
                score, target, reduction="none", delta=huber_delta
            )
    return _attribute_mean(loss, target_mask)


def ordinal(
    score: Tensor,
    target: Tensor,
    target_mask: Tensor,
    thresholds: Tensor,
    *,
    levels: Annotated[int, Ge(2)] = 5,
) -> Tensor:
    """Reward model for ordered levels, such as stars; the distances between levels are learned.

    -log P(y = target), with P(y <= k) = s(theta_k - score) and the target in 1..levels.
    McCullagh 1980, J. R. Stat. Soc. B 42(2) (proportional odds model).

    score[S, A], target[S, A], target_mask[S, A]: as for pointwise; thresholds[levels - 1]: theta,
    in ascending order, learned with the model.

    levels: number of levels; targets are whole numbers from 1.
    """
    assert len(thresholds) == levels - 1
    infinity = thresholds.new_full((1,), torch.inf)
    level = torch.where(target_mask, target, 1).long() - 1
    above = torch.cat([thresholds, infinity])[level]
    below = torch.cat([-infinity, thresholds])[level]
    # s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)) avoids the difference of two almost equal numbers,
    # which a level has that hardly any row uses
    gap = (above - below).clamp(min=torch.finfo(score.dtype).eps)
    loss = -logsigmoid(above - score) - logsigmoid(score - below) - (-torch.expm1(-gap)).log()
    return _attribute_mean(loss, target_mask)


def _attribute_mean(loss: Tensor, target_mask: Tensor) -> Tensor:
    """Mean [S] of loss[S, A] over the attributes with a target; 0 for a sequence without any."""
    return torch.where(target_mask, loss, 0).sum(1) / target_mask.sum(1).clamp(min=1)


# Metrics


def paired_scores(
    view: Mapping[str, Tensor], rewards: None, settings: Mapping[str, Any]
) -> Metrics:
    """Mean scores, accuracy (ties count half), and calibration error and Brier score of pairs."""
    chosen, rejected = view["score_w"].detach(), view["score_l"].detach()
    margin = chosen - rejected
    return {
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "rewards/accuracies": mean(won(margin)),
        "rewards/brier": mean(torch.sigmoid(-margin).square()),
        "rewards/calibration_error": Ranked(
            torch.sigmoid(margin.abs()), won(margin), "calibration_error"
        ),
    }


def single_scores(
    view: Mapping[str, Tensor], rewards: None, settings: Mapping[str, Any]
) -> Metrics:
    """Metrics of each attribute (numbered if there are several).

    Thumbs: those of pairs, and the AUC. Scores: correlations and mean absolute error. Levels: also
    the accuracy of the median level.
    """
    metrics: Metrics = {}
    columns = zip(
        *(view[name].detach().unbind(1) for name in ("score", "target", "target_mask")), strict=True
    )
    for a, (score, target, target_mask) in enumerate(columns):
        if "thresholds" in view:
            numbers = _level_metrics(score, target, target_mask, view["thresholds"].detach())
        elif settings.get("error") == "cross_entropy":
            numbers = _thumb_metrics(score, target, target_mask)
        else:
            numbers = _correlations(score, target, target_mask) | {
                "rewards/error": mean_of((score - target).abs(), target_mask)
            }
        metrics |= {
            name if view["score"].shape[1] == 1 else f"{name}/{a}": number
            for name, number in numbers.items()
        }
    return metrics


def _thumb_metrics(score: Tensor, target: Tensor, target_mask: Tensor) -> Metrics:
    p, up = torch.sigmoid(score), target > 0.5
    labels = torch.where(target_mask, up.to(score), torch.nan)
    return {
        "rewards/chosen": mean_of(score, target_mask & up),
        "rewards/rejected": mean_of(score, target_mask & ~up),
        "rewards/accuracies": mean_of(((score > 0) == up).to(score), target_mask),
        "rewards/brier": mean_of((p - target).square(), target_mask),
        "rewards/auc": Ranked(score, labels),
        "rewards/calibration_error": Ranked(p, labels, "calibration_error"),
    }


def _level_metrics(
    score: Tensor, target: Tensor, target_mask: Tensor, thresholds: Tensor
) -> Metrics:
    level = 1 + (score[:, None] > thresholds).sum(1)  # the median one
    return _correlations(score, target, target_mask) | {
        "rewards/accuracies": mean_of((level == target).to(score), target_mask),
        "rewards/error": mean_of((level - target).abs().to(score), target_mask),
    }


def _correlations(score: Tensor, target: Tensor, target_mask: Tensor) -> Metrics:
    labels = torch.where(target_mask, target, torch.nan)
    return {
        "rewards/mean": mean_of(score, target_mask),
        "rewards/pearson": Ranked(score, labels, "pearson"),
        "rewards/spearman": Ranked(score, labels, "spearman"),
    }
