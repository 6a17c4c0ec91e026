"""PyTorch, imported at its first use.

The names of losses, their settings and their documentation can then be read in milliseconds,
without the seconds that ``import torch`` takes. Loss modules write ``from valence.losses.lazy
import Tensor, torch``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "logsigmoid", "torch"]


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")
    Tensor = Any  # annotations only


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)) without overflow: ``torch.nn.functional.logsigmoid``."""
    return torch.nn.functional.logsigmoid(x)
