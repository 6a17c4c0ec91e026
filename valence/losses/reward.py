"""Losses of reward models, which score a whole sequence instead of its tokens.

One number per pair [P] or sequence [S].

score[S, A]: of each sequence and attribute; target[S, A]: what was given for it; given[S, A]: False
where nothing was, and the target is anything. A sequence's loss is the mean over the attributes
that its row gives.
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
    """The reward model of pairs: the chosen completion wins with probability s(score_w - score_l).

    -log s(score_w - score_l - margin) + center_coef*(score_w + score_l)^2. Bradley and Terry 1952;
    Ouyang et al. 2022, arXiv 2203.02155, Eq. 1; the margin of Touvron et al. 2023, arXiv
    2307.09288, Eq. 2; the centering of Eisenstein et al. 2023, arXiv 2312.09244.

    score_w, score_l [P]: scores of chosen and rejected; margin[P]: by how much the chosen one
    should win.

    center_coef: pulls the scores of a pair towards a mean of 0, which the pairs themselves leave
        open; 0.01 is usual.
    """
    return center_coef * (score_w + score_l).square() - logsigmoid(score_w - score_l - margin)


def pointwise(
    score: Tensor,
    target: Tensor,
    given: Tensor,
    *,
    error: Literal["cross_entropy", "squared", "huber"] = "cross_entropy",
    huber_delta: Annotated[float, Gt(0)] = 1.0,
    verdict: Literal["auto", "label", "score", "attributes"] = "auto",
) -> Tensor:
    """The reward model of single verdicts: thumbs, or real-valued scores of one attribute or
    several.

    cross_entropy: -t log s(score) - (1-t) log s(-score), with the target t in 0..1; squared: e^2, e
    = score - target;
    huber: e^2/2 up to |e| = huber_delta, from there on huber_delta*(|e| - huber_delta/2).
    Huber 1964 for the last; several attributes at once as in Wang et al. 2024, arXiv 2406.12845.

    score[S, A]: of each sequence and attribute; target[S, A]: what its row gives; given[S, A]:
    where it gives one.

    error: cross_entropy for thumbs (1 up, 0 down) or probabilities; squared, or huber where some
        scores are far off, for others.
    huber_delta: the error (units of the score) from which on huber grows linearly.
    verdict: what of a row is learnt, where it has more than one. auto: what all training rows have,
        with cross_entropy of label,
        score and attributes the first, else of score, attributes and label.
    """
    del verdict  # says what the targets are, which they are by now
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
    return _over_given(loss, given)


def ordinal(
    score: Tensor,
    target: Tensor,
    given: Tensor,
    thresholds: Tensor,
    *,
    levels: Annotated[int, Ge(2)] = 5,
) -> Tensor:
    """The reward model of ordered levels, such as stars: by how much one exceeds another is
    learned, not assumed.

    -log P(y = target), P(y <= k) = s(theta_k - score), with the target in 1..levels.
    The proportional odds of McCullagh 1980, J. R. Stat. Soc. B 42(2).

    score[S, A], target[S, A], given[S, A]: as for pointwise; thresholds[levels - 1]: theta,
    ascending, which belong to the model.

    levels: how many levels there are; the targets are 1 to this.
    """
    assert len(thresholds) == levels - 1
    infinity = thresholds.new_full((1,), torch.inf)
    level = torch.where(given, target, 1).long() - 1
    above = torch.cat([thresholds, infinity])[level]
    below = torch.cat([-infinity, thresholds])[level]
    # s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)), without the difference of two numbers that are
    # almost the same
    # of a level that hardly any row has
    gap = (above - below).clamp(min=torch.finfo(score.dtype).eps)
    loss = -logsigmoid(above - score) - logsigmoid(score - below) - (-torch.expm1(-gap)).log()
    return _over_given(loss, given)


def _over_given(loss: Tensor, given: Tensor) -> Tensor:
    """The mean over attributes [S] of loss[S, A], of those that are given. 0 for a sequence without
    any.
    """
    return torch.where(given, loss, 0).sum(1) / given.sum(1).clamp(min=1)


# What is reported


def paired_scores(
    view: Mapping[str, Tensor], rewards: None, settings: Mapping[str, Any]
) -> Metrics:
    """Mean scores of both sides, the share of pairs whose chosen side has the larger one (a tie
    counts half), and how far that is from the probability that the scores give: in bins, and as a
    Brier score.
    """
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
    """For each attribute (numbered when there are several): of thumbs the same as of pairs, and the
    area under the ROC curve; of other targets correlations and the mean absolute error; of levels
    also how often the median one is right.
    """
    found: Metrics = {}
    columns = zip(
        *(view[name].detach().unbind(1) for name in ("score", "target", "given")), strict=True
    )
    for a, (score, target, given) in enumerate(columns):
        if "thresholds" in view:
            numbers = _of_levels(score, target, given, view["thresholds"].detach())
        elif settings["error"] == "cross_entropy":
            numbers = _of_thumbs(score, target, given)
        else:
            numbers = _correlated(score, target, given) | {
                "rewards/error": mean_of((score - target).abs(), given)
            }
        found |= {
            name if view["score"].shape[1] == 1 else f"{name}/{a}": number
            for name, number in numbers.items()
        }
    return found


def _of_thumbs(score: Tensor, target: Tensor, given: Tensor) -> Metrics:
    p, up = torch.sigmoid(score), target > 0.5
    kept = torch.where(given, up.to(score), torch.nan)
    return {
        "rewards/chosen": mean_of(score, given & up),
        "rewards/rejected": mean_of(score, given & ~up),
        "rewards/accuracies": mean_of(((score > 0) == up).to(score), given),
        "rewards/brier": mean_of((p - target).square(), given),
        "rewards/auc": Ranked(score, kept),
        "rewards/calibration_error": Ranked(p, kept, "calibration_error"),
    }


def _of_levels(score: Tensor, target: Tensor, given: Tensor, thresholds: Tensor) -> Metrics:
    level = 1 + (score[:, None] > thresholds).sum(1)  # the median one
    return _correlated(score, target, given) | {
        "rewards/accuracies": mean_of((level == target).to(score), given),
        "rewards/error": mean_of((level - target).abs().to(score), given),
    }


def _correlated(score: Tensor, target: Tensor, given: Tensor) -> Metrics:
    kept = torch.where(given, target, torch.nan)
    return {
        "rewards/mean": mean_of(score, given),
        "rewards/pearson": Ranked(score, kept, "pearson"),
        "rewards/spearman": Ranked(score, kept, "spearman"),
    }
