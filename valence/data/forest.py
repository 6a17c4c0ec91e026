"""Sequences laid out as a forest: what several of them begin with is laid once, and each continues from where it parts.

Sequences are sorted, so that those with a common beginning are neighbours; each lays only what the path of the one before it
does not have. The rows come out depth first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARE = 16  # tokens; a shorter common piece costs more in attention calls than it saves


@dataclass(frozen=True, slots=True)
class Strand:
    """One sequence to be laid: its tokens, and which of them it measures."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Forest:
    """T rows. tokens[T], pos[T] (depth in tokens), source[T] (row of the token before; -1: none), mask[T] (measured by a
    sequence), seq[T] (which sequence measures the token, else one that runs through it), read[2, N] (the rows that are measured,
    and by which sequence); segments (first row, last row + 1,
    parent segment or -1), parents first; leaf[S] the segment that each sequence ends with."""

    tokens: NDArray[np.int64]
    pos: NDArray[np.int64]
    source: NDArray[np.int64]
    seq: NDArray[np.int64]
    mask: NDArray[np.bool_]
    read: NDArray[np.int64]
    segments: tuple[tuple[int, int, int], ...]
    leaf: tuple[int, ...]


def plant(strands: Sequence[Strand]) -> Forest:
    """Lays sequences out. A token that two sequences both measure is laid for each; all else may be shared.

    Raises ValueError when the first token of a sequence is measured: nothing predicts it.
    """
    if any(strand.mask[0] for strand in strands):
        raise ValueError("the first token of a sequence has nothing before it that could predict it")
    cuts = dict(_cuts(strands))
    total = sum(len(strands[s].ids) - cut for s, cut in cuts.items())
    tokens, pos, seq = (np.empty(total, np.int64) for _ in range(3))
    source, mask = np.arange(-1, total - 1), np.zeros(total, np.bool_)
    begins = {0}  # rows that begin a segment
    ends: dict[int, int] = {}
    path = np.empty(0, np.int64)
    row = 0
    for s, cut in cuts.items():
        strand = strands[s]
        new = np.arange(row, row := row + len(strand.ids) - cut)
        tokens[new], pos[new], seq[new] = strand.ids[cut:], np.arange(cut, len(strand.ids)), s
        begins |= {int(path[cut - 1]) + 1} if cut else set()
        if len(new):
            source[new[0]] = path[cut - 1] if cut else -1
            begins.add(int(new[0]))
        path = np.concatenate([path[:cut], new])
        own = path[np.array(strand.mask, np.bool_)]
        mask[own], seq[own] = True, s
        ends[s] = int(path[-1])
        begins.add(ends[s] + 1)
    edges = np.array(sorted(begins | {total}))
    holds = np.searchsorted(edges, np.arange(total), side="right") - 1  # [T], the segment that holds a row
    parents = [-1 if source[b] < 0 else int(holds[source[b]]) for b in edges[:-1]]
    segments = tuple((int(a), int(b), p) for a, b, p in zip(edges, edges[1:], parents, strict=False))
    read = np.stack([mask.nonzero()[0], seq[mask]])
    return Forest(tokens, pos, source, seq, mask, read, segments, tuple(int(holds[ends[s]]) for s in range(len(strands))))


def planted(strands: Sequence[Strand]) -> int:
    """Rows that ``plant`` would lay."""
    return sum(len(strands[s].ids) - cut for s, cut in _cuts(strands))


def _cuts(strands: Sequence[Strand]) -> Iterable[tuple[int, int]]:
    """For each sequence in the order of laying: its index, and the depth up to which the one before has laid its tokens."""
    before = owned = np.empty(0, np.int64)
    for s in sorted(range(len(strands)), key=lambda s: (strands[s].ids, strands[s].mask)):
        ids, mask = np.array(strands[s].ids), np.array(strands[s].mask)
        both = min(len(ids), len(before))
        stops = np.flatnonzero((ids[:both] != before[:both]) | (mask[:both] & owned[:both]))
        common = int(stops[0]) if len(stops) else both
        cut = common if common >= SHARE else 0
        before, owned = ids, np.concatenate([owned[:cut] | mask[:cut], mask[cut:]]).astype(np.bool_)
        yield s, cut
