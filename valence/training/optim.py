"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from valence.config.schema import OPTIMIZERS, Recipe, Train
from valence.errors import UserError, install_command
from valence.models.shape import hidden_matrices
from valence.models.values import PREFIX
from valence.user_code.attempt import Raised, attempt, describe_error

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = Any
"""A learning-rate scheduler, or a function of the optimizer that returns one."""

SET_ELSEWHERE = {
    "lr": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "betas": "train.betas",
}
"""Arguments of an optimizer class that have separate settings."""
BETAS = (0.9, 0.999)
"""The default of ``train.betas``."""
PROBE = 64
"""Rows and columns of the matrix with which an optimizer class is tried out."""


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer class that a recipe names, tried out on small weights.

    path: its import path. arguments: those that its constructor takes, or None if it takes any.
    settings: those that the recipe sets. only_matrices: whether it refuses other weights.
    has_modes: whether ``eval()`` replaces the weights that train by those to use (schedule-free
    optimizers). state_bytes: of its state per weight.
    """

    path: str
    type: Any
    arguments: frozenset[str] | None
    settings: Mapping[str, Any]
    only_matrices: bool
    has_modes: bool
    state_bytes: float

    def takes(self, argument: str) -> bool:
        return self.arguments is None or argument in self.arguments

    def build(self, groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
        """Return the optimizer of these parameter groups, in its training mode."""
        settings = dict(self.settings)
        if self.takes("betas") and (self.arguments or train.betas != BETAS):
            settings["betas"] = train.betas
        if not self.takes("weight_decay"):
            groups = [
                {name: value for name, value in group.items() if name != "weight_decay"}
                for group in groups
            ]
        optimizer = self.type(groups, lr=groups[0]["lr"], **settings)
        if self.has_modes:
            optimizer.train()
        return optimizer


def check_optimizer(recipe: Recipe) -> None:
    """Raise UserError when the optimizer cannot be imported or built, lacks its library, or does
    not support the type of the weights or the method. Imports the class that the recipe names.
    """
    train = recipe.train
    if train.optimizer == "adamw_8bit":
        _check_8bit(recipe.model.dtype)
    optimizer = optimizer_class(train)
    if optimizer is None:
        return
    if optimizer.has_modes and recipe.reward:
        raise UserError(
            f"{optimizer.path} has different weights for training and for sampling, but an "
            "online method must sample from the weights that it trains",
            code="optimizer-unsupported",
            where="train.optimizer",
            fix="set train.optimizer: adamw",
        )
    for argument, default in (("betas", BETAS), ("weight_decay", 0.0)):
        if getattr(train, argument) != default and not optimizer.takes(argument):
            raise UserError(
                f"this setting has no effect, because {optimizer.path} has no {argument}",
                code="setting-no-effect",
                where=f"train.{argument}",
                fix="remove it, or choose another optimizer",
            )


def _check_8bit(dtype: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "8-bit optimizer state needs bitsandbytes, which is not installed",
            code="library-missing",
            where="train.optimizer",
            fix=install_command("eightbit"),
        )
    if dtype == "float64":
        raise UserError(
            "8-bit optimizer state does not support float64 weights",
            code="optimizer-dtype",
            where="train.optimizer",
            fix="set train.optimizer: adamw",
        )


def optimizer_class(train: Train) -> OptimizerClass | None:
    """The class that the recipe names, or whose settings it changes; None for the plain optimizers
    of ``adamw``.

    Raises UserError when it cannot be imported or built with its settings.
    """
    if train.optimizer in OPTIMIZERS and not train.optimizer_settings:
        return None
    paths = {"adamw": "torch.optim.AdamW", "adamw_8bit": "bitsandbytes.optim.adamw.AdamW8bit"}
    path = paths.get(train.optimizer, train.optimizer)
    return _optimizer_class(path, json.dumps(train.optimizer_settings, sort_keys=True))


@lru_cache(maxsize=16)
def _optimizer_class(path: str, settings_json: str) -> OptimizerClass:
    settings = {
        # arguments with several values are tuples in all optimizers of PyTorch
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(settings_json).items()
    }
    optimizer_class = _import_class(path)
    is_adamw = optimizer_class is torch.optim.AdamW
    kind = cast(Any, AdamW if is_adamw else optimizer_class)
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [
        name
        for name, p in list(parameters.items())[1:]
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    _check_arguments(path, names, takes_any, settings)

    if is_adamw and "foreach" not in settings:
        settings = {"fused": True} | settings

    def probe(*sizes: int) -> Any:
        """An optimizer of one weight of this size, after one step."""
        weight = nn.Parameter(torch.ones(sizes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = kind([weight], lr=1e-3, **settings)
            if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
                optimizer.train()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return optimizer

    optimizer = _attempt(partial(probe, PROBE, PROBE))
    if isinstance(optimizer, Raised):
        raise UserError(
            f"{path} cannot make a step: {describe_error(optimizer.error)}",
            code="optimizer-failed",
            where="train.optimizer_settings" if settings else "train.optimizer",
            fix="correct its settings, or choose an optimizer whose step() needs no closure",
        ) from optimizer.error
    has_modes = hasattr(optimizer, "train") and hasattr(optimizer, "eval")
    only_matrices = isinstance(_attempt(partial(probe, PROBE)), Raised)
    values = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if odd := [t for t in tensors if type(t) not in (Tensor, nn.Parameter)]:
        raise UserError(
            f"{path} keeps its state in a {type(odd[0]).__name__}, which a checkpoint cannot store",
            code="optimizer-unsupported",
            where="train.optimizer",
            fix="set train.optimizer: adamw_8bit for 8-bit state, or adamw",
        )
    size = sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1) / PROBE**2
    arguments = None if takes_any else frozenset(names)
    return OptimizerClass(path, kind, arguments, settings, only_matrices, has_modes, size)


def _import_class(path: str) -> Any:
    """The class of an import path, ``package.module.Class`` or ``package.module:Class``; modules of
    the current folder can be named.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        module = _attempt(partial(importlib.import_module, module_name))
    finally:
        sys.path.remove(folder)
    if isinstance(module, Raised):
        error = module.error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_missing = missing is not None and module_name.startswith(missing)
        raise UserError(
            f"no module named {missing!r}, neither installed nor in {folder}"
            if is_missing
            else f"importing {module_name} failed: {describe_error(error)}",
            code="optimizer-not-found",
            where="train.optimizer",
            fix="install it, or start the command in the folder that contains it"
            if is_missing
            else "correct the module",
        ) from error
    member = getattr(module, name, None)
    if inspect.isclass(member) and issubclass(member, torch.optim.Optimizer):
        return member
    classes = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ]
    near = get_close_matches(name, classes, 1)
    others = f"use one of {', '.join(sorted(classes))}" if classes else None
    raise UserError(
        f"{module_name} has no optimizer class {name!r}",
        code="optimizer-not-found",
        where="train.optimizer",
        fix=f"did you mean {module_name}.{near[0]}?"
        if near
        else others or "use a module with a subclass of torch.optim.Optimizer",
    )


