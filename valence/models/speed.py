"""Estimate the duration of a training step: count its operations, and measure how fast this machine
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
"""Fraction of the matrix multiplication rate that a step reaches, by the dtype of its products.

Measured on a CPU: 0.50 to 0.59 in bfloat16 (0.58 to 0.70 with compiled layers), 0.65 to 0.85 in
float32. Not measured on other devices.
"""
MEASURING_SECONDS = 0.1  # for one rate
LAYER_OVERHEAD = {"cpu": (2e-3, 8e-5), "cuda": (5e-4, 0.0), "mps": (5e-4, 0.0)}
"""Seconds that a layer of a stock model needs per sampled token in addition to its products, and
additional seconds per row. Measured on two cores of a CPU, not on other devices.
"""
UNCACHED_BYTES, MAX_MATRICES = 2**27, 128
"""Bytes of weights that do not fit a CPU's cache, and the largest number of matrices for them."""


def slow(device: torch.device, dtype: torch.dtype) -> str:
    """Return a warning about a dtype that is slow on a device; empty if it is not slow.

    Bfloat16 was measured to be 60 times slower than float32 on a CPU without instructions for it.
    """
    if (
        device.type != "cpu"
        or dtype != torch.bfloat16
        or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return ""
    return (
        "this CPU has no instructions for bfloat16, so bfloat16 is many times slower than "
        "float32: set model.dtype: float32"
    )


def automatic_dtype() -> tuple[str, str]:
    """Return the dtype of ``model.dtype: auto`` on this machine, and the reason.

    Raises UserError when VALENCE_DTYPE is not a dtype.
    """
    if chosen := os.environ.get("VALENCE_DTYPE"):
        if chosen not in ("float32", "bfloat16", "float64"):
            raise UserError(
                f"{chosen!r} is not a supported dtype",
                code="environment-variable-invalid",
                where="VALENCE_DTYPE",
                fix="set it to float32, bfloat16 or float64, or unset it",
            )
        return chosen, "auto: VALENCE_DTYPE"
    if torch.cuda.is_available():
        device, has_bfloat16 = (
            "CUDA device",
            torch.cuda.is_bf16_supported(including_emulation=False),
        )
    else:
        device, has_bfloat16 = "CPU", torch.cpu._is_avx512_bf16_supported()
    return (
        ("bfloat16", f"auto: this {device} supports bfloat16")
        if has_bfloat16
        else ("float32", f"auto: this {device} has no instructions for bfloat16")
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Size of one forward pass: ``tokens`` of the decoder (each shared token once), ``scored``
    tokens of the head, and ``pairs`` of a query token and a key token.
    """

    tokens: float
    scored: float
    pairs: float

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.tokens - other.tokens, self.scored - other.scored, self.pairs - other.pairs
        )


def forward(shape: Shape, work: Work) -> float:
    """Return the floating-point operations of a forward pass."""
    return _decoder(shape, work) + 2 * shape.hidden * shape.vocabulary * work.scored


def step(
    shape: Shape, trained: Work, *measured: Work, checkpointing: Checkpointing = "off"
) -> float:
    """Return the floating-point operations that an optimizer step needs in any layout, and those of
    recomputed layers.

    measured: forward passes without a gradient, of the policy or the reference.
    """
    backward = 2 if shape.full else 1  # frozen weights need no gradient
    products = 0.0 if checkpointing == "selective_op" else RECOMPUTED[checkpointing]
    recomputed = products * _decoder(shape, trained)
    return (
        (1 + backward) * forward(shape, trained)
        + recomputed
        + sum(forward(shape, work) for work in measured)
    )


def sampling(
    shape: Shape, rows: int, prompt: int, new: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the estimated seconds to sample ``rows`` completions at once, each with ``new`` tokens
    after a prompt of ``prompt`` tokens. Every token reads all weights, and the keys and values of
    the tokens before it.
    """
    weights = shape.linear + shape.hidden * shape.vocabulary
    cached = rows * (prompt + new / 2) * 2 * shape.keys * shape.layers
    sizes = shape.hidden, shape.inner
    products = weights * seconds_per_weight(device, dtype, rows, *sizes)
    products += cached * seconds_per_weight(device, dtype, 1, *sizes)
    per_layer, per_row = LAYER_OVERHEAD[device.type]
    return new * (products + shape.layers * (per_layer + per_row * rows))


def _decoder(shape: Shape, work: Work) -> float:
    return 2 * shape.linear * work.tokens + 4 * shape.layers * shape.heads * work.pairs


@lru_cache
def matmul_rate(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> float:
    """Measure the floating-point operations per second of matrix products of the size of a
    feed-forward layer.
    """
    rows = 1024 if device.type == "cpu" else 8192
    a, b = (
        torch.randn(rows, hidden, device=device, dtype=dtype),
        torch.randn(hidden, inner, device=device, dtype=dtype),
    )
    return 2 * rows * hidden * inner / _seconds(lambda: a @ b)


@lru_cache
def seconds_per_weight(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int, inner: int
) -> float:
    """Measure the seconds per weight of a product of ``rows`` rows with a feed-forward layer's
    matrix that is not in the CPU's cache.
    """
    count = min(MAX_MATRICES, -(-UNCACHED_BYTES // (inner * hidden * dtype.itemsize)))
    matrices = [torch.ones(inner, hidden, device=device, dtype=dtype) for _ in range(count)]
    a = torch.ones(rows, hidden, device=device, dtype=dtype)
    return _seconds(lambda: [linear(a, matrix) for matrix in matrices][-1]) / (
        count * inner * hidden
    )


def _seconds(run: Callable[[], Tensor]) -> float:
    """Return the shortest duration of a call, after a first call that loads libraries."""
    float(run()[0, 0])  # blocks until the device has finished
    durations, end = list[float](), time.perf_counter() + MEASURING_SECONDS
    while not durations or time.perf_counter() < end:
        start = time.perf_counter()
        float(run()[0, 0])
        durations.append(time.perf_counter() - start)
    return min(durations)
