"""The visibility of a forest for FlexAttention, which runs all of it as one kernel on CUDA."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from valence.engine.layout import segments_of


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

        run: Any = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compiled()
        mod = capped if softcap else None
        return run(q, k, v, score_mod=mod, block_mask=self.masks[window], scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


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
    first = len(enter) - len(queries)

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query + first
        path = (enter[key] <= enter[at]) & (enter[at] < leave[key])
        return path & (depth[at] - depth[key] < window) if window else path

    return create_block_mask(sees, None, None, len(queries), len(enter), enter.device, _compile=enter.is_cuda)