def _attempt(action: Callable[[], Any]) -> Any:
    """The result of code of other people, or what it raised."""
    result = attempt(action)
    if isinstance(result, Raised) and isinstance(result.error, KeyboardInterrupt):
        raise result.error
    return result


def _check_arguments(
    path: str, names: Sequence[str], takes_any: bool, settings: Mapping[str, Any]
) -> None:
    for name in settings:
        where = f"train.optimizer_settings.{name}"
        if name in SET_ELSEWHERE:
            raise UserError(
                f"{name} cannot be set in train.optimizer_settings",
                code="optimizer-setting",
                where=where,
                fix=f"set {SET_ELSEWHERE[name]} instead",
            )
        if name not in names and not takes_any:
            near = get_close_matches(name, names, 1)
            known = ", ".join(n for n in names if n not in SET_ELSEWHERE)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"{path} has no argument {name!r}",
                code="optimizer-setting",
                where=where,
                fix=f"{hint}Its arguments are {known}" if hint else f"use one of {known}",
            )
    if "lr" not in names and not takes_any:
        raise UserError(
            f"{path} has no argument lr, so train.learning_rate and the schedule would have no "
            "effect",
            code="optimizer-unsupported",
            where="train.optimizer",
            fix="choose an optimizer with a learning rate",
        )


