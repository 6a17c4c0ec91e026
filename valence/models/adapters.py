"""Low-rank adapters: new, continued, planned for an estimate, and saved."""

from __future__ import annotations

import copy
import difflib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from valence.config.schema import peft_fields
from valence.errors import UserError
from valence.models.loading import loading, must_exist
from valence.models.weights import check_complete, check_finite, check_type

# PEFT imports it where it is installed, and it warns about missing 4-bit kernels
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


DELTA = ".token_adapter.trainable_tokens_"
"""Part of the names of PEFT's weights for single trained tokens of an embedding."""


def with_adapter(model: nn.Module, lora: Any, adapter: str | None) -> nn.Module:
    """Return the model with the adapter of a folder, which continues to train, or with a new one.

    lora: settings of ``model.lora``. Raises UserError when the adapter cannot be loaded, when one
    of model and adapter is a reward model and the other is not, or when a setting does not fit the
    model. Warns about an adapter that was trained on another model.
    """
    from peft import PeftModel

    if adapter is None:
        wrapped = _add_adapter(model, _lora_config(model, lora))
        _check_patterns(wrapped, lora)
        _check_biases(wrapped, lora)
        if changes_base(lora):
            cast(Any, wrapped).initial_adapter = _adapter_weights(wrapped)
        return _with_wide_masters(wrapped)
    saved = _read_config(adapter)
    _check_base(saved, adapter, model)
    _check_task(saved, adapter, model)
    # Without is_trainable an adapter loads frozen, and a run would train nothing.
    with loading("adapter", adapter), _without_warnings():
        wrapped = PeftModel.from_pretrained(
            model,  # type: ignore[arg-type]
            adapter,
            is_trainable=True,
            ignore_mismatched_sizes=True,  # an error below, which names the weight
        )
    check_adapter(wrapped, adapter)
    return _with_wide_masters(wrapped)


def check_adapter(wrapped: Any, adapter: str) -> None:
    """Raise UserError if the files of an adapter lack weights of the wrapped model, have them in
    another shape, or if one is an integer or not finite.
    """
    from peft import get_peft_model_state_dict

    stored = read_adapter_weights(adapter)
    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    report = {
        "missing_keys": expected.keys() - stored.keys(),
        "mismatched_keys": [
            (key, stored[key].shape, weight.shape)
            for key, weight in expected.items()
            if key in stored and stored[key].shape != weight.shape
        ],
        "unexpected_keys": {
            key for key in stored.keys() - expected.keys() if "lora_" in key or not expected
        },
    }
    check_complete(report, adapter, where="model.adapter")


def read_adapter_weights(adapter: str) -> dict[str, Tensor]:
    """Return the weights of an adapter's folder, by PEFT's names.

    Raises UserError when they cannot be read, or one is an integer or not finite.
    """
    from peft.utils.save_and_load import load_peft_weights

    must_exist(adapter, "model.adapter")
    with loading("adapter", adapter):
        stored: dict[str, Tensor] = load_peft_weights(adapter, device="cpu")
    for key, weight in stored.items():
        check_type(key, str(weight.dtype).removeprefix("torch."), adapter, where="model.adapter")
    check_finite(stored.items(), adapter, where="model.adapter")
    return stored


def disable_adapter_dropout(model: nn.Module, adapter: str) -> None:
    """Disable the dropout that a continued adapter was trained with, and warn if it had any."""
    dropouts = [
        module
        for name, module in model.named_modules()
        if "lora_dropout" in name and getattr(module, "p", 0)
    ]
    for module in dropouts:
        cast(Any, module).p = 0.0
    if dropouts:
        warnings.warn(
            f"the adapter {adapter!r} was trained with dropout, and continues without dropout",
            stacklevel=3,
        )


def planned_adapter(model: nn.Module, lora: Any, adapter: str | None) -> nn.Module:
    """Return the model as ``with_adapter`` would build it, without the adapter's weights: for a
    model on the meta device.
    """
    from transformers.initialization import no_init_weights

    if adapter is None:
        config = _lora_config(model, lora)
    else:
        config = _read_config(adapter)
        _check_task(config, adapter, model)
    config.inference_mode = False
    if config.init_lora_weights != "mica":  # which decides what trains; others only give values
        config.init_lora_weights = True
    # also with MiCA: on the meta device there are no weights to compute its values from
    with no_init_weights():  # each call would cost as much as the rest
        return _add_adapter(model, config, low_cpu_mem_usage=config.init_lora_weights == "mica")


