"""Context parallelism: several processes share the tokens of a micro-batch.

Each process runs the rows of two chunks through all layers. Only attention needs the others: its
queries are the local rows, and its keys and values those of all rows, gathered in each layer. This
is the scheme of PyTorch's context parallelism for FlexAttention
(dev/decisions/0051-context-parallelism.md). Later rows attend to more keys; a chunk from the start
and one from the end give each process about the same number of scores (Llama 3, arXiv 2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from valence.types import sent


class ContextGroup(Protocol):
    """The processes that share the tokens of each micro-batch. All call the same methods in the
    same order.
    """

    rank: int
    size: int
    replicas: Any
    """The group of processes whose gradients add up, with other tokens or other rows."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the values [n, ...] of all processes, concatenated in the order of ranks. The
        gradient is summed over the processes.
        """
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes, which all use it alike: its gradient is the same in
        all of them, and is that of each term.
        """
        ...


def padded_length(tokens: int, size: int, pad: Callable[[int], int]) -> int:
    """Return the number of rows of a pass over ``size`` processes, each of which has two chunks of
    equal length. pad: the length of a chunk after padding.
    """
    return 2 * size * pad(-(-tokens // (2 * size)))


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The rows of one process among the T rows of a pass.

    spans: (first, last + 1) of its two chunks. rows[T/size]: their numbers, ascending, on the CPU.
    order[T]: place of each row of the pass among the rows of all processes in the order of ranks.
    """

    group: ContextGroup
    spans: tuple[tuple[int, int], tuple[int, int]]
    rows: Tensor
    order: Tensor

    @classmethod
    def of(cls, group: ContextGroup, total: int, device: torch.device) -> TokenShard:
        """Return the shard of this process. total: T, from ``padded_length``."""
        chunk = total // (2 * group.size)

        def spans(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
            last = 2 * group.size - rank
            return (rank * chunk, (rank + 1) * chunk), ((last - 1) * chunk, last * chunk)

        by_rank = [torch.arange(*span) for rank in range(group.size) for span in spans(rank)]
        rows = torch.cat(by_rank[2 * group.rank : 2 * group.rank + 2])
        order = torch.cat(by_rank).argsort()
        return cls(group, spans(group.rank), rows, sent(order, device))

    def gather_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all rows [1, H_kv, T, D] from those of this process."""
        widths = [x.shape[1] * x.shape[3] for x in (key, value)]
        local = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (key, value)], 1)
        columns = self.group.gather(local)[self.order].split(widths, 1)
        heads = key.shape[1]
        full_key, full_value = (x.unflatten(1, (heads, -1)).transpose(0, 1)[None] for x in columns)
        return full_key, full_value


def shard_table(prefix_tree: Tensor, shard: TokenShard) -> Tensor:
    """Return a segment table (see ``layout``) in which only the rows of this process are queries.

    Segments of queries are cut at the ends of chunks. Rows of the pass are counted from the first
    query.
    """
    segments: list[tuple[int, int, int, bool]] = []
    last_piece = {-1: -1}
    table: list[list[int]] = prefix_tree.tolist()
    first = min(start for start, _, _, is_query in table if is_query)
    spans = [(first + start, first + end) for start, end in shard.spans]
    edges = {edge for span in spans for edge in span}
    for k, (start, end, parent, is_query) in enumerate(table):
        cuts = sorted({edge for edge in edges if is_query and start < edge < end})
        piece = last_piece[parent]
        for a, b in pairwise([start, *cuts, end]):
            is_local = bool(is_query) and any(low <= a < high for low, high in spans)
            segments.append((a, b, piece, is_local))
            piece = len(segments) - 1
        last_piece[k] = piece
    return torch.tensor(segments, dtype=torch.long)
