"""How long a training step will take: its operations, counted, and the rate at which this machine multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from valence.engine.memory import RECOMPUTED

if TYPE_CHECKING:
    from valence.engine.checkpointing import Checkpointing
    from valence.engine.shape import Shape

EFFICIENCY = {torch.bfloat16: 0.55, torch.float32: 0.75, torch.float64: 0.75}
"""Share of that rate which a step reaches, by the type of its products. Seen on a CPU: 0.50 to 0.59 in bfloat16 (0.58 to 0.70
with compiled layers), 0.65 to 0.85 in float32. Not measured on other devices."""
MEASURED = 0.3  # seconds that finding out the rate may take


def slow(device: torch.device, dtype: torch.dtype) -> str:
    """Why a type is a poor choice on a device, in a sentence; empty where it is not. A CPU without instructions for
    bfloat16 was seen to multiply in it 60 times slower than in float32."""
    if device.type != "cpu" or dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ""
    return "this CPU has no instructions for bfloat16, which makes it many times slower than float32: set model.dtype: float32"


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass runs: ``tokens`` through the decoder (shared ones once), ``scored`` ones through the head, and ``pairs`` of a
    token and one that it sees."""

    tokens: float
    scored: float
    pairs: float

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.scored - other.scored, self.pairs - other.pairs)


def forward(shape: Shape, work: Work) -> float:
    """Floating-point operations of a forward pass."""
    return _decoder(shape, work) + 2 * shape.hidden * shape.vocabulary * work.scored


def step(shape: Shape, trained: Work, *measured: Work, checkpointing: Checkpointing = "off") -> float:
    """Floating-point operations of an optimizer step that no layout can avoid, and those of recomputed layers.

    measured: what only goes forward, through the policy or the reference.
    """
    back = 2 if shape.full else 1  # frozen weights need no gradient of their own
    again = RECOMPUTED[checkpointing] * _decoder(shape, trained)
    return (1 + back) * forward(shape, trained) + again + sum(forward(shape, work) for work in measured)


def _decoder(shape: Shape, work: Work) -> float:
    return 2 * shape.linear * work.tokens + 4 * shape.layers * shape.heads * work.pairs


@lru_cache
def matmul_rate(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> float:
    """Floating-point operations per second of products as large as a feed-forward layer's, measured now."""
    rows = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(rows, hidden, device=device, dtype=dtype), torch.randn(hidden, inner, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + MEASURED
    while time.perf_counter() < end:
        began = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * rows * hidden * inner / best
