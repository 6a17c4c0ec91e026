"""Step B: how fast is attention, with a program for each size and with one for all sizes?"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.steps import median_seconds, release_memory, synchronize
from valence.models.attention import ATTENTION_BACKENDS, CannotPackError, Layout
from valence.models.check import compiler_failures
from valence.models.flex import FlexVariant, Visible
from valence.models.layout import packed_runs, segment_table, segments_of
from valence.models.memory import out_of_memory

VARIANTS: tuple[FlexVariant, ...] = ("flex", "flex_dynamic")
PREFIX, BRANCHES = 400, 8


@dataclass(frozen=True)
class AttentionCase:
    """Attention of ``rows`` tokens in documents of ``length`` tokens; with a prefix, as branches
    after shared prefixes of PREFIX tokens.
    """

    rows: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    has_prefix: bool = False

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        segments: list[tuple[int, int, int]] = []
        start = 0
        while start < self.rows:
            parent = -1
            if self.has_prefix and self.rows - start > PREFIX:
                segments.append((start, start + PREFIX, -1))
                start, parent = start + PREFIX, len(segments) - 1
            for _ in range(BRANCHES if self.has_prefix else 1):
                end = min(self.rows, start + self.length)
                if end > start:
                    segments.append((start, end, parent))
                start = end
        return segments

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        lengths = [(end - start, parent) for start, end, parent in self.segments]
        return sum(n * (n + 1) // 2 + (n * PREFIX if parent >= 0 else 0) for n, parent in lengths)

    @property
    def flops(self) -> int:
        """Operations of the forward pass; the backward pass has 2.5 times as many."""
        return 4 * self.heads * self.head_dim * self.pairs

    def __str__(self) -> str:
        kind = f"prefix {PREFIX}, {BRANCHES} of {self.length}" if self.has_prefix else self.length
        return f"{self.rows} rows, {kind}"


@dataclass(frozen=True)
class AttentionFigures:
    """Seconds of the forward and the backward pass, and of the first call, which compiles."""

    case: AttentionCase
    backend: str
    forward: float = math.nan
    backward: float = math.nan
    first: float = math.nan
    failure: str = ""

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __str__(self) -> str:
        if self.failure:
            return f"{self.backend:>13} {self.case!s:32} {self.failure}"
        flops = self.case.flops / 1e12
        return (
            f"{self.backend:>13} {self.case!s:32} forward {self.forward * 1e3:8.3f} ms "
            f"({flops / self.forward:4.0f} TFLOP/s), backward {self.backward * 1e3:8.3f} ms "
            f"({2.5 * flops / self.backward:4.0f} TFLOP/s), first call {self.first:5.1f} s"
        )


CASES = (
    *(AttentionCase(rows, n) for rows in (8192, 16_384, 32_768) for n in (160, 600, 4096)),
    AttentionCase(16_384, 300, has_prefix=True),
)
SMALL_CASES = (
    AttentionCase(256, 64, heads=4, kv_heads=2, head_dim=16),
    AttentionCase(1024, 60, heads=4, kv_heads=2, head_dim=16, has_prefix=True),
)
"""Without a GPU."""


def measure_attention(
    case: AttentionCase, device: torch.device, repeats: int
) -> Iterator[AttentionFigures]:
    """Measure each variant of FlexAttention, FlashAttention for sequences of different lengths
    (with copies of shared prefixes), and PyTorch's attention over separate documents.
    """
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, case.rows, case.head_dim).to(device, torch.bfloat16).requires_grad_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    table, scale = segment_table(case.segments), case.head_dim**-0.5
    segments = segments_of(table)
    calls: dict[str, Any] = {}
    for variant in VARIANTS:
        visible = Visible(segments, (0,), device, variant)
        calls[variant] = partial(visible, q, k, v, scale, 0, 0.0)
    layout = Layout(table, None, scale, runs=packed_runs(segments, device))
    calls["flash"] = partial(ATTENTION_BACKENDS["flash"].attend, q, k, v, layout)
    if not case.has_prefix:
        calls["sdpa"] = partial(_separate_documents, q, k, v, case)
    for backend, call in calls.items():
        try:
            yield _measure(case, backend, call, (q, k, v), repeats)
        except (CannotPackError, *compiler_failures()) as error:
            reason = "out of memory" if out_of_memory(error) else str(error).splitlines()[0]
            yield AttentionFigures(case, backend, failure=reason)
        release_memory(device)


def _measure(
    case: AttentionCase, backend: str, call: Any, inputs: tuple[Tensor, ...], repeats: int
) -> AttentionFigures:
    device = inputs[0].device
    start = time.perf_counter()
    out = call()
    grad = torch.ones_like(out)

    def run() -> None:
        torch.autograd.grad(call(), inputs, grad)

    run()
    synchronize(device)
    first = time.perf_counter() - start
    forward = median_seconds(call, device, repeats)
    backward = max(1e-9, median_seconds(run, device, repeats) - forward)
    return AttentionFigures(case, backend, forward, backward, first)


def _separate_documents(q: Tensor, k: Tensor, v: Tensor, case: AttentionCase) -> Tensor:
    """Causal attention [1, H, T, D] of documents of equal length, as one batch; the rest of the
    rows are one more call.
    """
    end = case.rows - case.rows % case.length
    groups = case.heads // case.kv_heads
    parts: list[Tensor] = []
    for rows, length in ((slice(0, end), case.length), (slice(end, None), case.rows - end)):
        if not length or not q[:, :, rows].shape[2]:
            continue
        batch = [x[0, :, rows].unflatten(1, (-1, length)).transpose(0, 1) for x in (q, k, v)]
        batch[1:] = [x.repeat_interleave(groups, 1) for x in batch[1:]]
        out = scaled_dot_product_attention(batch[0], batch[1], batch[2], is_causal=True)
        parts.append(out.transpose(0, 1).flatten(1, 2)[None])
    return torch.cat(parts, 2)
