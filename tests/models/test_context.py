"""Processes that share the tokens of a pass: every row is a query of one process, and sees the keys
that it sees in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.test_attention import SCALE, heads
from tests.models.test_layout import covered, windows
from tests.prefix_trees import Segments, dense_attention, path, prefix_trees, visible_mask
from valence.models.attention import (
    Layout,
    attend_by_flex,
    attend_on_cpu,
    prefix_tree_attention,
)
from valence.models.context import TokenShard, padded_length, shard_table
from valence.models.flex import Visible
from valence.models.layout import segment_table, segments_of, split_by_gradient
from valence.models.policy_model import local_states, padded_size

CPU = torch.device("cpu")
sizes = st.sampled_from([2, 3, 4])


@dataclass
class OtherRanks:
    """A group whose other processes have these values, which ``gather`` returns."""

    rank: int
    size: int
    replicas: Any = None
    shares: list[Tensor] | None = None

    def gather(self, values: Tensor) -> Tensor:
        assert self.shares is not None
        torch.testing.assert_close(values, self.shares[self.rank])
        return torch.cat(self.shares)

    def sum(self, values: Tensor) -> Tensor:
        raise NotImplementedError


def padded_to(segments: Segments, size: int) -> Segments:
    """With a sequence of padding at the end."""
    rows = segments[-1][1]
    total = padded_length(rows, size, int)
    return [*segments, *([(rows, total, -1)] if total > rows else [])]


@given(prefix_trees(), sizes, windows)
def test_the_queries_of_all_processes_see_what_they_see_in_one(
    segments: Segments, size: int, window: int
) -> None:
    segments = padded_to(segments, size)
    rows = segments[-1][1]
    expected = visible_mask(segments, window).long()
    result = torch.zeros_like(expected)
    for rank in range(size):
        shard = TokenShard.of(OtherRanks(rank, size), rows, CPU)
        table = segments_of(shard_table(segment_table(segments), shard))
        result[shard.rows] += covered(table, window)
    assert torch.equal(result, expected)


@given(prefix_trees(), sizes, windows, st.randoms(use_true_random=False))
def test_a_second_pass_is_shared_too(
    segments: Segments, size: int, window: int, draw: Random
) -> None:
    """Its queries come after the rows of the first pass, which are keys alone."""
    parents = {parent for _, _, parent in segments}
    leaves = [k for k in range(len(segments)) if k not in parents]
    trains = [draw.random() < 0.5 for _ in leaves]
    assume(len(set(trains)) == 2)
    pad = partial(padded_length, size=size, pad=int)
    split = split_by_gradient(segments, [path(segments, k) for k in leaves], trains, pad)
    first = int(split.no_grad_table[split.no_grad_table[:, 3] == 1][0, 0])
    end, count = int(split.no_grad_table[-1, 1]), len(split.no_grad_rows)
    padding = [[end, first + pad(count), -1, 1]] if pad(count) > count else []
    table = torch.cat([split.no_grad_table, split.no_grad_table.new_tensor(padding).view(-1, 4)])
    expected = covered(segments_of(table), window)
    result = torch.zeros_like(expected)
    for rank in range(size):
        shard = TokenShard.of(OtherRanks(rank, size), pad(count), CPU)
        result[shard.rows] += covered(segments_of(shard_table(table, shard)), window)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("way", ["operator", "flex"])
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
@settings(max_examples=15)
@given(prefix_trees(), sizes, st.sampled_from([0, 3]))
def test_attention_of_a_process_is_that_of_its_rows(
    way: str, segments: Segments, size: int, window: int
) -> None:
    segments = padded_to(segments, size)
    rows = segments[-1][1]
    q, k, v = (x.detach() for x in heads(rows, d_v=6))
    expected = dense_attention(q, k, v, visible_mask(segments, window), SCALE)
    shards = [TokenShard.of(OtherRanks(rank, size), rows, CPU) for rank in range(size)]
    columns = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (k, v)], 1)
    for shard in shards:
        shard.group.shares = [columns[other.rows] for other in shards]  # type: ignore[attr-defined]
        table = shard_table(segment_table(segments), shard)
        options = {"visible": Visible(segments_of(table), (window,), CPU)} if way == "flex" else {}
        out, _ = prefix_tree_attention(
            torch.nn.Identity(), *(x[:, :, shard.rows] for x in (q, k, v)),
            None if not window else torch.full((1, 1, 1, 1), window),
            scaling=SCALE, sliding_window=window or None, prefix_tree=table, shard=shard, **options,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, shard.rows], rtol=1e-10, atol=1e-11)


ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("way", ["operator", pytest.param("flex", marks=ON_CUDA)])
@pytest.mark.parametrize("window", [0, 100])
def test_gradients_of_all_processes_add_up(way: str, window: int) -> None:
    """Of keys and values over all processes; of queries, each process has those of its rows."""
    device = torch.device("cuda" if way == "flex" else "cpu")
    dtype = torch.float32 if way == "flex" else torch.float64
    segments = [(0, 700, -1), (700, 1100, 0), (1100, 1500, 0), (1500, 2048, -1)]
    inputs = [x.detach().to(device, dtype).requires_grad_() for x in heads(2048, d=16, d_v=16)]
    slopes = torch.randn(1, 2048, 4, 16, generator=torch.Generator().manual_seed(7)).to(inputs[0])
    out = dense_attention(*inputs, visible_mask(segments, window).to(device), SCALE)
    expected = torch.autograd.grad(out, inputs, slopes)
    total = [torch.zeros_like(x) for x in inputs]
    for rank in range(4):
        shard = TokenShard.of(OtherRanks(rank, 4), 2048, device)
        rows = shard.rows.to(device)
        table = shard_table(segment_table(segments), shard)
        visible = Visible(segments_of(table), (window,), device) if way == "flex" else None
        local = inputs[0][:, :, rows], *inputs[1:]
        layout = Layout(table, visible, SCALE, window)
        part = (attend_by_flex if visible else attend_on_cpu)(*local, layout)
        for sum_, grad in zip(
            total, torch.autograd.grad(part, inputs, slopes[:, rows]), strict=True
        ):
            sum_ += grad
    for result, reference in zip(total, expected, strict=True):
        tolerance = 1e-3 if way == "flex" else 1e-10
        assert (result - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("size", [2, 4])
def test_chunks_have_equal_lengths_and_balance_a_long_sequence(size: int) -> None:
    for device, tokens in (("cpu", 1), ("cpu", 1000), ("cuda", 3000), ("cuda", 40_000)):
        total = padded_length(tokens, size, partial(padded_size, device=device))
        assert total >= tokens
        shards = [TokenShard.of(OtherRanks(rank, size), total, CPU) for rank in range(size)]
        assert {len(shard.rows) for shard in shards} == {total // size}
        scores = [int((shard.rows + 1).sum()) for shard in shards]
        assert max(scores) == min(scores)
        ranks = torch.cat([shard.rows for shard in shards])
        assert torch.equal(ranks[shards[0].order], torch.arange(total))


def test_states_of_other_processes_are_left_out() -> None:
    states = local_states(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 0]), 5)
    local, is_local = states.at(torch.tensor([0, 1, 3, 3, 4]))
    assert isinstance(is_local, Tensor)
    assert local.flatten().tolist() == [2.0, 1.0, 1.0]
    assert is_local.tolist() == [True, False, True, True, False]
