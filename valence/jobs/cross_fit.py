"""Logistic regressions that predict the label of each row from rows that they were not trained
on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

FOLDS, REPEATS = 5, 3
MIN_ROWS = 2 * FOLDS
"""Minimum number of rows of each class: two in each fold."""
ITERATIONS = 200


def cross_fit(features: Tensor, labels: Sequence[bool], groups: Sequence[str], c: float) -> Tensor:
    """The probability [n] that each label is True, from regressions that were not trained on it.

    features[n, d]: standardized here, and divided by ``sqrt(d)``. groups: rows of one group are in
    the same fold. c: inverse strength of the L2 penalty, as in scikit-learn. The mean of REPEATS
    cross-fits with different folds.
    """
    x = standardize(features)
    y = torch.tensor(labels, dtype=torch.float64, device=x.device)
    folds = [_folds(labels, groups, seed) for seed in range(REPEATS)]
    held_out = torch.stack([fold == k for fold in folds for k in range(FOLDS)], 1).to(
        x.device
    )  # [n, REPEATS * FOLDS]
    weights, biases = fit_logistic(x, y, (~held_out).double(), c)
    probabilities = torch.sigmoid(x @ weights + biases)
    return (probabilities * held_out).sum(1).cpu() / REPEATS


def standardize(features: Tensor) -> Tensor:
    """Features [n, d] in float64 with mean 0 and deviation ``1 / sqrt(d)``."""
    x = features.double()
    return (x - x.mean(0)) / (x.std(0) + 1e-6) / x.shape[1] ** 0.5


def fit_logistic(x: Tensor, y: Tensor, included: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The weights [d, k] and biases [k] of k logistic regressions at once.

    x[n, d], y[n] of 0 and 1, included[n, k]: 1 where regression k is trained on row n, else 0. Each
    minimizes ``c * (sum of the losses) + |weights|^2 / 2``.
    """
    parameters = x.new_zeros(x.shape[1] + 1, included.shape[1], requires_grad=True)
    signs = (2 * y - 1)[:, None]
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
        losses = softplus(-signs * (x @ weights + biases)) * included
        loss = scale * (c * losses.sum() + weights.square().sum() / 2)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    fitted = parameters.detach()
    return fitted[:-1], fitted[-1]


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
