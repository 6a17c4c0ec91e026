"""The prefix tree of a micro-batch as dense blocks of attention: which queries run together, and
over which keys.

Every token attends to the tokens on its path from the root. A run is a chain of segments that
follow one another in the rows, each the parent of the next; its tokens attend to the path above the
run and causally to one another. The keys of a run are therefore the rows of its path, in order: key
j has depth j, and query i of a run with ``num_prefix_keys`` tokens above it attends to the keys
j <= num_prefix_keys + i. No other mask is needed, and no two blocks need merging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from valence.types import sent

MAX_RUN_SCORES = 1 << 18
"""Queries x keys of one run in one block, and a quarter of those of all its runs: scores stay in
the CPU's cache.
"""
MIN_QUERIES, MAX_QUERIES = 16, 512
"""Queries of one run in one block."""
BLOCK_COST = 25_000
"""Queries x keys that take as long as the calls of one more block."""
LENGTH_MULTIPLE = 16
"""Lengths are rounded up to multiples of this, so that libraries get few different shapes."""


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Queries of R runs and their keys.

    queries[R, n]: rows of the queries. keys[R, L]: rows of the keys. Padding of shorter runs
    repeats a row. is_query[R, n]: False where a query is padding; None without padding.
    num_prefix_keys[R]: query i of a run attends to key j if j <= num_prefix_keys + i; the first
    ``num_common_keys`` keys are visible to all queries. key_range: the keys as (first, last + 1)
    when they are successive rows of one run.
    """

    queries: Tensor
    keys: Tensor
    is_query: Tensor | None
    num_prefix_keys: Tensor
    num_common_keys: int
    key_range: tuple[int, int] | None


SegmentTable = tuple[tuple[int, int, int, bool], ...]
"""The segments as (first row, last row + 1, parent, whether its tokens are queries), parents
first.
"""


