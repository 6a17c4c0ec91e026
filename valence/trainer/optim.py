"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from valence.config.schema import Recipe
from valence.errors import UserError, install_command
from valence.models.values import PREFIX

Kind = Literal["adamw", "adamw_8bit"]

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = Any
"""A learning-rate scheduler, or a function of the optimizer that returns one."""


def make_optimizer(
    recipe: Recipe, policy: nn.Module, optimizer: OptimizerLike | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer given, the result of the function given, or the recipe's optimizer.

    Raises UserError for an optimizer of weights that are not the policy's.
    """
    train = recipe.train
    assert not isinstance(train.learning_rate, str), "load_recipe replaces auto"
    trained = [p for p in policy.parameters() if p.requires_grad]
    made = _object_or_result(optimizer, trained) or adamw(
        policy,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        betas=train.betas,
        kind=train.optimizer,
        value_learning_rate=recipe.value.learning_rate,
    )
    weights = {id(p) for p in policy.parameters()}
    if any(id(p) not in weights for group in made.param_groups for p in group["params"]):
        raise UserError(
            "the optimizer given holds weights that are not the policy's (whose weights may be "
            "split over processes by now)",
            code="optimizer-weights",
            where="optimizer",
            fix="give a function that takes the list of trained weights and returns the optimizer",
        )
    return made


def make_scheduler(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    scheduler: SchedulerLike = None,
) -> Any:
    """Return the scheduler given, the result of the function given, or the recipe's schedule."""
    train = recipe.train
    return _object_or_result(scheduler, optimizer) or schedule(
        optimizer, kind=train.schedule, warmup=train.warmup, total=max(1, total_steps)
    )


def _object_or_result(given: Any, argument: Any) -> Any:
    """Return the object given, or the result of the function given on the argument."""
    if given is None or (hasattr(given, "state_dict") and not isinstance(given, type)):
        return given
    return given(argument)


def check_optimizer(kind: Kind, dtype: torch.dtype) -> None:
    """Raises UserError when the optimizer's library is missing, or its moments cannot be those of
    weights of this type.
    """
    if kind != "adamw_8bit":
        return
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "moments of 8 bits are kept by bitsandbytes, which is not installed",
            code="library-missing",
            where="train.optimizer",
            fix=install_command("eightbit"),
        )
    if dtype == torch.float64:
        raise UserError(
            "weights in float64 have no moments of 8 bits",
            code="optimizer-dtype",
            where="train.optimizer",
            fix="set train.optimizer: adamw",
        )


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    kind: Kind = "adamw",
    value_learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """AdamW over the weights that train.

    Decay applies to matrices only: biases and norms keep their scale. value_learning_rate: that of
    a critic's weights, which are groups of their own after the others (default: as for the policy).

    PyTorch's fused one: 38 ms a step for 42 million weights on one CPU core, where ``foreach``
    takes 279 ms. adamw_8bit (of bitsandbytes; tensors below 4096 weights keep their moments in
    float32) takes 1.3 s there.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = _groups(
        [p for name, p in named if not name.startswith(PREFIX)], learning_rate, weight_decay
    )
    own = learning_rate if value_learning_rate is None else value_learning_rate
    groups += _groups([p for name, p in named if name.startswith(PREFIX)], own, weight_decay)
    if kind == "adamw":
        return AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    # it warns of kernels for 4-bit weights
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit(groups, lr=learning_rate, betas=betas)


def _groups(
    trained: Sequence[Tensor], learning_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices, which decay, and all else; those of both that there are."""
    matrices, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    pairs = (matrices, weight_decay), (others, 0.0)
    return [
        {"params": own, "lr": learning_rate, "weight_decay": decay} for own, decay in pairs if own
    ]


class AdamW(torch.optim.AdamW):
    """Works on the part of each weight that this process has: its fused kernel takes no mixture of
    weights that are split over processes and weights that are not.
    """

    def _init_group(self, group: Any, *lists: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return found


def warmup_steps(warmup: float, total: int) -> int:
    """A number of optimizer steps: a fraction of all steps below 1, else the number itself."""
    return up(warmup * total) if warmup < 1 else int(warmup)


def up(steps: float) -> int:
    """The next whole number, forgiving the rounding of a product: 0.07 * 100 is 7."""
    return math.ceil(round(steps, 9))


def schedule(optimizer: torch.optim.Optimizer, *, kind: str, warmup: float, total: int) -> LambdaLR:
    """Rises linearly from 0 over the warm-up, then falls to 0 at ``total`` steps (linear, cosine)
    or stays (constant).

    The first step already trains: its factor is 1/(warm-up steps), never 0.
    """
    rise = warmup_steps(warmup, total)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, total - rise))
        return {
            "linear": 1 - done,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "constant": 1.0,
        }[kind]

    return LambdaLR(optimizer, factor)
