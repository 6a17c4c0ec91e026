"""Count the weights of a model, to estimate memory."""

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

from valence.models.adapters import has_adapter, is_adapter_weight, planned_adapter
from valence.models.loading import load_config, loading
from valence.models.quantized import countable


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a causal model and of the part of it that trains.

    ``parameters``, ``trained``: all weights, and those that train.
    ``layers``, ``hidden``: number of layers, and hidden size.
    ``keys``: size of the keys of an attention layer, over all heads.
    ``operands``: numbers per token that the matrices of all layers read and write (of experts, only
    the selected ones).
    ``matrix``: weights of the largest matrix of a layer.
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
    layers: int
    hidden: int
    vocabulary: int
    operands: int
    matrix: int = 0
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


def shape_of(
    model: nn.Module, *, lora: Any = None, adapter: str | None = None, quantize: bool = False
) -> Shape:
    """Count the weights of a model, loaded or on the meta device.

    lora, adapter: as for ``build_policy``; a model on the meta device gets the adapter, of another
    model without one a copy on the meta device. quantize: as for ``load_model``. Raises UserError
    when the adapter does not fit.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    head_size: int = (
        _first_value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    )
    vocabulary: int = config.num_labels if hasattr(model, "score") else config.vocab_size
    layers = decoder_layers(model)
    layer_shapes = [_base_shapes(layer) for layer in layers]
    layer_sizes = [sum(shape.numel() for shape in shapes) for shapes in layer_shapes]
    trained = parameters = sum(shape.numel() for shape in _base_shapes(model))
    # 3-dimensional weights have one matrix per expert
    matrices = [shape for shapes in layer_shapes for shape in shapes if len(shape) in (2, 3)]
    experts: int = _first_value(config, "num_experts_per_tok") or 1
    quantized = 0
    if quantize:
        packed = [w for w in model.parameters() if getattr(w, "quant_state", None) is not None]
        quantized = sum(_unpacked_shape(w).numel() for w in packed) or countable(layers)
    if (lora is not None or adapter is not None) and not has_adapter(model):
        model = planned_adapter(_on_meta(model), lora, adapter)
    adapter_shapes = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
    if has_adapter(model):
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Shape(
        parameters=parameters,
        trained=trained,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=vocabulary,
        operands=sum(sum(s[-2:]) * (experts if len(s) == 3 else 1) for s in matrices),
        matrix=max((s.numel() for s in matrices if len(s) == 2), default=0),
        adapted=sum(p.shape[1] for name, p in adapter_shapes if "lora_A" in name and p.ndim == 2),
        adapter_outputs=sum(
            p.shape[0] for name, p in adapter_shapes if "lora_B" in name and p.ndim == 2
        ),
        largest=max(layer_sizes, default=0),
        outside=parameters - sum(layer_sizes),
        quantized=quantized,
        scaled=sum(p.numel() for name, p in adapter_shapes if "lora_magnitude" in name),
        matrices=sum(p.numel() for p in hidden_matrices(model).values()),
        keys=head_size
        * (_first_value(config, "num_key_value_heads") or config.num_attention_heads),
    )


def _base_shapes(module: nn.Module) -> list[torch.Size]:
    """Return the shapes of all weights outside an adapter, before quantization."""
    return [
        _unpacked_shape(weight)
        for name, weight in module.named_parameters()
        if not is_adapter_weight(name)
    ]


def _unpacked_shape(weight: Any) -> torch.Size:
    """Return the shape of a weight before it was quantized."""
    return (getattr(weight, "quant_state", None) or weight).shape


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its weights; the model itself if it has none."""
    if all(weight.is_meta for weight in model.parameters()):
        return model
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for weight in model.parameters():
        dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
        bare = torch.empty(_unpacked_shape(weight), dtype=dtype, device="meta")
        memo[id(weight)] = nn.Parameter(bare, weight.requires_grad)
    return copy.deepcopy(model, memo)


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


def _first_value(config: Any, *names: str) -> int | None:
    """Return the value of the first of these fields that a configuration has."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
