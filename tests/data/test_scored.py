"""Ratings other than thumbs: scores, attributes and soft labels, and the kind of rows for all of
them.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import ASSISTANT, USER, Source, load_rows, shown_findings, write
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from valence.data.audit import audit
from valence.data.convert import Unused
from valence.data.detect import detect
from valence.data.encode import Encoder
from valence.data.load import InMemory, Loaded, load
from valence.types import Judgement, Origin, Preference, Ranking, TokenizedExample

HERE = Origin("rows.jsonl", 1)
ANSWER = {"prompt": "p", "completion": "a"}
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
STARS = {"prompt": "p", "completion": "a", "score": 4}
RATED = {"prompt": "p", "completion": "a", "scores": {"truth": 3, "help": 1.5}}


def encoded(loaded: Loaded) -> list[TokenizedExample]:
    encoder = Encoder(tiny_tokenizer(), max_length=100, as_chat=False)
    result = encoder.encode_all(loaded.examples, loaded.sources)
    assert not result.unusable
    return list(result.units)


# Soft labels


@pytest.mark.parametrize("soft", [0, 0.25, 0.5, 1, "0.75"])
def test_a_soft_label_reaches_the_tokens(tmp_path: Path, soft: Any):
    loaded = load_rows(tmp_path, "preference", {**PAIR, "soft": soft, "margin": 0.5}, PAIR)
    assert [(e.soft, e.margin) for e in loaded.examples if isinstance(e, Preference)] == [
        (float(soft), 0.5),
        (None, 0.0),
    ]
    assert [(u.soft, u.margin) for u in encoded(loaded)] == [(float(soft), 0.5), (None, 0.0)]
    assert loaded.ignored_columns == {}


@pytest.mark.parametrize("soft", [-0.01, 1.01, 75])
def test_a_soft_label_is_a_probability(tmp_path: Path, soft: float):
    with raises_error("row-number-range", where="rows.jsonl:2", fix="from 0 to 1") as raised:
        load_rows(tmp_path, "preference", PAIR, {**PAIR, "soft": soft})
    assert "soft" in raised.error.message
    assert f"{soft:g}" in raised.error.message
    loaded = load_rows(tmp_path, "preference", PAIR, {**PAIR, "soft": soft}, on_bad_row="skip")
    assert [bad.origin.line for bad in loaded.bad] == [2]


@pytest.mark.parametrize("soft", ["nan", True, "high", [0.5]])
def test_a_soft_label_is_a_finite_number(tmp_path: Path, soft: Any):
    with raises_error("row-number-invalid", where="rows.jsonl:1") as raised:
        load_rows(tmp_path, "preference", {**PAIR, "soft": soft})
    assert "soft" in raised.error.message


def test_the_soft_label_of_token_ids_and_of_another_name(tmp_path: Path):
    row = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], "soft": 0.9}
    named = {**row, "p": 0.9, "soft": 0.1}
    [ours], [theirs] = (
        load_rows(tmp_path, "preference", r, keys=k).examples
        for r, k in ((row, {}), (named, {"soft": "p"}))
    )
    assert isinstance(ours, Preference)
    assert ours.soft == 0.9
    assert ours == theirs


@pytest.mark.parametrize(
    ("convert", "kind"), [("pairs_to_judgements", "judgement"), ("pairs_to_rankings", "ranking")]
)
def test_pairs_with_a_soft_label_of_one_half_are_not_converted_to_thumbs(
    tmp_path: Path, convert: str, kind: str
):
    rows = [{**PAIR, "soft": soft} for soft in (0.2, 0.5, 0.51)]
    loaded = load_rows(tmp_path, kind, *rows, convert=convert)
    assert {e.origin.line for e in loaded.examples} == {3}
    assert loaded.files[0].unused == {Unused.UNDECIDED: 2}
    assert [
        e.origin.line
        for e in load_rows(
            tmp_path, "demonstration", *rows, convert="chosen_to_demonstrations"
        ).examples
    ] == [3]


def test_identities_of_rows_without_the_new_parts_are_those_they_always_were():
    """Caches know rows by them."""
    judgement = Judgement(prompt="p", completion="a", label=True, score=0.5, origin=HERE)
    pair = Preference(prompt="p", chosen="a", rejected="b", margin=0.5, origin=HERE)
    assert (judgement.id, pair.id) == ("c7bb24aa6c39938a", "5a87de0053349ddf")
    others = {
        *(replace(pair, soft=soft).id for soft in (0.0, 0.5, 1.0)),
        *(
            replace(judgement, attributes=value).id
            for value in ({"a": 1.0}, {"a": 2.0}, {"b": 1.0})
        ),
    }
    assert len(others | {judgement.id, pair.id}) == 8
    there, back = ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0})
    assert replace(judgement, attributes=there).id == replace(judgement, attributes=back).id


def test_the_soft_label_of_a_pair_decides_which_side_contradicts_it():
    def contradictions(*pairs: tuple[str, str, float | None]) -> int:
        examples = [
            Preference(prompt="p", chosen=a, rejected=b, soft=soft, origin=HERE)
            for a, b, soft in pairs
        ]
        encoder = Encoder(tiny_tokenizer(), max_length=100, as_chat=False)
        loaded = load([InMemory(examples)], "preference")
        result = audit(
            loaded, encoder.encode_all(loaded.examples, loaded.sources), encoder
        ).findings.get("contradictions")
        return result.count if result else 0

    assert contradictions(("a", "b", None), ("b", "a", 0.3)) == 0
    assert contradictions(("a", "b", None), ("b", "a", 0.5)) == 0
    assert contradictions(("a", "b", None), ("b", "a", 0.7)) == 1
    assert contradictions(("a", "b", 0.7), ("a", "b", 0.3)) == 1


# Attributes


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("attributes", RATED),
        ("judgement", {**RATED, "label": True}),
        ("scored", {**RATED, "score": 4}),
        ("judgement", {**RATED, "score": 4, "label": True}),
        ("judged_messages", {"messages": [USER, ASSISTANT], "scores": {"help": 1}, "label": True}),
        ("scored_messages", {"messages": [USER, ASSISTANT], "scores": {"help": 1}, "score": 0}),
        ("helpsteer", {"prompt": "p", "response": "a", "helpfulness": 3, "verbosity": 0}),
    ],
)
def test_rows_with_attributes_are_detected_from_their_columns(name: str, row: dict):
    assert detect([row]) == name


def test_attributes_reach_the_tokens_sorted_by_name(tmp_path: Path):
    loaded = load_rows(tmp_path, "scored", RATED, {**RATED, "scores": {"help": 2, "truth": None}})
    assert [e.attributes for e in loaded.examples if isinstance(e, Judgement)] == [
        {"truth": 3.0, "help": 1.5},
        {"help": 2.0},
    ]
    assert [u.attributes for u in encoded(loaded)] == [
        (("help", 1.5), ("truth", 3.0)),
        (("help", 2.0),),
    ]
    assert [(u.kind, u.label, u.scores) for u in encoded(loaded)] == [("judgement", None, ())] * 2


def test_helpsteer_has_a_column_for_each_attribute(tmp_path: Path):
    row = {
        "prompt": "p",
        "response": "a",
        "helpfulness": 3,
        "correctness": "4",
        "coherence": None,
        "verbosity": 0,
    }
    [example] = load_rows(tmp_path, "scored", row).examples
    assert isinstance(example, Judgement)
    assert example.attributes == {"helpfulness": 3.0, "correctness": 4.0, "verbosity": 0.0}


@pytest.mark.parametrize(
    ("scores", "code", "value"),
    [
        ([1, 2], "row-value-type", "[1, 2]"),
        (3, "row-value-type", "3"),
        ({}, "row-scores-empty", ""),
        ({"help": None}, "row-scores-empty", ""),
        ({"help": "nan"}, "row-number-invalid", "'nan'"),
        ({"help": {"a": 1}}, "row-number-invalid", "help"),
        ({"": 1}, "row-value-type", ""),
    ],
)
def test_attributes_that_cannot_be_read(tmp_path: Path, scores: Any, code: str, value: str):
    with raises_error(code, where="rows.jsonl:1") as raised:
        load_rows(tmp_path, "scored", {**ANSWER, "scores": scores}, format="attributes")
    assert "scores" in raised.error.message
    assert value in raised.error.message
    assert raised.error.fix


def test_rows_that_lack_an_attribute_of_others_are_remarked_on(tmp_path: Path):
    loaded = load_rows(tmp_path, "scored", RATED, {**ANSWER, "scores": {"help": 2}})
    encoder = Encoder(tiny_tokenizer(), max_length=100, as_chat=False)
    result = audit(loaded, encoder.encode_all(loaded.examples, loaded.sources), encoder)
    assert result.findings["missing_attributes"].rows == (str(loaded.examples[1].origin),)
    assert "missing_attributes" in shown_findings(result)
    assert result.classes == {"scored": 2}
    assert "no_mismatch" not in result.findings  # which speaks of labels


# The kind ``scored``


@pytest.mark.parametrize(
    "row", [STARS, RATED, {**ANSWER, "label": True}, {"messages": [USER, ASSISTANT], "score": 2}]
)
def test_any_verdict_is_enough_for_scored(tmp_path: Path, row: dict):
    [unit] = encoded(load_rows(tmp_path, "scored", row))
    assert (unit.kind, unit.scores) == ("judgement", (row["score"],) if "score" in row else ())


def test_labels_and_scores_are_not_mixed(tmp_path: Path):
    rows = [{**ANSWER, "label": True, "score": 1}, {**ANSWER, "label": True}]
    assert len(load_rows(tmp_path, "scored", *rows).examples) == 2
    files = [write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", STARS)]
    with raises_error("rows-rated-differently", where="b.jsonl:1") as raised:
        load([Source(path) for path in files], "scored")
    assert re.search(r"\bscore\b.*\blabel\b", raised.error.message)
    files = [write(tmp_path / "c.jsonl", STARS), write(tmp_path / "d.jsonl", RATED)]
    with raises_error("rows-rated-differently", where="d.jsonl:1") as raised:
        load([Source(path) for path in files], "scored")
    assert re.search(r"\battributes\b.*\bscore\b", raised.error.message)


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        (PAIR, "data.convert: pairs_to_judgements"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1, 2]}, "rankings_to_scored"),
        (ANSWER, "sft"),
    ],
)
def test_rows_without_individual_labels_are_refused_with_a_fix(tmp_path: Path, row: dict, fix: str):
    with raises_error("kind-mismatch", where="rows.jsonl:1", fix=fix):
        load_rows(tmp_path, "scored", row)


def test_rows_without_a_label_are_refused_where_one_is_needed(tmp_path: Path):
    with raises_error("kind-mismatch") as raised:
        load_rows(tmp_path, "judgement", RATED)
    assert "attributes" in raised.error.message
    with raises_error("kind-mismatch"):
        load([InMemory([Judgement(prompt="p", completion="a", origin=HERE)])], "scored")
    with raises_error("kind-mismatch", fix="format: demonstration"):
        load_rows(tmp_path, "demonstration", STARS)
    assert len(load_rows(tmp_path, "demonstration", STARS, format="demonstration").examples) == 1


def test_conversions_that_make_verdicts_serve_scored_too(tmp_path: Path):
    result = load_rows(tmp_path, "scored", PAIR, convert="pairs_to_judgements").examples
    assert [e.label for e in result if isinstance(e, Judgement)] == [True, False]
    result = load_rows(
        tmp_path, "scored", STARS, convert="scores_to_judgements", threshold=4
    ).examples
    assert [(e.label, e.score) for e in result if isinstance(e, Judgement)] == [(True, 4.0)]
    with raises_error("conversion-mismatch", where="data.convert"):
        load_rows(tmp_path, "judgement", {**ANSWER, "label": True}, convert="rankings_to_scored")


def test_a_conversion_does_not_hide_a_mixture(tmp_path: Path):
    files = [write(tmp_path / "pairs.jsonl", PAIR), write(tmp_path / "stars.jsonl", STARS)]
    with raises_error("rows-rated-differently", where="pairs.jsonl:1"):
        load([Source(path) for path in files], "scored", convert="pairs_to_judgements")


# Rows in memory


def judgement(**more: Any) -> Judgement:
    return Judgement(prompt="p", completion="a", origin=HERE, **more)


def preference(**more: Any) -> Preference:
    return Preference(prompt="p", chosen="a", rejected="b", origin=HERE, **more)


def ranking(completions: str, *scores: float) -> Ranking:
    return Ranking(prompt="p", completions=tuple(completions), scores=scores, origin=HERE)


@pytest.mark.parametrize(
    ("example", "kind", "code", "names"),
    [
        (judgement(score=math.nan), "scored", "row-number-invalid", ["score", "nan"]),
        (judgement(attributes={"help": math.inf}), "scored", "row-number-invalid", ["help", "inf"]),
        (preference(soft=2.0), "preference", "row-number-range", ["soft", "2"]),
        (preference(margin=math.nan), "preference", "row-number-invalid", ["margin", "nan"]),
        (ranking("ab", 1, math.nan), "ranking", "row-number-invalid", ["number 2 of scores"]),
        (ranking("ab", 1.0), "ranking", "row-length-mismatch", ["completions", "2", "scores", "1"]),
        (ranking("a", 1.0), "ranking", "row-length-mismatch", ["completions", "1", "scores"]),
    ],
)
def test_numbers_of_examples_in_memory_are_checked(
    example: Any, kind: Any, code: str, names: list[str]
):
    with raises_error(code, where="rows.jsonl:1") as raised:
        load([InMemory([example])], kind)
    assert all(name in raised.error.message for name in names), raised.error
