"""Rounding of the operands of matrix products on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class _OpenBlocks:
    """Number of open blocks in all threads, and the setting before the first: it applies to the
    process, and is restored when the last block ends.
    """

    count, previous = 0, "none"
    lock = Lock()


@contextmanager
def bfloat16_operands(enabled: bool) -> Iterator[None]:
    """Inside the block float32 products on a CPU may round their operands to bfloat16, which is
    exact for operands that bfloat16 can represent. Products are accumulated and returned in
    float32.
    """
    if not enabled:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _OpenBlocks.lock:
        if not _OpenBlocks.count:
            _OpenBlocks.previous, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        _OpenBlocks.count += 1
    try:
        yield
    finally:
        with _OpenBlocks.lock:
            _OpenBlocks.count -= 1
            if not _OpenBlocks.count:
                matmul.fp32_precision = _OpenBlocks.previous
