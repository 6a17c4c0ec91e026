"""Loading a causal model and its tokenizer, putting an adapter on it, and saying which weights train."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from valence.engine.logprobs import Engine
from valence.engine.reference import AdapterOff, Frozen, Reference
from valence.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
BARS = sys.stderr.isatty()  # transformers' own bars are noise in a log
LOADING_ERRORS = (OSError, ValueError, ImportError, RuntimeError)


def load_tokenizer(name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises UserError when there is none."""
    _must_exist(name, "model.tokenizer or model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS as error:
        raise _cannot_load("tokenizer", name, error) from error


def load_model(name: str, *, dtype: torch.dtype, gguf_file: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """A causal language model with its weights in ``dtype``. Raises UserError when it cannot be loaded."""
    _must_exist(name, "model.name")
    if not BARS:
        disable_progress_bar()
    extra: dict[str, Any] = {}
    if gguf_file:
        from transformers import GgufConfig

        extra = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, **({"gguf_file": gguf_file} if gguf_file else {})
        )
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, config=config, **extra
        )
    except LOADING_ERRORS as error:
        raise _cannot_load("model", name, error) from error
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets every dropout to 0: with it, the loss of a step would depend on how the step is cut into micro-batches."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.__dict__["attention_dropout"] = 0.0
    return model


def build_policy(
    model: nn.Module, *, dtype: torch.dtype, lora: Any = None, adapter: str | None = None, checkpointing: bool = False
) -> Engine:
    """Makes a loaded model trainable, without dropout of its own: whole, with a fresh adapter, or with a continued one.

    lora: rank, alpha, dropout, targets.
    Adapter weights, and all weights of a full run, are float32 masters (float64 for a float64 model).
    """
    model = without_dropout(model)
    if lora is not None or adapter is not None:
        model = _with_adapter(model, lora, adapter)
    elif dtype == torch.bfloat16:
        model = model.float()
    if checkpointing:
        # The name changes in transformers 5.2x; the first parameter of both is the settings of torch.utils.checkpoint.
        name = "activation_checkpointing_enable"
        enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
        enable({"use_reentrant": False})
    full = lora is None and adapter is None
    engine = Engine(model, compute=torch.bfloat16 if full and dtype == torch.bfloat16 else None)
    engine.check_layout()
    return engine.train()


def build_reference(policy: Engine, *, fresh_adapter: bool, model: nn.Module | None = None, name: str = "") -> Reference:
    """The reference: a model of its own, or the policy as it starts (adapter off if that started from zero, else a copy)."""
    if model is not None:
        engine = Engine(without_dropout(model))
        engine.check_layout()
        return Frozen(engine, name)
    return AdapterOff(policy) if fresh_adapter else Frozen(copy.deepcopy(policy))


def _with_adapter(model: nn.Module, lora: Any, adapter: str | None) -> nn.Module:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter is not None:
        _must_exist(adapter, "model.adapter")
        try:
            # Without is_trainable an adapter loads frozen, and a run would train nothing.
            return PeftModel.from_pretrained(model, adapter, is_trainable=True)  # type: ignore[arg-type]
        except LOADING_ERRORS as error:
            raise _cannot_load("adapter", adapter, error) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # between peft and transformers
            return get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(str(error), where="model.lora.targets", fix="name linear layers of this model, or all-linear") from error


def _must_exist(name: str, setting: str) -> None:
    """A name that is written as a path must be a folder: a hub would answer with something confusing."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise UserError(
            f"there is no folder {name!r}", where=setting, fix="name an existing folder, or a hub id such as owner/model"
        )


def _cannot_load(what: str, name: str, error: Exception) -> UserError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(
        f"cannot load the {what} {name!r}: {first}",
        where="model",
        fix="check the folder or hub id and that it holds a causal language model; a hub needs a network connection",
    )
