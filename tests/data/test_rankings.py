"""Several scored answers to a prompt: as rankings, as tokens, and in conversions."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import Source, load_rows, shown_findings, write
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from valence.config.schema import Data
from valence.data.audit import audit
from valence.data.convert import CONVERSIONS, Unused
from valence.data.encode import Encoder
from valence.data.load import Loaded, load
from valence.data.sampler import canonical_order
from valence.types import Judgement, Origin, Preference, Ranking

HERE = Origin("rows.jsonl", 1)
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}


def scored(completion: str, score: float | None = None, prompt: str = "p", **more) -> dict:
    return {"prompt": prompt, "completion": completion, "score": score, **more}


def ranked(*scores: float | str | None, prompt: str = "p", **more) -> dict:
    return {
        "prompt": prompt,
        "completions": [f"answer {n}" for n in range(len(scores))],
        "scores": list(scores),
        **more,
    }


def pairs(loaded: Loaded) -> list[tuple]:
    return [(e.prompt, e.chosen, e.rejected) for e in loaded.examples if isinstance(e, Preference)]


def rankings(loaded: Loaded) -> list[tuple]:
    return [(e.prompt, e.completions, e.scores) for e in loaded.examples if isinstance(e, Ranking)]


def test_the_recipe_offers_every_conversion():
    [words] = [
        get_args(a) for a in get_args(Data.model_fields["convert"].annotation) if get_args(a)
    ]
    assert set(words) == set(CONVERSIONS)


# Rankings as they are


def test_rankings_are_read_encoded_audited_and_ordered(tmp_path: Path):
    rows = [ranked(1, 0.5, -2, weight=0.5), ranked(3, 3, prompt="tied"), ranked(0, 1, prompt="q")]
    loaded = load_rows(tmp_path, "ranking", *rows)
    encoder = Encoder(tiny_tokenizer(None), max_length=100)
    outcome = encoder.encode_all(loaded.examples, loaded.sources)
    assert [(u.kind, len(u.answers), u.scores, u.weight) for u in outcome.units] == [
        ("ranking", 3, (1.0, 0.5, -2.0), 0.5),
        ("ranking", 2, (3.0, 3.0), 1.0),
        ("ranking", 2, (0.0, 1.0), 1.0),
    ]
    assert all(a.complete and all(a.mask) for u in outcome.units for a in u.answers)
    result = audit(loaded, outcome, encoder)
    assert (result.kind, result.classes, result.weights) == ("ranking", {"rankings": 3}, None)
    assert result.findings["tied_scores"].rows == (str(loaded.examples[1].origin),)
    assert "tied_scores" in shown_findings(result)
    shuffled = list(outcome.units)
    Random(1).shuffle(shuffled)
    orders = (
        [units[i].id for i in canonical_order(units, 3, 0)] for units in (outcome.units, shuffled)
    )
    assert next(orders) == next(orders)


@pytest.mark.parametrize("score", ["nan", "inf", None, True, "failed"])
def test_a_score_that_is_no_number_is_a_bad_row(tmp_path: Path, score: str | None):
    with raises_error("row-number-invalid", where="rows.jsonl:2") as raised:
        load_rows(tmp_path, "ranking", ranked(1, 2), ranked(1, score))
    assert "number 2 of scores" in raised.error.message
    loaded = load_rows(tmp_path, "ranking", ranked(1, 2), ranked(1, score), on_bad_row="skip")
    assert (len(loaded.examples), len(loaded.bad)) == (1, 1)


def test_a_ranking_is_dropped_whole_when_one_answer_is_too_long(tmp_path: Path):
    row = {"prompt": "p", "completions": ["a", "b " * 300], "scores": [1, 2]}
    loaded = load_rows(tmp_path, "ranking", row, ranked(1, 2))
    encoder = Encoder(tiny_tokenizer(None), max_length=60).encode_all(loaded.examples)
    assert ([u.kind for u in encoder.unusable], len(encoder.units)) == (["too_long"], 1)


# Into pairs


def test_all_pairs_over_a_difference(tmp_path: Path):
    loaded = load_rows(tmp_path, "preference", ranked(1, 3, 2, 3), convert="scores_to_all_pairs")
    assert sorted((c, r) for _, c, r in pairs(loaded)) == [
        (f"answer {better}", f"answer {worse}")
        for better, worse in ((1, 0), (1, 2), (2, 0), (3, 0), (3, 2))
    ]
    loaded = load_rows(
        tmp_path, "preference", ranked(1, 3, 2, 3), convert="scores_to_all_pairs", threshold=2
    )
    assert sorted(pairs(loaded)) == [("p", "answer 1", "answer 0"), ("p", "answer 3", "answer 0")]
    assert [e.margin for e in loaded.examples if isinstance(e, Preference)] == [0.0, 0.0]


def test_all_pairs_of_scored_answers_count_omitted_pairs(tmp_path: Path):
    rows = [
        scored("good", 3, weight=0.5), scored("bad", 1), scored("middling", 2),
        scored("tie 1", 1, "q"), scored("tie 2", 1, "q"), scored("alone", 1, "r"),
    ]  # fmt: skip
    loaded = load_rows(tmp_path, "preference", *rows, convert="scores_to_all_pairs", threshold=1.5)
    assert pairs(loaded) == [("p", "good", "bad")]
    assert loaded.examples[0].weight == 0.5
    assert loaded.files[0].unused == {
        Unused.WITHIN_THRESHOLD_OF_ALL: 1,
        Unused.SAME_SCORES: 2,
        Unused.NO_OTHER_SCORED: 1,
    }


scores_of_one_prompt = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 3).map(float)), min_size=1, max_size=6
)


@given(scores_of_one_prompt, st.none() | st.floats(0, 3))
def test_all_pairs_are_those_that_differ_enough(
    answers: list[tuple[str, float]], threshold: float | None
):
    examples = [
        Judgement(prompt="p", completion=text, score=score, origin=HERE) for text, score in answers
    ]
    result, unused = CONVERSIONS["scores_to_all_pairs"].run(examples, threshold)
    expected = sorted(
        (max(two, key=lambda a: a[1])[0], min(two, key=lambda a: a[1])[0])
        for two in combinations(answers, 2)
        if two[0][0] != two[1][0]
        and abs(two[0][1] - two[1][1]) >= (threshold or 0)
        and two[0][1] != two[1][1]
    )
    assert sorted((e.chosen, e.rejected) for e in result if isinstance(e, Preference)) == expected
    left = {id(e) for e, _ in unused}
    assert len(left) == len(unused)
    texts = {text for pair in expected for text in pair}
    assert all(e.completion in texts for e in examples if id(e) not in left)
    assert bool(result) or len(unused) == len(examples)


# Into rankings


def test_scores_to_rankings_groups_by_prompt(tmp_path: Path):
    files = [
        write(
            tmp_path / "a.jsonl",
            scored("x", 0.5),
            scored("alone", 1, "q"),
            scored("y", 2, weight=0.5),
        ),
        write(tmp_path / "b.jsonl", scored("x", 1)),
        write(tmp_path / "c.jsonl", ranked(1, 2, prompt="r")),
    ]
    loaded = load([Source(path) for path in files], "ranking", convert="scores_to_rankings")
    assert rankings(loaded) == [
        ("r", ("answer 0", "answer 1"), (1.0, 2.0)),
        ("p", ("x", "y", "x"), (0.5, 2.0, 1.0)),
    ]
    assert [e.weight for e in loaded.examples] == [1.0, 0.5]
    assert loaded.files[0].unused == {Unused.NO_OTHER_JUDGED: 1}


def test_labels_become_one_and_minus_one(tmp_path: Path):
    rows = [
        {"prompt": "p", "completion": text, "label": text != "down"}
        for text in ("up", "down", "up too")
    ]
    loaded = load_rows(tmp_path, "ranking", *rows, convert="scores_to_rankings")
    assert rankings(loaded) == [("p", ("up", "down", "up too"), (1.0, -1.0, 1.0))]
    rows = [{**row, "score": n} for n, row in enumerate(rows)]
    assert rankings(load_rows(tmp_path, "ranking", *rows, convert="scores_to_rankings"))[0][2] == (
        0.0,
        1.0,
        2.0,
    )
    del rows[1]["score"]
    assert rankings(load_rows(tmp_path, "ranking", *rows, convert="scores_to_rankings"))[0][2] == (
        1.0,
        -1.0,
        1.0,
    )


def test_labels_and_scores_are_not_ranked_together(tmp_path: Path):
    files = [
        write(tmp_path / "a.jsonl", scored("x", 0.5)),
        write(tmp_path / "b.jsonl", {**scored("y"), "label": True}),
    ]
    with raises_error("rows-rated-differently", where="b.jsonl:1") as raised:
        load([Source(path) for path in files], "ranking", convert="scores_to_rankings")
    assert re.search(r"\blabel\b.*\bscore\b", raised.error.message)


def test_pairs_to_rankings(tmp_path: Path):
    loaded = load_rows(tmp_path, "ranking", {**PAIR, "weight": 2}, convert="pairs_to_rankings")
    assert rankings(loaded) == [("p", ("a", "b"), (1.0, -1.0))]
    assert loaded.examples[0].weight == 2


@pytest.mark.parametrize(
    ("row", "convert"),
    [(PAIR, "pairs_to_rankings"), (scored("a", 1), "scores_to_rankings")],
    ids=["pairs", "scores"],
)
def test_rows_that_could_be_ranked_are_refused_with_the_conversion(
    tmp_path: Path, row: dict, convert: str
):
    with raises_error("kind-mismatch", fix=f"data.convert: {convert}"):
        load_rows(tmp_path, "ranking", row)


# Out of rankings


def test_rankings_to_scored_gives_every_answer_its_score(tmp_path: Path):
    loaded = load_rows(tmp_path, "scored", ranked(1, 2.5, weight=3), convert="rankings_to_scored")
    assert [
        (e.completion, e.label, e.score, e.weight)
        for e in loaded.examples
        if isinstance(e, Judgement)
    ] == [
        ("answer 0", None, 1.0, 3.0),
        ("answer 1", None, 2.5, 3.0),
    ]
    files = [write(tmp_path / "a.jsonl", ranked(1, 2)), write(tmp_path / "b.jsonl", scored("x", 5))]
    loaded = load([Source(path) for path in files], "scored", convert="rankings_to_scored")
    assert [e.score for e in loaded.examples if isinstance(e, Judgement)] == [5.0, 1.0, 2.0]


def test_conversions_do_not_change_their_input():
    ranking = Ranking(prompt="p", completions=("a", "b"), scores=(1.0, 2.0), origin=HERE)
    before = replace(ranking)
    for name in ("scores_to_all_pairs", "scores_to_pairs", "rankings_to_scored"):
        CONVERSIONS[name].run([ranking], None)
    assert ranking == before
