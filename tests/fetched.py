"""Counting what makes the host wait for a device, on a machine that has none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NUMBERS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}
COUNTS = {"nonzero", "masked_select", "unique"}  # of which a device must say how many it found
WAITING = NUMBERS | COUNTS


class Fetched(TorchFunctionMode):
    """Inside the block: the calls for which a device would have to finish what it does, as ``name file:line``.

    Weights count as on a device, and so does whatever is made with a device named or from something that is there. All else
    (a table of plain numbers) counts as on the host, and may be read. Tensors picked by a mask have to be counted first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        there = any(map(_is_there, tree_leaves((args, kwargs))))
        if name == "__getitem__" and _has_mask(args[1]):
            name = "masked_select"
        if there and name in WAITING:
            self.calls.append(f"{name} {_place()}")
        out = func(*args, **(kwargs or {}))
        if name in ("cpu", "to"):
            out = out.view_as(out)  # another object, as it would be with a device
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and there and name != "cpu":
                made.there = True  # type: ignore[attr-defined]
        return out

    @property
    def names(self) -> list[str]:
        return [call.split()[0] for call in self.calls]


def _is_there(value: Any) -> bool:
    return isinstance(value, torch.device | nn.Parameter) or (isinstance(value, Tensor) and hasattr(value, "there"))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _place() -> str:
    """The innermost line of this project that is running."""
    frames = [f for f in traceback.extract_stack() if "/valence/" in f.filename or "/tests/" in f.filename]
    return next(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames) if f.filename != __file__)
