"""Assertions on answers, and what a comparison says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, command_error, place
from tests.errors import raises_error
from tests.evaluation.test_compare import SAMPLING, folder
from tests.evaluation.test_judge import pair
from valence.apps.compare.assertions import check_assertions, count_assertions, parse_assertions
from valence.cli import GATE_FAILED
from valence.cli.compare import shortened

__all__ = ["folder", "place"]

SCHEMA = {"type": "object", "required": ["city"]}
CASES: list[tuple[Any, str, bool]] = [
    ({"contains": "Paris"}, "It is Paris.", True),
    ({"contains": "Paris"}, "It is paris.", False),
    ({"contains": ["Paris", "France"]}, "Paris", False),
    ({"contains": {"words": ["paris"], "ignore_case": True}}, "PARIS", True),
    ({"not_contains": ["London", "Rome"]}, "Paris", True),
    ({"not_contains": ["London", "Rome"]}, "Rome", False),
    ({"regex": r"^\d+$"}, "42", True),
    ({"regex": r"^\d+$"}, "42 or so", False),
    ({"json_schema": SCHEMA}, '{"city": "Paris"}', True),
    ({"json_schema": SCHEMA}, 'Here:\n```json\n{"city": 1}\n```', True),
    ({"json_schema": SCHEMA}, '{"town": "Paris"}', False),
    ({"json_schema": None}, "[1]", True),
    ({"json_schema": None}, "one", False),
    ({"refusal": True}, "I'm sorry, I can't help with that.", True),
    ({"refusal": False}, "I'm sorry, I can't help with that.", False),
    ({"refusal": False}, "Of course.", True),
    ({"length": {"max_length": 3}}, "one two three", True),
    ({"length": {"max_length": 3}}, "one two three four", False),
    ({"length": {"min_length": 2, "unit": "characters"}}, "a", False),
]


@pytest.mark.parametrize(("value", "text", "passes"), CASES)
def test_an_assertion_passes_or_fails(value: Any, text: str, passes: bool) -> None:
    (assertion,) = parse_assertions(value, "rows.jsonl:1")
    (result,) = check_assertions([pair("", text)], {"": [assertion]})
    assert result.candidate is passes


def test_a_row_may_have_several_assertions() -> None:
    for value in ([{"contains": "a"}, {"refusal": False}], {"contains": "a", "refusal": False}):
        names = [assertion.name for assertion in parse_assertions(value, "here")]
        assert names == ["contains: a", "refusal: false"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("Paris", "assertion-invalid"),
        ([], "assertion-invalid"),
        ([{"contains": "a"}, "b"], "assertion-invalid"),
        ({"equals": "a"}, "assertion-invalid"),
        ({"regex": "("}, "reward-setting-value"),
        ({"length": {"max": 3}}, "reward-setting-unknown"),
        ({"refusal": "no"}, "reward-setting-value"),
        ({"contains": ""}, "reward-setting-value"),
        ({"contains": 3}, "reward-setting-value"),
    ],
)
def test_another_value_is_a_mistake(value: Any, code: str) -> None:
    with raises_error(code, where="rows.jsonl:7"):
        parse_assertions(value, "rows.jsonl:7")


def test_a_failed_check_is_neither_broken_nor_fixed() -> None:
    checks = {"": [*parse_assertions([{"contains": "a"}, {"regex": r"(x+x+)+y"}], "here")]}
    results = check_assertions(
        [pair("a", "b"), pair("b", "a"), pair("a", "a" + "x" * 5000)], checks
    )
    counts = count_assertions(results)
    assert (counts["number"], counts["baseline"], counts["candidate"]) == (6, 2, 2)
    assert counts["unchecked"] == 1
    assert [entry["assertion"] for entry in counts["broken"]] == ["contains: a"]
    assert [entry["answer"] for entry in counts["fixed"]] == ["a"]


# In the command


def write_assertions() -> None:
    rows = [
        {"prompt": "what about  ", "assert": {"length": {"max_length": 1000}}},
        {"prompt": "and this? ", "assert": [{"regex": "^$"}, {"length": {"min_length": 0}}]},
    ]
    Path("regression.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_with_assertions_are_answered_and_not_judged(folder: Path) -> None:
    write_assertions()
    words = ("compare", "model", "other", *SAMPLING, "--judge", "my_rewards:long")
    assert command(*words, "--assertions", "regression.jsonl", "--max-broken", "0") == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    assert result["prompts"] == 9  # one prompt is in both files
    judge = result["judges"][0]
    assert judge["wins"] + judge["ties"] + judge["losses"] == 8
    assert result["assertions"]["number"] == 3
    assert result["assertions"]["baseline"] == result["assertions"]["candidate"] == 2
    assert "Assertions" in Path("comparison/report.html").read_text()


def test_assertions_need_no_judge_and_set_the_exit_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("--assertions", "regression.jsonl", "--max-new-tokens", "6")
    write_assertions()
    assert command("compare", "model", "other", *ask) == 0
    answers = [
        json.loads(Path(f"comparison/answers.{side}.jsonl").read_text().splitlines()[0])
        for side in ("baseline", "candidate")
    ]
    assert answers[0]["completion"] != answers[1]["completion"]
    # what only the baseline says
    rows = [{"prompt": "what about  ", "assert": {"contains": answers[0]["completion"]}}]
    Path("regression.jsonl").write_text(json.dumps(rows[0]) + "\n")
    words = ("compare", "model", "other", *ask, "--out", "broken")
    capsys.readouterr()
    assert command(*words, "--max-broken", "1") == 0
    printed = "".join(capsys.readouterr().out.split())
    assert f"answer: {answers[1]['completion']!r}".replace(" ", "") in printed
    assert command(*words, "--max-broken", "0") == GATE_FAILED
    result = json.loads(Path("broken/compare.json").read_text())
    assert len(result["assertions"]["broken"]) == 1


def test_a_long_answer_is_shown_with_its_beginning_and_end() -> None:
    assert shortened("short") == "short"
    text = shortened("a" * 500 + "b" * 500)
    assert text == "a" * 150 + " ... " + "b" * 150


def test_wrong_files_of_assertions_are_refused(folder: Path) -> None:
    error = command_error("compare", "model", "other", "--assertions", "prompts.jsonl")
    assert (error.code, error.where) == ("assertion-missing", "prompts.jsonl:1")
    write_assertions()
    words = ("--assertions", "regression.jsonl", "--judge", "my_rewards:long")
    assert command_error("compare", "model", "other", *words).code == "rows-missing"
