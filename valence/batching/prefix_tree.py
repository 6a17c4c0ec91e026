"""The prefix tree of a step: tokens that several sequences begin with are stored once.

Sequences are sorted, so that those with a common beginning are neighbours. Each adds only the
tokens that the path of the one before it does not have. Rows come out depth first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from valence.types import path_to

MIN_SHARED_TOKENS = 16
"""A shorter common prefix costs more in attention calls than it saves."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence: its tokens, and whether a loss reads the log-probability of each."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class Segment(NamedTuple):
    """Rows ``start`` to ``end`` (exclusive), which continue those of segment ``parent`` (-1:
    none).
    """

    start: int
    end: int
    parent: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """T rows of S sequences, of which a loss reads N.

    tokens[T]           token ids
    position_ids[T]     position in the sequence
    previous[T]         row of the token before (-1: none)
    sequence_ids[T]     which sequence reads the row, else one that it is part of
    loss_mask[T]        whether a sequence reads the log-probability of the row
    segments            parents first
    leaves[S]           the segment that each sequence ends with
    """

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    previous: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    segments: tuple[Segment, ...]
    leaves: tuple[int, ...]

    @property
    def scored(self) -> NDArray[np.int64]:
        """The rows that a loss reads, and the sequence that reads each: [2, N]."""
        return np.stack([self.loss_mask.nonzero()[0], self.sequence_ids[self.loss_mask]])

    def path(self, sequence: int) -> list[int]:
        """Segments of a sequence, from the root to its leaf."""
        return path_to(self.segments, self.leaves[sequence])

    def segments_of(self, sequences: Iterable[int]) -> set[int]:
        """Segments of any of these sequences."""
        return {segment for sequence in sequences for segment in self.path(sequence)}

    def num_tokens(self, segments: Iterable[int]) -> int:
        """Rows of these segments together."""
        return sum(self.segments[segment].num_tokens for segment in segments)

    def num_context_tokens(self, segments: Iterable[int]) -> float:
        """Tokens that the rows of these segments attend to, added up."""
        total = 0.0
        for segment in segments:
            start, end, _ = self.segments[segment]
            first, count = int(self.position_ids[start]) if end > start else 0, end - start
            total += count * (first + 1) + count * (count - 1) / 2
        return total

    def select(self, sequences: Sequence[int]) -> PrefixTree:
        """The tree of these sequences alone, numbered in the order given.

        A segment that continues another one without a fork becomes part of it.
        """
        paths = [self.path(sequence) for sequence in sequences]
        selected = sorted({segment for path in paths for segment in path})
        num_children = Counter(self.segments[segment].parent for segment in selected)
        ends = {path[-1] for path in paths}
        new_index = {-1: -1}
        segments: list[Segment] = []
        total = 0
        for segment in selected:
            start, end, parent = self.segments[segment]
            last = total + end - start
            if parent >= 0 and num_children[parent] == 1 and parent not in ends:
                new_index[segment] = new_index[parent]
                segments[new_index[parent]] = segments[new_index[parent]]._replace(end=last)
            else:
                new_index[segment] = len(segments)
                segments.append(Segment(total, last, new_index[parent]))
            total = last
        rows = np.concatenate([np.arange(*self.segments[segment][:2]) for segment in selected])
        previous = self.previous[rows]
        owners = {segment: number for number, path in enumerate(paths) for segment in path}
        part_of = np.array([owners[segment] for segment in selected])
        lengths = [self.segments[segment].num_tokens for segment in selected]
        numbers = {sequence: number for number, sequence in enumerate(sequences)}
        readers, inverse = np.unique(self.sequence_ids[rows], return_inverse=True)
        readers = np.array([numbers.get(int(reader), -1) for reader in readers])[inverse]
        return PrefixTree(
            tokens=self.tokens[rows],
            position_ids=self.position_ids[rows],
            previous=np.where(previous < 0, -1, np.searchsorted(rows, previous)),
            sequence_ids=np.where(readers >= 0, readers, np.repeat(part_of, lengths)),
            loss_mask=self.loss_mask[rows] & (readers >= 0),
            segments=tuple(segments),
            leaves=tuple(new_index[path[-1]] for path in paths),
        )


def build_prefix_tree(sequences: Sequence[TokenSequence]) -> PrefixTree:
    """Build the tree. A token that two sequences both read is stored for each of them.

    Raises ValueError when a loss reads the first token of a sequence: nothing predicts it.
    """
    if any(sequence.loss_mask[0] for sequence in sequences):
        raise ValueError("a loss reads the first token of a sequence, which nothing predicts")
    arrays = [
        (np.array(sequence.token_ids, np.int64), np.array(sequence.loss_mask, np.bool_))
        for sequence in sequences
    ]
    shared = list(_shared_prefixes(sequences, arrays))
    total = sum(len(sequences[s].token_ids) - num_shared for s, num_shared in shared)
    tokens, position_ids, sequence_ids = (np.empty(total, np.int64) for _ in range(3))
    previous, loss_mask = np.arange(-1, total - 1), np.zeros(total, np.bool_)
    starts = {0}  # rows that begin a segment
    last_rows: dict[int, int] = {}
    path = np.empty(0, np.int64)  # rows of the sequence before
    row = 0
    for s, num_shared in shared:
        token_ids, mask = arrays[s]
        length = len(token_ids)
        new = np.arange(row, row := row + length - num_shared)
        tokens[new], sequence_ids[new] = token_ids[num_shared:], s
        position_ids[new] = np.arange(num_shared, length)
        starts |= {int(path[num_shared - 1]) + 1} if num_shared else set()
        if len(new):
            previous[new[0]] = path[num_shared - 1] if num_shared else -1
            starts.add(int(new[0]))
        path = np.concatenate([path[:num_shared], new])
        read = path[mask]
        loss_mask[read], sequence_ids[read] = True, s
        last_rows[s] = int(path[-1])
        starts.add(last_rows[s] + 1)
    edges = np.array(sorted(starts | {total}))
    segment_of = np.searchsorted(edges, np.arange(total), side="right") - 1  # [T]
    parents = [
        -1 if previous[start] < 0 else int(segment_of[previous[start]]) for start in edges[:-1]
    ]
    segments = tuple(
        Segment(int(start), int(end), parent)
        for start, end, parent in zip(edges, edges[1:], parents, strict=False)
    )
    leaves = tuple(int(segment_of[last_rows[s]]) for s in range(len(sequences)))
    return PrefixTree(tokens, position_ids, previous, sequence_ids, loss_mask, segments, leaves)


def _shared_prefixes(
    sequences: Sequence[TokenSequence],
    arrays: Sequence[tuple[NDArray[np.int64], NDArray[np.bool_]]],
) -> Iterable[tuple[int, int]]:
    """Yield each sequence in sorted order, with the number of tokens that the one before has.

    arrays: the tokens and the mask of each sequence.
    """
    ids_before, read_before = np.empty(0, np.int64), np.empty(0, np.bool_)
    order = sorted(
        range(len(sequences)), key=lambda s: (sequences[s].token_ids, sequences[s].loss_mask)
    )
    for s in order:
        ids, mask = arrays[s]
        length = min(len(ids), len(ids_before))
        differs = ids[:length] != ids_before[:length]
        stops = np.flatnonzero(differs | (mask[:length] & read_before[:length]))
        common = int(stops[0]) if len(stops) else length
        num_shared = common if common >= MIN_SHARED_TOKENS else 0
        ids_before = ids
        read_before = np.concatenate(
            [read_before[:num_shared] | mask[:num_shared], mask[num_shared:]]
        )
        yield s, num_shared
