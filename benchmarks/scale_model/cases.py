"""Models and steps of the tables."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.scale_model.model import Layout
from valence.config.schema import LoraSettings
from valence.models.head import CACHE_BYTES, MAX_LOGITS
from valence.models.memory import NCCL_BUFFERS, Memory, predict
from valence.models.shape import Shape, shape_of

DECODERS = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}
"""Hidden size, MLP size, layers, heads, key-value heads, vocabulary, and whether the head is tied,
of Qwen2.5 0.5B and 1.5B and of Llama 3.1 8B and 70B.
"""

ROWS, SHORTEST, LONGEST = 1024, 256, 3840
MICRO_BATCH_TOKENS = 4096
"""Rows per step, their shortest and longest lengths (evenly spread) and micro-batches, in tokens.
"""


@cache
def shape(model: str, lora: bool = False, quantize: bool = False) -> Shape:
    """Shape of a model of DECODERS, trained in full or with an adapter of rank 16. quantize: frozen
    weights in 4 bits.
    """
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = DECODERS[model]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    return shape_of(llama, lora=LoraSettings(rank=16) if lora else None, quantize=quantize)


def lengths(rows: int = ROWS) -> list[int]:
    """Lengths (tokens) of the rows of a step, in random order."""
    lengths = [round(SHORTEST + (LONGEST - SHORTEST) * i / (rows - 1)) for i in range(rows)]
    random.Random(0).shuffle(lengths)
    return lengths


def memory(
    model: str, method: str, layout: Layout, *, lora: bool = False, quantize: bool = False
) -> Memory:
    """Predicted bytes per device, of which the head takes a share of 80 GB."""
    has_frozen_copy = method != "sft" and not lora
    device = torch.device("meta")  # not the CPU, so the estimate is that of a GPU
    estimate = predict(
        shape(model, lora, quantize),
        width=2,
        frozen_copy=has_frozen_copy,
        checkpointing="full",
        device=device,
        split=layout.split,
    )
    return replace(
        estimate,
        head=CACHE_BYTES["cuda"] + 4 * 4 * MAX_LOGITS["cuda"],
        communication=NCCL_BUFFERS if layout.processes > 1 else 0,
    )
