"""What a model is made of, counted before any of its weights are loaded: for planning."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from valence.models.adapters import planned_adapter
from valence.models.loading import LOADING_ERRORS, cannot_load, must_exist
from valence.models.quantized import countable
from valence.models.scores import is_reward_model


@dataclass(frozen=True, slots=True)
class Shape:
    """A causal model and what of it trains.

    ``linear``: weights that each token is multiplied with in the decoder's layers (of experts,
    those that it is sent to). ``inner``, ``heads``, ``keys``: numbers of a token inside a
    feed-forward layer, and in all heads of an attention layer, of its queries and of its keys.
    ``vocabulary``: numbers that the model's head gives (a reward model's: scores). ``adapted``:
    inputs of all linear layers with an adapter, in numbers per token. ``largest``: weights of the
    largest of the decoder's layers; ``outside``: those of no layer (embedding, head).
    ``quantized``: weights that are kept in 4 bits. ``scaled``: outputs of all layers with DoRA, in
    numbers per token. ``matrices``: weights that train in matrices of hidden layers.
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

    @property
    def full(self) -> bool:
        """Do all weights train?"""
        return self.trained == self.parameters


def skeleton(
    name: str,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    scores: int | None = None,
) -> nn.Module:
    """The model's layers without memory behind them; with so many scores as a reward model's.

    Raises UserError when there is no such model.
    """
    must_exist(name, "model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
        kind = AutoModelForCausalLM
        if scores is not None:
            kind, config.num_labels = AutoModelForSequenceClassification, scores
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error


def skeleton_of(model: Any) -> nn.Module:
    """The layers of a model at hand, without its weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def shape_of(
    model: nn.Module, *, lora: Any = None, adapter: str | None = None, quantize: bool = False
) -> Shape:
    """Counts a skeleton (which it may change). lora, adapter: as for ``build_policy``; quantize: as
    for ``load_model``.

    Raises UserError when the adapter does not fit.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    experts: int = _of(config, "num_experts_per_tok") or 1
    inner: int = _of(config, "moe_intermediate_size", "intermediate_size") or 4 * config.hidden_size
    head: int = _of(config, "head_dim") or config.hidden_size // config.num_attention_heads
    trained = parameters = sum(p.numel() for p in model.parameters())
    linear, adapted, scaled = _multiplied(model, experts), 0, 0
    whole: nn.Module = model
    layers = decoder_layers(model)
    each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    quantized = countable(layers) if quantize else 0
    if lora is not None or adapter is not None:
        whole = planned = planned_adapter(model, lora, adapter)
        trained = sum(p.numel() for p in planned.parameters() if p.requires_grad)
        adapted = sum(
            p.shape[1] for name, p in planned.named_parameters() if "lora_A" in name and p.ndim == 2
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
        heads=head * config.num_attention_heads,
        vocabulary=config.num_labels if is_reward_model(model) else config.vocab_size,
        adapted=adapted,
        largest=max(each, default=0),
        outside=parameters - sum(each),
        quantized=quantized,
        scaled=scaled,
        matrices=sum(p.numel() for p in hidden_matrices(whole).values()),
        keys=head * (_of(config, "num_key_value_heads") or config.num_attention_heads),
    )


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices that train, by name, without those of the embedding and of the head."""
    edges: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            ends = module.get_input_embeddings(), module.get_output_embeddings()
            edges += [end for end in (*ends, getattr(module, "score", None)) if end is not None]
    excluded = {id(p) for module in edges for p in module.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and id(p) not in excluded
    }


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, first to last; none of a model that has no list of them."""
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


def _multiplied(model: Any, experts: int) -> int:
    """Weights of the decoder's products for one token: no table that is looked up in, and not the
    head.
    """
    head = model.get_output_embeddings()
    tables = [
        module for module in model.modules() if isinstance(module, nn.Embedding) or module is head
    ]
    apart = {id(p) for module in tables for p in module.parameters()}
    weights = [p for p in model.parameters() if id(p) not in apart]
    # a matrix for each expert
    stacked = [p.numel() // p.shape[0] * experts for p in weights if p.ndim == 3]
    return sum(stacked) + sum(p.numel() for p in weights if p.ndim == 2)


def _of(config: Any, *names: str) -> int | None:
    """The first of these entries that a configuration has."""
    return next((found for name in names if (found := getattr(config, name, None))), None)
