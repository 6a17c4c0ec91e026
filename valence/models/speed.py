"""How long a training step will take: its operations, counted, and the rate at which this machine
multiplies matrices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from valence.errors import UserError
from valence.models.memory import RECOMPUTED

if TYPE_CHECKING:
    from valence.models.checkpointing import Checkpointing
    from valence.models.shape import Shape

EFFICIENCY = {torch.bfloat16: 0.55, torch.float32: 0.75, torch.float64: 0.75}
"""Share of that rate which a step reaches, by the type of its products.

Seen on a CPU: 0.50 to 0.59 in bfloat16 (0.58 to 0.70 with compiled layers), 0.65 to 0.85 in
float32. Not measured on other devices.
"""
MEASURED = 0.1  # seconds that finding out a rate may take
BESIDES = {"cpu": (2e-3, 8e-5), "cuda": (5e-4, 0.0), "mps": (5e-4, 0.0)}
"""Seconds that a layer of a stock model takes besides its products when a token is sampled, and
more for each row. Seen on two cores of a CPU; not measured on other devices.
"""
COLD, MANY = 2**27, 128
"""Bytes of weights that are no longer in a CPU's cache when their turn comes again; most matrices,
as small ones stay there.
"""


def slow(device: torch.device, dtype: torch.dtype) -> str:
    """Why a type is a poor choice on a device, in a sentence; empty where it is not.

    A CPU without instructions for bfloat16 was seen to multiply in it 60 times slower than in
    float32.
    """
    if (
        device.type != "cpu"
        or dtype != torch.bfloat16
        or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return ""
    return (
        "this CPU has no instructions for bfloat16, which makes it many times slower than "
        "float32: set model.dtype: float32"
    )


def automatic_dtype() -> tuple[str, str]:
    """The type that ``model.dtype: auto`` stands for on this machine, and why."""
    if chosen := os.environ.get("VALENCE_DTYPE"):
        if chosen not in ("float32", "bfloat16", "float64"):
            fix = "set it to float32, bfloat16 or float64, or unset it"
            raise UserError(
                f"{chosen!r} is not a supported dtype",
                code="environment-variable-invalid",
                where="VALENCE_DTYPE",
                fix=fix,
            )
        return chosen, "auto: VALENCE_DTYPE"
    if torch.cuda.is_available():
        device, narrow = "CUDA device", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        device, narrow = "CPU", torch.cpu._is_avx512_bf16_supported()
    return (
        ("bfloat16", f"auto: this {device} multiplies bfloat16")
        if narrow
        else ("float32", f"auto: this {device} does not multiply bfloat16")
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass runs: ``tokens`` through the decoder (shared ones once), ``scored`` ones
    through the head, and ``pairs`` of a token and one that it sees.
    """

    tokens: float
    scored: float
    pairs: float

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.tokens - other.tokens, self.scored - other.scored, self.pairs - other.pairs
        )


def forward(shape: Shape, work: Work) -> float:
    """Floating-point operations of a forward pass."""
    return _decoder(shape, work) + 2 * shape.hidden * shape.vocabulary * work.scored


def step(
    shape: Shape, trained: Work, *measured: Work, checkpointing: Checkpointing = "off"
) -> float:
    """Floating-point operations of an optimizer step that no layout can avoid, and those of
    recomputed layers.

    measured: what only goes forward, through the policy or the reference.
    """
    back = 2 if shape.full else 1  # frozen weights need no gradient of their own
    again = RECOMPUTED[checkpointing] * _decoder(shape, trained)
    return (
        (1 + back) * forward(shape, trained)
        + again
        + sum(forward(shape, work) for work in measured)
    )


def sampling(
    shape: Shape, rows: int, prompt: int, new: int, device: torch.device, dtype: torch.dtype
) -> float:
    """About how many seconds it takes to sample so many answers at once, of ``new`` tokens each
    behind prompts of ``prompt``: every token runs through all weights, and through the keys and
    values of those before it.
    """
    weights = shape.linear + shape.hidden * shape.vocabulary
    seen = rows * (prompt + new / 2) * 2 * shape.keys * shape.layers
    sizes = shape.hidden, shape.inner
    products = weights * per_weight(device, dtype, rows, *sizes) + seen * per_weight(
        device, dtype, 1, *sizes
    )
    each, more = BESIDES[device.type]
    return new * (products + shape.layers * (each + more * rows))


def _decoder(shape: Shape, work: Work) -> float:
    return 2 * shape.linear * work.tokens + 4 * shape.layers * shape.heads * work.pairs


@lru_cache
def matmul_rate(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> float:
    """Floating-point operations per second of products as large as a feed-forward layer's, measured
    now.
    """
    rows = 1024 if device.type == "cpu" else 8192
    a, b = (
        torch.randn(rows, hidden, device=device, dtype=dtype),
        torch.randn(hidden, inner, device=device, dtype=dtype),
    )
    return 2 * rows * hidden * inner / _seconds(lambda: a @ b)


@lru_cache
def per_weight(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int, inner: int
) -> float:
    """Seconds for each weight of a product of so many rows with a feed-forward layer's matrix that
    is in no cache, measured now.
    """
    count = min(MANY, -(-COLD // (inner * hidden * dtype.itemsize)))
    matrices = [torch.ones(inner, hidden, device=device, dtype=dtype) for _ in range(count)]
    a = torch.ones(rows, hidden, device=device, dtype=dtype)
    return _seconds(lambda: [linear(a, matrix) for matrix in matrices][-1]) / (
        count * inner * hidden
    )


def _seconds(run: Callable[[], Tensor]) -> float:
    """The least that it takes. Its first call, which loads libraries, does not count."""
    float(run()[0, 0])  # waits for the device
    taken, end = list[float](), time.perf_counter() + MEASURED
    while not taken or time.perf_counter() < end:
        began = time.perf_counter()
        float(run()[0, 0])
        taken.append(time.perf_counter() - began)
    return min(taken)
