"""Models, machines and steps of the tables, with the source of every constant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.scale_model.model import Job, Layout, Machine, distribute_rows, sharded
from valence.config.schema import LoraSettings
from valence.models.checkpointing import Checkpointing
from valence.models.head import CACHE_BYTES, MAX_LOGITS
from valence.models.memory import NCCL_BUFFERS, Memory, Split, predict
from valence.models.shape import Shape, shape_of
from valence.models.speed import Work

DECODERS = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}
"""Hidden size, MLP size, layers, heads, key-value heads, vocabulary, and whether the head is tied,
of Qwen2.5 0.5B and 1.5B and of Llama 3.1 8B and 70B.
"""

HBM, MARGIN = 80e9, 0.8
"""Memory of an H100 (bytes), and the share of it that `shard: auto` plans to fill."""
PEAK, SHARE = 989e12, 0.35
NVLINK, NETWORK, REACHED = 450e9, 400e9, 0.8
H100 = Machine(
    flops=SHARE * PEAK,
    memory=REACHED * 3.35e12,
    near=REACHED * NVLINK,
    far=REACHED * NETWORK,
    start=8.4e-6,
    near_hop=3.4e-6,
    far_hop=14e-6,
)
CONSTANTS = (
    (
        "matrix multiplications, bfloat16",
        "989 TFLOPS",
        "vendor: data sheets of H100 SXM and H200, without sparsity",
    ),
    (
        "fraction of this that a step reaches",
        f"{SHARE:.2f}",
        "assumed: fitted so that the prediction for 8 GPUs below equals the published figure",
    ),
    ("memory", "80 GB at 3.35 TB/s (H200: 141 GB at 4.8 TB/s)", "vendor: the same data sheets"),
    ("links within a host", "450 GB/s each way", "vendor: NVLink 4, 900 GB/s both ways together"),
    (
        "links between hosts",
        "8 times 400 Gb/s",
        "vendor: a ConnectX-7 for each GPU, as in the DGX H100 user guide",
    ),
    ("share of links and memory that is reached", f"{REACHED:.1f}", "assumed"),
    (
        "start of a collective, hop within a host, between hosts",
        "8.4, 3.4, 14 us",
        "NCCL's own model of rings (`tuning.cc`)",
    ),
    (
        "overlap of collectives and matrix multiplications",
        "complete",
        "assumed: neither slows the other",
    ),
)

ROWS, SHORTEST, LONGEST = 1024, 256, 3840
MICRO_BATCH_TOKENS = 4096
"""Rows per step, their shortest and longest lengths (evenly spread) and micro-batches, in tokens.
"""
PROMPT_SHARE = 0.25
"""Share of the tokens of a row that are its prompt."""
FULL: Checkpointing = "full"


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


def work(rows: Sequence[int], answers: int = 1) -> Work:
    """Work of a pass over rows of these lengths, each with a prompt and ``answers`` completions."""
    tokens = scored = pairs = 0.0
    for length in rows:
        prompt, answer = PROMPT_SHARE * length, (1 - PROMPT_SHARE) * length / answers
        tokens += length
        scored += answer * answers
        pairs += prompt * prompt / 2 + answers * (answer * prompt + answer * answer / 2)
    return Work(tokens, scored, pairs)


def passes(method: str) -> tuple[Work, tuple[Work, ...]]:
    """Work with a gradient, and work of each pass without one, with an empty reference cache."""
    trained = work(lengths(), 2 if method == "dpo" else 1)
    # kto: reference and policy also run the mismatched completions
    measured = {
        "sft": (),
        "dpo": (trained,),
        "kto": (trained, trained, trained),
    }
    return trained, measured[method]


def job(model: str, method: str, layout: Layout, *, lora: bool = False) -> Job:
    """The step that the tables predict."""
    count, balance = distribute_rows(lengths(), layout, MICRO_BATCH_TOKENS)
    trained, measured = passes(method)
    return Job(shape(model, lora), trained, measured, count, balance, checkpointing=FULL)


def automatic_layout(
    model: str, method: str, processes: int, *, lora: bool = False, tensor: int = 1
) -> Layout:
    """The layout that `shard: auto` and `sync: auto` choose on an H100."""
    layout = Layout(processes, Split(tensor=tensor))
    fits = memory(model, method, layout, lora=lora).total(MICRO_BATCH_TOKENS) <= MARGIN * HBM
    return layout if fits else sharded(processes, tensor=tensor, sync_every_micro_batch=not lora)


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
        checkpointing=FULL,
        device=device,
        split=layout.split,
    )
    return replace(
        estimate,
        head=CACHE_BYTES["cuda"] + 4 * 4 * MAX_LOGITS["cuda"],
        communication=NCCL_BUFFERS if layout.processes > 1 else 0,
    )


PUBLISHED = (("8 GPUs", 8, 5762), ("128 GPUs", 128, 5605))
"""Tokens per second per GPU of Llama 3.1 8B: bfloat16 and FSDP2, not compiled, two rows of 8,192
tokens per GPU, layers recomputed in part; H100 at 500 W with 400 Gb/s each. Tables 1 and 3 of
llama3_h100_202412_torchtitan.md of torchtitan.
"""


def published(layout: Layout) -> Job:
    """The step of the published figures."""
    tokens = 2 * 8192.0 * layout.processes
    return Job(shape("8B"), Work(tokens, tokens, tokens * 8192 / 2), checkpointing="selective")
