"""Users' losses and advantages, and whether they keep the contract of ``losses``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NoReturn, cast

from valence.errors import UserError
from valence.losses import LOSSES, Loss
from valence.losses.average import PER_TOKEN, Average
from valence.losses.modifiers import MODIFIERS
from valence.losses.views import INPUTS, VIEWS, View
from valence.types import Kind
from valence.user_code.attempt import Raised, attempt, describe_error
from valence.user_code.load import definition_place, describe_raised

ADVANTAGE_INPUTS = ("reward", "reward_t", "group", "owner", "old_t", "ref_t")
"""Tensors that users' advantages may read, see ``losses.advantage``."""
FITTING: dict[View, tuple[frozenset[Average], tuple[Kind, ...]]] = {
    "token": (PER_TOKEN, ("demonstration", "ranking")),
    "seq": (frozenset(("seq_mean", "class_mean")), ("judgement", "demonstration")),
    "pair": (frozenset(("pair_mean",)), ("preference",)),
    "answer": (frozenset(("seq_mean",)), ("ranking",)),
    "score": (frozenset(("seq_mean",)), ("scored",)),
    "score_pair": (frozenset(("pair_mean",)), ("preference",)),
}
"""The averages and the kinds of rows that fit each view."""
SUPPLIED_BY = {
    "soft": "smoothing", "wrong": "smoothing", "confidence": "wpo", "confidence_w": "wpo",
    "confidence_l": "wpo", "sum_sq_t": "wpo", "sampler_t": "correction", "sampler": "correction",
    "value_t": "value", "return_t": "value", "critic_t": "value",
}  # fmt: skip
"""Inputs that only a modifier makes available, and that modifier."""
ROWS = ((0, 1), (1, 3), (3, 7))
"""How the rows of a trial are divided: first row, and the first row behind the part."""
NUM_ROWS, TOKENS_PER_ROW = 7, 3
SCALES = (1.0, 60.0)
"""Factors of the log-probabilities in trials, for short and long completions."""


def is_advantage(value: Any) -> bool:
    """Whether this is an advantage function, which reads the reward."""
    if isinstance(value, Loss) or not callable(value):
        return False
    return not {"reward", "reward_t"}.isdisjoint(_inputs(value))


def custom_loss(value: Any, target: str) -> Loss:
    """The loss that a user's object stands for: a ``Loss``, the function of one, or an advantage
    function, which replaces that of ``grpo``.

    target: its import path. Raises UserError if it is none of these, reads unknown tensors, or has
    fields that do not fit together.
    """
    if inspect.isclass(value) or not (isinstance(value, Loss) or callable(value)):
        raise UserError(
            f"{target} is neither a function nor a valence.Loss",
            code="method-not-callable",
            where="method",
            fix="name a function that computes a loss or an advantage, or a valence.Loss",
        )
    fn = value.fn if isinstance(value, Loss) else value
    if isinstance(attempt(lambda: _inputs(fn)), Raised):
        _refuse(fn, target, "signature", "its parameters cannot be read", "write a function")
    if is_advantage(value):
        _refuse_unknown(fn, target, ADVANTAGE_INPUTS, _inputs(fn))
        return replace(LOSSES["grpo"], advantage=value)
    loss = value if isinstance(value, Loss) else Loss(cast(Any, value))
    _check_fields(loss, target)
    known = set(INPUTS[loss.view])
    if not isinstance(value, Loss) and not set(loss.reads) & known:
        known = set(INPUTS[max(INPUTS, key=lambda view: len(set(loss.reads) & INPUTS[view]))])
    known |= {"wrong", *(["z0"] if loss.statistic else []), *(["delta"] if loss.shifts else [])}
    known |= {"thresholds"} if "levels" in loss.settings else set()
    known -= {name for name, modifier in SUPPLIED_BY.items() if modifier not in loss.modifiers}
    _refuse_unknown(fn, target, sorted(known), loss.reads)
    return loss


def _check_fields(loss: Loss, target: str) -> None:
    """Raise UserError for fields of a loss that do not exist or do not fit together."""
    averages, kinds = FITTING.get(loss.view, (frozenset[Average](), ()))
    unknown = [name for name in loss.modifiers if name not in MODIFIERS]
    for name, value, allowed in (
        ("view", loss.view, tuple(VIEWS)),
        ("average", loss.average, tuple(sorted(averages))),
        ("data", loss.data, kinds),
        ("modifiers", unknown[0] if unknown else None, (None, *MODIFIERS)),
    ):
        if value not in allowed:
            names = ", ".join(str(item) for item in allowed if item)
            problem = f"{name} is {value!r}, which does not fit"
            _refuse(loss.fn, target, "field", problem, f"set {name} to one of {names}")
    if loss.couples and loss.view not in ("seq", "pair"):
        problem = "couples is only possible for losses of the views seq and pair"
        _refuse(loss.fn, target, "field", problem, "remove couples")
    settings = attempt(lambda: loss.settings)
    if isinstance(settings, Raised):
        problem = f"its annotations cannot be read: {describe_error(settings.error)}"
        _refuse(loss.fn, target, "signature", problem, "import the names that they use")


