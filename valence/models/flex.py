"""The visibility of a prefix tree as block masks for FlexAttention, which computes it in one kernel
on CUDA.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from valence.models.layout import SegmentTable, segments_of
from valence.types import sent

BLOCK, SUBBLOCK = 128, 16
"""Rows and columns of a block, and of the parts of it that are tested for visible pairs."""
MAX_PROGRAMS = 8192
"""Limit of compiled programs: one for each size with and without a gradient, and for each pair of
sizes of two passes.
"""
KERNEL_OPTIONS = {"ROWS_GUARANTEED_SAFE": True}
"""Every query attends at least to itself, so that no row of scores is empty."""


class Visible:
    """Block masks of one pass for all layers, one for each window (0: none) of the layers."""

    def __init__(
        self, segments: SegmentTable, windows: tuple[int, ...], device: torch.device
    ) -> None:
        enter, leave, depth = sent(_columns(segments), device)
        spans = sorted((start, end) for start, end, _, is_query in segments if is_query)
        queries = sent(torch.cat([torch.arange(*span) for span in spans]), device)
        self.masks = {window: _mask(enter, leave, depth, queries, window) for window in windows}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """q[1, H, T, D], k[1, H_kv, T_k, D], v[1, H_kv, T_k, D_v] -> [1, H, T, D_v]."""
        if q.is_cuda:
            return self.run_compiled(q, k, v, scale, window, softcap)
        return flex_attention(q, k, v, **self._options(q, k, scale, window, softcap))

    def run_compiled(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        """The same, compiled."""
        raise_recompile_limits()
        # Compiled layers keep less for their backward pass (see ``compiling``), which would compute
        # attention twice.
        with torch._functorch.config.patch(activation_memory_budget=1.0):
            return _compiled()(q, k, v, **self._options(q, k, scale, window, softcap))

    def _options(
        self, q: Tensor, k: Tensor, scale: float, window: int, softcap: float
    ) -> dict[str, Any]:
        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        return {
            "score_mod": capped if softcap else None,
            "block_mask": self.masks[window],
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
            "kernel_options": KERNEL_OPTIONS,
        }


@lru_cache(maxsize=2)
def _visible(segments: SegmentTable, windows: tuple[int, ...], device: torch.device) -> Visible:
    with torch.inference_mode(False):  # the result is cached for passes with a gradient too
        return Visible(segments, windows, device)


def visible(prefix_tree: Tensor, windows: tuple[int, ...], device: torch.device) -> Visible:
    """Return the block masks of a pass; cached, since a reference often follows the policy.

    prefix_tree: the segment table of ``layout.py``.
    """
    return _visible(segments_of(prefix_tree), windows, device)


@cache
def _compiled() -> Any:
    """Return FlexAttention with one compiled program for each size.

    fullgraph: beyond its limit of programs the compiler would otherwise silently compute attention
    without a kernel, with all scores in memory at once.
    """
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, options=compiler_options())


def compiler_options() -> dict[str, Any] | None:
    """Return PyTorch's options for compiled programs.

    On a GPU, the compiler measures several kernels of a reduction and takes the fastest, which
    rounds differently in the next process. In its deterministic mode it measures none of them.
    """
    return {"deterministic": True} if torch.cuda.is_available() else None


def raise_recompile_limits() -> None:
    """Let the compiler build up to MAX_PROGRAMS programs in this thread.

    Each thread has its own settings of the compiler: checkpointed layers run in the thread of the
    backward pass, reward models in others.
    """
    limits = torch._dynamo.config
    if limits.recompile_limit < MAX_PROGRAMS:
        limits.recompile_limit = MAX_PROGRAMS
    if limits.accumulated_recompile_limit < MAX_PROGRAMS:
        limits.accumulated_recompile_limit = MAX_PROGRAMS


def _columns(segments: SegmentTable) -> Tensor:
    """Return for every row when a depth-first walk enters it, when the walk has left all its
    descendants, and its depth in tokens: [3, T], in 32 bits as the kernel's other indices.
    """
    total = max(end for _, end, _, _ in segments)
    enter, leave, depth = (torch.zeros(total, dtype=torch.int32) for _ in range(3))
    children: dict[int, list[int]] = {}
    for k, (_, _, parent, _) in enumerate(segments):
        children.setdefault(parent, []).append(k)
    clock = 0
    walk = [(k, False) for k in reversed(children[-1])]
    while walk:
        k, is_done = walk.pop()
        start, end, parent, _ = segments[k]
        if is_done:
            leave[start:end] = clock
            continue
        above = 0 if parent < 0 else int(depth[segments[parent][1] - 1]) + 1
        enter[start:end] = torch.arange(clock, clock + end - start, dtype=torch.int32)
        depth[start:end] = torch.arange(above, above + end - start, dtype=torch.int32)
        clock += end - start
        walk += [(k, True), *((child, False) for child in reversed(children.get(k, [])))]
    return torch.stack([enter, leave, depth])


def _mask(enter: Tensor, leave: Tensor, depth: Tensor, queries: Tensor, window: int) -> BlockMask:
    """Return the block mask of the rows queries[T_q].

    The minimum and maximum of the columns over a few rows determine in which blocks some pair is
    visible, and in which all pairs are, so that the mask of pairs is not evaluated there.
    """
    query_enter, query_depth = (column[queries] for column in (enter, depth))
    unreached = query_depth - window

    # Only tensors: a compiled program is specialized to the numbers that its mask reads.
    def is_visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        on_path = (enter[key] <= query_enter[query]) & (query_enter[query] < leave[key])
        return on_path & (depth[key] > unreached[query]) if window else on_path

    is_any = (_min(enter, SUBBLOCK) <= _max(query_enter, SUBBLOCK)[:, None]) & (
        _min(query_enter, SUBBLOCK)[:, None] < _max(leave, SUBBLOCK)
    )
    is_all = (_max(enter) <= _min(query_enter)[:, None]) & (
        _max(query_enter)[:, None] < _min(leave)
    )
    if window:
        is_any &= _min(query_depth, SUBBLOCK)[:, None] - _max(depth, SUBBLOCK) < window
        is_all &= _max(query_depth)[:, None] - _min(depth) < window
    parts = BLOCK // SUBBLOCK
    is_any = is_any.view(is_all.shape[0], parts, is_all.shape[1], parts).any(3).any(1)
    # Incomplete blocks at the end need the mask of pairs.
    is_all[len(queries) // BLOCK :] = is_all[:, len(enter) // BLOCK :] = False
    lengths = len(queries), len(enter)
    return BlockMask.from_kv_blocks(
        *_list_blocks(is_any & ~is_all), *_list_blocks(is_all), BLOCK, is_visible, lengths
    )


def _min(values: Tensor, rows: int = BLOCK) -> Tensor:
    """Return the minimum of each block of ``rows`` of values[T]; the last value pads the last
    block.
    """
    return torch.cat([values, values[-1:].expand(-len(values) % BLOCK)]).view(-1, rows).amin(1)


def _max(values: Tensor, rows: int = BLOCK) -> Tensor:
    return -_min(-values, rows)


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of blocks[Q, K] the number of True entries, and the indices of the
    entries, those of True ones first.
    """
    count = blocks.sum(1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return count[None, None], indices[None, None]
