"""Loading a causal model and its tokenizer, putting an adapter on it, and saying which weights train."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from valence.engine.adapters import with_adapter
from valence.engine.checkpointing import Checkpointing, recompute_layers
from valence.engine.loading import LOADING_ERRORS, cannot_load, must_exist
from valence.engine.logprobs import Engine
from valence.engine.reference import AdapterOff, Frozen, Reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
BARS = sys.stderr.isatty()  # transformers' own bars are noise in a log
NOISE = re.compile("drop|^(input_)?jitter_noise$")  # names of numbers that make a training forward random, and nothing else


def load_tokenizer(name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises UserError when there is none."""
    must_exist(name, "model.tokenizer or model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS as error:
        raise cannot_load("tokenizer", name, error) from error


def load_model(name: str, *, dtype: torch.dtype, gguf_file: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """A causal language model with its weights in ``dtype``. Raises UserError when it cannot be loaded."""
    must_exist(name, "model.name")
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
        raise cannot_load("model", name, error) from error
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets every dropout (and multiplicative jitter) to 0, but not an adapter's own: with it, the loss of a step would depend on
    how the step is cut into micro-batches."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Many models keep no dropout module but a number, by which they call the function.
        module.__dict__.update(
            {key: 0.0 for key, value in vars(module).items() if isinstance(value, float) and NOISE.search(key)}
        )
    return model


def position_limit(model: nn.Module) -> tuple[int, bool] | None:
    """The number of positions that a model was made for (None: its configuration says nothing), and whether it is a table of
    positions that ends there, beyond which the forward pass fails (not so with rotary positions)."""
    config: Any = model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not limit:
        return None
    tables = [(name, p) for name, p in (*model.named_parameters(), *model.named_buffers()) if re.search(r"pos|wpe", name)]
    # Some tables have two rows more, for padding.
    return limit, any(table.ndim == 2 and limit <= table.shape[0] <= limit + 2 for _, table in tables)


def build_policy(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    lora: Any = None,
    adapter: str | None = None,
    checkpointing: Checkpointing = "off",
) -> Engine:
    """Makes a loaded model trainable, without dropout of its own: whole, with a fresh adapter, or with a continued one.

    lora: rank, alpha, dropout, targets. dtype: of the computation.
    Weights that train are float32 masters, whatever the type that the model comes in (float64 stays, and comes with float64);
    those under an adapter are cast to ``dtype``. checkpointing: as for ``recompute_layers``.
    Raises UserError when the model is not causal, the adapter does not fit, or layers cannot be recomputed as asked.
    """
    model = without_dropout(model)
    full = lora is None and adapter is None
    if full:
        wide = torch.float64 in (dtype, next(model.parameters()).dtype) and dtype != torch.bfloat16
        _cast(model, torch.float64 if wide else torch.float32)
    else:
        _cast(model, dtype)
        model = with_adapter(model, lora, adapter)
    recompute_layers(model, checkpointing, next(model.parameters()).device)
    engine = Engine(model, compute=torch.bfloat16 if dtype == torch.bfloat16 else None)
    engine.check_layout()
    return engine.train()


def build_reference(policy: Engine, *, fresh_adapter: bool, model: nn.Module | None = None, name: str = "") -> Reference:
    """The reference: a model of its own, or the policy as it starts (adapter off if that started from zero, else a copy).

    A model of its own is computed as the policy is, in the types of the policy's weights and products: the same weights have a
    reward of exactly zero. Raises UserError when it is not causal.
    """
    if model is not None:
        _cast(model, policy.causal.get_input_embeddings().weight.dtype)
        engine = Engine(without_dropout(model), compute=policy.compute)
        engine.check_layout()
        return Frozen(engine, name)
    return AdapterOff(policy) if fresh_adapter else Frozen(copy.deepcopy(policy))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the weights a type. Buffers keep theirs: rotary frequencies in bfloat16 would turn positions."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
