"""The pairs of prompts and completions that estimate KTO's reference point."""

from __future__ import annotations

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.errors import raises_error
from tests.units import unit
from valence.batching.kl_pairs import make_kl_pairs, make_kl_pairs_in_groups
from valence.data.sampler import Sampler
from valence.errors import UserError
from valence.types import TokenizedExample

LONG = 1000


def row(prompt: int | tuple[int, ...], completion: int | tuple[int, ...]) -> TokenizedExample:
    """A judgement; a plain number stands for one token."""
    p, c = ((x,) if isinstance(x, int) else x for x in (prompt, completion))
    return unit(f"{p}{c}", "judgement", p, c, label=True)


def put(results: list[TokenizedExample]) -> list[tuple[int, ...]]:
    """The completions, in order."""
    return [u.answers[0].ids for u in results]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7])
def test_the_partner_is_the_next_one_cyclically(count: int) -> None:
    """Also for odd counts, where pairing two by two or by reversal would leave a row with
    itself.
    """
    step = [row(i, 50 + i) for i in range(count)]
    result = make_kl_pairs(step, max_length=LONG)
    assert put(result) == [(50 + (i + 1) % count,) for i in range(count)]
    assert [u.prompt_ids for u in result] == [u.prompt_ids for u in step]


def test_rows_with_the_same_prompt_are_passed_over() -> None:
    step = [row(1, 51), row(1, 52), row(1, 53), row(2, 54)]
    assert put(make_kl_pairs(step, max_length=LONG)) == [(54,), (54,), (54,), (51,)]


def test_rows_with_the_same_completion_are_passed_over() -> None:
    step = [row(1, 51), row(2, 51), row(3, 51), row(4, 52)]
    assert put(make_kl_pairs(step, max_length=LONG)) == [(52,), (52,), (52,), (51,)]


def test_two_rows_with_the_same_text_are_never_partners() -> None:
    step = [row(1, 51), row(1, 51), row(2, 52)]
    assert put(make_kl_pairs(step, max_length=LONG)) == [(52,), (52,), (51,)]


def test_a_partner_that_fits_goes_before_a_nearer_one_that_does_not() -> None:
    step = [row((1, 1, 1), 51), row(2, (52,) * 4), row(3, (53, 53))]
    assert put(make_kl_pairs(step, max_length=5))[0] == (53, 53)


def test_if_none_fits_the_next_is_cut_on_the_right_and_not_for_good() -> None:
    step = [row((1, 1, 1), 51), row(2, (52, 60, 61, 62)), row(3, (53, 63, 64, 65))]
    before = copy.deepcopy(step)
    result = make_kl_pairs(step, max_length=5)
    assert put(result) == [(52, 60), (53, 63, 64, 65), (51,)]
    assert not result[0].answers[0].complete  # what is left does not end with its end-of-turn token
    assert result[1].answers[0].complete
    assert step == before


def test_truncation_keeps_at_least_one_token() -> None:
    step = [row((1,) * 9, 51), row(2, (52, 60))]
    result = make_kl_pairs(step, max_length=9)
    assert put(result) == [(52,), (51,)]
    assert all(any(u.answers[0].mask) for u in result)


def test_a_step_of_one_takes_its_partner_from_the_following_examples() -> None:
    following = [row(1, 60), row(2, 51), row(3, 61), row(4, 62)]
    assert put(make_kl_pairs([row(1, 51)], following, max_length=LONG)) == [(61,)]


def test_only_rows_without_a_partner_in_the_step_look_further() -> None:
    step, following = [row(1, 51), row(2, 51), row(3, 52)], [row(4, 53)]
    assert put(make_kl_pairs(step, following, max_length=LONG)) == [(52,), (52,), (51,)]
    step = [row(1, 51), row(1, 52)]
    assert put(make_kl_pairs(step, following, max_length=LONG)) == [(53,), (53,)]


def test_following_examples_are_not_read_when_the_step_has_partners() -> None:
    def never():
        pytest.fail("the following examples were read")
        yield

    make_kl_pairs([row(1, 51), row(2, 52)], never(), max_length=LONG)


def test_the_short_tail_of_an_epoch_finds_partners() -> None:
    units = tuple(row(i, 50 + i) for i in range(5))
    sampler = Sampler(units, 4)
    ours, following = sampler.step(1)
    assert len(ours) == 1
    (result,) = make_kl_pairs(
        [units[i] for i in ours], (units[i] for i in following), max_length=LONG
    )
    assert (
        result.answers[0].ids == units[following[0]].answers[0].ids != units[ours[0]].answers[0].ids
    )


def test_partners_change_from_epoch_to_epoch() -> None:
    """Nothing about the pairing is kept with the data."""
    units = tuple(row(i, 50 + i) for i in range(12))
    sampler = Sampler(units, 12)

    def partners(epoch: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        ours, _ = sampler.step(epoch)
        result = make_kl_pairs([units[i] for i in ours], max_length=LONG)
        return {u.prompt_ids: u.answers[0].ids for u in result}

    assert partners(0) != partners(1)


def test_examples_with_equal_completions_raise_a_user_error() -> None:
    with raises_error("kl-pairs-missing", where="made.jsonl:1", fix="apo_zero_unpaired"):
        make_kl_pairs([row(1, 51), row(1, 52)], [row(1, 53), row(2, 51)], max_length=LONG)


def test_turns_trained_on_inside_a_prompt_are_not_measured() -> None:
    from dataclasses import replace

    trained = replace(row((1, 1), 51), prompt_mask=(False, True))
    assert make_kl_pairs([trained, row(2, 52)], max_length=LONG)[0].prompt_mask == (False, False)


ids = st.lists(st.integers(3, 6), min_size=1, max_size=5).map(tuple)


@given(
    st.lists(st.tuples(ids, ids), min_size=1, max_size=8),
    st.lists(st.tuples(ids, ids), max_size=4),
    st.integers(5, 12),
)
def test_every_prompt_gets_a_completion_of_another_prompt(
    step: list, following: list, room: int
) -> None:
    assume(all(len(p) + len(c) <= room for p, c in [*step, *following]))
    results, later = [row(*pair) for pair in step], [row(*pair) for pair in following]
    try:
        outcome = make_kl_pairs(results, later, max_length=room)
    except UserError:
        everyone = [*step, *following]
        assert any(all(q == p or d == c for q, d in everyone) for p, c in step)
        return
    assert len(outcome) == len(results)
    for (prompt, completion), result in zip(step, outcome, strict=True):
        (answer,) = result.answers
        assert result.prompt_ids == prompt
        assert 1 <= len(answer.ids) == len(answer.mask) <= room - len(prompt)
        space = room - len(prompt)
        candidates = [c for q, c in [*step, *following] if q != prompt and c != completion]
        assert answer.ids in [c[:space] for c in candidates]


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("next", [1, 2, 0, 4, 5, 3, 6]),
        ("previous", [2, 0, 1, 5, 3, 4, 6]),
        ("reversed", [2, 1, 0, 5, 4, 3, 6]),
    ],
)
def test_groups_pair_as_published_systems_do(pairing: str, expected: list[int]) -> None:
    """Odd runs paired by reversal, and a run of one, leave a row with itself: that is what is
    reproduced.
    """
    step = [row(i, 50 + i) for i in range(7)]
    result = make_kl_pairs_in_groups(step, 3, pairing, max_length=LONG)  # type: ignore[arg-type]
    assert put(result) == [(50 + i,) for i in expected]
