"""Keys and values of answers that are being sampled, in memory with room for the tokens to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 64
"""Tokens for which there is room when memory is full."""


class Roomy(DynamicLayer):
    """Keys and values [rows, heads, tokens, width] of one layer, the beginning of a larger memory:
    a token's are written behind them, and a row that ends gives its place to another. transformers'
    own layer copies all of it for each token. Under autocast they are kept in its type, which
    attention would otherwise turn all of them into for each token.
    """

    def __init__(self, layer: Any, which: Tensor) -> None:
        """Those of the rows ``which`` of another layer; a row may be there several times."""
        super().__init__()
        self.device, self.is_initialized = layer.keys.device, True
        on = self.device.type
        self.dtype = (
            torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else layer.keys.dtype
        )
        self.rows, self.tokens = len(which), layer.keys.shape[2]
        self.memory = [
            _with_room(part[which].to(self.dtype), ROOM) for part in (layer.keys, layer.values)
        ]
        self.keys, self.values = self.parts

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Keys and values, without the room behind them."""
        keys, values = (memory[: self.rows, :, : self.tokens] for memory in self.memory)
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        start, more = self.tokens, key_states.shape[2]
        if start + more > self.memory[0].shape[2]:
            self.memory = [_with_room(part, max(ROOM, more)) for part in self.parts]
        self.tokens = start + more
        for part, new in zip(self.parts, (key_states, value_states), strict=True):
            part[:, :, start:] = new
        self.keys, self.values = self.parts
        return self.parts

    def keep(self, rows: int, holes: Tensor, others: Tensor) -> None:
        """The first so many rows, after ``others`` have taken the places ``holes``."""
        for part in self.parts:
            part[holes] = part[others]
        self.rows = rows
        self.keys, self.values = self.parts


def _with_room(part: Tensor, more: int) -> Tensor:
    """A copy [rows, heads, tokens + more, width], of which the last tokens are still to come."""
    memory = part.new_empty(*part.shape[:2], part.shape[2] + more, part.shape[3])
    memory[:, :, : part.shape[2]] = part
    return memory


def give_room(cache: Any, which: Tensor) -> None:
    """Makes the rows ``which`` of a cache its rows.

    Layers that keep only a window stay transformers' own.
    """
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.ndim == 4:
            cache.layers[i] = Roomy(layer, which)
        else:
            layer.batch_select_indices(which)


def drop(cache: Any, going: Tensor, rest: Sequence[Tensor]) -> list[Tensor]:
    """Leaves the cache with the rows ``going`` (ascending), and gives what is left of each of
    ``rest`` [rows, ...] in the same
    order: rows behind the new end have taken the places of those that are gone.
    """
    rows = len(going)
    order = torch.arange(rows, device=going.device)
    free = torch.ones_like(order, dtype=torch.bool)
    free[going[going < rows]] = False
    holes, others = order[free], going[going >= rows]
    order = order.index_put((holes,), others)
    for layer in cache.layers:
        if isinstance(layer, Roomy):
            layer.keep(rows, holes, others)
        else:
            layer.batch_select_indices(order)
    return [each[order] for each in rest]
