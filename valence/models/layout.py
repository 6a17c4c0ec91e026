"""Which queries run together, and over which keys: the forest of a micro-batch as dense blocks of
attention.

Every token sees the tokens on its path from the root and nothing else. A run is a chain of segments
that follow each other in the rows, each the parent of the next; its tokens see the path above the
run, and each other causally. The keys of a run are therefore the rows of its path, in order: key j
stands at depth j, and query i of a run behind ``above`` tokens sees the keys j <= above + i.
Nothing else has to be masked, and no two blocks have to be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

AREA = (
    1 << 18
    # queries x keys of one run in one block (of all its runs: four times that): scores stay in a
    # processor's cache
)
FEWEST, MOST = 16, 512  # queries of one run in one block
CALL = 25_000  # queries x keys that take as long as the calls of one more block
STRIDE = (
    16  # lengths are rounded up to multiples of it, so that the libraries below meet few shapes
)


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Queries of R runs and their keys. queries[R, n]: rows among the queries; keys[R, L]: rows
    among the keys. What pads a shorter run repeats a row. real[R, n]: False where a query is
    padding; None when none is. above[R]: query i of a run sees key j when j <= above + i; the first
    ``least`` keys are seen by all. span: the keys as (first, last + 1) when they are successive
    rows of one run.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor | None
    above: Tensor
    least: int
    span: tuple[int, int] | None


Table = tuple[tuple[int, int, int, bool], ...]
"""The segments as (first row, last row + 1, parent, whether its tokens are queries), parents
first.
"""


def table(segments: Sequence[tuple[int, int, int]]) -> Tensor:
    """The layout of a whole forest as attention is handed it: [N, 4] on the CPU."""
    return torch.tensor([(*segment, 1) for segment in segments])


@dataclass(frozen=True, slots=True)
class GradientSplit:
    """A forest in two passes: rows[T1] of what has a gradient, and rest[T2] that only reads its
    keys and values.

    first, second: their tables. Rows of the second table count on behind those of the first, with
    what fills these up.
    """

    rows: Tensor
    rest: Tensor
    first: Tensor
    second: Tensor


def split(
    segments: Sequence[tuple[int, int, int]],
    paths: Sequence[Sequence[int]],
    trains: Sequence[bool],
    fill: Callable[[int], int] = int,
) -> GradientSplit:
    """paths[S]: the segments of each sequence; trains[S]: which of them have a gradient. fill: how
    many rows the first pass has in place of so many.
    """
    kept = {k for path, it in zip(paths, trains, strict=True) if it for k in path}
    ours, others = (
        [k for k in range(len(segments)) if k in kept],
        [k for k in range(len(segments)) if k not in kept],
    )
    number, spans, row = {-1: -1}, list[tuple[int, int, int]](), 0

    def add(which: Sequence[int]) -> None:
        nonlocal row
        for k in which:  # parents come before children
            start, end, parent = segments[k]
            number[k] = len(spans)
            spans.append((row, row := row + end - start, number[parent]))

    add(ours)
    first = table(spans)
    if fill(row) > row:
        spans.append((row, row := fill(row), -1))
    asked = len(spans)
    add(others)
    rows = [[r for k in which for r in range(*segments[k][:2])] for which in (ours, others)]
    second = torch.tensor([(*span, i >= asked) for i, span in enumerate(spans)])
    return GradientSplit(torch.tensor(rows[0]), torch.tensor(rows[1]), first, second)


def segments_of(layout: Tensor) -> Table:
    """The table as plain numbers."""
    return tuple((a, b, p, bool(q)) for a, b, p, q in layout.tolist())


@lru_cache(maxsize=32)
def blocks(segments: Table, device: torch.device) -> tuple[Block, ...]:
    """The blocks of a table, made once for all layers of a pass."""
    pieces = [piece for run in runs(segments) for piece in _pieces(run)]
    return tuple(_block(bucket, device) for bucket in _buckets(pieces))


@lru_cache(maxsize=256)
def hidden(block: Block, window: int) -> Tensor:
    """True where a query may not see a key: later ones and, with a window (0: none), those so many
    tokens or more before it. [R, 1, n, L], or without a window only the keys that not all queries
    see: [R, 1, n, L - least].
    """
    start = 0 if window else block.least
    device = block.keys.device
    length = block.keys.shape[1]
    query = block.above[:, None] + torch.arange(block.queries.shape[1], device=device)
    query = query.clamp(max=length - 1)  # what pads the queries must see something too
    distance = query[:, :, None] - torch.arange(start, length, device=device)
    return ((distance < 0) | ((distance >= window) if window else False))[:, None]


@dataclass(frozen=True, slots=True)
class RowRun:
    """own: rows among the queries; keys: rows among the keys of the path to the last of them, of
    which ``above`` come before the first.
    """

    own: list[int]
    keys: list[int]

    @property
    def above(self) -> int:
        return len(self.keys) - len(self.own)


def runs(segments: Table) -> list[RowRun]:
    """Every segment of queries is in one run; a run starts where a segment does not follow its
    parent.
    """
    first = min(start for start, _, _, queries in segments if queries)
    paths: list[list[int]] = []  # rows to the end of each segment
    found: list[RowRun] = []
    at: dict[int, int] = {}  # segment -> its run, for the last segment of each run
    for k, (start, end, parent, queries) in enumerate(segments):
        rows = range(start, end)
        paths.append([*paths[parent], *rows] if parent >= 0 else list(rows))
        if not queries:
            continue
        own = [row - first for row in rows]
        at[k] = at.pop(parent) if parent in at and segments[parent][1] == start else len(found)
        if at[k] == len(found):
            found.append(RowRun(own, paths[k]))
        else:
            found[at[k]] = RowRun(found[at[k]].own + own, paths[k])
    return found


def _pieces(run: RowRun) -> list[RowRun]:
    """A long run in pieces, each over the keys up to its own last query."""
    found: list[RowRun] = []
    start = 0
    while start < len(run.own):
        keys = run.above + start + 1
        stop = min(
            len(run.own), start + min(MOST, max(FEWEST, AREA // (keys + min(MOST, AREA // keys))))
        )
        found.append(RowRun(run.own[start:stop], run.keys[: run.above + stop]))
        start = stop
    return found


def _buckets(runs: Sequence[RowRun]) -> list[list[RowRun]]:
    """Runs together as long as padding them to one size costs less than the calls of one more
    block.
    """
    found: list[tuple[int, int, list[RowRun]]] = []  # queries, keys, runs
    for run in sorted(runs, key=lambda run: (-len(run.keys), -len(run.own))):
        n, length = len(run.own), len(run.keys)
        best, least = None, n * length + CALL
        for i, (most, longest, bucket) in enumerate(found):
            wide = max(n, most)
            more = (len(bucket) + 1) * wide * longest - len(bucket) * most * longest
            if more < least and (len(bucket) + 1) * wide * longest <= 4 * AREA:
                best, least = i, more
        if best is None:
            found.append((n, length, [run]))
        else:
            most, longest, bucket = found[best]
            found[best] = max(n, most), longest, [*bucket, run]
    return [bucket for _, _, bucket in found]


def _up(length: int) -> int:
    return -(-length // STRIDE) * STRIDE


def _block(runs: Sequence[RowRun], device: torch.device) -> Block:
    n, length = _up(max(len(run.own) for run in runs)), max(len(run.keys) for run in runs)
    start = runs[0].keys[0]
    successive = len(runs) == 1 and runs[0].keys == list(range(start, start + length))
    # else what pads the keys would be rows of others, and what is not a number there would come
    # along
    if not successive:
        length = _up(length)
    queries = [run.own + [run.own[-1]] * (n - len(run.own)) for run in runs]
    keys = [run.keys + [run.keys[-1]] * (length - len(run.keys)) for run in runs]
    real = torch.tensor([[i < len(run.own) for i in range(n)] for run in runs], device=device)
    above = [run.above for run in runs]
    return Block(
        queries=torch.tensor(queries, device=device),
        keys=torch.tensor(keys, device=device),
        real=None if all(len(run.own) == n for run in runs) else real,
        above=torch.tensor(above, device=device),
        least=min(above),
        span=(start, start + length) if successive else None,
    )
