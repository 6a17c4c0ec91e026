"""Units of a step to micro-batches: which units run together under a token budget, and their columns."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from valence.data.forest import Forest, Strand, plant, planted
from valence.types import Batch, Encoded, sent


def pack(units: Sequence[Encoded], budget: int) -> list[list[int]]:
    """Deals units to as few micro-batches as will hold them, evenly filled. A unit longer than the budget runs alone.

    Units whose sequences begin alike stay together as far as the budget goes. Returns indices, each micro-batch in the order
    of its units.
    """
    families = _families(units, budget)
    dealt = fill([tokens for tokens, _ in families], budget)
    return [sorted(i for k in rows for i in families[k][1]) for rows in dealt]


def fill(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Deals things of these sizes to as few bins as will hold them, evenly filled; one larger than the budget has a bin alone."""
    if not sizes:
        return []
    longest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    alone = [i for i in longest_first if sizes[i] > budget]
    shared = longest_first[len(alone) :]
    dealt: list[list[int]] = [[] for _ in range(-(-sum(sizes[i] for i in shared) // budget))]
    filled = [(0, k) for k in range(len(dealt))]  # a heap: the lightest bin first
    for i in shared:
        size, k = filled[0]
        if size + sizes[i] <= budget:
            heapq.heapreplace(filled, (size + sizes[i], k))
        else:  # what does not fit the lightest fits none
            k = len(dealt)
            dealt.append([])
            heapq.heappush(filled, (sizes[i], k))
        dealt[k].append(i)
    return [[i] for i in alone] + [sorted(rows) for rows in dealt if rows]


def deal(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Deals things of these costs to so many hands, the dearest first and each to the hand that has least so far. Indices,
    ascending in each hand; some may stay empty."""
    found: list[list[int]] = [[] for _ in range(hands)]
    held = [(0.0, k) for k in range(hands)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        cost, k = held[0]
        heapq.heapreplace(held, (cost + costs[i], k))
        found[k].append(i)
    return [sorted(hand) for hand in found]


def _families(units: Sequence[Encoded], budget: int) -> list[tuple[int, list[int]]]:
    """Units that share tokens with the one before them in sorted order, cut where the budget is full: (tokens, indices) each."""
    found: list[tuple[int, list[int]]] = []
    before: Encoded | None = None
    for i in sorted(range(len(units)), key=lambda i: (units[i].prompt_ids, [answer.ids for answer in units[i].answers])):
        alone = planted(strands(units[i]))
        more = alone if before is None else planted([*strands(before), *strands(units[i])]) - planted(strands(before))
        if more < alone and found[-1][0] + more <= budget:
            found[-1] = found[-1][0] + more, [*found[-1][1], i]
        else:
            found.append((alone, [i]))
        before = units[i]
    return found


def strands(unit: Encoded) -> list[Strand]:
    """The sequences of a unit: its prompt with each answer."""
    return [Strand(unit.prompt_ids + a.ids, unit.prompt_mask + a.mask) for a in unit.answers]


def collate(
    units: Sequence[Encoded],
    numbers: Sequence[int],
    groups: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    measured: Sequence[Encoded] = (),
) -> Batch:
    """One micro-batch of these units. ``numbers``: each unit's index within the step; ``groups``: its statistic group;
    ``measured``: a unit for each of them that is only measured (in the same group)."""
    both = [*zip(units, numbers, [True] * len(units), strict=True)]
    both += zip(measured, numbers, [False] * len(measured), strict=True) if measured else ()
    rows = [(unit, number, side, trains) for unit, number, trains in both for side in range(len(unit.answers))]
    forest = plant([strand for unit, _, _ in both for strand in strands(unit)])
    labels = [unit.label for unit, *_ in rows]

    device = torch.device(device)
    wide = torch.float32 if device.type == "mps" else torch.float64

    def column(values: Sequence[float | bool | None], dtype: torch.dtype) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=dtype), device)

    def laid(values: object) -> torch.Tensor:
        return sent(torch.as_tensor(values), device)

    return Batch(
        tokens=laid(forest.tokens),
        pos=laid(forest.pos),
        source=laid(forest.source),
        seq=laid(forest.seq),
        mask=laid(forest.mask),
        scored=laid(forest.read[0]),
        host=torch.as_tensor(forest.tokens),
        read=torch.as_tensor(forest.read),
        segments=forest.segments,
        leaf=forest.leaf,
        trains=tuple(trains for *_, trains in rows),
        unit=column([number for _, number, _, _ in rows], torch.long),
        side=column([side for _, _, side, _ in rows], torch.long),
        label=None if None in labels else column(labels, torch.bool),
        weight=column([unit.weight for unit, *_ in rows], torch.float32),
        margin=column([unit.margin for unit, *_ in rows], torch.float32),
        soft=column([math.nan if unit.soft is None else unit.soft for unit, *_ in rows], torch.float32),
        target=_targets(
            [unit.scores[side : side + 1] if unit.kind == "ranking" else unit.scores for unit, _, side, _ in rows], device
        ),
        group=column([groups[number] if groups else 0 for _, number, _, _ in rows], torch.long),
        groups=max(groups) + 1 if groups else 1,
        ids=tuple(unit.id for unit, *_ in rows),
        given={name: column(values, wide) for name, values in _given(rows, forest).items()},
    )


def _given(rows: Sequence[tuple[Encoded, int, int, bool]], forest: Forest) -> dict[str, list[float]]:
    """Columns of the answers, by name: a number for each token that is read. Raises ValueError where only some have a column."""
    columns = [dict(unit.answers[side].columns) for unit, _, side, _ in rows]
    names = list(columns[0])
    if any(list(each) != names for each in columns):
        raise ValueError("some answers of a micro-batch have columns that others lack")
    starts = [len(unit.prompt_ids) for unit, *_ in rows]
    places = list(zip(forest.read[1].tolist(), forest.pos[forest.read[0]].tolist(), strict=True))
    return {name: [columns[s][name][at - starts[s]] for s, at in places] for name in names}


def _targets(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor | None:
    """[S, A], or None when no row has any."""
    width = max(map(len, rows))
    if not width:
        return None
    return sent(torch.tensor([list(row) or [math.nan] * width for row in rows], dtype=torch.float32), device)
