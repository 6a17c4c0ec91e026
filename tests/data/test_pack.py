"""Units to micro-batches under a budget of tokens, and their columns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.units import unit, units
from valence.data.pack import collate, pack

lengths = st.lists(st.integers(1, 40), max_size=40)


@given(lengths, st.integers(1, 60))
def test_every_unit_runs_once_and_within_the_budget(sizes: list[int], budget: int) -> None:
    dealt = pack(sizes, budget)
    assert sorted(i for rows in dealt for i in rows) == list(range(len(sizes)))
    for rows in dealt:
        assert rows == sorted(rows)
        assert len(rows) == 1 or sum(sizes[i] for i in rows) <= budget


@given(lengths, st.integers(1, 60))
def test_there_are_few_micro_batches(sizes: list[int], budget: int) -> None:
    """At most one more than twice what the tokens alone would ask for."""
    shared = [n for n in sizes if n <= budget]
    most = 2 * sum(shared) / budget + 1 if shared else 0
    assert len(pack(sizes, budget)) - (len(sizes) - len(shared)) <= most


@pytest.mark.parametrize(("sizes", "budget", "expected"), [
    ([], 10, []),
    ([4], 10, [[0]]),
    ([4, 4, 2], 10, [[0, 1, 2]]),
    ([5, 5, 5, 5], 10, [[0, 2], [1, 3]]),
    ([30, 4, 50, 5], 10, [[2], [0], [1, 3]]),
    ([10, 10, 10], 10, [[0], [1], [2]]),
    ([9, 8, 1, 2], 10, [[0, 2], [1, 3]]),
    ([6, 6, 6, 1, 1], 10, [[0, 3], [1, 4], [2]]),
])  # fmt: skip
def test_a_unit_over_the_budget_runs_alone_and_the_others_are_dealt_evenly(sizes: list, budget: int, expected: list) -> None:
    assert pack(sizes, budget) == expected


@given(lengths.filter(bool))
def test_a_budget_of_one_runs_one_by_one(sizes: list[int]) -> None:
    assert all(len(rows) == 1 for rows in pack(sizes, 1))


def test_the_columns_of_a_pair() -> None:
    pair = unit("pair", "preference", (3, 4), (5, 6, 7), (8,), weight=0.5, margin=0.25)
    batch = collate([pair], [9])
    assert batch.tokens.tolist() == [3, 4, 5, 6, 7, 3, 4, 8]
    assert batch.pos.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.seq.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert batch.mask.tolist() == [False, False, True, True, True, False, False, True]
    assert batch.bounds == (0, 5, 8)
    assert (batch.unit.tolist(), batch.side.tolist()) == ([9, 9], [0, 1])
    assert (batch.weight.tolist(), batch.margin.tolist()) == ([0.5, 0.5], [0.25, 0.25])
    assert batch.label is None
    assert batch.ids == ("pair", "pair")


def test_labels_and_groups_are_columns() -> None:
    rows = units("judgement", 4)
    batch = collate([rows[3], rows[1]], [3, 1], groups=[0, 0, 1, 1])
    assert batch.label is not None
    assert batch.label.tolist() == [False, True]
    assert batch.group.tolist() == [1, 0]
    assert batch.unit.tolist() == [3, 1]


@pytest.mark.parametrize("kind", ["judgement", "preference", "demonstration"])
def test_columns_agree_with_the_units(kind: str) -> None:
    rows = units(kind, 7)  # type: ignore[arg-type]
    batch = collate(rows, range(7))
    assert batch.sequences == sum(len(u.answers) for u in rows)
    assert len(batch.tokens) == batch.bounds[-1] == sum(u.tokens for u in rows)
    for s, (start, end) in enumerate(zip(batch.bounds, batch.bounds[1:], strict=False)):
        of = rows[int(batch.unit[s])]
        given_answer = of.answers[int(batch.side[s])]
        assert tuple(batch.tokens[start:end].tolist()) == of.prompt_ids + given_answer.ids
        assert batch.pos[start:end].tolist() == list(range(end - start))
        assert (batch.seq[start:end] == s).all()
        assert int(batch.mask[start:end].sum()) == len(given_answer.ids)
    assert batch.tokens.dtype == torch.long