def segment_table(segments: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return a prefix tree of which all tokens are queries in the form that attention receives:
    [N, 4] on the CPU.
    """
    return torch.tensor([(*segment, 1) for segment in segments])


@dataclass(frozen=True, slots=True)
class GradientSplit:
    """A prefix tree as two passes: rows grad_rows[T1] with a gradient, and no_grad_rows[T2], which
    only read the keys and values of the first pass.

    grad_table, no_grad_table: their segment tables. Rows of the second table continue those of the
    first, including its padding.
    """

    grad_rows: Tensor
    no_grad_rows: Tensor
    grad_table: Tensor
    no_grad_table: Tensor


def split_by_gradient(
    segments: Sequence[tuple[int, int, int]],
    paths: Sequence[Sequence[int]],
    requires_grad: Sequence[bool],
    padded_length: Callable[[int], int] = int,
) -> GradientSplit:
    """Split a prefix tree by whether sequences need a gradient.

    paths[S]: the segments of each sequence. padded_length: the number of rows of the first pass
    after padding, from the number before.
    """
    with_grad = [path for path, grad in zip(paths, requires_grad, strict=True) if grad]
    in_first = {k for path in with_grad for k in path}
    first = [k for k in range(len(segments)) if k in in_first]
    second = [k for k in range(len(segments)) if k not in in_first]
    number, spans, row = {-1: -1}, list[tuple[int, int, int]](), 0

    def add(selected: Sequence[int]) -> None:
        nonlocal row
        for k in selected:  # parents come before children
            start, end, parent = segments[k]
            number[k] = len(spans)
            spans.append((row, row := row + end - start, number[parent]))

    add(first)
    grad_table = segment_table(spans)
    if padded_length(row) > row:
        spans.append((row, row := padded_length(row), -1))
    num_first = len(spans)
    add(second)
    rows = [[r for k in selected for r in range(*segments[k][:2])] for selected in (first, second)]
    no_grad_table = torch.tensor([(*span, i >= num_first) for i, span in enumerate(spans)])
    return GradientSplit(torch.tensor(rows[0]), torch.tensor(rows[1]), grad_table, no_grad_table)


def segments_of(layout: Tensor) -> SegmentTable:
    """Return the segment table as Python numbers."""
    return tuple((a, b, p, bool(q)) for a, b, p, q in layout.tolist())


@lru_cache(maxsize=32)
def make_blocks(
    segments: SegmentTable,
    device: torch.device,
    max_scores: int = MAX_RUN_SCORES,
    block_cost: int = BLOCK_COST,
) -> tuple[Block, ...]:
    """Return the blocks of a table; cached for all layers of a pass."""
    pieces = [piece for run in make_runs(segments) for piece in _split_run(run, max_scores)]
    buckets = _bucket_runs(pieces, 4 * max_scores, block_cost)
    return tuple(_make_block(bucket, device) for bucket in buckets)


@lru_cache(maxsize=256)
def hidden_keys(block: Block, window: int) -> Tensor:
    """Return the mask that is True where a query does not attend to a key: later keys and, with a
    window (0: none), keys at least that many tokens before the query.

    [R, 1, n, L]; without a window only the keys that are not visible to all queries:
    [R, 1, n, L - num_common_keys].
    """
    start = 0 if window else block.num_common_keys
    device = block.keys.device
    length = block.keys.shape[1]
    query = block.num_prefix_keys[:, None] + torch.arange(block.queries.shape[1], device=device)
    query = query.clamp(max=length - 1)  # queries that are padding need a visible key too
    distance = query[:, :, None] - torch.arange(start, length, device=device)
    return ((distance < 0) | ((distance >= window) if window else False))[:, None]


@dataclass(frozen=True, slots=True)
class RowRun:
    """queries: numbers of the queries among the rows that are queries. keys: rows of the keys on
    the path to the last query, of which ``num_prefix_keys`` come before the first query.
    """

    queries: list[int]
    keys: list[int]

    @property
    def num_prefix_keys(self) -> int:
        return len(self.keys) - len(self.queries)


def make_runs(segments: SegmentTable) -> list[RowRun]:
    """Return the runs of a table. A run starts where a segment of queries does not follow its
    parent.
    """
    numbers = _number_queries(segments)
    paths: list[list[int]] = []  # rows to the end of each segment
    runs: list[RowRun] = []
    run_of: dict[int, int] = {}  # last segment of each run -> index of the run
    for k, (start, end, parent, is_query) in enumerate(segments):
        rows = range(start, end)
        paths.append([*paths[parent], *rows] if parent >= 0 else list(rows))
        if not is_query:
            continue
        queries = [numbers[k] + i for i in range(end - start)]
        follows_parent = parent in run_of and segments[parent][1] == start
        run_of[k] = run_of.pop(parent) if follows_parent else len(runs)
        if run_of[k] == len(runs):
            runs.append(RowRun(queries, paths[k]))
        else:
            runs[run_of[k]] = RowRun(runs[run_of[k]].queries + queries, paths[k])
    return runs


@dataclass(frozen=True, eq=False, slots=True)
class PackedRuns:
    """All runs of a table one after another, as kernels for sequences of different lengths read
    them: the queries of a run are the last of its keys, and attend causally.

    queries[T_q], keys[T_k]: rows. cu_seqlens_q[R + 1], cu_seqlens_k[R + 1]: int32, where each run
    starts. order[T_q]: where the result of each row of the queries is.
    """

    queries: Tensor
    keys: Tensor
    order: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@lru_cache(maxsize=32)
def packed_runs(segments: SegmentTable, device: torch.device) -> PackedRuns:
    """Return the runs of a table on a device; cached for all layers of a pass."""
    runs = make_runs(segments)
    queries, keys = [run.queries for run in runs], [run.keys for run in runs]

    def starts(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)

    with torch.inference_mode(False):  # the result is cached for passes with a gradient too
        query_rows = torch.tensor([row for rows in queries for row in rows])
        key_rows = torch.tensor([row for rows in keys for row in rows])
        return PackedRuns(
            queries=sent(query_rows, device),
            keys=sent(key_rows, device),
            order=sent(query_rows.argsort(), device),
            cu_seqlens_q=sent(starts(queries), device),
            cu_seqlens_k=sent(starts(keys), device),
            max_seqlen_q=max(map(len, queries)),
            max_seqlen_k=max(map(len, keys)),
        )


def _number_queries(segments: SegmentTable) -> dict[int, int]:
    """Return the number of the first query of each segment of queries, in the order of the rows."""
    numbers: dict[int, int] = {}
    total = 0
    for k in sorted(range(len(segments)), key=lambda k: segments[k][0]):
        start, end, _, is_query = segments[k]
        if is_query:
            numbers[k] = total
            total += end - start
    return numbers


def _split_run(run: RowRun, max_scores: int) -> list[RowRun]:
    """Split a long run into pieces, each with the keys up to its last query."""
    pieces: list[RowRun] = []
    start = 0
    while start < len(run.queries):
        keys = run.num_prefix_keys + start + 1
        size = max_scores // (keys + min(MAX_QUERIES, max_scores // keys))
        stop = min(len(run.queries), start + min(MAX_QUERIES, max(MIN_QUERIES, size)))
        pieces.append(RowRun(run.queries[start:stop], run.keys[: run.num_prefix_keys + stop]))
        start = stop
    return pieces


def _bucket_runs(runs: Sequence[RowRun], max_scores: int, block_cost: int) -> list[list[RowRun]]:
    """Group runs as long as padding them to one size costs less than the calls of one more
    block.
    """
    buckets: list[tuple[int, int, list[RowRun]]] = []  # queries, keys, runs
    for run in sorted(runs, key=lambda run: (-len(run.keys), -len(run.queries))):
        n, length = len(run.queries), len(run.keys)
        best, min_cost = None, n * length + block_cost
        for i, (max_queries, max_keys, bucket) in enumerate(buckets):
            scores = (len(bucket) + 1) * max(n, max_queries) * max_keys
            cost = scores - len(bucket) * max_queries * max_keys
            if cost < min_cost and scores <= max_scores:
                best, min_cost = i, cost
        if best is None:
            buckets.append((n, length, [run]))
        else:
            max_queries, max_keys, bucket = buckets[best]
            buckets[best] = max(n, max_queries), max_keys, [*bucket, run]
    return [bucket for _, _, bucket in buckets]


def _round_up(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _make_block(runs: Sequence[RowRun], device: torch.device) -> Block:
    n = _round_up(max(len(run.queries) for run in runs))
    length = max(len(run.keys) for run in runs)
    start = runs[0].keys[0]
    is_range = len(runs) == 1 and runs[0].keys == list(range(start, start + length))
    # Padding a range of rows would include rows of other sequences, and their NaN values.
    if not is_range:
        length = _round_up(length)
    queries = [run.queries + [run.queries[-1]] * (n - len(run.queries)) for run in runs]
    keys = [run.keys + [run.keys[-1]] * (length - len(run.keys)) for run in runs]
    is_query = torch.tensor(
        [[i < len(run.queries) for i in range(n)] for run in runs], device=device
    )
    num_prefix_keys = [run.num_prefix_keys for run in runs]
    return Block(
        queries=torch.tensor(queries, device=device),
        keys=torch.tensor(keys, device=device),
        is_query=None if all(len(run.queries) == n for run in runs) else is_query,
        num_prefix_keys=torch.tensor(num_prefix_keys, device=device),
        num_common_keys=min(num_prefix_keys),
        key_range=(start, start + length) if is_range else None,
    )
