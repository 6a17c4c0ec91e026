"""Logistic and linear regressions, and their predictions of rows that they were not trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from valence.statistics import FOLDS, auc_interval, placements

REPEATS = 3
"""Cross-fits with different folds, whose mean is taken."""
ITERATIONS = 200
"""Of L-BFGS, which solves regressions with many features."""
NEWTON_FEATURES, NEWTON_ITERATIONS, NEWTON_TOLERANCE = 64, 100, 1e-10
"""Up to this number of features, Newton steps solve thousands of regressions at once."""


@dataclass(frozen=True)
class CrossFit:
    """probabilities[n]: that each label is True. auc: with its 95 % interval. influences[n]: how
    much each row moves the AUC; their sums over independent groups of rows give its standard error.
    """

    probabilities: Tensor
    auc: float
    interval: tuple[float, float]
    influences: Tensor


def cross_fit(
    features: Tensor, labels: Sequence[bool], groups: Sequence[str], c: float
) -> CrossFit:
    """Predict each label with regressions that were not trained on it.

    features[n, d]: standardized here, and divided by ``sqrt(d)``. groups: rows of one group are in
    the same fold. c: inverse strength of the L2 penalty, as in scikit-learn. The mean of REPEATS
    cross-fits. At least MIN_CLASS_ROWS of each class make every fold have both.
    """
    x = standardize(features)
    y = torch.tensor(labels, dtype=torch.float64, device=x.device)
    held_out = _held_out(labels, groups)
    weights, biases = fit_logistic(x, y, (~held_out).double().to(x.device), c)
    probabilities = torch.sigmoid(x @ weights + biases).cpu()
    value, influences = _auc_within_folds(probabilities, held_out, torch.tensor(labels))
    # Every two rows of different folds are compared twice: each predicts the other. Without
    # information this doubles the variance, as half the rows would.
    counts = sum(labels) / 2, (len(labels) - sum(labels)) / 2
    return CrossFit(
        (probabilities * held_out).sum(1) / REPEATS,
        0.5 if value is None else value,
        (0.0, 1.0) if value is None else auc_interval(value, *counts),
        influences,
    )


def cross_fit_values(
    features: Tensor, values: Tensor, labels: Sequence[bool], groups: Sequence[str], c: float
) -> Tensor:
    """Predict each value [n] with linear regressions that were not trained on it.

    labels: classes that are spread evenly over the folds; the other arguments are those of
    ``cross_fit``, and labels of the same rows have the same folds there.
    """
    x = standardize(features)
    held_out = _held_out(labels, groups)
    weights, biases = fit_linear(x, values.double(), (~held_out).double(), c)
    return ((x @ weights + biases) * held_out).sum(1) / REPEATS


def _held_out(labels: Sequence[bool], groups: Sequence[str]) -> Tensor:
    """[n, REPEATS * FOLDS]: the rows that each regression predicts, and is not trained on."""
    folds = [_folds(labels, groups, seed) for seed in range(REPEATS)]
    return torch.stack([fold == k for fold in folds for k in range(FOLDS)], 1)


def _auc_within_folds(
    probabilities: Tensor, held_out: Tensor, labels: Tensor
) -> tuple[float | None, Tensor]:
    """The share of pairs of an up and a down row in one fold whose order is right, None without
    such a pair; and the influence [n] of each row on it.

    Rows of different folds are predicted by different regressions. Where a fold has more ups, there
    are fewer in the data that its regression was trained on, so its predictions are lower: over all
    rows, even constant features would rank the classes, in the wrong order.
    """
    folds: list[tuple[Tensor, Tensor, Tensor]] = []
    for column, is_held_out in zip(probabilities.T, held_out.T, strict=True):
        rows = is_held_out.nonzero().flatten()
        is_up = labels[rows]
        num_opposite = torch.where(is_up, (~is_up).sum(), is_up.sum()).double()
        if is_up.any() and not is_up.all():
            scores = column[rows].round(decimals=9)  # equal rows may differ in the last bits
            shares = torch.tensor(placements(scores.tolist(), is_up.tolist()), dtype=torch.float64)
            folds.append((rows, shares, num_opposite))
    num_pairs = sum(float(num_opposite.sum()) / 2 for *_, num_opposite in folds)
    influences = torch.zeros(len(labels), dtype=torch.float64)
    if not folds:
        return None, influences
    value = sum(float((shares * counts).sum()) / 2 for _, shares, counts in folds) / num_pairs
    for rows, shares, counts in folds:
        influences[rows] += (shares - value) * counts / num_pairs
    return value, influences


def standardize(features: Tensor) -> Tensor:
    """Features [n, d] in float64 with mean 0 and deviation ``1 / sqrt(d)``."""
    x = features.double()
    return (x - x.mean(0)) / (x.std(0) + 1e-6) / x.shape[1] ** 0.5


def fit_logistic(x: Tensor, y: Tensor, counts: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The weights [d, k] and biases [k] of k logistic regressions at once.

    x[n, d], y[n] from 0 to 1, counts[n, k]: how often regression k is trained on row n. Each
    minimizes ``c * (sum of the losses) + |weights|^2 / 2``.
    """
    solve = _newton if x.shape[1] <= NEWTON_FEATURES else _lbfgs
    fitted = solve(x, y[:, None], counts, c)
    return fitted[:-1], fitted[-1]


