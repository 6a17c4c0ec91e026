"""Blocks of attention cover each visible pair of query and key once, and no other pair."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.prefix_trees import Segments, path, prefix_trees, rows, visible_mask
from valence.models import layout
from valence.models.layout import (
    SegmentTable,
    hidden_keys,
    make_blocks,
    make_runs,
    segment_table,
    segments_of,
    split_by_gradient,
)

CPU = torch.device("cpu")
windows = st.sampled_from([0, 1, 2, 5, 30])


def covered(segments: SegmentTable, window: int, *sizes: int) -> Tensor:
    """How often each query (row) sees each key (column), by the blocks."""
    keys = max(end for _, end, _, _ in segments)
    queries = sum(end - start for start, end, _, flag in segments if flag)
    result = torch.zeros(queries, keys, dtype=torch.long)
    for block in make_blocks(segments, CPU, *sizes):
        (count, n), length = block.queries.shape, block.keys.shape[1]
        unseen = hidden_keys(block, window)
        full = torch.zeros(count, 1, n, length, dtype=torch.bool)
        full[..., length - unseen.shape[3] :] = unseen
        real = torch.ones(count, n, dtype=torch.bool) if block.is_query is None else block.is_query
        rows_of_keys = (
            block.keys if block.key_range is None else torch.arange(*block.key_range)[None]
        )
        assert rows_of_keys.shape == block.keys.shape
        for r in range(count):
            for i in torch.nonzero(real[r]).flatten().tolist():
                result[block.queries[r, i]] += torch.bincount(
                    rows_of_keys[r][~full[r, 0, i]], minlength=keys
                )
    return result


@given(prefix_trees(), windows, st.sampled_from([(1 << 18, 25_000), (60, 0), (200, 10**9)]))
@example([(0, 30, -1), (30, 32, 0), (32, 33, 0)], 4, (1 << 18, 25_000))
def test_blocks_cover_visible_pairs_exactly_once(
    segments: Segments, window: int, sizes: tuple[int, int]
) -> None:
    """Whatever the size of a block, and however readily runs are put into one."""
    result = covered(segments_of(segment_table(segments)), window, *sizes)
    assert torch.equal(result, visible_mask(segments, window).long())


@given(prefix_trees())
def test_every_query_is_in_one_run_over_the_rows_of_its_path(segments: Segments) -> None:
    result = make_runs(segments_of(segment_table(segments)))
    assert sorted(row for run in result for row in run.queries) == list(range(segments[-1][1]))
    wanted = visible_mask(segments)
    for run in result:
        assert run.keys[run.num_prefix_keys :] == run.queries
        for i, row in enumerate(run.queries):
            assert (
                sorted(run.keys[: run.num_prefix_keys + i + 1])
                == torch.nonzero(wanted[row]).flatten().tolist()
            )


@given(prefix_trees())
def test_a_chain_of_segments_is_one_run(segments: Segments) -> None:
    """As many runs as there are segments that do not follow their parent."""
    separate = [
        k
        for k, (start, _, parent) in enumerate(segments)
        if parent < 0 or segments[parent][1] != start
    ]
    assert len(make_runs(segments_of(segment_table(segments)))) == len(separate)


@given(prefix_trees(), windows, st.randoms(use_true_random=False))
def test_two_passes_see_the_same_pairs_as_one(
    segments: Segments, window: int, draw: Random
) -> None:
    parents = {parent for _, _, parent in segments}
    leaves = [k for k in range(len(segments)) if k not in parents]
    trains = [draw.random() < 0.5 for _ in leaves]
    assume(len(set(trains)) == 2)
    split = split_by_gradient(segments, [path(segments, k) for k in leaves], trains)
    wanted = visible_mask(segments, window).long()
    order = torch.cat([split.grad_rows, split.no_grad_rows])
    with_gradient = {
        row for k, flag in zip(leaves, trains, strict=True) if flag for row in rows(segments, k)
    }
    assert sorted(order.tolist()) == list(range(segments[-1][1]))
    assert set(split.grad_rows.tolist()) == with_gradient
    assert torch.equal(
        covered(segments_of(split.grad_table), window), wanted[split.grad_rows][:, split.grad_rows]
    )
    assert not wanted[split.grad_rows][:, split.no_grad_rows].any()
    assert torch.equal(
        covered(segments_of(split.no_grad_table), window), wanted[split.no_grad_rows][:, order]
    )


@given(prefix_trees(segments=6, longest=60), windows)
@example([(0, 30, -1), (30, 32, 0), (32, 33, 0)], 4)
def test_a_query_that_pads_sees_a_key_too(segments: Segments, window: int) -> None:
    """Else its softmax is not a number, which no mask takes out of a gradient."""
    for block in make_blocks(segments_of(segment_table(segments)), CPU):
        unseen = hidden_keys(block, window)
        assert unseen.shape[3] < block.keys.shape[1] or not unseen.all(-1).any()


def test_a_window_reaches_over_a_long_path_in_pieces() -> None:
    """One run of many queries, and another that begins deep inside it."""
    segments = [(0, 1100, -1), (1100, 1103, 0)]
    wanted = visible_mask(segments, 100).long()
    assert len(make_blocks(segments_of(segment_table(segments)), CPU)) > 2
    assert torch.equal(covered(segments_of(segment_table(segments)), 100), wanted)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_padding_is_little(lengths: list[int]) -> None:
    """Sequences that share nothing: no more is computed than twice what their squares are, and what
    rounding lengths up costs.
    """
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    result = make_blocks(
        segments_of(
            segment_table([(end - n, end, -1) for n, end in zip(lengths, ends, strict=True)])
        ),
        CPU,
    )
    computed = sum(block.queries.numel() * block.keys.shape[1] for block in result)
    assert computed <= sum(
        (n + layout.LENGTH_MULTIPLE) ** 2 for n in lengths
    ) + layout.BLOCK_COST * len(lengths)
    assert len(result) <= len(lengths) + sum(n // layout.MIN_QUERIES for n in lengths)
