"""Low-rank adapters: a fresh one, one to continue, and one that is only planned."""

from __future__ import annotations

import copy
import difflib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from valence.errors import UserError
from valence.models.loading import LOADING_ERRORS, cannot_load, must_exist

# peft imports it where it is installed: it warns of 4-bit kernels
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def with_adapter(model: nn.Module, lora: Any, adapter: str | None) -> nn.Module:
    """The model with the adapter of a folder, which trains on, or else with a fresh one (rank,
    alpha, dropout, targets).

    Raises UserError when the adapter cannot be loaded, when one of both is of a reward model and
    the other is not, or a target is no layer. Warns of an adapter made for another model.
    """
    from peft import PeftModel

    if adapter is None:
        return _wrapped(model, _fresh(model, lora))
    saved = _saved(adapter)
    _check_base(saved, adapter, model)
    _check_task(saved, adapter, model)
    try:
        # Without is_trainable an adapter loads frozen, and a run would train nothing.
        with _without_its_warning():
            return PeftModel.from_pretrained(model, adapter, is_trainable=True)  # type: ignore[arg-type]
    except LOADING_ERRORS as error:
        raise cannot_load("adapter", adapter, error) from error


def go_on_without_dropout(model: nn.Module, adapter: str) -> None:
    """Switches off the dropout that an adapter was trained with, for which nobody has asked here.

    Warns if it had any.
    """
    own = [
        module
        for name, module in model.named_modules()
        if "lora_dropout" in name and getattr(module, "p", 0)
    ]
    for module in own:
        cast(Any, module).p = 0.0
    if own:
        warnings.warn(
            f"the adapter {adapter!r} was trained with dropout, and goes on without", stacklevel=3
        )


def planned_adapter(model: nn.Module, lora: Any, adapter: str | None) -> nn.Module:
    """The model as ``with_adapter`` would make it, without the adapter's weights: for a model
    without memory behind it.
    """
    config = _fresh(model, lora) if adapter is None else _saved(adapter)
    config.inference_mode = False
    return _wrapped(model, config)


def merged(base: nn.Module, trained: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """The base with the adapter of a trained model added to it, in the type of the base's weights.
    weights: those of the adapter, as peft saves them.
    """
    from peft import set_peft_model_state_dict

    wrapped: Any = _wrapped(base, copy.deepcopy(trained.peft_config[trained.active_adapter]))
    set_peft_model_state_dict(wrapped, dict(weights))
    return wrapped.merge_and_unload()


def adapted(model: nn.Module) -> bool:
    """Whether there is an adapter on the model."""
    return hasattr(model, "peft_config")


def largest_rank(model: nn.Module) -> int:
    """The largest rank of an adapter's updates; 0 without one."""
    configs: Any = getattr(model, "peft_config", {})
    return max(
        (rank for each in configs.values() for rank in (each.r, *each.rank_pattern.values())),
        default=0,
    )


def inputs_as_they_come(module: nn.Module) -> AbstractContextManager[None]:
    """Inside the block an adapter's layers do not first widen their input, which autocast would
    narrow again.
    """
    from peft.helpers import disable_input_dtype_casting

    return disable_input_dtype_casting(module)


def _fresh(model: nn.Module, lora: Any) -> Any:
    from peft import LoraConfig

    _check_targets(model, lora.targets)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type=_task(model),
    )


def _task(model: nn.Module) -> str:
    """What peft calls it. With the former it trains and saves the head as well."""
    return "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"


def _saved(adapter: str) -> Any:
    from peft import PeftConfig

    must_exist(adapter, "model.adapter")
    try:
        return PeftConfig.from_pretrained(adapter)
    except LOADING_ERRORS as error:
        raise cannot_load("adapter", adapter, error) from error


def _wrapped(model: nn.Module, config: Any) -> nn.Module:
    from peft import get_peft_model

    try:
        with _without_its_warning():
            return get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(
            str(error),
            code="lora-targets",
            where="model.lora.targets",
            fix="name linear layers of this model, or all-linear",
        ) from error


@contextmanager
def _without_its_warning() -> Iterator[None]:
    """peft reads a name that transformers has given up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _check_base(saved: Any, adapter: str, model: nn.Module) -> None:
    """Warns when an adapter was made for another model than the one it is put on."""
    made_for: str | None = saved.base_model_name_or_path
    put_on: str = model.config.name_or_path  # type: ignore[union-attr]
    if made_for and "/" not in made_for and Path(put_on).name == made_for:
        return  # an exported adapter holds the last part alone of a local folder
    if (
        made_for
        and put_on
        and Path(made_for).expanduser().resolve() != Path(put_on).expanduser().resolve()
    ):
        warnings.warn(
            f"the adapter {adapter!r} was made for {made_for!r} and is put on {put_on!r}: it is "
            f"of use only if both hold the "
            "same weights",
            stacklevel=4,
        )


def _check_task(saved: Any, adapter: str, model: nn.Module) -> None:
    """Raises UserError when an adapter's head for scores would be left out, or the model's would
    stay as it is.
    """
    if saved.task_type == "SEQ_CLS" != _task(model):
        raise UserError(
            f"the adapter {adapter!r} is of a reward model, and the model has no head for scores",
            code="adapter-kind",
            where="model.adapter",
            fix="name the merged model, such as the folder model/ of the run that trained it",
        )
    if _task(model) == "SEQ_CLS" != saved.task_type:
        raise UserError(
            f"the adapter {adapter!r} was made for a language model, and brings no head for scores",
            code="adapter-kind",
            where="model.adapter",
            fix="merge it into its model and start from that, or continue the adapter of a "
            "reward model",
        )


def _check_targets(model: nn.Module, targets: list[str] | str) -> None:
    """Raises UserError for a target that is no layer: it would be left out without a word."""
    if isinstance(targets, str):
        return
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            layers = [
                name
                for name, module in model.named_modules()
                if getattr(module, "weight", None) is not None
            ]
            leaves = sorted(
                {leaf for name in layers if not (leaf := name.rpartition(".")[2]).isdigit()}
            )
            near = difflib.get_close_matches(target, leaves) or leaves
            raise UserError(
                f"no layer of {type(model).__name__} is named {target!r}",
                code="lora-targets",
                where="model.lora.targets",
                fix=f"name linear layers of this model (near ones: {', '.join(near)}), or "
                f"all-linear",
            )
