"""Units to micro-batches under a budget of tokens, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.prefix_trees import sharing
from tests.units import unit, units
from valence.batching.micro_batches import StepPacker, fill_bins, make_micro_batch, token_sequences
from valence.batching.prefix_tree import build_prefix_tree
from valence.types import MicroBatch, TokenizedExample

lengths = st.lists(st.integers(1, 40), max_size=40)


@given(lengths, st.integers(1, 60))
def test_every_unit_is_in_one_micro_batch_within_the_budget(sizes: list[int], budget: int) -> None:
    dealt = fill_bins(sizes, budget)
    assert sorted(i for rows in dealt for i in rows) == list(range(len(sizes)))
    for rows in dealt:
        assert rows == sorted(rows)
        assert len(rows) == 1 or sum(sizes[i] for i in rows) <= budget


def test_turns_trained_on_inside_a_prompt_are_read_once_in_each_sequence_that_trains_on_them() -> (
    None
):
    """Two conversations that begin alike: one trains on the earlier answer (token 6), the other
    does not.
    """
    first, second = (
        unit("a", "demonstration", (5, 6, 7), (8, 9)),
        unit("b", "demonstration", (5, 6, 7), (8, 10)),
    )
    batch = make_micro_batch([replace(first, prompt_mask=(False, True, False)), second])
    read = sorted((s, int(batch.tokens[row])) for row, s in batch.cpu_scored.T.tolist())
    assert read == [(0, 6), (0, 8), (0, 9), (1, 8), (1, 10)]


@given(lengths, st.integers(1, 60))
def test_there_are_few_bins(sizes: list[int], budget: int) -> None:
    """At most one more than twice what the tokens alone would ask for."""
    shared = [n for n in sizes if n <= budget]
    largest = 2 * sum(shared) / budget + 1 if shared else 0
    assert len(fill_bins(sizes, budget)) - (len(sizes) - len(shared)) <= largest


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
def test_units_over_the_budget_are_alone_and_the_others_are_balanced(
    sizes: list, budget: int, expected: list
) -> None:
    assert fill_bins(sizes, budget) == expected


@given(lengths.filter(bool))
def test_a_budget_of_one_puts_each_alone(sizes: list[int]) -> None:
    assert all(len(rows) == 1 for rows in fill_bins(sizes, 1))


@st.composite
def unit_sets(draw: st.DrawFn) -> list[TokenizedExample]:
    """Units of few prompts, some of which go on where others end, with one to three answers that no
    other unit has.
    """
    letters = st.lists(st.integers(0, 1), min_size=1, max_size=8)
    prompts = [tuple(draw(letters))]
    for _ in range(draw(st.integers(0, 3))):
        prompts.append(draw(st.sampled_from([(), *prompts])) + tuple(draw(letters)))
    results: list[TokenizedExample] = []
    for i in range(draw(st.integers(1, 9))):
        answers = draw(st.lists(letters, min_size=1, max_size=3))
        results.append(
            unit(
                f"unit{i}",
                "ranking",
                draw(st.sampled_from(prompts)),
                *((i + 2, *a) for a in answers),
            )
        )
    return results


def num_tokens(examples: Sequence[TokenizedExample]) -> int:
    return len(
        build_prefix_tree([s for example in examples for s in token_sequences(example)]).tokens
    )


def pack(examples: Sequence[TokenizedExample], max_tokens: int) -> list[list[int]]:
    return StepPacker(examples).pack(range(len(examples)), max_tokens)


@given(unit_sets(), st.integers(0, 20))
def test_every_unit_runs_once_and_the_tokens_laid_are_within_the_budget(
    generated: list[TokenizedExample], less: int
) -> None:
    """Also when the budget is just too small for all of them at once."""
    with sharing(1):
        budget = max(1, num_tokens(generated) - less)
        dealt = pack(generated, budget)
        laid = [len(make_micro_batch([generated[i] for i in rows]).tokens) for rows in dealt]
    assert sorted(i for rows in dealt for i in rows) == list(range(len(generated)))
    for rows, tokens in zip(dealt, laid, strict=True):
        assert rows == sorted(rows)
        assert len(rows) == 1 or tokens <= budget


@given(unit_sets(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_of_the_units_changes_no_micro_batch_count(
    generated: list[TokenizedExample], min_shared: int, draw: Random
) -> None:
    with sharing(min_shared):
        assert len(pack(generated, 40)) == len(pack(draw.sample(generated, len(generated)), 40))


def test_short_questions_behind_one_system_prompt_are_within_the_budget() -> None:
    system = (1,) * 100
    results = [
        unit(f"{q}{i}", "judgement", system + (q,) * 10, (20 + q, i, 5))
        for q in range(3, 7)
        for i in range(2)
    ]
    for budget in range(120, num_tokens(results) + 1):
        assert all(
            num_tokens([results[i] for i in rows]) <= budget for rows in pack(results, budget)
        )


def test_units_of_one_prompt_run_together_as_far_as_the_budget_goes() -> None:
    prompts = [(p,) * 30 for p in range(3)]
    results = [
        unit(f"{p}{i}", "judgement", prompts[p], (p, i, 5)) for i in range(4) for p in range(3)
    ]
    assert pack(results, 42) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    tokens = [
        len(make_micro_batch([results[i] for i in rows]).tokens) for rows in pack(results, 37)
    ]
    assert sorted(tokens) == [36] * 6
    assert len(pack(results, 10_000)) == 1


def test_turns_of_one_conversation_run_together() -> None:
    """Each judged by itself: the later turn's prompt holds the earlier turn."""
    results: list[TokenizedExample] = []
    for talk in range(3):
        first, second = (talk,) * 20, (talk,) * 20 + (7,) * 5 + (8,) * 20
        results += [
            unit(f"second{talk}", "judgement", second, (9, 9)),
            unit(f"first{talk}", "judgement", first, (7,) * 5),
        ]
    assert pack(results, 50) == [[0, 1], [2, 3], [4, 5]]
    assert all(len(make_micro_batch([results[i], results[i + 1]]).tokens) == 47 for i in (0, 2, 4))


