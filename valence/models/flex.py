"""The visibility of a forest for FlexAttention, which runs all of it as one kernel on CUDA."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from valence.models.layout import Table, segments_of
from valence.types import sent

BLOCK, GRAIN = 128, 16  # rows and columns of a block, and of the parts of it that are looked at
# most of them: one for each size with and without a gradient, and for each pair of sizes of two
# passes
PROGRAMS = 8192


class Visible:
    """Block masks of one pass, a mask for each window (0: none) that the model's layers have, which
    all layers share.
    """

    def __init__(self, segments: Table, windows: tuple[int, ...], device: torch.device) -> None:
        enter, leave, depth = sent(_columns(segments), device)
        own = sum(end - start for start, end, _, asks in segments if asks)
        self.masks = {window: _mask(enter, leave, depth, own, window) for window in windows}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """q[1, H, T, D], k[1, H_kv, T_k, D], v[1, H_kv, T_k, D_v] -> [1, H, T, D_v]."""

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        how: dict[str, Any] = {
            "score_mod": capped if softcap else None,
            "block_mask": self.masks[window],
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if not q.is_cuda:
            return flex_attention(q, k, v, **how)
        raise_recompile_limits()
        # Compiled layers keep less for their backward pass (see ``compiling``). Attention keeps
        # all, or it would run twice.
        with torch._functorch.config.patch(activation_memory_budget=1.0):
            return _compiled()(q, k, v, **how)


@lru_cache(maxsize=2)
def _visible(segments: Table, windows: tuple[int, ...], device: torch.device) -> Visible:
    with torch.inference_mode(False):  # whoever asks first: a pass with a gradient may follow
        return Visible(segments, windows, device)


def visible(forest: Tensor, windows: tuple[int, ...], device: torch.device) -> Visible:
    """What a pass sees; once for the policy and a reference that run one after the other. forest:
    the table of ``layout.py``.
    """
    return _visible(segments_of(forest), windows, device)


@cache
def _compiled() -> Any:
    """One program for each size.

    Beyond its limit the compiler would leave attention as it is, with all scores in memory at once,
    and go on: hence an error where it is reached.
    """
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def raise_recompile_limits() -> None:
    """For as many programs as there may be.

    The compiler's settings are each thread's own: layers that run again do so in the thread of the
    backward pass, and reward models in theirs.
    """
    limits = torch._dynamo.config
    if limits.recompile_limit < PROGRAMS:
        limits.recompile_limit = PROGRAMS
    if limits.accumulated_recompile_limit < PROGRAMS:
        limits.accumulated_recompile_limit = PROGRAMS


def _columns(segments: Table) -> Tensor:
    """For every row: when a walk depth first enters it and when it has left all that is behind it,
    and its depth in tokens: [3, T].
    """
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
    return torch.stack([enter, leave, depth])


def _mask(enter: Tensor, leave: Tensor, depth: Tensor, queries: int, window: int) -> BlockMask:
    """What each of the last rows, so many queries, sees, and in which blocks it has to be asked:
    those in which some pair may see, by the least and largest numbers of a few rows, and not every
    pair does.
    """
    first = len(enter) - queries

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + first
        path = (enter[key] <= enter[at]) & (enter[at] < leave[key])
        return path & (depth[at] - depth[key] < window) if window else path

    asked, deep = enter[first:], depth[first:]
    some = (_least(enter, GRAIN) <= _most(asked, GRAIN)[:, None]) & (
        _least(asked, GRAIN)[:, None] < _most(leave, GRAIN)
    )
    every = (_most(enter) <= _least(asked)[:, None]) & (_most(asked)[:, None] < _least(leave))
    if window:
        some &= _least(deep, GRAIN)[:, None] - _most(depth, GRAIN) < window
        every &= _most(deep)[:, None] - _least(depth) < window
    some = some.view(every.shape[0], BLOCK // GRAIN, every.shape[1], BLOCK // GRAIN).any(3).any(1)
    every[queries // BLOCK :] = every[:, len(enter) // BLOCK :] = (
        False  # a block that is cut off at the end
    )
    lengths = queries, len(enter)
    return BlockMask.from_kv_blocks(*_listed(some & ~every), *_listed(every), BLOCK, sees, lengths)


def _least(values: Tensor, rows: int = BLOCK) -> Tensor:
    """Of each so many of values[T], in whole blocks."""
    return torch.cat([values, values[-1:].expand(-len(values) % BLOCK)]).view(-1, rows).amin(1)


def _most(values: Tensor, rows: int = BLOCK) -> Tensor:
    return -_least(-values, rows)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks[Q, K] how many are marked, and their places, before those of the
    others.
    """
    count = blocks.sum(1, dtype=torch.int32)
    return count[None, None], blocks.int().argsort(dim=1, descending=True, stable=True).int()[
        None, None
    ]
