"""Frozen 4-bit weights (QLoRA: Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from valence.errors import UserError, install_command

BYTES = 0.53
"""Bytes per weight: 4 bits, an 8-bit scale for every 64 weights, a scale of the scales, and tables;
slightly more on small layers.
"""
STATES = 0.03
"""Bytes per weight of scales and tables."""


def check_library() -> None:
    """Raise UserError when bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "4-bit weights need bitsandbytes, which is not installed",
            code="library-missing",
            where="model.quantize",
            fix=install_command("eightbit"),
        )


def quantization_config(dtype: torch.dtype) -> Any:
    """Return transformers' settings: nf4 with quantized scales, and products in ``dtype``.

    The bytes are stored as numbers of that dtype, so that they are sharded with other weights.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def is_quantized(model: nn.Module) -> bool:
    """Return whether any layer has 4-bit weights."""
    return any(True for _ in _layers(model))


def packed_weights(model: nn.Module) -> set[int]:
    """Return the ids of weights that store 4-bit numbers, which must not be cast."""
    return {id(layer.weight) for _, layer in _layers(model)}


def states(model: nn.Module) -> dict[str, Tensor]:
    """Return the scales and tables of each layer, named as in its state_dict.

    Every process has all of them, also with sharded weights, where the state_dict omits them.
    """
    return {
        f"{path}.weight.{name}": value
        for path, layer in _layers(model)
        for name, value in layer.quant_state.as_dict(packed=True).items()
    }


def disable_cpu_repacking(model: nn.Module) -> nn.Module:
    """Disable a repacking of weights in bitsandbytes and return the model. On some CPUs evaluation
    would repack them, with other rounding from then on: policy and reference would differ, and so
    would the digest of the weights.
    """
    for _, layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False
    return model


def countable(layers: list[nn.Module]) -> int:
    """Return the number of weights of these unquantized layers that would be stored in 4 bits:
    those of linear layers, but not of experts in a single tensor.
    """
    from transformers.pytorch_utils import Conv1D

    linear: list[Any] = [
        module
        for layer in layers
        for module in layer.modules()
        if type(module) in (nn.Linear, Conv1D)
    ]
    return sum(module.weight.numel() for module in linear)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of each 4-bit layer, identified by an attribute, so that the library is
    not imported.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module, "quant_state"):
            yield name, module
