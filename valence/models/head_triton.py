"""The elementwise part of the head on a CUDA device: one pass over a range of logits instead of
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
    found,
    reference,
    value,
    out,
    rows,
    width,
    block: tl.constexpr,
    measure: tl.constexpr,
    write: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, block)
    here = places < width
    at_column = places == tl.load(column + row)
    x = tl.load(logits + row * width + places, mask=here, other=float("-inf"))
    if measure:
        # As ``head.LEAST``. A number beyond those of float32 would have all that follows computed
        # in float64.
        top = tl.maximum(tl.max(x, 0), -3.4e38)
    else:
        top = tl.load(reference + row)
    e = tl.exp2((x - top) * 1.4426950408889634)
    if measure:
        tl.store(found + row, top)
        tl.store(found + rows + row, tl.sum(e, 0))
        tl.store(found + 2 * rows + row, tl.sum(tl.where(e > 0, e * (x - top), 0.0), 0))
        tl.store(found + 3 * rows + row, tl.sum(tl.where(at_column & here, x, 0.0), 0))
    else:
        e = tl.where(at_column, tl.load(value + row), e)
    if write:
        tl.store(out + row * width + places, e.to(out.dtype.element_ty), mask=here)


def measure(
    logits: Tensor, column: Tensor, found: Tensor, keep: torch.dtype | None
) -> Tensor | None:
    """As ``head.measure_logits``: fills found[4, N]; returns exp(logits[N, w] - largest) in the
    type ``keep``, if given.
    """
    out = None if keep is None else torch.empty_like(logits, dtype=keep)
    _launch(logits, column, found, logits, logits, out, measure=True)
    return out


def exponentials(
    logits: Tensor, column: Tensor, reference: Tensor, value: Tensor, dtype: torch.dtype
) -> Tensor:
    """As ``head.softmax_exponentials``: exp(logits[N, w] - reference[N]) as ``dtype``, with
    value[N] at column[N].
    """
    out = torch.empty_like(logits, dtype=dtype)
    _launch(logits, column, logits, reference, value, out, measure=False)
    return out


def _launch(
    logits: Tensor,
    column: Tensor,
    found: Tensor,
    reference: Tensor,
    value: Tensor,
    out: Tensor | None,
    *,
    measure: bool,
) -> None:
    rows, width = logits.shape
    if rows == 0:
        return
    tensors = logits.contiguous(), column, found, reference, value, logits if out is None else out
    block = triton.next_power_of_2(width)
    kernel: Any = _exponentials
    with torch.cuda.device_of(logits):
        kernel[(rows,)](
            *tensors, rows, width, block=block, measure=measure, write=out is not None, num_warps=8
        )
