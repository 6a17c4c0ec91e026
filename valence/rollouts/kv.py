"""Key-value cache for sampling, preallocated for future tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as memoize
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

GROWTH = 64
"""Tokens that are allocated first; each time the memory is full, its size doubles. Many sizes, each
a little larger than the one before, would fragment the memory of a GPU.
"""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in inputs and outputs of models. Since transformers 5.24, it is ``cache``; the
others are deprecated, except in code that comes with a model.
"""


class PreallocatedLayer(DynamicLayer):
    """Keys and values [rows, heads, tokens, width] of one layer, in a larger memory.

    New tokens are written in place, and finished rows are overwritten by others. transformers' own
    layer copies everything for each token. Under autocast the cache has autocast's dtype, to which
    attention would otherwise convert all of it for each token.
    """

    def __init__(self, layer: Any, indices: Tensor, max_tokens: int | None = None) -> None:
        """Copies the rows ``indices`` of another layer; a row may appear several times. max_tokens:
        the most tokens of a row, if that is known: more are not allocated in advance.
        """
        super().__init__()
        self.max_tokens = max_tokens
        self.device, self.is_initialized = layer.keys.device, True
        device_type = self.device.type
        self.dtype = (
            torch.get_autocast_dtype(device_type)
            if torch.is_autocast_enabled(device_type)
            else layer.keys.dtype
        )
        self.rows, self.tokens = len(indices), layer.keys.shape[2]
        capacity = self._limited(self.tokens + GROWTH)
        self.memory = [
            _allocate(part[indices].to(self.dtype), capacity) for part in (layer.keys, layer.values)
        ]
        self.keys, self.values = self.parts

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Tensor, Tensor]]) -> PreallocatedLayer:
        """A layer of the keys and values [heads, tokens, width] of several rows. The last tokens
        are aligned; the shorter rows are padded with zeros on the left."""
        tokens = max(keys.shape[1] for keys, _ in rows)
        layer = DynamicLayer()
        layer.keys, layer.values = (
            torch.stack([pad(part, (0, 0, tokens - part.shape[1], 0)) for part in parts])
            for parts in zip(*rows, strict=True)
        )
        return cls(layer, torch.arange(len(rows), device=layer.keys.device))

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Keys and values, without unused memory."""
        keys, values = (memory[: self.rows, :, : self.tokens] for memory in self.memory)
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        start, needed = self.tokens, self.tokens + key_states.shape[2]
        if needed > (capacity := self.memory[0].shape[2]):
            capacity = max(needed, self._limited(2 * capacity))
            self.memory = [_allocate(part, capacity) for part in self.parts]
        self.tokens = needed
        for part, new in zip(self.parts, (key_states, value_states), strict=True):
            part[:, :, start:] = new
        self.keys, self.values = self.parts
        return self.parts

    def _limited(self, tokens: int) -> int:
        return tokens if self.max_tokens is None else min(tokens, self.max_tokens)

    def move_rows(self, rows: int, sources: Tensor, targets: Tensor) -> None:
        """Move rows from ``sources`` to ``targets``, then keep the first ``rows``."""
        for part in self.parts:
            part[targets] = part[sources]
        self.rows = rows
        self.keys, self.values = self.parts

    def append_rows(self, other: PreallocatedLayer) -> None:
        """Add the rows of another layer below the present ones. The last tokens are aligned; the
        shorter rows are padded with zeros on the left.
        """
        rows, tokens = self.rows + other.rows, max(self.tokens, other.tokens)
        memory: list[Tensor] = []
        for part, added in zip(self.parts, other.parts, strict=True):
            joined = part.new_zeros(rows, part.shape[1], tokens + GROWTH, part.shape[3])
            joined[: self.rows, :, tokens - self.tokens : tokens] = part
            joined[self.rows :, :, tokens - other.tokens : tokens] = added
            memory.append(joined)
        self.memory, self.rows, self.tokens, self.max_tokens = memory, rows, tokens, None
        self.keys, self.values = self.parts

    def drop_first(self, tokens: int) -> None:
        """Remove the first tokens of all rows."""
        self.memory = [part[:, :, tokens:] for part in self.memory]
        self.tokens -= tokens
        self.keys, self.values = self.parts


def _allocate(part: Tensor, capacity: int) -> Tensor:
    """A copy [rows, heads, capacity, width] whose last tokens are uninitialized."""
    memory = part.new_empty(*part.shape[:2], capacity, part.shape[3])
    memory[:, :, : part.shape[2]] = part
    return memory


def forward_with_cache(model: Any, cache: Any, **inputs: Any) -> tuple[Any, Any]:
    """Return the output of a causal language model and its cache, extended by the inputs.

    cache: None for the first tokens. The extended cache is None if the model has none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = _cache_argument(type(base))
    output = model(**inputs, use_cache=True, **({name: cache} if name else {}))
    extended = (getattr(output, name, None) for name in CACHE_NAMES)
    return output, next((cache for cache in extended if cache is not None), None)


@memoize
def _cache_argument(model: type[nn.Module]) -> str | None:
    parameters = signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def can_select_rows(cache: Any) -> bool:
    """Whether ``select_rows`` supports a cache. It does not support those of recurrent models."""
    return hasattr(cache, "batch_select_indices") and not any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers
    )


def select_rows(cache: Any, indices: Tensor, max_tokens: int | None = None) -> None:
    """Make the rows ``indices`` of a cache its rows, and preallocate its layers. max_tokens: the
    most tokens of a row, if that is known.

    Sliding-window layers remain transformers' own.
    """
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.ndim == 4:
            cache.layers[i] = PreallocatedLayer(layer, indices, max_tokens)
        else:
            layer.batch_select_indices(indices)


def append_rows(cache: Any, other: Any) -> None:
    """Add the rows of another cache to a cache. All layers of both must be preallocated."""
    for layer, added in zip(cache.layers, other.layers, strict=True):
        layer.append_rows(added)


def remove_finished(cache: Any, active: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Keep only the rows ``active`` (ascending) of the cache and of ``tensors`` [rows, ...].

    Rows beyond the new end move to the places of finished rows, in the cache and in the tensors.
    """
    rows = len(active)
    order = torch.arange(rows, device=active.device)
    is_free = torch.ones_like(order, dtype=torch.bool)
    is_free[active[active < rows]] = False
    targets, sources = order[is_free], active[active >= rows]
    order = order.index_put((targets,), sources)
    for layer in cache.layers:
        if isinstance(layer, PreallocatedLayer):
            layer.move_rows(rows, sources, targets)
        else:
            layer.batch_select_indices(order)
    return [tensor[order] for tensor in tensors]
