"""The dtype of a run that names none, and a warning about slow ones."""

from __future__ import annotations

import os

import torch

from valence.errors import UserError


def slow_dtype(device: torch.device, dtype: torch.dtype) -> str:
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
