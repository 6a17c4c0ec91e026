"""Users' losses and advantages, and whether they keep the contract of ``losses``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

from valence.errors import UserError
from valence.losses import LOSSES, Loss
from valence.losses.views import COMPUTED, INPUTS, View
from valence.user_code.attempt import Raised, attempt, describe_error
from valence.user_code.load import definition_place, frames_of, place_of

ADVANTAGE_INPUTS = ("reward", "group", "owner", "old_t", "ref_t", "value_t")
"""Tensors that advantages of sampled completions may read, see ``losses.advantage``."""
NUM_ROWS, NUM_ATTRIBUTES = 6, 1
"""Sizes of the tensors that a loss is tried on."""


def is_advantage(value: Any) -> bool:
    """Whether this is an advantage function: its inputs are those of advantages, not of losses."""
    if isinstance(value, Loss) or not callable(value):
        return False
    names = _inputs(value)
    return "reward" in names and set(names) <= set(ADVANTAGE_INPUTS)


def custom_loss(value: Any, target: str) -> Loss:
    """The loss that a user's object stands for: a ``Loss``, the function of one, or an advantage
    function, which replaces that of ``grpo``.

    target: its import path. Raises UserError if it is none of these, or reads unknown tensors.
    """
    if inspect.isclass(value) or not (isinstance(value, Loss) or callable(value)):
        raise UserError(
            f"{target} is neither a function nor a valence.Loss",
            code="method-not-callable",
            where="method",
            fix="name a function that computes a loss or an advantage, or a valence.Loss",
        )
    signature = attempt(lambda: _inputs(value.fn if isinstance(value, Loss) else value))
    if isinstance(signature, Raised):
        raise _refused(value, target, "signature", "its parameters cannot be read", "use def")
    if is_advantage(value):
        return replace(LOSSES["grpo"], advantage=value)
    loss = value if isinstance(value, Loss) else Loss(cast(Any, value))
    reads = set(loss.reads) - COMPUTED
    view = loss.view if reads <= INPUTS[loss.view] else _nearest_view(reads)
    if unknown := sorted(reads - INPUTS[view]):
        names = sorted(INPUTS[view])
        close = get_close_matches(unknown[0], names, 1)
        raise _refused(
            loss.fn,
            target,
            "input-unknown",
            f"there is no tensor {', '.join(unknown)} among those of its other inputs",
            f"{f'did you mean {close[0]}? ' if close else ''}its inputs may be {', '.join(names)}; "
            "write settings after `*` (def loss(logp, *, beta=0.1))",
        )
    settings = attempt(lambda: loss.settings)
    if isinstance(settings, Raised):
        reason = f"its annotations cannot be read: {describe_error(settings.error)}"
        raise _refused(loss.fn, target, "signature", reason, "import the names that they use")
    return loss


def _nearest_view(reads: set[str]) -> View:
    """The view that has most of these inputs."""
    return max(INPUTS, key=lambda view: len(reads & INPUTS[view]))


def check_loss(loss: Loss, target: str, settings: Mapping[str, Any]) -> None:
    """Try a user's loss on random tensors.

    Raises UserError if it raises, if it does not return one finite number with a gradient for each
    token, sequence or pair, or if the number of one depends on the others although ``couples`` is
    false: the result would then depend on how a step is divided into micro-batches.
    """
    inputs = _random_inputs(loss)
    values = _tried(loss, target, settings, inputs)
    unit = {"token": "token", "pair": "pair", "score_pair": "pair"}.get(loss.view, "sequence")
    expected = f"one number per {unit} (shape [{NUM_ROWS}])"
    if tuple(values.shape) != (NUM_ROWS,):
        raise _refused(
            loss.fn,
            target,
            "shape",
            f"it returns a tensor of the shape {list(values.shape)} instead of {expected}",
            "return the loss of each one, without a mean or sum: the average is taken later, over "
            "all micro-batches of the step",
        )
    if not values.requires_grad or not bool(values.isfinite().all()):
        problem = "is not finite" if values.requires_grad else "has no gradient"
        raise _refused(
            loss.fn, target, "value", f"its result {problem}", "compute it from the log-"
            "probabilities or scores of the policy, with torch functions",
        )  # fmt: skip
    if loss.couples or (loss.view == "answer" and any(n.endswith("_t") for n in loss.reads)):
        return
    half = NUM_ROWS // 2
    parts = [
        _tried(loss, target, settings, {name: value[rows] for name, value in inputs.items()})
        for rows in (slice(half), slice(half, None))
    ]
    torch = _torch()
    if not torch.allclose(torch.cat(parts), values, rtol=1e-6, atol=1e-9):
        raise _refused(
            loss.fn,
            target,
            "couples",
            f"the loss of one {unit} depends on the others, so that the result would depend on how "
            "a step is divided into micro-batches",
            "compute each number from its own row only; if the step as a whole is meant, pass "
            "valence.Loss(FUNCTION, couples=True)",
        )


def _tried(loss: Loss, target: str, settings: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    torch = _torch()
    with torch.enable_grad():
        result = attempt(lambda: loss(inputs, settings))
    if isinstance(result, Raised):
        if isinstance(result.error, KeyboardInterrupt):
            raise result.error
        place = place_of(frames_of(result.error, (str(torch.__path__[0]), __file__)))
        shapes = ", ".join(f"{name}{list(inputs[name].shape)}" for name in loss.reads)
        raise _refused(
            loss.fn,
            target,
            "failed",
            f"it raised {describe_error(result.error)}{f' ({place})' if place else ''} on {shapes}",
            "fix the function",
        ) from result.error
    if not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        fix = "return a tensor"
        raise _refused(loss.fn, target, "shape", f"it returns {kind} instead of a tensor", fix)
    return result


def _random_inputs(loss: Loss) -> dict[str, Any]:
    """Float64 tensors for all names of the loss's view: log-probabilities from -5 to 0."""
    torch = _torch()
    draw = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float, *shape: int) -> Any:
        values = torch.rand(*(shape or (NUM_ROWS,)), generator=draw, dtype=torch.float64)
        return low + (high - low) * values

    inputs: dict[str, Any] = {}
    for name in sorted(INPUTS[loss.view] | COMPUTED):
        stem = name.removesuffix("_t").removesuffix("_w").removesuffix("_l")
        if stem == "score":
            shape = (NUM_ROWS, NUM_ATTRIBUTES) if name == "score" else (NUM_ROWS,)
            value = uniform(-1, 1, *shape)
        elif name in ("target", "target_mask"):
            value = uniform(0, 1, NUM_ROWS, NUM_ATTRIBUTES)
            value = value > 0 if name == "target_mask" else value
        elif stem in ("n", "unit"):
            value = torch.arange(NUM_ROWS, dtype=torch.float64) + 1
            value = value if stem == "n" else value.long()
        elif stem == "weight":
            value = torch.ones(NUM_ROWS, dtype=torch.float64)
        elif name == "label":
            value = torch.arange(NUM_ROWS) % 2 == 0
        elif stem in ("soft", "wrong", "delta", "z0"):
            value = torch.zeros(NUM_ROWS, dtype=torch.float64)
        elif stem in ("margin", "adv", "value", "return", "critic"):
            value = uniform(-1, 1)
        else:
            value = uniform(-5, -0.1)
        inputs[name] = value.requires_grad_(stem in ("logp", "score") and value.is_floating_point())
    return inputs


def _inputs(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters."""
    parameters = inspect.signature(fn).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


def _torch() -> Any:
    import torch

    return torch


def _refused(fn: Any, target: str, code: str, problem: str, fix: str) -> UserError:
    place = definition_place(cast(Callable[..., Any], fn)) if callable(fn) else ""
    return UserError(
        f"{target}{f' ({place})' if place else ''} cannot be used as a loss: {problem}",
        code=f"loss-{code}",
        where="method",
        fix=fix,
    )
