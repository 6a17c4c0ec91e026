"""How matrix products round, where PyTorch leaves a choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class _Inside:
    """How many blocks are open, in all threads: the choice is one of the process, and ends with the
    last of them.
    """

    count, before = 0, "none"
    lock = Lock()


@contextmanager
def bfloat16_operands(wanted: bool) -> Iterator[None]:
    """Lets a float32 product on a CPU take operands that bfloat16 holds exactly for bfloat16
    (others it may round); it is accumulated in, and returned as, float32 all the same.
    """
    if not wanted:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _Inside.lock:
        if not _Inside.count:
            _Inside.before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        _Inside.count += 1
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.count -= 1
            if not _Inside.count:
                matmul.fp32_precision = _Inside.before
