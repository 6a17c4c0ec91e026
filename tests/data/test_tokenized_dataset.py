"""Arrays contain the examples that were stored in them, and columns have the values of these."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.units import sampled, units
from valence.batching.kl_pairs import check_kl_pairs, make_kl_pairs
from valence.data.sampler import Sampler, canonical_order
from valence.data.tokenized_dataset import build_dataset, fingerprint
from valence.errors import UserError
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample, content_id


def with_ids(rows: list[TokenizedExample]) -> list[TokenizedExample]:
    return [
        replace(row, id=content_id(i), origin=Origin(f"{i % 2}.jsonl", i), source=f"{i % 2}.jsonl")
        for i, row in enumerate(rows)
    ]


ROWS = with_ids(
    [
        *(row for kind in ("judgement", "preference", "ranking", "prompt") for row in units(kind)),
        *sampled(4),
        replace(units("judgement")[0], label=None, scores=(2,), attributes=(("a", 1), ("b", 0.5))),
        replace(units("preference")[0], margin=1, soft=0, weight=0.25),
        replace(units("demonstration")[0], prompt_mask=(True,) * 4),
    ]
)
ROWS[-1] = replace(ROWS[-1], prompt_mask=(False,) * (len(ROWS[-1].prompt_ids) - 1) + (True,))


def test_arrays_return_equal_examples() -> None:
    dataset = build_dataset(ROWS)
    assert dataset == ROWS
    assert repr(list(dataset)) == repr(ROWS)  # also whether a number is an integer
    assert dataset[-1] == ROWS[-1]
    assert dataset[3:8:2] == tuple(ROWS[3:8:2])
    assert dataset != ROWS[1:]
    with pytest.raises(IndexError):
        dataset[len(ROWS)]


def test_columns_have_the_values_of_the_examples() -> None:
    dataset = build_dataset(ROWS)
    assert list(dataset.ids) == [row.id for row in ROWS]
    assert dataset.num_sequence_tokens.tolist() == [row.tokens for row in ROWS]
    assert dataset.num_unique_tokens.tolist() == [
        len(row.prompt_ids) + sum(len(a.ids) for a in row.answers) for row in ROWS
    ]
    assert dataset.longest_answer.tolist() == [
        max((len(a.ids) for a in row.answers), default=0) for row in ROWS
    ]
    assert dataset.last_tokens == {a.ids[-1] for row in ROWS for a in row.answers}
    assert dataset.columns["fingerprint"].tolist() == [fingerprint(row) for row in ROWS]
    digests = dataset.prompt_column("digest").tolist()
    assert len(set(digests)) == len({row.prompt_ids for row in ROWS})
    assert dataset.nbytes / dataset.num_unique_tokens.sum() < 60  # rows of some ten tokens


def test_fingerprints_equal_those_in_run_folders() -> None:
    pair = TokenizedExample(
        id="0123456789abcdef",
        origin=Origin("a", 1),
        kind="preference",
        prompt_ids=(1, 2, 70000),
        prompt_mask=(False,) * 3,
        answers=(
            TokenizedCompletion((5, 6), (True, True)),
            TokenizedCompletion((7,), (True,), False),
        ),
        margin=0.5,
        soft=0.75,
        weight=2.0,
    )
    ranking = TokenizedExample(
        id="0123456789abcdef",
        origin=Origin("a", 1),
        kind="ranking",
        prompt_ids=(1, 2),
        prompt_mask=(False,) * 2,
        answers=(TokenizedCompletion((5, 6), (True, True), True, (("old", (-0.5, -1.25)),)),),
        scores=(1, 0.5),
        attributes=(("a", 2.0),),
    )
    assert fingerprint(pair) == -4992484852477412534
    assert fingerprint(ranking) == -7335512713673916289


def test_scores_and_token_columns_can_be_replaced() -> None:
    dataset = build_dataset(ROWS)
    scores = [((), (float(i), float("inf")), (i,))[i % 3] for i in range(len(ROWS))]
    expected = [replace(row, scores=item) for row, item in zip(ROWS, scores, strict=True)]
    changed = dataset.with_scores(scores)
    assert repr(list(changed)) == repr(expected)
    assert changed.columns["fingerprint"].tolist() == [fingerprint(row) for row in expected]
    bare = [
        replace(row, answers=tuple(replace(answer, columns=()) for answer in row.answers))
        for row in ROWS
    ]
    assert dataset.without_token_columns() == bare


@pytest.mark.parametrize("kind", ["judgement", "preference"])
def test_the_sampler_reads_arrays_as_it_reads_examples(kind: Kind) -> None:
    rows = with_ids(units(kind, 23))
    assert canonical_order(build_dataset(rows), 3, 1) == canonical_order(rows, 3, 1)
    for stratify in (False, True):
        ours, theirs = (
            Sampler(item, 4, seed=1, stratify=stratify) for item in (build_dataset(rows), rows)
        )
        for number in range(7):
            assert ours.step(number) == theirs.step(number)
            chosen, following = ours.step(number)
            assert sorted([*chosen, *following]) == list(range(23))
            assert len(following) == 23 - len(chosen)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6))
def test_checking_kl_pairs_raises_the_error_of_making_them(
    rows: list[tuple[int, int]],
) -> None:
    one = units("judgement")[0]
    step = [
        replace(
            one,
            id=content_id(i),
            origin=Origin("x", i),
            prompt_ids=(prompt,),
            prompt_mask=(False,),
            answers=(replace(one.answers[0], ids=(answer,), mask=(True,)),),
        )
        for i, (prompt, answer) in enumerate(rows)
    ]
    places: list[str | None] = []
    dataset = build_dataset(step)
    for check in (
        lambda: make_kl_pairs(step, max_length=9),
        lambda: check_kl_pairs(
            dataset.prompt_column("digest"), dataset.answer_column("digest"), dataset.origins
        ),
    ):
        try:
            check()
            places.append(None)
        except UserError as error:
            places.append(error.where)
    assert places[0] == places[1]
