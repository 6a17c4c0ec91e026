"""How matrix products round, where PyTorch leaves a choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def bfloat16_operands(wanted: bool) -> Iterator[None]:
    """Lets a float32 product on a CPU take operands that bfloat16 holds exactly for bfloat16 (others it may round); it is
    accumulated in, and returned as, float32 all the same."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if wanted else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
