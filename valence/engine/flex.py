"""The visibility of a forest for FlexAttention, which runs all of it as one kernel on CUDA."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from valence.engine.layout import segments_of

BLOCK, GRAIN = 128, 16  # rows and columns of a block, and of the parts of it that are looked at
PROGRAMS = 1024  # most of them: one for each size, with and without a gradient


class Visible:
    """Block masks of one pass, a mask for each window (0: none) that the model's layers have, which all layers share."""

    def __init__(self, forest: Tensor, windows: tuple[int, ...], device: torch.device) -> None:
        """forest: the table of ``layout.py``."""
        order, leaves, depth, self.queries = (column.to(device) for column in _columns(forest))
        self.masks = {window: _mask(order, leaves, depth, self.queries, window) for window in windows}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        """q[1, H, T, D], k[1, H_kv, T_k, D], v[1, H_kv, T_k, D_v] -> [1, H, T, D_v]."""

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        run: Any = _compiled() if q.is_cuda else flex_attention
        mod = capped if softcap else None
        return run(q, k, v, score_mod=mod, block_mask=self.masks[window], scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled() -> Any:
    """One program for each size. Beyond its limit the compiler would leave attention as it is, with all scores in memory at once,
    and go on: hence the limits, and an error where they are reached."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, PROGRAMS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, PROGRAMS)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _columns(forest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every row: when a walk depth first enters it and when it has left all that is behind it, and its depth in tokens; and
    the rows of queries."""
    segments = segments_of(forest)
    total = max(end for _, end, _, _ in segments)
    enter, leave, depth = (torch.zeros(total, dtype=torch.long) for _ in range(3))
    children: dict[int, list[int]] = {}
    for k, (_, _, parent, _) in enumerate(segments):
        children.setdefault(parent, []).append(k)
    clock = 0
    walk = [(k, False) for k in reversed(children[-1])]
    while walk:
        k, done = walk.pop()
        start, end, parent, _ = segments[k]
        if done:
            leave[start:end] = clock
            continue
        above = 0 if parent < 0 else int(depth[segments[parent][1] - 1]) + 1
        enter[start:end] = torch.arange(clock, clock + end - start)
        depth[start:end] = torch.arange(above, above + end - start)
        clock += end - start
        walk += [(k, True), *((child, False) for child in reversed(children.get(k, [])))]
    queries = [row for start, end, _, asks in segments if asks for row in range(start, end)]
    return enter, leave, depth, torch.tensor(queries)


def _mask(enter: Tensor, leave: Tensor, depth: Tensor, queries: Tensor, window: int) -> BlockMask:
    """What each query sees, and in which blocks it has to be asked: those in which some pair may see, by the least and largest
    numbers of a few rows, and not every pair does."""
    first = len(enter) - len(queries)

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + first
        path = (enter[key] <= enter[at]) & (enter[at] < leave[key])
        return path & (depth[at] - depth[key] < window) if window else path

    asked, deep = enter[first:], depth[first:]
    some = (_least(enter, GRAIN) <= _most(asked, GRAIN)[:, None]) & (_least(asked, GRAIN)[:, None] < _most(leave, GRAIN))
    every = (_most(enter) <= _least(asked)[:, None]) & (_most(asked)[:, None] < _least(leave))
    if window:
        some &= _least(deep, GRAIN)[:, None] - _most(depth, GRAIN) < window
        every &= _most(deep)[:, None] - _least(depth) < window
    some = some.view(every.shape[0], BLOCK // GRAIN, every.shape[1], BLOCK // GRAIN).any(3).any(1)
    every[len(queries) // BLOCK :] = every[:, len(enter) // BLOCK :] = False  # a block that is cut off at the end
    lengths = len(queries), len(enter)
    return BlockMask.from_kv_blocks(*_listed(some & ~every), *_listed(every), BLOCK, sees, lengths)


def _least(values: Tensor, rows: int = BLOCK) -> Tensor:
    """Of each so many of values[T], in whole blocks."""
    return torch.cat([values, values[-1:].expand(-len(values) % BLOCK)]).view(-1, rows).amin(1)


def _most(values: Tensor, rows: int = BLOCK) -> Tensor:
    return -_least(-values, rows)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks[Q, K] how many are marked, and their places, before those of the others."""
    count = blocks.sum(1, dtype=torch.int32)
    return count[None, None], blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None]