def make_optimizer(
    recipe: Recipe, policy: nn.Module, optimizer: OptimizerLike | None = None
) -> torch.optim.Optimizer:
    """Return the given optimizer, the result of the given function, or the recipe's optimizer.

    Raises UserError for an optimizer of weights that are not the policy's.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    result = _object_or_result(optimizer, trained) or recipe_optimizer(recipe, policy)
    weights = {id(p) for p in policy.parameters()}
    if any(id(p) not in weights for group in result.param_groups for p in group["params"]):
        raise UserError(
            "the optimizer has weights that are not those of "
            "the policy (which may already be split over processes)",
            code="optimizer-weights",
            where="optimizer",
            fix="pass a function that takes the list of trained weights and returns the optimizer",
        )
    return result


def recipe_optimizer(recipe: Recipe, policy: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe names, over the weights that train.

    An optimizer that takes only matrices gets those of the hidden layers; AdamW trains the others
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    train = recipe.train
    assert not isinstance(train.learning_rate, str), "load_recipe replaces auto"
    rates = train.learning_rate, recipe.value.learning_rate
    kind = optimizer_class(train)
    if kind is None:
        return adamw(
            policy,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=train.betas,
            kind=train.optimizer,
            value_learning_rate=recipe.value.learning_rate,
        )
    named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    if not kind.only_matrices:
        return kind.build(parameter_groups(named, rates, train.weight_decay), train)
    matrices = {name for name in hidden_matrices(policy) if not name.startswith(PREFIX)}
    split = (
        {name: p for name, p in named.items() if name in matrices},
        {name: p for name, p in named.items() if name not in matrices},
    )
    first, second = (parameter_groups(part, rates, train.weight_decay) for part in split)
    if not first:
        raise UserError(
            f"{kind.path} optimizes only matrices of hidden layers, and none of them is trained",
            code="optimizer-unsupported",
            where="train.optimizer",
            fix="set train.optimizer: adamw",
        )
    optimizer = kind.build(first, train)
    if not second:
        return optimizer
    others = AdamW(second, lr=train.learning_rate, betas=train.betas, fused=True)
    return CombinedOptimizer([optimizer, others])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different weights as one, with the parameter groups of all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """As that of one optimizer: the weights are numbered through all parts."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            saved, first = part.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + index: value for index, value in saved["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]]}
                for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        for part in self.parts:
            saved = [groups.pop(0) for _ in part.param_groups]
            count = sum(len(group["params"]) for group in saved)
            part.load_state_dict(
                {
                    "state": {
                        index - first: value
                        for index, value in state_dict["state"].items()
                        if first <= index < first + count
                    },
                    "param_groups": [
                        {**group, "params": [index - first for index in group["params"]]}
                        for group in saved
                    ],
                }
            )
            first += count
        # each part has new groups now, and the schedule sets the rates of these
        self.param_groups = [group for part in self.parts for group in part.param_groups]


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside the block, the policy has the weights to use rather than those that train, where the
    optimizer distinguishes them: schedule-free optimizers average them (Defazio et al. 2024, arXiv
    2405.15682). Afterwards it has the same weights as before, to the last bit.
    """
    parts = getattr(optimizer, "parts", [optimizer])
    modal: list[Any] = [p for p in parts if hasattr(p, "train") and hasattr(p, "eval")]
    weights = [p for part in modal for group in part.param_groups for p in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    for part in modal:
        part.eval()
    try:
        yield
    finally:
        for part in modal:
            part.train()
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)


def has_evaluation_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``evaluation_weights`` are others than those that train."""
    parts = getattr(optimizer, "parts", [optimizer])
    return any(hasattr(part, "train") and hasattr(part, "eval") for part in parts)


def make_scheduler(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    scheduler: SchedulerLike = None,
) -> Any:
    """Return the given scheduler, the result of the given function, or the recipe's schedule."""
    train = recipe.train
    return _object_or_result(scheduler, optimizer) or schedule(
        optimizer, kind=train.schedule, warmup=train.warmup, total=max(1, total_steps)
    )


def _object_or_result(value: Any, argument: Any) -> Any:
    """Return an object as it is, and the result of a function or class on the argument."""
    if value is None or (hasattr(value, "state_dict") and not isinstance(value, type)):
        return value
    return value(argument)


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    kind: str = "adamw",
    value_learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW over the weights that train.

    kind: adamw or adamw_8bit. For the other arguments see ``parameter_groups``.

    PyTorch's fused one: 38 ms a step for 42 million weights on one CPU core, where ``foreach``
    takes 279 ms. adamw_8bit (of bitsandbytes; tensors below 4096 weights keep their moments in
    float32) takes 1.3 s there.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = parameter_groups(named, (learning_rate, value_learning_rate), weight_decay)
    if kind == "adamw":
        return AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    # it warns about missing kernels for 4-bit weights
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit(groups, lr=learning_rate, betas=betas)


def parameter_groups(
    named: Mapping[str, Tensor], rates: tuple[float, float | None], weight_decay: float
) -> list[dict[str, Any]]:
    """Divide weights into parameter groups: the policy's matrices, which decay, its other weights,
    and the same of a critic. Empty groups are left out.

    rates: the learning rates of the policy and of a critic (None: as for the policy).
    """
    groups: list[dict[str, Any]] = []
    for is_critic, rate in enumerate((rates[0], rates[0] if rates[1] is None else rates[1])):
        weights = [p for name, p in named.items() if name.startswith(PREFIX) == bool(is_critic)]
        matrices, others = [p for p in weights if p.ndim >= 2], [p for p in weights if p.ndim < 2]
        groups += [
            {"params": params, "lr": rate, "weight_decay": decay}
            for params, decay in ((matrices, weight_decay), (others, 0.0))
            if params
        ]
    return groups


class AdamW(torch.optim.AdamW):
    """AdamW on the part of each weight that this process has: the fused kernel takes no mixture of
    weights that are split over processes and weights that are not.
    """

    def _init_group(self, group: Any, *lists: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return has_complex


def warmup_steps(warmup: float, total: int) -> int:
    """Return a number of optimizer steps: below 1 a fraction of all steps, else the number."""
    return up(warmup * total) if warmup < 1 else int(warmup)


def up(steps: float) -> int:
    """Round up, and ignore the rounding error of a product: 0.07 * 100 is 7."""
    return math.ceil(round(steps, 9))


def schedule(optimizer: torch.optim.Optimizer, *, kind: str, warmup: float, total: int) -> LambdaLR:
    """Return a schedule that rises linearly over the warm-up, then falls to 0 at ``total`` steps
    (linear, cosine) or stays (constant).

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
