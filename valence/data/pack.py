"""Units of a step to micro-batches: which units run together under a token budget, and their columns."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import torch

from valence.types import Batch, Encoded


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Deals units to as few micro-batches as will hold them, evenly filled. A unit longer than the budget runs alone.

    lengths: tokens of each unit. Returns indices, each micro-batch in the order of its units.
    """
    if not lengths:
        return []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alone = [i for i in longest_first if lengths[i] > budget]
    shared = longest_first[len(alone) :]
    dealt: list[list[int]] = [[] for _ in range(-(-sum(lengths[i] for i in shared) // budget))]
    filled = [(0, k) for k in range(len(dealt))]  # a heap: the lightest micro-batch first
    for i in shared:
        size, k = filled[0]
        if size + lengths[i] <= budget:
            heapq.heapreplace(filled, (size + lengths[i], k))
        else:  # what does not fit the lightest fits none
            k = len(dealt)
            dealt.append([])
            heapq.heappush(filled, (lengths[i], k))
        dealt[k].append(i)
    return [[i] for i in alone] + [sorted(rows) for rows in dealt if rows]


def collate(
    units: Sequence[Encoded], numbers: Sequence[int], groups: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> Batch:
    """One micro-batch of these units. ``numbers``: each unit's index within the step; ``groups``: its statistic group."""
    tokens: list[int] = []
    pos: list[int] = []
    mask: list[bool] = []
    bounds = [0]
    rows: list[tuple[int, int, int]] = []
    for k, unit in enumerate(units):
        for side, answer in enumerate(unit.answers):
            ids = unit.prompt_ids + answer.ids
            tokens += ids
            pos += range(len(ids))
            mask += unit.prompt_mask + answer.mask
            bounds.append(len(tokens))
            rows.append((k, numbers[k], side))
    of = [units[k] for k, _, _ in rows]
    labels = [unit.label for unit in of]

    def column(values: Sequence[float | bool | None], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    lengths = column([b - a for a, b in pairwise(bounds)], torch.long)
    return Batch(
        tokens=column(tokens, torch.long),
        pos=column(pos, torch.long),
        seq=torch.repeat_interleave(torch.arange(len(rows), device=device), lengths),
        mask=column(mask, torch.bool),
        bounds=tuple(bounds),
        unit=column([number for _, number, _ in rows], torch.long),
        side=column([side for _, _, side in rows], torch.long),
        label=None if None in labels else column(labels, torch.bool),
        weight=column([unit.weight for unit in of], torch.float32),
        margin=column([unit.margin for unit in of], torch.float32),
        group=column([groups[number] if groups else 0 for _, number, _ in rows], torch.long),
        ids=tuple(unit.id for unit in of),
    )
