"""How much memory a run will need, from the shape of its model and before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from valence.engine.adapters import planned_adapter
from valence.engine.head import CHUNK
from valence.engine.loading import LOADING_ERRORS, cannot_load, must_exist


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes of each part, and the parameters counted."""

    parameters: int
    trained: int
    weights: int
    reference: int
    optimizer: int
    activations: int
    program: int = 400_000_000
    """Python and its libraries (on a CUDA device about as much for its context)."""

    @property
    def total(self) -> int:
        return self.program + self.weights + self.reference + self.optimizer + self.activations


def skeleton(name: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> nn.Module:
    """The model's layers without memory behind them. Raises UserError when there is no such model."""
    must_exist(name, "model.name")
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **extra)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise cannot_load("model", name, error) from error


def predict(
    model: nn.Module, *, width: int, lora: Any, tokens: int, frozen_copy: bool, checkpointing: bool, adapter: str | None = None
) -> Memory:
    """Bytes of a run. model: a skeleton; width: bytes of one number of the computation; tokens: of the largest micro-batch;
    lora, adapter: as for ``build_policy``. Raises UserError when the adapter does not fit.

    Weights that train are float32 masters, with a gradient and two moments each. Activations are what the layers keep for the
    backward pass: about 16 hidden-sized (float32 over float32 masters) and 4 feed-forward-sized numbers per token and layer, and
    under an adapter that computes in float32 a copy of the input of each layer that it is on; a third of it when they are
    computed again. To it come a few copies of one chunk of float32 logits.
    Largest resident set of two steps on a CPU (SmolLM2-135M, sequences of 350 tokens), measured and predicted in GB: LoRA
    of rank 16 in bfloat16 2.8 and 2.4 (1400 tokens), 4.4 and 3.9 (3000), recomputed 1.5 and 1.6, 1.9 and 2.1; in float32
    5.1 and 4.8 (1400); all weights in float32 5.3 and 5.5, in bfloat16 4.8 and 5.0, recomputed 3.4 and 3.7 (1400).
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator]
    parameters = sum(p.numel() for p in model.parameters())
    full = lora is None and adapter is None
    masters = max(width, 4)
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    kept = 16 * hidden * (masters if full else width) + 4 * inner * width
    if full:
        trained, weights, copies = parameters, parameters * masters, 0
    else:
        planned = planned_adapter(model, lora, adapter)
        trained = sum(p.numel() for p in planned.parameters() if p.requires_grad)
        weights = parameters * width + trained * masters
        inputs = sum(p.shape[1] for name, p in planned.named_parameters() if "lora_A" in name and p.ndim == 2)
        copies = inputs * masters // config.num_hidden_layers if width == masters else 0
    per_token = config.num_hidden_layers * (kept + copies) // (3 if checkpointing else 1)
    return Memory(
        parameters=parameters,
        trained=trained,
        weights=weights,
        reference=parameters * (masters if full else width) if frozen_copy else 0,
        optimizer=trained * 3 * masters,
        activations=tokens * per_token + 4 * CHUNK * config.vocab_size * 4,
    )