def merge_adapter(base: nn.Module, trained: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """Merge the adapter of a trained model into a base, in the type of the base's weights.

    weights: those of the adapter, by PEFT's names.
    """
    from peft import set_peft_model_state_dict

    wrapped: Any = _add_adapter(base, copy.deepcopy(trained.peft_config[trained.active_adapter]))
    set_peft_model_state_dict(wrapped, dict(weights))
    return wrapped.merge_and_unload()


def active_module(module: Any) -> nn.Module:
    """Return the module that computes. For a module that trains in full next to an adapter, this is
    the trained copy, or the original while the adapter is disabled.
    """
    if not hasattr(module, "modules_to_save"):
        return module
    name = module.active_adapters[0] if module.active_adapters else ""
    is_off = module.disable_adapters or name not in module.modules_to_save
    return module.original_module if is_off else module.modules_to_save[name]


def has_adapter(model: nn.Module) -> bool:
    """Return whether the model has an adapter."""
    return hasattr(model, "peft_config")


def is_adapter_weight(name: str) -> bool:
    """Return whether PEFT gives this name to a weight of an adapter."""
    # modules_to_save: for example a head that is trained with the adapter
    return any(part in name for part in ("lora_", ".modules_to_save.", DELTA))


def check_trains(model: nn.Module, spec: Any) -> None:
    """Raise UserError for a model object whose weights or adapter a run cannot train.

    spec: the section ``model`` of the recipe.
    """
    adds_adapter = spec.lora is not None or spec.adapter is not None
    if has_adapter(model) and not hasattr(model, "get_base_model"):
        raise UserError(
            "the model object contains the layers of an adapter, but is not a PeftModel",
            code="model-adapter-bare",
            where="model",
            fix="pass the PeftModel around it, which is run.policy.model after a run, or load the "
            "model again",
        )
    if has_adapter(model) and adds_adapter:
        raise UserError(
            "the model object already has an adapter",
            code="model-has-adapter",
            where="model.lora" if spec.lora is not None else "model.adapter",
            fix="remove the setting to train the adapter of the object, or pass its base model",
        )
    configs: Any = getattr(model, "peft_config", {})
    if any(config.is_prompt_learning for config in configs.values()):
        raise UserError(
            "the adapter of the model object is a prompt or prefix, which packed sequences do not "
            "support",
            code="model-adapter-kind",
            where="model",
            fix="use an adapter inside layers, such as LoRA",
        )
    if not adds_adapter and not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            "no weight of the model object requires a gradient",
            code="model-frozen",
            where="model",
            fix="call requires_grad_() for the weights to train, load the adapter with "
            "is_trainable=True, or set model.lora",
        )


def largest_rank(model: nn.Module) -> int:
    """Return the largest rank of a saved adapter (see ``save_adapter``); 0 without one."""
    configs: Any = getattr(model, "peft_config", {})
    rank = max(
        (r for config in configs.values() for r in (config.r, *config.rank_pattern.values())),
        default=0,
    )
    return 2 * rank if getattr(model, "initial_adapter", None) else rank


@contextmanager
def keep_input_dtype(module: nn.Module) -> Iterator[None]:
    """Inside the block, an adapter's layers do not widen their input, which autocast would narrow
    again. PEFT's ``disable_input_dtype_casting`` fails for an embedding of which some tokens train.
    """
    layers: list[Any] = [m for m in module.modules() if hasattr(m, "cast_input_dtype_enabled")]
    before = [layer.cast_input_dtype_enabled for layer in layers]
    try:
        for layer in layers:
            layer.cast_input_dtype_enabled = False
        yield
    finally:
        for layer, is_enabled in zip(layers, before, strict=True):
            layer.cast_input_dtype_enabled = is_enabled


PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings of ``model.lora`` whose keys are regular expressions."""


def _lora_config(model: nn.Module, lora: Any) -> Any:
    """Return PEFT's ``LoraConfig`` for the settings of ``model.lora``. Only rank, alpha, dropout
    and targets are required.

    Raises UserError for a name that is not in the model, and for settings that PEFT refuses.
    """
    from peft import LoraConfig

    _check_expressions(lora)
    _check_names(model, lora)
    targets = lora.targets
    layers = getattr(lora, "layers_to_transform", None)
    if targets == "all-linear" and layers is not None:  # PEFT takes layers only with a list
        targets = _linear_layers(model)
    # Copies, because PEFT adds patterns of its own to them.
    fields = {name: copy.deepcopy(getattr(lora, name, None)) for name in peft_fields()}
    try:
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
            lora_dropout=lora.dropout,
            target_modules=targets,
            task_type=_task(model),
            **{name: value for name, value in fields.items() if value is not None},
        )
    except (ValueError, TypeError) as error:
        raise _unsupported(error) from error


def changes_base(lora: Any) -> bool:
    """Return whether the initialization moves a part of the model's weights into the adapter. The
    model with the adapter disabled is then not the model that training starts from.
    """
    return str(getattr(lora, "init_lora_weights", True)).startswith(("pissa", "olora"))


def starts_at_base(lora: Any) -> bool:
    """Return whether a new adapter's update is exactly zero, and disabling the adapter also
    disables everything else that trains. The model with the adapter disabled is then exactly the
    reference during the entire run.
    """
    is_zero = getattr(lora, "init_lora_weights", True) in (True, "gaussian", "mica")
    has_unknown = bool(getattr(lora, "model_extra", None))  # may do anything
    return is_zero and getattr(lora, "bias", "none") == "none" and not has_unknown


def unsplittable(lora: Any) -> str | None:
    """Return the first setting that needs the model's weights when the adapter is built, or that
    trains some of them; None without one. With weights split over processes, they are not loaded
    yet.
    """
    reads_weights = changes_base(lora) or getattr(lora, "init_lora_weights", True) == "mica"
    names = ["init_lora_weights"] if reads_weights else []
    names += [
        name
        for name in (
            "use_dora",
            "modules_to_save",
            "trainable_token_indices",
            "target_parameters",
            "lora_bias",
        )
        if getattr(lora, name, None)
    ]
    names += ["bias"] if getattr(lora, "bias", "none") != "none" else []
    names += getattr(lora, "model_extra", None) or {}  # fields that Valence does not know
    return names[0] if names else None


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the last parts of the names of all linear layers, without the head."""
    from transformers.pytorch_utils import Conv1D

    heads = {id(model.get_output_embeddings())}  # type: ignore[operator]
    heads |= {id(getattr(model, "score", None))}
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and id(module) not in heads
        }
    )


def _task(model: nn.Module) -> str:
    """PEFT's task type. With SEQ_CLS it also trains and saves the head."""
    return "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"


def _read_config(adapter: str) -> Any:
    from peft import PeftConfig

    must_exist(adapter, "model.adapter")
    with loading("adapter", adapter):
        config = PeftConfig.from_pretrained(adapter)
        if config.peft_type is None:
            raise ValueError("peft_type is missing in its adapter_config.json")
        return config


def _add_adapter(model: nn.Module, config: Any, *, low_cpu_mem_usage: bool = False) -> nn.Module:
    from peft import get_peft_model

    names = _linear_layers(model)  # before PEFT replaces some of them
    try:
        with _without_warnings():
            return get_peft_model(cast(Any, model), config, low_cpu_mem_usage=low_cpu_mem_usage)
    except (ValueError, TypeError, NotImplementedError) as error:
        if "target" not in str(error).lower():
            raise _unsupported(error) from error
        raise UserError(
            str(error),
            code="lora-targets",
            where="model.lora.targets",
            fix=f"use names of linear layers of this model ({', '.join(names)}), or all-linear",
        ) from error