def _refuse_unknown(fn: Any, target: str, known: Sequence[str], reads: Sequence[str]) -> None:
    """Raise UserError for an input that nothing supplies."""
    unknown = [name for name in reads if name not in known]
    if not unknown:
        return
    close = get_close_matches(unknown[0], known, 1)
    _refuse(
        fn,
        target,
        "input-unknown",
        f"there is no tensor {', '.join(unknown)} among those of its other inputs",
        f"{f'did you mean {close[0]}? ' if close else ''}its inputs may be {', '.join(known)}; "
        "write settings after `*` (def loss(logp, *, beta=0.1))",
    )


# Trials


def check_loss(loss: Loss, target: str, settings: Mapping[str, Any], where: str) -> None:
    """Try a user's loss on random tensors.

    Raises UserError if it raises, if it does not return one finite number with a finite gradient
    for each token, sequence or pair, if it is random, or if the number or the gradient of one
    depends on the others although ``couples`` is false: the result would then depend on how a step
    is divided into micro-batches.
    """
    unit = {"token": "token", "pair": "pair", "score_pair": "pair"}.get(loss.view, "completion")
    size = NUM_ROWS * (TOKENS_PER_ROW if loss.average in PER_TOKEN else 1)
    for scale in SCALES:
        inputs = _random_inputs(loss, scale)
        values, gradient = _tried(loss, target, settings, inputs, where)
        if tuple(values.shape) != (size,):
            _refuse(
                loss.fn,
                target,
                "shape",
                f"it returns a tensor of the shape {list(values.shape)} instead of one number per "
                f"{unit} (shape [{size}])",
                "return the loss of each one, without a mean or sum: the average is taken later, "
                "over all micro-batches of the step",
                where,
            )
        is_finite = all(bool(part.isfinite().all()) for part in (values, *gradient.values()))
        if not is_finite and scale == SCALES[0]:
            problem = "its result or its gradient is not finite"
            fix = "clamp what may overflow, also in the branch of torch.where that is not used"
            _refuse(loss.fn, target, "value", problem, fix, where)
        again, _ = _tried(loss, target, settings, inputs, where)
        if not _are_close(again, values):
            problem = "it returns other numbers for the same inputs"
            fix = "remove what is random: a resumed run could not repeat it"
            _refuse(loss.fn, target, "random", problem, fix, where)
        is_mixed = loss.view == "answer" and any(name.endswith("_t") for name in loss.reads)
        if loss.couples or is_mixed or not is_finite:
            continue
        width = TOKENS_PER_ROW if loss.average in PER_TOKEN else 1
        for first, end in ROWS:
            rows = slice(first * width, end * width)
            part = {name: value[rows] for name, value in inputs.items()}
            some, some_gradient = _tried(loss, target, settings, part, where, rows.start)
            if (
                some.shape == values[rows].shape
                and _are_close(some, values[rows])
                and all(_are_close(g, gradient[name][rows]) for name, g in some_gradient.items())
            ):
                continue
            _refuse(
                loss.fn,
                target,
                "couples",
                f"the loss or gradient of one {unit} depends on the others, so that the result "
                "would depend on how a step is divided into micro-batches",
                "compute each number from its row only; if the step as a whole is meant, pass "
                "valence.Loss(FUNCTION, couples=True)",
                where,
            )


