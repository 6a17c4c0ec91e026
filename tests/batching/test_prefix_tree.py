"""Prefix trees: properties of all trees, and the tokens that are shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prefix_trees import sequence_sets, sharing
from valence.batching import prefix_tree
from valence.batching.prefix_tree import (
    PrefixTree,
    TokenSequence,
    build_prefix_tree,
)


def token_sequence(ids: list[int] | str, mask: str = "") -> TokenSequence:
    """``mask``: an x for each token that is measured; what it does not say is not."""
    read = tuple(c == "x" for c in mask.ljust(len(ids)))
    return TokenSequence(tuple(map(int, ids)), read)


shares = st.sampled_from([1, 2, 3, 4, prefix_tree.MIN_SHARED_TOKENS])


def num_rows(sequences: Sequence[TokenSequence]) -> int:
    return len(build_prefix_tree(sequences).tokens)


def path(results: PrefixTree, s: int) -> list[int]:
    """The segments from the root to the one that a sequence ends with."""
    segments = [results.leaves[s]]
    while (parent := results.segments[segments[-1]][2]) >= 0:
        segments.append(parent)
    return segments[::-1]


def rows(results: PrefixTree, s: int) -> list[int]:
    return [row for k in path(results, s) for row in range(*results.segments[k][:2])]


@given(sequence_sets(), shares)
def test_every_path_spells_its_sequence(sequences: list[TokenSequence], min_shared: int) -> None:
    with sharing(min_shared):
        result = build_prefix_tree(sequences)
    assert len(result.leaves) == len(sequences)
    for s, one in enumerate(sequences):
        actual = rows(result, s)
        assert tuple(result.tokens[actual]) == one.token_ids
        assert result.position_ids[actual].tolist() == list(range(len(one.token_ids)))
        assert result.previous[actual].tolist() == [-1, *actual[:-1]]


@given(sequence_sets(), shares)
def test_segments_come_parents_first_and_tile_the_rows(
    sequences: list[TokenSequence], min_shared: int
) -> None:
    with sharing(min_shared):
        result = build_prefix_tree(sequences)
    assert [start for start, _, _ in result.segments] == [
        0,
        *(end for _, end, _ in result.segments[:-1]),
    ]
    assert result.segments[-1][1] == len(result.tokens)
    assert all(
        start < end and -1 <= parent < k for k, (start, end, parent) in enumerate(result.segments)
    )
    assert {k for s in range(len(sequences)) for k in path(result, s)} == set(
        range(len(result.segments))
    )
    for name in ("tokens", "position_ids", "previous", "sequence_ids", "loss_mask"):
        assert getattr(result, name).shape == result.tokens.shape


@given(sequence_sets(), shares)
def test_a_measured_token_has_one_row_and_one_reader(
    sequences: list[TokenSequence], min_shared: int
) -> None:
    with sharing(min_shared):
        result = build_prefix_tree(sequences)
    readers = Counter[int]()
    for s, one in enumerate(sequences):
        actual = np.array(rows(result, s))
        read = actual[np.array(one.loss_mask)]
        assert result.loss_mask[read].all()
        assert (result.sequence_ids[read] == s).all()
        assert not (
            (result.sequence_ids[actual] == s) & result.loss_mask[actual] & ~np.array(one.loss_mask)
        ).any()
        readers.update(read.tolist())
    assert set(readers) == set(np.flatnonzero(result.loss_mask).tolist())
    assert set(readers.values()) <= {1}


@given(sequence_sets(), shares)
def test_a_token_that_none_measures_belongs_to_a_sequence_that_has_it(
    sequences: list[TokenSequence], min_shared: int
) -> None:
    with sharing(min_shared):
        result = build_prefix_tree(sequences)
    inside = [set(rows(result, s)) for s in range(len(sequences))]
    assert all(row in inside[s] for row, s in enumerate(result.sequence_ids.tolist()))


@given(sequence_sets(), shares, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_costs_no_row(
    sequences: list[TokenSequence], min_shared: int, draw: Random
) -> None:
    with sharing(min_shared):
        result = num_rows(sequences)
        assert (
            num_rows(sequences[::-1]) == num_rows(draw.sample(sequences, len(sequences))) == result
        )
    assert result <= sum(len(one.token_ids) for one in sequences)


@given(sequence_sets(measured=False))
def test_without_measured_tokens_every_prefix_is_stored_once(
    sequences: list[TokenSequence],
) -> None:
    with sharing(1):
        result = num_rows(sequences)
    assert result == len(
        {one.token_ids[:n] for one in sequences for n in range(1, len(one.token_ids) + 1)}
    )


@given(sequence_sets(), shares)
def test_a_beginning_is_shared_only_if_it_is_long_enough(
    sequences: list[TokenSequence], min_shared: int
) -> None:
    with sharing(min_shared):
        result = build_prefix_tree(sequences)
    users = Counter(k for s in range(len(sequences)) for k in path(result, s))
    for s in range(len(sequences)):
        shared = [k for k in path(result, s) if users[k] > 1]
        assert (
            not shared or result.position_ids[result.segments[shared[-1]][1] - 1] + 1 >= min_shared
        )


def test_a_prompt_is_stored_once_for_all_its_answers() -> None:
    prompt = "12345678901234567890"
    result = build_prefix_tree(
        [token_sequence(prompt + answer, " " * 20 + "xxx") for answer in ("111", "222", "133")]
    )
    assert result.segments == ((0, 20, -1), (20, 23, 0), (23, 26, 0), (26, 29, 0))
    assert result.leaves == (1, 3, 2)
    assert result.position_ids.tolist() == [*range(20), *[20, 21, 22] * 3]
    assert result.previous.tolist() == [*range(-1, 19), 19, 20, 21, 19, 23, 24, 19, 26, 27]
    assert result.sequence_ids[20:].tolist() == [0] * 3 + [2] * 3 + [1] * 3
    assert result.loss_mask.tolist() == [False] * 20 + [True] * 9


def test_a_short_prompt_is_laid_for_each() -> None:
    assert prefix_tree.MIN_SHARED_TOKENS == 16
    for length, laid in ((15, 2 * 15 + 2), (16, 16 + 2)):
        prompt = "0" * length
        assert (
            num_rows([token_sequence(prompt + answer, " " * length + "x") for answer in "12"])
            == laid
        )


def test_a_turn_is_measured_by_one_and_context_of_another() -> None:
    """Two turns of one conversation judged separately: everything is there once."""
    first, second = "0" * 20, "0" * 20 + "1" * 20 + "2" * 20
    result = build_prefix_tree(
        [
            token_sequence(second + "3", " " * 60 + "x"),
            token_sequence(first + "1" * 20, " " * 20 + "x" * 20),
        ]
    )
    assert len(result.tokens) == 61
    assert result.sequence_ids[20:40].tolist() == [1] * 20
    assert result.sequence_ids[60] == 0
    assert result.loss_mask.tolist() == [False] * 20 + [True] * 20 + [False] * 20 + [True]
    assert result.leaves == (1, 0)


def test_measured_tokens_are_stored_for_each_sequence() -> None:
    """Also when they are the same, as when one answer was judged twice."""
    same = token_sequence("0" * 20 + "12", " " * 20 + "xx")
    result = build_prefix_tree([same, same])
    assert result.segments == ((0, 20, -1), (20, 22, 0), (22, 24, 0))
    assert sorted(result.leaves) == [1, 2]


@pytest.mark.parametrize(
    "sequences",
    [[token_sequence("1", "x")], [token_sequence("12", " x"), token_sequence("12", "xx")]],
)
def test_a_measured_first_token_is_an_error(sequences: list[TokenSequence]) -> None:
    with pytest.raises(ValueError):
        build_prefix_tree(sequences)


def rows_of_path(tree: PrefixTree, sequence: int) -> list[int]:
    return [row for k in tree.path(sequence) for row in range(*tree.segments[k][:2])]


@given(sequence_sets(), shares, st.data())
def test_a_selection_is_a_tree_of_its_sequences(
    sequences: list[TokenSequence], min_shared: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, unique=True))
    with sharing(min_shared):
        tree = build_prefix_tree(sequences).select(chosen)
    assert [start for start, _, _ in tree.segments] == [
        0,
        *(end for _, end, _ in tree.segments[:-1]),
    ]
    assert tree.segments[-1].end == len(tree.tokens)
    assert all(
        start < end and -1 <= parent < k for k, (start, end, parent) in enumerate(tree.segments)
    )
    num_readers = Counter[int]()
    for number, sequence in enumerate(chosen):
        rows = rows_of_path(tree, number)
        assert tuple(tree.tokens[rows]) == sequences[sequence].token_ids
        assert tree.position_ids[rows].tolist() == list(range(len(rows)))
        assert tree.previous[rows].tolist() == [-1, *rows[:-1]]
        reads = tree.loss_mask[rows] & (tree.sequence_ids[rows] == number)
        assert tuple(reads) == sequences[sequence].loss_mask
        num_readers.update(np.array(rows)[reads].tolist())
    assert num_readers == Counter(np.flatnonzero(tree.loss_mask).tolist())
    paths = [set(rows_of_path(tree, number)) for number in range(len(chosen))]
    assert all(row in paths[s] for row, s in enumerate(tree.sequence_ids.tolist()))


@given(sequence_sets(measured=False), shares, st.data())
def test_a_selection_is_the_tree_that_would_be_built(
    sequences: list[TokenSequence], min_shared: int, data: st.DataObject
) -> None:
    """Segments too: one that has lost its siblings is no longer apart from its parent."""
    chosen = sorted(
        data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, unique=True))
    )
    with sharing(min_shared):
        selected = build_prefix_tree(sequences).select(chosen)
        built = build_prefix_tree([sequences[s] for s in chosen])
    assert selected.segments == built.segments
    assert selected.leaves == built.leaves
    for name in ("tokens", "position_ids", "previous", "loss_mask"):
        assert getattr(selected, name).tolist() == getattr(built, name).tolist()