def _unsupported(error: Exception) -> UserError:
    """The error for settings that PEFT does not accept."""
    return UserError(
        f"PEFT cannot create the adapter: {error}",
        code="lora-unsupported",
        where="model.lora",
        fix="change or remove the setting of model.lora that the message names",
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence what PEFT warns about and handles: a name that transformers has deprecated, layers
    with transposed weights, and biases of the adapter, which it takes for incomplete matrices.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", ".*LoRA tensor.s. have invalid shape.*lora_B.bias")
        yield


def _check_base(saved: Any, adapter: str, model: nn.Module) -> None:
    """Warn when an adapter was trained on another model."""
    base: str | None = saved.base_model_name_or_path
    name: str = model.config.name_or_path  # type: ignore[union-attr]
    if base and "/" not in base and Path(name).name == base:
        return  # an uploaded adapter names only the last part of a local folder
    if base and name and Path(base).expanduser().resolve() != Path(name).expanduser().resolve():
        warnings.warn(
            f"the adapter {adapter!r} was trained on {base!r} and is added to {name!r}: this works "
            "only if both have the same weights",
            stacklevel=4,
        )


def _check_task(saved: Any, adapter: str, model: nn.Module) -> None:
    """Raise UserError when only one of adapter and model has a head for scores."""
    if saved.task_type == "SEQ_CLS" != _task(model):
        raise UserError(
            f"the adapter {adapter!r} was trained on a reward model, but the model has no head for "
            "scores",
            code="adapter-kind",
            where="model.adapter",
            fix="remove model.adapter, and set model.name to the merged reward model, such as the "
            "folder model/ of the run that trained the adapter",
        )
    if _task(model) == "SEQ_CLS" != saved.task_type:
        raise UserError(
            f"the adapter {adapter!r} belongs to a language model, and has no score head",
            code="adapter-kind",
            where="model.adapter",
            fix="remove model.adapter, and set model.name to the merged model, such as the folder "
            "model/ of the run that trained the adapter; or set model.adapter to the adapter of a "
            "reward model",
        )


def _check_expressions(lora: Any) -> None:
    """Raise UserError for a pattern in ``model.lora`` that is not a regular expression."""
    for setting in ("targets", "exclude_modules", "layers_pattern", *PATTERNS):
        value = getattr(lora, setting, None) or []
        if not isinstance(value, str | Mapping) and setting != "layers_pattern":
            continue  # names
        for pattern in [value] if isinstance(value, str) else value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"{pattern!r} is not a valid regular expression: {error}",
                    code=f"lora-{setting.replace('_', '-')}",
                    where=f"model.lora.{setting}",
                    fix="correct the regular expression, or use the name of a layer",
                ) from error


def _check_names(model: nn.Module, lora: Any) -> None:
    """Raise UserError for a name in ``model.lora`` that is not in the model: PEFT ignores it."""
    modules = dict(model.named_modules())
    with_weight = [name for name, m in modules.items() if getattr(m, "weight", None) is not None]
    linear = _linear_layers(model)
    parameters = [name for name, _ in model.named_parameters()]
    saved = getattr(lora, "modules_to_save", None) or []
    for setting, names, known, shown, kind in (
        ("targets", lora.targets, modules, linear, "linear layers"),
        (
            "exclude_modules",
            getattr(lora, "exclude_modules", None),
            modules,
            linear,
            "linear layers",
        ),
        ("modules_to_save", saved, modules, with_weight, "modules"),
        (
            "target_parameters",
            getattr(lora, "target_parameters", None),
            parameters,
            parameters,
            "parameters",
        ),
    ):
        for name in [] if names is None or isinstance(names, str) else names:
            if any(known_name == name or known_name.endswith(f".{name}") for known_name in known):
                continue
            leaves = {leaf for full in shown if not (leaf := full.rpartition(".")[2]).isdigit()}
            leaves |= set(shown) if kind == "parameters" else set()
            near = difflib.get_close_matches(name, sorted(leaves))
            hint = f"similar: {', '.join(near)}" if near else ", ".join(sorted(leaves)[:12])
            or_all = ", or all-linear" if setting == "targets" else ""
            raise UserError(
                f"no {kind[:-1].removeprefix('linear ')} of {type(model).__name__} is named "
                f"{name!r}",
                code=f"lora-{setting.replace('_', '-')}",
                where=f"model.lora.{setting}",
                fix=f"use names of {kind} in this model ({hint}){or_all}",
            )
    _check_layer_numbers(model, getattr(lora, "layers_to_transform", None))
    _check_tied(model, lora)


def _check_layer_numbers(model: Any, numbers: list[int] | int | None) -> None:
    count: int = model.config.get_text_config().num_hidden_layers
    for number in [numbers] if isinstance(numbers, int) else numbers or []:
        if number >= count:
            raise UserError(
                f"{type(model).__name__} has no layer {number}",
                code="lora-layers-to-transform",
                where="model.lora.layers_to_transform",
                fix=f"use numbers from 0 to {count - 1}",
            )