def check_advantage(
    fn: Callable[..., Any], target: str, settings: Mapping[str, Any], where: str
) -> None:
    """Try a user's advantage function on random tensors. Raises UserError unless it returns one
    finite number per token.
    """
    torch = _torch()
    owner = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4])
    logps = -torch.rand(2, len(owner), dtype=torch.float64)
    tensors = {
        "reward": torch.tensor([0.5, 1.0, 0.0, 2.0, 2.0], dtype=torch.float64),
        "reward_t": torch.tensor([0, 0.5, 1, 0, 0.5, 1.5, 0, 1, 1], dtype=torch.float64),
        "group": torch.tensor([0, 0, 1, 1, 1]),
        "owner": owner,
        "old_t": logps[0],
        "ref_t": logps[1],
    }
    parameters = inspect.signature(fn).parameters.values()
    options = {p.name: settings[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    inputs = {name: tensors[name] for name in _inputs(fn)}
    result = attempt(lambda: fn(**inputs, **options))
    if isinstance(result, Raised):
        _refuse_raised(fn, target, result.error, inputs, where)
    values: Any = result.get("adv") if isinstance(result, dict) else result
    is_tensor = isinstance(values, torch.Tensor)
    if not is_tensor or values.shape != owner.shape or not bool(values.isfinite().all()):
        shape = (
            f"a tensor of the shape {list(values.shape)}" if is_tensor else type(values).__name__
        )
        problem = f"it returns {shape} instead of a finite number per token (shape [{len(owner)}])"
        fix = "index numbers of completions with `owner`, as in `advantage[owner]`"
        _refuse(fn, target, "shape", problem, fix, where, kind="an advantage")


def _tried(
    loss: Loss,
    target: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    where: str,
    first: int = 0,
) -> tuple[Any, dict[str, Any]]:
    """The numbers of a loss, and the gradient of their weighted sum, by input. first: the number of
    the first one, which the weights depend on.
    """
    torch = _torch()
    inputs = {
        name: value.detach().clone().requires_grad_(_is_trained(name))
        for name, value in inputs.items()
    }
    with torch.enable_grad():
        result = attempt(lambda: loss(inputs, settings))
    if isinstance(result, Raised):
        read = {name: inputs[name] for name in loss.reads}
        _refuse_raised(loss.fn, target, result.error, read, where)
    if not isinstance(result, torch.Tensor):
        problem = f"it returns {type(result).__name__} instead of a tensor"
        _refuse(loss.fn, target, "shape", problem, "return a tensor", where)
    trained = [name for name in loss.reads if _is_trained(name)]
    gradients = None
    if result.requires_grad and trained:
        weights = 1 + (first + torch.arange(result.numel(), dtype=result.dtype)) / 10
        gradients = torch.autograd.grad(
            (weights * result.flatten()).sum(),
            [inputs[name] for name in trained],
            allow_unused=True,
        )
    if gradients is None or all(gradient is None for gradient in gradients):
        fix = "compute it from the log-probabilities or scores of the policy, with torch functions"
        _refuse(loss.fn, target, "value", "its result has no gradient", fix, where)
    named = zip(trained, gradients, strict=True)
    return result.detach(), {
        name: torch.zeros_like(inputs[name]) if value is None else value for name, value in named
    }


def _is_trained(name: str) -> bool:
    """Whether an input has a gradient: log-probabilities and scores of the policy."""
    return name.split("_")[0] in ("logp", "score")


def _are_close(one: Any, other: Any) -> bool:
    return bool(_torch().allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True))


def _random_inputs(loss: Loss, scale: float) -> dict[str, Any]:
    """Float64 tensors for the inputs of a loss. scale: factor of the log-probabilities."""
    torch = _torch()
    draw = torch.Generator().manual_seed(0)
    is_of_tokens = loss.view in ("token", "answer")

    def random_input(name: str) -> Any:
        stem = name.removesuffix("_t").removesuffix("_w").removesuffix("_l")
        size = NUM_ROWS * (TOKENS_PER_ROW if is_of_tokens and name.endswith("_t") else 1)
        shape = (size, 1) if name in ("score", "target", "target_mask") else (size,)
        uniform = torch.rand(*shape, generator=draw, dtype=torch.float64)
        match stem:
            case "target_mask":
                return torch.ones(*shape, dtype=torch.bool)
            case "label":
                return torch.arange(size) % 2 == 0
            case "unit":
                return torch.arange(size)
            case "n":
                return torch.arange(size, dtype=torch.float64) + 1
            case "weight":
                return torch.ones(size, dtype=torch.float64)
            case "soft" | "wrong" | "delta" | "z0" | "thresholds":
                return torch.zeros(size, dtype=torch.float64)
            case "score" | "margin" | "adv" | "value" | "return" | "critic":
                return 2 * uniform - 1
            case "target":
                return uniform
            case _:
                return -scale * (0.1 + 4.9 * uniform)

    return {name: random_input(name) for name in loss.reads}


def _inputs(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters."""
    parameters = inspect.signature(fn).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


def _torch() -> Any:
    import torch

    return torch


def _refuse_raised(
    fn: Any, target: str, error: BaseException, inputs: Mapping[str, Any], where: str
) -> NoReturn:
    shapes = ", ".join(f"{name}{list(value.shape)}" for name, value in inputs.items())
    raised = describe_raised(error, str(_torch().__path__[0]), __file__)
    problem = f"it {raised} on {shapes}"
    _refuse(fn, target, "failed", problem, "fix the function", where)


def _refuse(
    fn: Any,
    target: str,
    code: str,
    problem: str,
    fix: str,
    where: str = "method",
    *,
    kind: str = "a loss",
) -> NoReturn:
    place = definition_place(fn)
    raise UserError(
        f"{target}{f' ({place})' if place else ''} cannot be used as {kind}: {problem}",
        code=f"loss-{code}",
        where=where,
        fix=fix,
    )