def test_the_size_of_a_unit_is_its_number_of_unique_tokens() -> None:
    ranking = unit("ranking", "ranking", (1,) * 100, *((i,) * 5 for i in range(8)))
    assert ranking.tokens == 840
    assert len(build_prefix_tree(token_sequences(ranking)).tokens) == 140
    assert pack([ranking, unit("other", "judgement", (2,) * 10, (3,) * 10)], 160) == [[0, 1]]


def test_the_columns_of_a_pair() -> None:
    pair = unit("pair", "preference", (3, 4), (5, 6, 7), (8,), weight=0.5, margin=0.25)
    batch = StepPacker([pair] * 10).micro_batch([9])
    assert batch.tokens.tolist() == [3, 4, 5, 6, 7, 3, 4, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.previous.tolist() == [-1, 0, 1, 2, 3, -1, 5, 6]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, False, True]
    assert batch.scored.tolist() == [2, 3, 4, 7]
    assert batch.cpu_scored.tolist() == [[2, 3, 4, 7], [0, 0, 0, 1]]
    assert batch.segments == ((0, 5, -1), (5, 8, -1))
    assert (batch.leaves, batch.requires_grad) == ((0, 1), (True, True))
    assert (batch.unit.tolist(), batch.side.tolist()) == ([9, 9], [0, 1])
    assert (batch.weight.tolist(), batch.margin.tolist()) == ([0.5, 0.5], [0.25, 0.25])
    assert batch.label is None
    assert batch.ids == ("pair", "pair")


def test_a_long_prompt_of_a_pair_is_there_once() -> None:
    pair = unit("pair", "preference", (3,) * 16, (8,), (5, 6))
    batch = make_micro_batch([pair])
    assert batch.tokens.tolist() == [3] * 16 + [5, 6, 8]
    assert batch.segments == ((0, 16, -1), (16, 18, 0), (18, 19, 0))
    assert batch.leaves == (2, 1)
    assert batch.previous[16:].tolist() == [15, 16, 15]
    assert batch.sequence_ids[16:].tolist() == [1, 1, 0]
    assert batch.rows(0).tolist() == [*range(16), 18]
    assert batch.rows(1).tolist() == list(range(18))
    assert batch.path(2) == [0, 2]


