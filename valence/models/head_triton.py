"""Triton kernels for the elementwise part of the head: one pass over a range of logits instead of
ten.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _exponentials(
    logits,
    column,
    stats,
    reference,
    value,
    out,
    rows,
    width,
    block: tl.constexpr,
    statistics: tl.constexpr,
    write: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, block)
    is_inside = places < width
    at_column = places == tl.load(column + row)
    x = tl.load(logits + row * width + places, mask=is_inside, other=float("-inf"))
    if statistics:
        # ``head.LOWEST_LOGIT``. A constant outside the range of float32 would make the rest of the
        # kernel compute in float64.
        top = tl.maximum(tl.max(x, 0), -3.4e38)
    else:
        top = tl.load(reference + row)
    e = tl.exp2((x - top) * 1.4426950408889634)
    if statistics:
        tl.store(stats + row, top)
        tl.store(stats + rows + row, tl.sum(e, 0))
        tl.store(stats + 2 * rows + row, tl.sum(tl.where(e > 0, e * (x - top), 0.0), 0))
        tl.store(stats + 3 * rows + row, tl.sum(tl.where(at_column & is_inside, x, 0.0), 0))
    else:
        e = tl.where(at_column, tl.load(value + row), e)
    if write:
        tl.store(out + row * width + places, e.to(out.dtype.element_ty), mask=is_inside)


def logit_statistics(
    logits: Tensor, column: Tensor, stats: Tensor, keep: torch.dtype | None
) -> Tensor | None:
    """``head.TorchKernels.logit_statistics``, always with the sum for the entropy: fill stats[4, N]
    and return exp(logits[N, w] - maximum) with dtype ``keep``, None without one.
    """
    out = None if keep is None else torch.empty_like(logits, dtype=keep)
    _launch(logits, column, stats, logits, logits, out, statistics=True)
    return out


def exponentials(
    logits: Tensor, column: Tensor, reference: Tensor, value: Tensor, dtype: torch.dtype
) -> Tensor:
    """``head.TorchKernels.exponentials``: exp(logits[N, w] - reference[N]) as ``dtype``, with
    value[N] at column[N].
    """
    out = torch.empty_like(logits, dtype=dtype)
    _launch(logits, column, logits, reference, value, out, statistics=False)
    return out


def _launch(
    logits: Tensor,
    column: Tensor,
    stats: Tensor,
    reference: Tensor,
    value: Tensor,
    out: Tensor | None,
    *,
    statistics: bool,
) -> None:
    rows, width = logits.shape
    if rows == 0:
        return
    tensors = logits.contiguous(), column, stats, reference, value, logits if out is None else out
    block = triton.next_power_of_2(width)
    kernel: Any = _exponentials
    with torch.cuda.device_of(logits):
        kernel[(rows,)](
            *tensors,
            rows,
            width,
            block=block,
            statistics=statistics,
            write=out is not None,
            num_warps=8,
        )
