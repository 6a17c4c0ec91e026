"""Frozen weights of 4 bits (QLoRA: Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from valence.errors import UserError, install_command

BYTES = 0.53
"""Of a weight: 4 bits, an 8-bit scale for every 64 of them, a scale of those, and tables; a little
more on small layers.
"""
STATES = 0.03
"""Those of scales and tables."""


def check_library() -> None:
    """Raises UserError when the library that keeps weights in 4 bits is missing."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "4-bit weights need bitsandbytes, which is not installed",
            code="library-missing",
            where="model.quantize",
            fix=install_command("eightbit"),
        )


def how(dtype: torch.dtype) -> Any:
    """What transformers is told: nf4 with scales that are quantized too, products in ``dtype``, and
    bytes that are kept as numbers of that type, so that they are split over processes with the
    weights beside them.
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
    """Whether any layer keeps its weights in 4 bits."""
    return any(True for _ in _layers(model))


def packed(model: nn.Module) -> set[int]:
    """The ids of weights whose bytes are no numbers of their type, and must not be cast."""
    return {id(layer.weight) for _, layer in _layers(model)}


def states(model: nn.Module) -> dict[str, Tensor]:
    """Scales and tables of each layer, named as in its state_dict.

    They are whole on every process, also where weights are split and the state_dict has them no
    more.
    """
    return {
        f"{path}.weight.{name}": value
        for path, layer in _layers(model)
        for name, value in layer.quant_state.as_dict(packed=True).items()
    }


def compute_alike(model: nn.Module) -> nn.Module:
    """Has layers compute in one way. bitsandbytes would pack weights anew on some CPUs as soon as a
    model is evaluated, and round otherwise from then on: policy and reference would differ, and so
    would the weights' digest.
    """
    for _, layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False
    return model


def countable(layers: list[nn.Module]) -> int:
    """Weights of these layers (of a model that is not quantized) that would be kept in 4 bits:
    those of linear layers, but not of experts that are kept as one tensor.
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
    """Name and module of each layer of 4 bits.

    Known by what it has: the library is loaded by those who need it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module, "quant_state"):
            yield name, module
