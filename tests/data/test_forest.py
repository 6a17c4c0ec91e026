"""Sequences laid out as a forest: what holds for all of them, and what is shared."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forests import sharing, strand_sets
from valence.data import forest
from valence.data.forest import Forest, Strand, plant, planted


def strand(ids: list[int] | str, mask: str = "") -> Strand:
    """``mask``: an x for each token that is measured; what it does not say is not."""
    read = tuple(c == "x" for c in mask.ljust(len(ids)))
    return Strand(tuple(map(int, ids)), read)


shares = st.sampled_from([1, 2, 3, 4, forest.SHARE])


def path(found: Forest, s: int) -> list[int]:
    """The segments from the root to the one that a sequence ends with."""
    segments = [found.leaf[s]]
    while (parent := found.segments[segments[-1]][2]) >= 0:
        segments.append(parent)
    return segments[::-1]


def rows(found: Forest, s: int) -> list[int]:
    return [row for k in path(found, s) for row in range(*found.segments[k][:2])]


@given(strand_sets(), shares)
def test_every_path_spells_its_sequence(strands: list[Strand], least: int) -> None:
    with sharing(least):
        found = plant(strands)
    assert len(found.leaf) == len(strands)
    for s, one in enumerate(strands):
        own = rows(found, s)
        assert tuple(found.tokens[own]) == one.ids
        assert found.pos[own].tolist() == list(range(len(one.ids)))
        assert found.source[own].tolist() == [-1, *own[:-1]]


@given(strand_sets(), shares)
def test_segments_come_parents_first_and_tile_the_rows(strands: list[Strand], least: int) -> None:
    with sharing(least):
        found = plant(strands)
        assert planted(strands) == len(found.tokens)
    assert [start for start, _, _ in found.segments] == [0, *(end for _, end, _ in found.segments[:-1])]
    assert found.segments[-1][1] == len(found.tokens)
    assert all(start < end and -1 <= parent < k for k, (start, end, parent) in enumerate(found.segments))
    assert {k for s in range(len(strands)) for k in path(found, s)} == set(range(len(found.segments)))
    for name in ("tokens", "pos", "source", "seq", "mask"):
        assert getattr(found, name).shape == found.tokens.shape


@given(strand_sets(), shares)
def test_a_measured_token_has_one_row_and_one_reader(strands: list[Strand], least: int) -> None:
    with sharing(least):
        found = plant(strands)
    readers = Counter[int]()
    for s, one in enumerate(strands):
        own = np.array(rows(found, s))
        read = own[np.array(one.mask)]
        assert found.mask[read].all()
        assert (found.seq[read] == s).all()
        assert not ((found.seq[own] == s) & found.mask[own] & ~np.array(one.mask)).any()
        readers.update(read.tolist())
    assert set(readers) == set(np.flatnonzero(found.mask).tolist())
    assert set(readers.values()) <= {1}


@given(strand_sets(), shares)
def test_a_token_that_none_measures_belongs_to_a_sequence_that_has_it(strands: list[Strand], least: int) -> None:
    with sharing(least):
        found = plant(strands)
    inside = [set(rows(found, s)) for s in range(len(strands))]
    assert all(row in inside[s] for row, s in enumerate(found.seq.tolist()))


@given(strand_sets(), shares, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_costs_no_row(strands: list[Strand], least: int, draw: Random) -> None:
    with sharing(least):
        found = planted(strands)
        assert planted(strands[::-1]) == planted(draw.sample(strands, len(strands))) == found
    assert found <= sum(len(one.ids) for one in strands)


@given(strand_sets(measured=False))
def test_with_nothing_measured_every_beginning_is_laid_once(strands: list[Strand]) -> None:
    with sharing(1):
        found = planted(strands)
    assert found == len({one.ids[:n] for one in strands for n in range(1, len(one.ids) + 1)})


@given(strand_sets(), shares)
def test_a_beginning_is_shared_only_if_it_is_long_enough(strands: list[Strand], least: int) -> None:
    with sharing(least):
        found = plant(strands)
    users = Counter(k for s in range(len(strands)) for k in path(found, s))
    for s in range(len(strands)):
        shared = [k for k in path(found, s) if users[k] > 1]
        assert not shared or found.pos[found.segments[shared[-1]][1] - 1] + 1 >= least


def test_a_prompt_is_laid_once_for_all_its_answers() -> None:
    prompt = "12345678901234567890"
    found = plant([strand(prompt + answer, " " * 20 + "xxx") for answer in ("111", "222", "133")])
    assert found.segments == ((0, 20, -1), (20, 23, 0), (23, 26, 0), (26, 29, 0))
    assert found.leaf == (1, 3, 2)
    assert found.pos.tolist() == [*range(20), *[20, 21, 22] * 3]
    assert found.source.tolist() == [*range(-1, 19), 19, 20, 21, 19, 23, 24, 19, 26, 27]
    assert found.seq[20:].tolist() == [0] * 3 + [2] * 3 + [1] * 3
    assert found.mask.tolist() == [False] * 20 + [True] * 9


def test_a_short_prompt_is_laid_for_each() -> None:
    assert forest.SHARE == 16
    for length, laid in ((15, 2 * 15 + 2), (16, 16 + 2)):
        prompt = "0" * length
        assert planted([strand(prompt + answer, " " * length + "x") for answer in "12"]) == laid


def test_a_turn_is_measured_by_one_and_context_of_another() -> None:
    """Two turns of one conversation judged separately: everything is there once."""
    first, second = "0" * 20, "0" * 20 + "1" * 20 + "2" * 20
    found = plant([strand(second + "3", " " * 60 + "x"), strand(first + "1" * 20, " " * 20 + "x" * 20)])
    assert len(found.tokens) == 61
    assert found.seq[20:40].tolist() == [1] * 20
    assert found.seq[60] == 0
    assert found.mask.tolist() == [False] * 20 + [True] * 20 + [False] * 20 + [True]
    assert found.leaf == (1, 0)


def test_what_two_sequences_measure_is_laid_for_each() -> None:
    """Also when they are the same, as when one answer was judged twice."""
    same = strand("0" * 20 + "12", " " * 20 + "xx")
    found = plant([same, same])
    assert found.segments == ((0, 20, -1), (20, 22, 0), (22, 24, 0))
    assert sorted(found.leaf) == [1, 2]


@pytest.mark.parametrize("strands", [[strand("1", "x")], [strand("12", " x"), strand("12", "xx")]])
def test_a_measured_first_token_is_an_error(strands: list[Strand]) -> None:
    with pytest.raises(ValueError):
        plant(strands)
