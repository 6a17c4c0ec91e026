"""Step A: are values and gradients on this device right?

Packed sequences of several thousand tokens, which fill many blocks of attention, are compared with
the model's own forward of one sequence at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.step.cases import Shape
from benchmarks.step.inputs import config_of
from valence.batching.micro_batches import make_micro_batch
from valence.models.build import build_policy
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch, Origin, TokenizedCompletion, TokenizedExample

GROUPED = Shape(
    "7 heads to a key",
    vocabulary=512,
    hidden=256,
    intermediate=384,
    layers=2,
    heads=7,
    kv_heads=1,
    head_dim=64,
)
GROUPED_SMALL = replace(
    GROUPED, vocabulary=128, hidden=32, intermediate=48, head_dim=16, name="small"
)
PROMPT_TOKENS, NUM_COMPLETIONS = 400, 8
BACKENDS = ("flex", "flex_small", "flex_dynamic", "flash", "sdpa")
BOUNDS = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.05)}
"""Largest difference of a log-probability (nats), and relative difference of the gradient."""


def backends_for(dtype: torch.dtype) -> list[str]:
    """The attention backends to compare. FlashAttention does not compute float32."""
    return [name for name in BACKENDS if name != "flash" or dtype != torch.float32]


def long_batch(vocabulary: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch of 2,900 tokens: a prompt of 400 tokens with 8 completions of different
    lengths, two of them without a gradient, and two separate sequences. The passes with and without
    a gradient have different sizes.
    """
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(count))

    def example(name: str, prompt: int, *completions: int) -> TokenizedExample:
        return TokenizedExample(
            id=name,
            origin=Origin("random", 1),
            kind="ranking" if len(completions) > 1 else "judgement",
            prompt_ids=ids(prompt),
            prompt_mask=(False,) * prompt,
            answers=tuple(
                TokenizedCompletion(ids(count), (True,) * count) for count in completions
            ),
            label=None if len(completions) > 1 else True,
            scores=(0.0,) * len(completions) if len(completions) > 1 else (),
        )

    lengths = [60 + 45 * k for k in range(NUM_COMPLETIONS)]
    examples = [
        example("group", PROMPT_TOKENS, *lengths),
        example("long", 130, 570),
        example("short", 3, 57),
    ]
    batch = make_micro_batch(examples, device=device)
    is_measured = {1, NUM_COMPLETIONS - 1, NUM_COMPLETIONS + 1}
    return replace(batch, requires_grad=tuple(s not in is_measured for s in range(batch.sequences)))


def compare_with_one_by_one(
    policy: PolicyModel, batch: MicroBatch, backend: str
) -> tuple[float, float]:
    """Return the largest difference of a log-probability (nats), and the difference of the gradient
    relative to its norm, between a backend of packed attention and one sequence at a time.

    The gradient is that of the sum of the log-probabilities, weighted by random numbers.
    """
    slopes = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    slopes = slopes.to(policy.device)
    results: list[tuple[Tensor, list[Tensor]]] = []
    before = policy.attention_backend
    try:
        for is_packed in (False, True):
            policy.lay_out(packed=is_packed, attention=backend)
            policy.zero_grad()
            policy.max_joint_rows = 0
            logp = policy(batch).logp
            (logp * slopes).sum().backward()
            grads = [p.grad.float().cpu() for p in policy.parameters() if p.grad is not None]
            results.append((logp.detach().float().cpu(), grads))
    finally:
        del policy.max_joint_rows
        policy.lay_out(packed=True, attention=before)
        policy.zero_grad()
    (expected, exact_grads), (logp, grads) = results
    error = torch.cat([(x - y).flatten() for x, y in zip(grads, exact_grads, strict=True)]).norm()
    norm = torch.cat([x.flatten() for x in exact_grads]).norm()
    return (logp - expected).abs().max().item(), (error / norm).item()


def grouped_policy(shape: Shape, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    """Return a policy with random weights, seven query heads to a key head."""
    torch.manual_seed(0)
    model: nn.Module = Qwen3ForCausalLM(config_of(shape)).to(device)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.mul_(3)  # attention of fresh weights is nearly uniform
    return build_policy(model, dtype=dtype)


def measure_errors(
    device: torch.device, shape: Shape
) -> Iterator[tuple[str, torch.dtype, float, float]]:
    """Yield the backend, the dtype of products, and the errors of ``compare_with_one_by_one``."""
    for dtype in BOUNDS:
        policy = grouped_policy(shape, dtype, device)
        batch = long_batch(shape.vocabulary, device)
        for backend in backends_for(dtype):
            yield backend, dtype, *compare_with_one_by_one(policy, batch, backend)
