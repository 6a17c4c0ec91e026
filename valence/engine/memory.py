"""How much memory a run will need, from the shape of its model and before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from valence.engine.head import CHUNK


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes of each part, and the parameters counted."""

    parameters: int
    trained: int
    weights: int
    reference: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.reference + self.optimizer + self.activations


def skeleton(name: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> nn.Module:
    """The model's layers without memory behind them."""
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def predict(model: nn.Module, *, width: int, lora: Any, tokens: int, frozen_copy: bool, checkpointing: bool) -> Memory:
    """Bytes of a run. width: bytes of one number of the computation; tokens: of the largest micro-batch.

    Weights that train are float32 masters, with a gradient and two moments each. Activations are what the layers keep for the
    backward pass: about 16 hidden-sized and 4 feed-forward-sized numbers per token and layer (one hidden-sized when they
    are computed again), and a few copies of one chunk of float32 logits. An estimate: within about 30 % for dense models.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    parameters = sum(p.numel() for p in model.parameters())
    if lora is None:
        trained, weights = parameters, parameters * max(width, 4)
    else:
        wanted = None if lora.targets == "all-linear" else tuple(lora.targets)
        head = model.get_output_embeddings()  # type: ignore[operator]
        layers = [
            m
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and m is not head and (wanted is None or name.endswith(wanted))
        ]
        trained = sum(lora.rank * (m.in_features + m.out_features) for m in layers)
        weights = parameters * width + trained * 4
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    per_token = config.num_hidden_layers * (hidden if checkpointing else 16 * hidden + 4 * inner) * width
    logits = 4 * CHUNK * config.vocab_size * 4
    return Memory(
        parameters=parameters,
        trained=trained,
        weights=weights,
        reference=parameters * width if frozen_copy else 0,
        optimizer=trained * 12,
        activations=tokens * per_token + logits,
    )
