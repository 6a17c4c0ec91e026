"""The examples of each step depend only on seed, epoch and content."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.units import unit
from valence.data.sampler import Sampler, canonical_order
from valence.types import TokenizedExample


def judged(count: int, ups: int | None = None) -> tuple[TokenizedExample, ...]:
    """A number of judgements, the first ``ups`` of them thumbs up (default: every second one)."""
    labels = [i % 2 == 0 if ups is None else i < ups for i in range(count)]
    return tuple(
        unit(f"row{i}", "judgement", (5, i), (7, i), label=label) for i, label in enumerate(labels)
    )


def names(units: tuple[TokenizedExample, ...], rows: list[int]) -> list[str]:
    return [units[i].id for i in rows]


def steps(sampler: Sampler, epoch: int = 0) -> list[list[str]]:
    """The ids of each step of an epoch."""
    count = sampler.steps_per_epoch
    return [names(sampler.units, sampler.step(epoch * count + k)[0]) for k in range(count)]


@given(st.permutations(range(12)), st.integers(0, 5), st.integers(0, 3))
def test_the_order_does_not_know_how_units_arrived(
    arrival: list[int], seed: int, epoch: int
) -> None:
    units = judged(12)
    shuffled = tuple(units[i] for i in arrival)
    ours, theirs = canonical_order(units, seed, epoch), canonical_order(shuffled, seed, epoch)
    assert names(units, ours) == names(shuffled, theirs)
    assert sorted(ours) == list(range(12))


@given(st.permutations(range(11)), st.booleans())
def test_steps_do_not_depend_on_the_order_of_units_in_the_file(
    arrival: list[int], stratify: bool
) -> None:
    units = judged(11)
    shuffled = tuple(units[i] for i in arrival)
    ours, theirs = (Sampler(u, 4, seed=3, stratify=stratify) for u in (units, shuffled))
    for number in range(7):
        for first, second in zip(ours.step(number), theirs.step(number), strict=True):
            assert names(units, first) == names(shuffled, second)


def test_seed_and_epoch_each_change_the_order() -> None:
    units = judged(30)
    orders = [tuple(canonical_order(units, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == len(orders)
    assert canonical_order(units, 0, 1) == list(orders[1])


@pytest.mark.parametrize(
    ("count", "size", "drop_last", "expected"),
    [
        (10, 4, False, [4, 4, 2]),
        (10, 4, True, [4, 4]),
        (8, 4, False, [4, 4]),
        (3, 4, False, [3]),
        (3, 4, True, []),
        (1, 1, False, [1]),
        (5, 1, True, [1, 1, 1, 1, 1]),
    ],
)
def test_a_last_smaller_step_is_kept_unless_dropped(
    count: int, size: int, drop_last: bool, expected: list[int]
) -> None:
    sampler = Sampler(judged(count), size, drop_last=drop_last)
    assert sampler.steps_per_epoch == len(expected)
    assert [len(step) for step in steps(sampler)] == expected


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 2), st.booleans())
def test_every_unit_comes_once_an_epoch(count: int, size: int, epoch: int, stratify: bool) -> None:
    sampler = Sampler(judged(count), size, stratify=stratify)
    observed = [name for step in steps(sampler, epoch) for name in step]
    assert sorted(observed) == sorted(u.id for u in sampler.units)


def test_a_step_depends_only_on_its_number() -> None:
    """Any step can be asked for, in any order: a resumed run needs no more than where it
    stopped.
    """
    sampler = Sampler(judged(10), 3, seed=1)
    forward = [sampler.step(k) for k in range(12)]
    numbers = random.Random(0).sample(range(12), 12)
    assert [Sampler(judged(10), 3, seed=1).step(k) for k in numbers] == [
        forward[k] for k in numbers
    ]


@pytest.mark.parametrize("stratify", [False, True])
def test_a_step_is_in_canonical_order_followed_by_the_rest_of_its_epoch(
    stratify: bool,
) -> None:
    sampler = Sampler(judged(10), 4, seed=2, stratify=stratify)
    order = sampler.epoch(0)
    for k in range(3):
        ours, following = sampler.step(k)
        assert sorted(ours) == sorted(order[4 * k : 4 * k + 4])
        assert ours == sorted(ours, key=canonical_order(sampler.units, 2, 0).index)
        assert following == [*order[4 * k + 4 :], *order[: 4 * k]]
        assert not set(ours) & set(following)


def test_a_block_of_each_class_is_mixed() -> None:
    """Thumbs up in one block and thumbs down in the next, as data that was pairs may come."""
    sampler = Sampler(judged(400, ups=200), 16)
    by_id = {u.id: u.label for u in sampler.units}
    mixed = [len({by_id[name] for name in step}) for step in steps(sampler)]
    assert set(mixed) == {2}


@pytest.mark.parametrize(
    ("count", "ups", "size"), [(40, 10, 8), (37, 12, 5), (64, 3, 16), (20, 20, 4)]
)
def test_stratified_steps_have_the_share_of_the_whole(count: int, ups: int, size: int) -> None:
    sampler = Sampler(judged(count, ups=ups), size, stratify=True)
    by_id = {u.id: u.label for u in sampler.units}
    for epoch in (0, 1):
        for step in steps(sampler, epoch):
            share = Counter(by_id[name] for name in step)[True]
            assert abs(share - len(step) * ups / count) <= 1


def test_stratified_epochs_differ() -> None:
    sampler = Sampler(judged(40, ups=10), 8, stratify=True)
    assert steps(sampler, 0) != steps(sampler, 1)


def test_units_of_the_same_content_all_come() -> None:
    twice = (*judged(3), *judged(3))
    assert sorted(canonical_order(twice, 0, 0)) == list(range(6))
    assert [twice[i].id for i in canonical_order(twice, 0, 0)][::2] == [
        twice[i].id for i in canonical_order(twice, 0, 0)
    ][1::2]