def _newton(x: Tensor, y: Tensor, counts: Tensor, c: float) -> Tensor:
    """Weights and biases [d + 1, k], with Newton steps that are halved until the losses fall."""
    features, penalties = _with_bias(x)
    products = (features[:, :, None] * features[:, None, :]).flatten(1)

    def losses(weights: Tensor) -> Tensor:
        logits = features @ weights
        loss = (counts * (softplus(logits) - y * logits)).sum(0)
        return c * loss + (penalties * weights.square()).sum(0) / 2

    weights = x.new_zeros(features.shape[1], counts.shape[1])
    loss = losses(weights)
    for _ in range(NEWTON_ITERATIONS):
        p = torch.sigmoid(features @ weights)
        gradient = c * features.T @ (counts * (p - y)) + penalties * weights
        curvature = (c * products.T @ (counts * p * (1 - p))).T.unflatten(1, (len(weights), -1))
        ridge = torch.diag_embed(penalties[:, 0] + 1e-12 * c)
        step = torch.linalg.solve(curvature + ridge, gradient.T[..., None])[..., 0].T
        size = torch.ones_like(loss)
        for _ in range(30):
            is_worse = losses(weights - size * step) > loss + 1e-12 * c
            if not is_worse.any():
                break
            size[is_worse] /= 2
        weights = weights - size * step
        loss = losses(weights)
        if gradient.abs().max() < NEWTON_TOLERANCE * c * len(x):
            break
    return weights


def _lbfgs(x: Tensor, y: Tensor, counts: Tensor, c: float) -> Tensor:
    """Weights and biases [d + 1, k] of a few regressions with many features."""
    parameters = x.new_zeros(x.shape[1] + 1, counts.shape[1], requires_grad=True)
    signs = 2 * y - 1
    scale = 1 / (c * len(x))  # keeps gradients near 1, whatever the number of rows
    optimizer = torch.optim.LBFGS(
        [parameters],
        max_iter=ITERATIONS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights, biases = parameters[:-1], parameters[-1]
        losses = softplus(-signs * (x @ weights + biases)) * counts
        loss = scale * (c * losses.sum() + weights.square().sum() / 2)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return parameters.detach()


def fit_linear(x: Tensor, y: Tensor, counts: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The weights [d, k] and biases [k] of k linear regressions at once.

    Each minimizes ``c * (sum of squared errors) / 2 + |weights|^2 / 2``; see ``fit_logistic``.
    """
    features, penalties = _with_bias(x)
    products = (features[:, :, None] * features[:, None, :]).flatten(1)
    curvature = (c * products.T @ counts).T.unflatten(1, (features.shape[1], -1))
    ridge = torch.diag_embed(penalties[:, 0] + 1e-12 * c)
    targets = c * (features.T @ (counts * y[:, None])).T
    fitted = torch.linalg.solve(curvature + ridge, targets[..., None])[..., 0].T
    return fitted[:-1], fitted[-1]


def _with_bias(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, d + 1] with a column of ones, and the penalties [d + 1, 1] of the weights: 0 of the
    bias.
    """
    penalties = x.new_ones(x.shape[1] + 1, 1)
    penalties[-1] = 0
    return torch.cat([x, x.new_ones(len(x), 1)], 1), penalties


def _folds(labels: Sequence[bool], groups: Sequence[str], seed: int) -> Tensor:
    """The fold [n] of each row. The groups of each class are spread evenly over the folds."""
    label_of: dict[str, bool] = {}
    for group, label in zip(groups, labels, strict=True):
        label_of.setdefault(group, label)
    order = list(label_of)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda group: label_of[group])
    fold_of = {group: index % FOLDS for index, group in enumerate(order)}
    return torch.tensor([fold_of[group] for group in groups])