def test_labels_and_groups_are_columns() -> None:
    rows = units("judgement", 4)
    batch = StepPacker(rows[:4], groups=[0, 0, 1, 1]).micro_batch([3, 1])
    assert batch.label is not None
    assert batch.label.tolist() == [False, True]
    assert batch.group.tolist() == [1, 0]
    assert batch.unit.tolist() == [3, 1]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["judgement", "preference", "demonstration"])
def test_columns_agree_with_the_units(kind: str, share: bool) -> None:
    rows = units(kind, 7)  # type: ignore[arg-type]
    with sharing(1 if share else 10**9):
        batch = make_micro_batch(rows)
    assert batch.sequences == sum(len(u.answers) for u in rows)
    assert share or len(batch.tokens) == sum(u.tokens for u in rows)
    for s in range(batch.sequences):
        of = rows[int(batch.unit[s])]
        answer = of.answers[int(batch.side[s])]
        actual = batch.rows(s)
        assert tuple(batch.tokens[actual].tolist()) == of.prompt_ids + answer.ids
        assert batch.position_ids[actual].tolist() == list(range(len(actual)))
        read = actual[(batch.sequence_ids[actual] == s) & batch.loss_mask[actual]]
        assert torch.equal(read, actual[len(of.prompt_ids) :])
    assert torch.equal(batch.scored, batch.loss_mask.nonzero().squeeze(1))
    assert batch.tokens.dtype == torch.long


def joint() -> tuple[MicroBatch, list[TokenizedExample], list[TokenizedExample]]:
    """Two units that train and two that are measured behind the same prompts, in groups of their
    own.
    """
    prompts = [(p,) * 20 for p in (3, 4)]
    trains = [
        unit(f"own{p}", "judgement", prompts[p], (5 + p,) * 3, label=p == 0, weight=1.0 + p)
        for p in (0, 1)
    ]
    measured = [
        unit(f"other{p}", "judgement", prompts[p], (6 - p,) * 3, label=p == 0, weight=1.0 + p)
        for p in (0, 1)
    ]
    return make_micro_batch(trains, kl_pairs=measured, groups=[0, 1]), trains, measured


def test_measured_units_come_behind_those_that_train_and_have_their_numbers_and_groups() -> None:
    batch, trains, measured = joint()
    assert len(batch.tokens) == 2 * (20 + 3 + 3)
    assert batch.requires_grad == (True, True, False, False)
    assert batch.unit.tolist() == batch.group.tolist() == [0, 1, 0, 1]
    assert batch.ids == ("own0", "own1", "other0", "other1")
    for s, of in enumerate([*trains, *measured]):
        assert tuple(batch.tokens[batch.rows(s)].tolist()) == of.prompt_ids + of.answers[0].ids


@pytest.mark.parametrize("trains", [True, False])
def test_each_part_of_a_micro_batch_reads_its_sequences_of_the_same_tokens(trains: bool) -> None:
    batch, units_that_train, measured = joint()
    result = batch.part(requires_grad=trains)
    of = units_that_train if trains else measured
    assert result.tokens is batch.tokens
    assert result.segments is batch.segments
    assert result.ids == tuple(u.id for u in of)
    assert result.requires_grad == (trains, trains)
    assert result.unit.tolist() == result.group.tolist() == [0, 1]
    assert result.weight.tolist() == [1.0, 2.0]
    assert result.label is not None
    assert result.label.tolist() == [True, False]
    assert torch.equal(result.scored, result.loss_mask.nonzero().squeeze(1))
    assert torch.equal(
        result.cpu_scored, torch.stack([result.scored, result.sequence_ids[result.scored]])
    )
    assert result.num_groups == batch.num_groups == 2
    assert int(result.sequence_ids.min()) >= 0
    assert int(result.sequence_ids.max()) < 2
    for s, one in enumerate(of):
        actual = result.rows(s)
        assert tuple(result.tokens[actual].tolist()) == one.prompt_ids + one.answers[0].ids
        read = torch.nonzero(result.loss_mask & (result.sequence_ids == s)).squeeze(1)
        assert torch.equal(read, actual[20:])


def test_a_part_that_is_all_is_the_batch() -> None:
    batch = make_micro_batch(units("judgement", 4))
    assert batch.part(requires_grad=True) is batch
    actual = joint()[0].part(requires_grad=False)
    assert actual.part(requires_grad=False) is actual
