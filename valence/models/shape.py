"""Count the weights of a model before they are loaded, to estimate memory and time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from valence.models.adapters import planned_adapter
from valence.models.loading import load_config, loading
from valence.models.quantized import countable
from valence.models.scores import is_reward_model


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a causal model and of the part of it that trains.

    ``parameters``, ``trained``: all weights, and those that train.
    ``linear``: weights of the decoder's layers that multiply each token (of experts, only the
    selected ones).
    ``layers``, ``hidden``: number of layers, and hidden size.
    ``inner``: size inside a feed-forward layer, over the selected experts.
    ``heads``, ``keys``: size of the queries and of the keys of an attention layer, over all heads.
    ``vocabulary``: outputs of the head (the scores of a reward model).
    ``adapted``: summed input sizes of all linear layers with an adapter.
    ``largest``: weights of the decoder's largest layer.
    ``outside``: weights outside the decoder's layers (embedding, head).
    ``quantized``: weights that are stored in 4 bits.
    ``adapter_outputs``: summed output sizes of all linear layers with an adapter.
    ``scaled``: summed output sizes of all layers with DoRA.
    ``matrices``: trained weights in matrices of hidden layers.
    """

    parameters: int
    trained: int
    linear: int
    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    adapted: int = 0
    largest: int = 0
    outside: int = 0
    quantized: int = 0
    keys: int = 0
    scaled: int = 0
    matrices: int = 0
    adapter_outputs: int = 0

    @property
    def full(self) -> bool:
        """Whether all weights train."""
        return self.trained == self.parameters


def skeleton(
    name: str,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    num_scores: int | None = None,
) -> nn.Module:
    """Build a model on the meta device; with ``num_scores`` a reward model.

    Raises UserError when the model does not exist.
    """
    config = load_config(name, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    kind = AutoModelForCausalLM
    if num_scores is not None:
        kind, config.num_labels = AutoModelForSequenceClassification, num_scores
    with loading("model", name), torch.device("meta"):
        return kind.from_config(config, trust_remote_code=trust_remote_code)


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return a copy of a loaded model on the meta device, without adapters.

    The modules are copied, not built again: the class may have another constructor than those of
    transformers, and may have been changed since. Hooks are left out, and what FSDP keeps in
    modules.
    """
    memo: dict[int, Any] = {}
    for weight in model.parameters():
        quantized: Any = getattr(weight, "quant_state", None)
        shape = weight.shape if quantized is None else quantized.shape
        dtype = weight.dtype if quantized is None else quantized.dtype
        bare = torch.empty(shape, dtype=dtype, device="meta")
        memo[id(weight)] = nn.Parameter(bare, weight.requires_grad)
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    modules = list(model.modules())
    for module in modules:
        # FSDP replaces a module's class by one that cannot be copied.
        kind = next(
            base
            for base in type(module).__mro__
            if not base.__module__.startswith("torch.distributed.")
        )
        memo[id(module)] = object.__new__(kind)
        nn.Module.__init__(memo[id(module)])
    for module in modules:
        attributes = {
            name: value
            for name, value in vars(module).items()
            if "_hooks" not in name and not name.startswith("__")
        }
        vars(memo[id(module)]).update(copy.deepcopy(attributes, memo))
    copied: nn.Module = memo[id(model)]
    for path, module in list(copied.named_modules()):
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if isinstance(inner, nn.Module):
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, inner)
    return copied.requires_grad_(True)


def shape_of(
    model: nn.Module, *, lora: Any = None, adapter: str | None = None, quantize: bool = False
) -> Shape:
    """Count the weights of a model on the meta device. The model may be modified.

    lora, adapter: as for ``build_policy``. quantize: as for ``load_model``. Raises UserError when
    the adapter does not fit.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    experts: int = _first_value(config, "num_experts_per_tok") or 1
    inner: int = (
        _first_value(config, "moe_intermediate_size", "intermediate_size") or 4 * config.hidden_size
    )
    head_size: int = (
        _first_value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    )
    trained = parameters = sum(p.numel() for p in model.parameters())
    linear, adapted, adapter_outputs, scaled = _linear_weights(model, experts), 0, 0, 0
    trained_model: nn.Module = model
    layers = decoder_layers(model)
    layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    quantized = countable(layers) if quantize else 0
    if lora is not None or adapter is not None:
        trained_model = planned = planned_adapter(model, lora, adapter)
        trained = sum(p.numel() for p in planned.parameters() if p.requires_grad)
        adapted = sum(
            p.shape[1] for name, p in planned.named_parameters() if "lora_A" in name and p.ndim == 2
        )
        adapter_outputs = sum(
            p.shape[0] for name, p in planned.named_parameters() if "lora_B" in name and p.ndim == 2
        )
        scaled = sum(
            p.numel() for name, p in planned.named_parameters() if "lora_magnitude" in name
        )
    return Shape(
        parameters=parameters,
        trained=trained,
        linear=linear,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=inner * experts,
        heads=head_size * config.num_attention_heads,
        vocabulary=config.num_labels if is_reward_model(model) else config.vocab_size,
        adapted=adapted,
        adapter_outputs=adapter_outputs,
        largest=max(layer_sizes, default=0),
        outside=parameters - sum(layer_sizes),
        quantized=quantized,
        scaled=scaled,
        matrices=sum(p.numel() for p in hidden_matrices(trained_model).values()),
        keys=head_size
        * (_first_value(config, "num_key_value_heads") or config.num_attention_heads),
    )


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained matrices by name, without the embedding and the head."""
    excluded_modules: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            pair = module.get_input_embeddings(), module.get_output_embeddings()
            excluded_modules += [
                m for m in (*pair, getattr(module, "score", None)) if m is not None
            ]
    excluded = {id(p) for module in excluded_modules for p in module.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and id(p) not in excluded
    }


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder in order; an empty list if the model has no list of layers."""
    layers: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[operator]
    lists = (
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )
    return layers or list(next(lists, ()))


def _linear_weights(model: Any, experts: int) -> int:
    """Return the number of weights that multiply a token, without embeddings and the head.

    experts: the number of experts that a token is routed to.
    """
    head = model.get_output_embeddings()
    tables = [
        module for module in model.modules() if isinstance(module, nn.Embedding) or module is head
    ]
    excluded = {id(p) for module in tables for p in module.parameters()}
    weights = [p for p in model.parameters() if id(p) not in excluded]
    # 3-dimensional weights have one matrix per expert
    stacked = [p.numel() // p.shape[0] * experts for p in weights if p.ndim == 3]
    return sum(stacked) + sum(p.numel() for p in weights if p.ndim == 2)


def _first_value(config: Any, *names: str) -> int | None:
    """Return the value of the first of these fields that a configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
