"""All values that are reachable from an object, by path, to compare with a run's saved state."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

OURS = (
    "valence",
    "tests",
    "torch.optim",
    "torch.nn",
    "torch._",
    "transformers.models",
    "peft.tuners",
)
"""Modules whose objects are looked into; others count as one value that does not change."""


def walk(root: object) -> dict[str, Any]:
    """Path -> number, text or digest, of everything below ``root`` (an object that is met again is
    followed once).
    """
    return dict(_walk(root, "", {}))


def _walk(value: Any, path: str, observed: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if value is None or isinstance(value, str | bool | int | float | bytes):
        yield path, value
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, _digest(value)
        return
    if id(value) in observed or isinstance(
        value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
    ):
        return
    observed[id(value)] = value  # kept alive: an id is not given to another object meanwhile
    for name, inner in _parts(value):
        yield from _walk(inner, f"{path}{name}", observed)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in list(value.items()):
            yield f"[{key!r}]" if isinstance(key, str | int | tuple) else "[?]", inner
        yield ".keys", ",".join(sorted(str(key) for key in value if isinstance(key, str | int)))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield f"[{i}]", inner
        yield ".length", len(value)
    elif isinstance(value, set | frozenset):
        yield ".members", ",".join(sorted(map(str, value)))
    elif type(value).__module__.startswith(OURS):
        for name, inner in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", inner
        for kind in type(value).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if isinstance(name, str) and hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _digest(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    array = (
        value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.ascontiguousarray(value))
    )
    raw = array.contiguous().flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
    return f"{array.dtype} {tuple(array.shape)} {hashlib.sha256(raw).hexdigest()[:12]}"
