"""Properties of the form of answers, how well they alone rank held-out answers, and what the
rewards of a model add to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from valence.reports.regression import cross_fit, cross_fit_values
from valence.statistics import (
    Z95,
    Z99,
    auc_influences,
    grouped_error,
    mean,
    ranks,
    right_share,
    spearman,
)

C_BASELINE = 300.0
"""Inverse strength of the L2 penalty: weak, so that labels that follow length exactly are predicted
almost exactly.
"""

KNOTS = tuple(k / 6 for k in range(1, 6))
"""Ranks of length at which its effect may change, such as where it turns from good to bad."""

REFUSAL = re.compile(
    r"\bI(?: am|['\N{RIGHT SINGLE QUOTATION MARK}]m)(?: very| really)? (?:sorry|unable)\b"
    r"|\bI (?:cannot|can not|can['\N{RIGHT SINGLE QUOTATION MARK}]t|am not able)\b"
    r"|\bas an AI\b",
    re.IGNORECASE,
)
LIST_ITEM = re.compile(r"^\s*(?:[-*+\N{BULLET}]|\d+[.)])\s", re.MULTILINE)


def form_of(text: str) -> Mapping[str, float]:
    """Properties of the form of a completion, whatever it says, by name."""
    return {
        "words": float(len(text.split())),
        "list items": float(len(LIST_ITEM.findall(text))),
        "code blocks": float(text.count("```") // 2),
        "question marks": float(text.count("?")),
        "refusals": float(len(REFUSAL.findall(text))),
    }


@dataclass(frozen=True, kw_only=True)
class RatedAnswers:
    """Held-out answers with their rewards and what people said of them.

    labels: thumbs as 1 and 0, or scores; without meaning for pairs, whose rewards and forms are
    differences between the chosen and the rejected answer. before: the rewards before training,
    None if they do not differ or are unknown. forms: of each answer, the number of tokens first.
    groups: the prompts.
    """

    kind: Literal["thumbs", "pairs", "scores"]
    labels: Sequence[float]
    rewards: Sequence[float]
    before: Sequence[float] | None
    forms: Sequence[Sequence[float]]
    groups: Sequence[str]


@dataclass(frozen=True)
class FormComparison:
    """What length and form reach without reading the answers, and what the rewards add.

    alone: the AUC, the share of pairs or the rank correlation of a regression on the form.
    difference: that of the rewards minus ``alone``, with a 95 % interval; None for scores.
    correlation: of rewards and labels after length and form, and the rewards before training, have
    been taken out of both; low, high: its 99 % interval.
    """

    alone: float
    difference: tuple[float, float, float] | None
    correlation: float
    low: float
    high: float


def compare_with_form(answers: RatedAnswers) -> FormComparison:
    """Compare rewards with the form of the answers on the same rows. Both classes need at least
    MIN_CLASS_ROWS rows.

    The regressions on the form are cross-fitted on the held-out rows, not fitted on the training
    rows. They then know how these rows were rated, so that a model is never credited for a
    difference between both sets; any evaluation can be compared, also without its training rows;
    and it is the regression of the audit.

    The difference of both shares alone does not show that the model has learned more than form: a
    noisy estimate of the form may rank worse than a model that has learned nothing but length. The
    correlation shows it. It is the generalised covariance measure (Shah and Peters 2020): labels
    and ranks of rewards, minus their predictions from the form, multiplied and averaged. Of rewards
    that follow length alone, nothing is left to correlate; of labels that do, nothing is left to
    explain. Its error adds up the rows of one prompt before squaring. The level is 99 %, because a
    report is written after every run: at 95 %, one useless run of 40 would be called improved.
    """
    labels, rewards, groups = list(answers.labels), list(answers.rewards), list(answers.groups)
    forms = torch.tensor([list(form) for form in answers.forms], dtype=torch.float64)
    before = answers.before
    if answers.kind == "pairs":  # in both orders: nothing depends on which side comes first
        labels = [1.0] * len(labels) + [0.0] * len(labels)
        rewards += [-reward for reward in rewards]
        groups += groups
        forms = torch.cat([forms, -forms])
        before = None if before is None else [*before, *(-reward for reward in before)]
    average = mean(labels) or 0.0
    is_up = [label > average for label in labels]
    are_scores = answers.kind == "scores"
    features = _features(forms)
    baselines = features if before is None else torch.cat([features, _shares(before)[:, None]], 1)

    def expected(x: Tensor) -> Tensor:
        """The labels, or shares of labels, that the features predict."""
        if are_scores:
            return cross_fit_values(x, _shares(labels), is_up, groups, C_BASELINE)
        return cross_fit(x, is_up, groups, C_BASELINE).probabilities

    targets = _shares(labels) if are_scores else torch.tensor(labels, dtype=torch.float64)
    shares = _shares(rewards)
    unexplained = targets - expected(baselines)
    remaining = shares - cross_fit_values(baselines, shares, is_up, groups, C_BASELINE)
    correlation, error = _correlation(unexplained, remaining, groups)
    return FormComparison(
        *_alone(answers, features, is_up, groups),
        correlation,
        max(-1.0, correlation - Z99 * error),
        min(1.0, correlation + Z99 * error),
    )


def _alone(
    answers: RatedAnswers, features: Tensor, is_up: Sequence[bool], groups: Sequence[str]
) -> tuple[float, tuple[float, float, float] | None]:
    """How well the form alone ranks the answers, and the difference of the rewards to that."""
    if answers.kind == "scores":
        values = cross_fit_values(features, _shares(answers.labels), is_up, groups, C_BASELINE)
        return spearman(values.tolist(), answers.labels) or 0.0, None
    fit = cross_fit(features, is_up, groups, C_BASELINE)
    if answers.kind == "pairs":
        first, second = fit.probabilities.chunk(2)
        alone, of_form = right_share((first - second).tolist())
        rewards, of_rewards = right_share(answers.rewards)
    else:
        alone, of_form = fit.auc, fit.influences.tolist()
        rewards, of_rewards = auc_influences(answers.rewards, is_up)
    influences = [a - b for a, b in zip(of_rewards, of_form, strict=True)]
    change, half = rewards - alone, Z95 * grouped_error(influences, answers.groups)
    return alone, (change, change - half, change + half)


def _correlation(a: Tensor, b: Tensor, groups: Sequence[str]) -> tuple[float, float]:
    """The correlation of two columns of residuals, and its standard error if they are unrelated."""
    size = float((a.square().sum() * b.square().sum()).sqrt())
    if size < 1e-12:  # nothing is left of one of them
        return 0.0, 1.0
    products = (a * b / size).tolist()
    return sum(products), grouped_error(products, groups)


def _features(forms: Tensor) -> Tensor:
    """[n, d]: the form, the rank of the length, and how far that is above each knot."""
    lengths = _shares(forms[:, 0].tolist())[:, None]
    above = [(lengths - knot).clamp(min=0) for knot in KNOTS]
    return torch.cat([forms, lengths, *above], 1)


def _shares(values: Sequence[float]) -> Tensor:
    """[n]: for each value the share of the others that are smaller."""
    return torch.tensor(ranks(values), dtype=torch.float64) / max(1, len(values) - 1)
