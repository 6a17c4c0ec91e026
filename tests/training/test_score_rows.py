"""Scores added to rows of any format: the numbers, rows without any, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.command import command
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.training.scoring import FILES, invoke, read, score, write
from valence.config.schema import SourceSettings
from valence.data.load import load, stream
from valence.data.sources import BadRow
from valence.jobs.score_rows import NOT_FINITE
from valence.models.build import load_model


def one_by_one(model: Any, kind: Any, row: dict[str, Any]) -> list[Any]:
    return valence.logprobs(model, [row], kind=kind)


# The numbers


def test_every_answer_of_every_kind_has_the_numbers_it_has_alone(place: Path) -> None:
    score(overrides=["reference.model=./other"], beta=0.3, tokens=150)
    expected = [(kind, row) for kind, rows in FILES.items() for row in rows]
    result = read()
    policy, reference = (load_model(name, dtype=torch.float32) for name in ("model", "other"))
    assert [len(line["valence"]["answers"]) for line in result] == [1] * 5 + [2] * 4 + [1] * 3 + [
        3
    ] * 2 + [1] * 3
    for line, (kind, row) in list(zip(result, expected, strict=True))[::3]:
        assert list(line) == [*row, "valence"]
        assert {name: line[name] for name in row} == row
        alone = zip(one_by_one(policy, kind, row), one_by_one(reference, kind, row), strict=True)
        for answer, (actual, ref) in zip(line["valence"]["answers"], alone, strict=True):
            assert answer["tokens"] == len(actual.tokens)
            for name, value in {
                "logp": actual.total, "ref": ref.total,
                "mean_logp": actual.total / len(actual.tokens),
                "logratio": actual.total - ref.total, "reward": 0.3 * (actual.total - ref.total),
            }.items():  # fmt: skip
                assert answer[name] == pytest.approx(value, abs=2e-4), name
    assert [a["answer"] for a in result[5]["valence"]["answers"]] == ["chosen", "rejected"]
    assert result[6]["valence"]["origin"] == "preference.jsonl:2"


def test_a_model_has_no_reward_against_itself(place: Path) -> None:
    score("preference.jsonl", overrides=["reference.model=./model"])
    assert {answer["reward"] for line in read() for answer in line["valence"]["answers"]} == {0.0}


def test_scored_rows_are_read_as_data(place: Path) -> None:
    score("preference.jsonl", out="once.jsonl")
    before, after = (
        load([SourceSettings(path=path)], "preference").examples
        for path in ("preference.jsonl", "once.jsonl")
    )
    assert [example.id for example in after] == [example.id for example in before]
    with raises_error("row-column-taken", where="once.jsonl:1", fix="--column") as raised:
        score("once.jsonl")
    assert "'valence'" in raised.error.message
    with raises_error("column-reserved", where="--column"):
        score("once.jsonl", column="scores")
    score("once.jsonl", column="second", target="other")
    assert [*read()[0]] == ["prompt", "chosen", "rejected", "valence", "second"]
    assert read()[0]["second"]["answers"] != read()[0]["valence"]["answers"]


def test_rows_in_one_line_are_distinguished(place: Path) -> None:
    rows = [{"prompt": "hello", "completion": " " + "a" * n} for n in (1, 2)]
    Path("rows.json").write_text(f"[\n{json.dumps(rows[0])}, {json.dumps(rows[1])}\n]")
    score("rows.json", "rows.json")
    tokens = [line["valence"]["answers"][0]["logp"] for line in read()]
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]


def test_columns_of_other_names_are_given_with_the_file(place: Path) -> None:
    write("named.jsonl", [{"q": f"question {i}", "a": " yes", "prompt": None} for i in range(3)])
    score("{path: named.jsonl, keys: {prompt: q, completion: a}, limit: 2}")
    assert [line["q"] for line in read()] == ["question 0", "question 1"]
    with raises_error("keys-missing-column", where="named.jsonl") as raised:
        score("{path: named.jsonl, keys: {prompt: q, completion: a, weight: b}}", out="2.jsonl")
    assert "'b'" in raised.error.message
    write("both.jsonl", [{"prompt": "1", "completion": "2", "chosen": "3", "rejected": "4"}])
    score("both.jsonl", out="3.jsonl", format="preference")
    assert len(read("3.jsonl")[0]["valence"]["answers"]) == 2


# Rows without numbers


def test_rows_that_cannot_be_scored_say_why_in_their_place(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"prompt": "hello", "completion": " world", "label": True}
    rows: list[Any] = [
        '{"prompt": ',
        good,
        {**good, "label": "maybe"},
        good,
        {**good, "completion": " a b" * 99},
    ]
    write("rows.jsonl", rows)
    write("good.jsonl", [good])
    tally = score("rows.jsonl", "good.jsonl", overrides=["data.max_length=64"])
    assert (tally.rows, tally.failed) == (6, 3)
    lines = read()
    assert list(lines[0]) == ["origin", "error", "fix"]
    assert [{**line, "valence": None} for line in lines[2::2]] == [
        {**row, "valence": None} for row in rows[2::2]
    ]
    errors = [lines[0], lines[2]["valence"], lines[4]["valence"]]
    assert [list(error) for error in errors[1:]] == [
        ["origin", "error", "fix"], ["origin", "id", "error", "fix"],
    ]  # fmt: skip
    assert [error["origin"] for error in errors] == [f"rows.jsonl:{n}" for n in (1, 3, 5)]
    pairs = stream(SourceSettings(path="rows.jsonl"))
    bad_rows = [example for _, example in pairs if isinstance(example, BadRow)]
    for error, bad_row in zip(errors[:2], bad_rows, strict=True):
        assert (error["error"], error["fix"]) == (bad_row.reason, bad_row.fix)
    assert "'maybe'" in errors[1]["error"]
    assert "data.max_length is 64" in errors[2]["error"]
    alone = one_by_one(load_model("model", dtype=torch.float32), "judgement", good)[0].total
    for line in lines[1::2]:
        assert [answer["logp"] for answer in line["valence"]["answers"]] == pytest.approx(
            [alone], abs=2e-4
        )
    shown = capsys.readouterr().out
    assert "3 of 6" in shown
    assert "out.jsonl" in shown
    assert re.findall(r"rows\.jsonl:\d", shown) == [error["origin"] for error in errors]
    again = score("rows.jsonl", "good.jsonl", overrides=["data.max_length=64"])
    assert (again.rows, again.failed, again.earlier) == (6, 3, 6)


def test_weights_that_overflow_are_an_error_of_the_row(place: Path) -> None:
    """They are finite, unlike the logits."""
    model: Any = load_model("model", dtype=torch.float32)
    model.get_output_embeddings().weight.data[5:] = 3e38
    model.save_pretrained("broken")
    tiny_tokenizer().save_pretrained("broken")
    with raises_error("no-usable-rows", where="out.jsonl"):
        score("scored.jsonl", target="broken")
    assert all(line["valence"]["fix"] == NOT_FINITE and line["valence"]["id"] for line in read())
    assert "answers" not in read()[0]["valence"]
    again, first = (
        load([SourceSettings(path=path)], "scored").examples
        for path in ("out.jsonl", "scored.jsonl")
    )
    assert [example.id for example in again] == [example.id for example in first]


def test_a_row_that_json_cannot_hold_has_an_error_alone(place: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": f"{i} ", "completion": "yes", "more": float("nan") if i == 1 else i}
        for i in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    score("rows.parquet")
    assert [list(line) for line in read()[:2]] == [
        [*rows[0], "valence"],
        ["origin", "id", "error", "fix"],
    ]
    assert read()[1]["origin"] == "rows.parquet:2"
    assert score("rows.parquet").earlier == 3


def test_truncated_rows_are_noted(place: Path) -> None:
    write("long.jsonl", [{"prompt": "hello", "completion": " a b" * 50}])
    score("long.jsonl", overrides=["data.max_length=20", "data.long_rows=cut_completion"])
    assert read()[0]["valence"]["notes"] == ["cut_completion"]


def test_rows_without_answers_are_refused(place: Path) -> None:
    write("prompts.jsonl", [{"prompt": "hello", "said": "world"}])
    with raises_error(
        "row-not-scorable",
        where="prompts.jsonl:1",
        fix="keys: {completion: COLUMN}",
    ):
        score("prompts.jsonl")


# The command


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "score",
        "./model",
        "--data",
        "preference.jsonl",
        "--data",
        "scored.jsonl",
        "--out",
        "out.jsonl",
    )
    more = (
        "--reference",
        "./other",
        "--beta",
        "0.5",
        "--dtype",
        "float64",
        "--max-length",
        "99",
        "--tokens",
        "64",
    )
    assert command(*words, *more) == 0
    shown = capsys.readouterr().out
    assert "7/7" in shown
    assert {"./model", "out.jsonl"} <= set(re.findall(r"[\w./]+", shown))
    answer = read()[0]["valence"]["answers"][0]
    assert answer["reward"] == pytest.approx(0.5 * (answer["logp"] - answer["ref"]), abs=1e-5)
    assert command(*words, "--fresh", "--quiet", "--column", "seen") == 0
    assert "seen" in read()[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("model",),
        ("model", "--data", "scored.jsonl"),
        ("model", "--out", "out.jsonl"),
        ("recipe.yaml", "--reference", "other"),
        ("model", "--data", "scored.jsonl", "--out", "out.jsonl", "--verify", "3"),
    ],
)
def test_half_a_command_is_refused(words: tuple[str, ...], place: Path) -> None:
    with raises_error("option-missing", where="score"):
        invoke("score", *words)


@pytest.mark.parametrize(("target", "code", "where"), [
    ("scored.jsonl", "path-is-file", "scored.jsonl"),
    ("./nowhere", "model-not-found", "model"),
    ("no.yaml", "recipe-not-found", "no.yaml"),
])  # fmt: skip
def test_a_target_that_is_none(target: str, code: str, where: str, place: Path) -> None:
    with raises_error(code, where=where):
        invoke("score", target, "--data", "scored.jsonl", "--out", "out.jsonl")
    assert not Path("out.jsonl").exists()