def _check_tied(model: Any, lora: Any) -> None:
    """Raise UserError where one of two tied weights would change: the saved model can contain only
    one of them.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding is None or embedding.weight is not head.weight:
        return
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if m in (embedding, head)}

    def includes(setting: str) -> bool:
        value = getattr(lora, setting, None) or []
        return not isinstance(value, str) and any(n.rpartition(".")[2] in names for n in value)

    saves_untied = includes("modules_to_save") and not getattr(lora, "ensure_weight_tying", False)
    if not includes("targets") and not saves_untied:
        return
    setting = "targets" if includes("targets") else "modules_to_save"
    fix = "set model.lora.ensure_weight_tying: true"
    if setting == "targets":
        fix = f"move the name from this list to model.lora.modules_to_save, and {fix}"
    tied = " and ".join(sorted(names))
    raise UserError(
        f"{tied} of {type(model).__name__} are tied, and a saved model has one weight for both",
        code="lora-tied-weights",
        where=f"model.lora.{setting}",
        fix=f"{fix}; or remove the name from this list",
    )


def _check_patterns(model: nn.Module, lora: Any) -> None:
    """Raise UserError for a pattern of ranks or alphas that matches no layer with an adapter: PEFT
    ignores it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    prefix = "base_model.model."
    adapted_layers = [
        name.removeprefix(prefix)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]
    for setting in PATTERNS:
        for pattern in getattr(lora, setting, None) or {}:
            # as peft.utils.get_pattern_key matches them
            expression = re.compile(rf"(.*\.)?({pattern})$")
            if not any(expression.match(name) for name in adapted_layers):
                near = sorted({name.rpartition(".")[2] for name in adapted_layers})
                raise UserError(
                    f"{pattern!r} matches no layer with an adapter",
                    code=f"lora-{setting.replace('_', '-')}",
                    where=f"model.lora.{setting}",
                    fix=f"use a name or a regular expression for some of {', '.join(near)}",
                )


def _check_biases(model: nn.Module, lora: Any) -> None:
    """Raise UserError where a bias of the adapter could not be merged."""
    if not getattr(lora, "lora_bias", False):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and cast(Any, module).get_base_layer().bias is None:
            raise UserError(
                f"{name.removeprefix('base_model.model.')} has no bias into which the "
                "adapter's bias could be merged",
                code="lora-bias",
                where="model.lora.lora_bias",
                fix="remove it, or list only layers with a bias in model.lora.targets",
            )


def _with_wide_masters(model: nn.Module) -> nn.Module:
    """Keep everything that trains in float32 at least; PEFT does so for the adapter alone.

    The type of the residual stream stays: an embedding returns rows of its former type.
    """
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        narrow = [w for w in weights if w.requires_grad and w.dtype == torch.bfloat16]
        if not narrow:
            continue
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_in_bfloat16)
        # a norm takes no weight and bias of different types
        is_product = isinstance(module, nn.Linear) or module.__class__.__name__ == "Conv1D"
        for weight in narrow if is_product else weights:
            weight.data = weight.data.float()
    return model


def _in_bfloat16(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.bfloat16()


def _adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the adapter's weights on the host, by their names in an adapter file."""
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(cast(Any, model))
    return {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}


def save_adapter(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter as PEFT does, for the model that it was trained on.

    An adapter whose initialization changed the base model's weights (PiSSA, OLoRA) is written for
    the unchanged model, as one of twice the rank: W_res + s B A = W + s (B A - B0 A0), with B0 A0
    the initial adapter and W_res = W - s B0 A0 (Meng et al. 2024, arXiv 2404.02948, appendix C).

    weights: all tensors of the model, if they differ from those in memory.
    """
    with _without_warnings():
        model.save_pretrained(str(folder), state_dict=weights)
    initial: dict[str, Tensor] | None = getattr(model, "initial_adapter", None)
    if initial is None:
        return
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    trained = load_file(path)
    for name, start in initial.items():
        start = start.to(trained[name])
        if ".lora_A." in name:
            trained[name] = torch.cat([trained[name], start], 0).contiguous()
        elif ".lora_B." in name:
            trained[name] = torch.cat([trained[name], -start], 1).contiguous()
    save_file(trained, path, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[model.active_adapter])
    # the scale s is alpha/r, or alpha/sqrt(r) of rsLoRA, and stays
    factor = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, factor * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: factor * alpha for name, alpha in config.alpha_pattern.items()}
    config.init_lora_weights, config.inference_mode = True, True
    config.save_pretrained(str(folder))
