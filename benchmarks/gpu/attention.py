"""Part B: how fast is attention, and how long are its programs compiled?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.steps import median_seconds, release_memory, synchronize
from valence.models.attention import Layout, attend_by_flash
from valence.models.flex import Visible
from valence.models.layout import packed_runs, segment_table, segments_of

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


CASES = (
    AttentionCase(16_384, 160),
    AttentionCase(16_384, 600),
    AttentionCase(16_384, 4096),
    AttentionCase(16_384, 300, has_prefix=True),
)
SMALL_CASES = (
    AttentionCase(480, 160, heads=4, kv_heads=2, head_dim=16),
    AttentionCase(256, 64, heads=4, kv_heads=2, head_dim=16),
    AttentionCase(1024, 60, heads=4, kv_heads=2, head_dim=16, has_prefix=True),
)
"""Without a GPU."""
SIZES, SMALL_SIZES = (8192, 12_288, 16_384), (256, 384, 512)
"""Numbers of rows for which programs are counted; the latter without a GPU."""
PROGRAM_CASE, SMALL_PROGRAM_CASE = CASES[1], SMALL_CASES[1]


def backends_for(case: AttentionCase) -> tuple[str, ...]:
    """The backends to measure; separate: PyTorch's attention over separate documents."""
    return ("flex", "flash", *(() if case.has_prefix else ("separate",)))


def measure_attention(case: AttentionCase, backend: str, device: torch.device) -> dict[str, float]:
    """Measure the forward and the backward pass, and the first call of both, which compiles.

    FlashAttention attends to copies of shared prefixes.
    """
    run, call = _passes(case, backend, device)
    start = time.perf_counter()
    run()
    synchronize(device)
    first = time.perf_counter() - start
    forward = median_seconds(call, device, repeats=5)
    backward = max(1e-9, median_seconds(run, device, repeats=5) - forward)
    return {
        "forward_ms": forward * 1e3,
        "forward_tflops": case.flops / forward / 1e12,
        "backward_ms": backward * 1e3,
        "backward_tflops": 2.5 * case.flops / backward / 1e12,
        "tokens_per_s": case.rows / (forward + backward),
        "first_s": first,
    }


def measure_programs(
    case: AttentionCase, sizes: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Count the programs of FlexAttention that a case needs with several numbers of rows, without
    any of earlier checks and starts, and measure the seconds of their compilation.
    """
    torch.compiler.reset()
    before, compilation = counters["stats"]["unique_graphs"], 0.0
    with fresh_cache():
        for rows in sizes:
            run, _ = _passes(replace(case, rows=rows), "flex", device)
            start = time.perf_counter()
            run()
            synchronize(device)
            compilation += time.perf_counter() - start - median_seconds(run, device)
    programs = counters["stats"]["unique_graphs"] - before
    return {"sizes": len(sizes), "programs": programs, "compile_s": compilation}


def _passes(
    case: AttentionCase, backend: str, device: torch.device
) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """Return a function that runs the forward and the backward pass, and one that runs the former.

    On a CPU both are the forward pass: FlexAttention has no gradient there.
    """
    release_memory()
    torch.manual_seed(0)
    has_gradient = device.type == "cuda"
    q, k, v = (
        torch.randn(1, heads, case.rows, case.head_dim)
        .to(device, torch.bfloat16)
        .requires_grad_(has_gradient)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    table, scale = segment_table(case.segments), case.head_dim**-0.5
    segments = segments_of(table)
    if backend == "flex":
        call = partial(Visible(segments, (0,), device), q, k, v, scale, 0, 0.0)
    elif backend == "flash":
        layout = Layout(table, None, scale, runs=packed_runs(segments, device))
        call = partial(attend_by_flash, q, k, v, layout)
    else:
        call = partial(_separate_documents, q, k, v, case)
    grad = torch.ones_like(q)

    def run() -> object:
        out = call()
        return torch.autograd.grad(out, (q, k, v), grad.view(out.shape))

    return run if has_gradient else call, call


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
