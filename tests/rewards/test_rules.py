"""Rules: results, rejected settings, and robustness to any answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rewards.kit import answer, error, has_words, reward, scores, values
from valence.errors import install_command
from valence.rewards import rules
from valence.rewards.rules import RULES, settings_of


def one(
    rule: str,
    text: str,
    settings: dict[str, Any] | None = None,
    *,
    tokens: int | None = None,
    **info: Any,
) -> float | None:
    combined = reward(rule, settings=settings or {})
    return values(
        combined, [answer(text, tokens=None if tokens is None else range(tokens), **info)]
    )[0]


@pytest.mark.parametrize(("rule", "settings", "text", "info", "value"), [
    ("exact_match", {}, " Paris\n", {"answer": "Paris"}, 1.0),
    ("exact_match", {}, "paris", {"answer": "Paris"}, 0.0),
    ("exact_match", {"ignore_case": True}, "PARIS", {"answer": ["Lyon", "Paris"]}, 1.0),
    ("exact_match", {"answer": "n"}, "3", {"n": 3}, 1.0),
    ("exact_match", {}, "", {"answer": "Paris"}, 0.0),
    ("contains", {}, "It is Paris.", {"answer": "Paris"}, 1.0),
    ("contains", {"words": ["a", "b"]}, "only a", {}, 1.0),
    ("contains", {"words": ["a", "b"], "want": "all"}, "only a", {}, 0.0),
    ("contains", {"words": ["a", "b"], "want": "none"}, "xyz", {}, 1.0),
    ("contains", {"words": ["SORRY"], "want": "none", "ignore_case": True}, "sorry", {}, 0.0),
    ("regex", {"pattern": "<think>.*</think>"}, "<think>a\nb</think> c", {}, 1.0),
    ("regex", {"pattern": "<b>.*</b>", "full_match": True}, "<b>a\nb</b> c", {}, 0.0),
    ("regex", {"pattern": "YES", "ignore_case": True}, "oh yes", {}, 1.0),
    ("length", {"unit": "words", "max_length": 3}, "one two three", {}, 1.0),
    ("length", {"unit": "words", "max_length": 3}, "one two three four", {}, 0.0),
    ("length", {"unit": "words", "max_length": 3, "fall": 4}, "one two three four", {}, 0.75),
    ("length", {"unit": "words", "min_length": 4, "fall": 8}, "one two", {}, 0.75),
    ("length", {"unit": "words", "min_length": 40, "fall": 8}, "one two", {}, 0.0),
    ("length", {"unit": "characters", "min_length": 3, "max_length": 3}, "abc", {}, 1.0),
    ("json_schema", {}, '{"a": [1, 2]}', {}, 1.0),
    ("json_schema", {}, '{"a": [1, 2]', {}, 0.0),
    ("json_schema", {}, '{"a": NaN}', {}, 0.0),
    ("json_schema", {}, "[" * 100000, {}, 0.0),
    ("json_schema", {}, "9" * 5000, {}, 0.0),
    ("json_schema", {"schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', {}, 1.0),
    ("json_schema", {"schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', {}, 0.0),
    ("json_schema", {"fenced": True}, 'Here:\n```json\n{"a": 1}\n```\nDone.', {}, 1.0),
    ("json_schema", {}, '```json\n{"a": 1}\n```', {}, 0.0),
    ("vader", {}, "VADER is smart, handsome, and funny!", {}, pytest.approx(0.8439, abs=1e-4)),
    ("vader", {"part": "neg"}, "This is wonderful, I love it!", {}, 0.0),
    ("vader", {}, "", {}, 0.0),
    ("refusal", {}, "I'm sorry, but I can't help with that.", {}, 1.0),
    ("refusal", {}, "I\u2019m really sorry.", {}, 1.0),
    ("refusal", {}, "Unfortunately, I cannot do this.", {}, 1.0),
    ("refusal", {}, "As an AI language model, I have no opinion.", {}, 1.0),
    ("refusal", {}, "Air scatters blue light.", {}, 0.0),
    ("refusal", {}, "Penguins cannot fly.", {}, 0.0),
    ("refusal", {}, f"{'Boil the egg. ' * 20}I cannot say more.", {}, 0.0),
    ("refusal", {"want": False}, "I cannot do this.", {}, 0.0),
    ("refusal", {"want": False}, "Sure.", {}, 1.0),
])  # fmt: skip
def test_what_rules_give(
    rule: str, settings: dict[str, Any], text: str, info: dict[str, Any], value: float
) -> None:
    assert one(rule, text, settings, **info) == value


def test_tokens_are_counted_as_they_were_sampled() -> None:
    assert one("length", "a b c d", {"max_length": 2}, tokens=2) == 1.0
    assert one("length", "a", {"max_length": 2}, tokens=3) == 0.0
    assert one("length", "", {"max_length": 2}, tokens=0) == 1.0
    assert one("length", "", {"max_length": 2}, tokens=3) == 0.0


@pytest.mark.parametrize("text", ["some text", " "])
@pytest.mark.parametrize(
    "settings",
    [{}, {"min_length": 0}, {"max_length": 2, "fall": 3}, {"unit": "tokens", "min_length": 4}],
)
def test_tokens_that_are_not_known_are_not_counted(text: str, settings: dict[str, Any]) -> None:
    assert has_words(error(reward("length", settings=settings), [answer(text, tokens=())]), "unit")
    assert one("length", text, {"unit": "characters", "max_length": 9}, tokens=0) == 1.0


MATHS = [
    ("The answer is 1/2.", "\\frac{1}{2}", 1.0),
    ("so $x = 0.5$", "1/2", 1.0),
    ("\\boxed{42}", 42, 1.0),
    ("It is 42.", "43", 0.0),
    ("no idea", "3", 0.0),
    ("", "3", 0.0),
    ("$\\frac{\\sqrt{2}}{2}$", "\\frac{1}{\\sqrt{2}}", 1.0),
    ("1,000", 1000, 1.0),
    ("$(x+1)^2$", "$x^2+2x+1$", 1.0),
    ("7", ["6", "7"], 1.0),
    ("first 3, then 4", "3", 0.0),
]


def test_formulas_are_compared_by_what_they_mean() -> None:
    result = values(
        reward("maths", timeout=60.0), [answer(text, answer=right) for text, right, _ in MATHS]
    )
    assert result == [value for *_, value in MATHS]


def test_an_answer_that_no_computer_gets_done_with_is_an_error_and_the_next_one_is_judged() -> None:
    endless, good, unknown = (
        "$9^{9^{9^{9}}}$",
        answer("#5 is 5", solution="long #### 5"),
        answer("5", solution="x #### "),
    )
    combined = reward(
        "maths", timeout=60.0, settings={"seconds": 1.5, "answer": "solution", "after": "####"}
    )
    result = scores(combined, [answer(endless, solution="#### 3"), good, unknown])
    assert [score.value for score in result] == [None, 1.0, None]
    assert has_words(result[0].error, "1.5 s", "solution", "' 3'")
    assert has_words(result[2].error, "solution", "' '")


def test_a_row_that_does_not_say_what_is_right_is_an_error() -> None:
    for rule in ("exact_match", "contains", "maths"):
        assert has_words(error(reward(rule), [answer("x", question="y")]), "'answer'", "question")
    assert has_words(
        error(reward("exact_match"), [answer("x", answer={"a": 1})]), "'answer'", "{'a': 1}"
    )
    assert has_words(error(reward("exact_match"), [answer("x", answer=[])]), "'answer'", "[]")


def test_a_pattern_that_backtracks_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PATTERN_SECONDS", 0.2)
    assert has_words(
        error(reward("regex", settings={"pattern": "(a|aa)+$"}), [answer("a" * 80 + "b")]), "0.2 s"
    )


def test_a_schema_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(json.dumps({"type": "array"}))
    assert one("json_schema", "[]", {"schema": "schema.json"}) == 1.0
    assert one("json_schema", "{}", {"schema": "schema.json"}) == 0.0


@pytest.mark.parametrize(("rule", "settings", "code", "name", "words"), [
    ("length", {"mots": 3}, "reward-setting-unknown", "mots", []),
    ("length", {"max_length": "3"}, "reward-setting-value", "max_length", ["whole number"]),
    ("length", {"max_length": -1}, "reward-setting-value", "max_length", []),
    ("length", {"min_length": 5, "max_length": 3}, "reward-setting-value", "max_length", [5, 3]),
    ("regex", {}, "reward-setting-missing", "pattern", []),
    ("regex", {"pattern": "(a"}, "reward-setting-value", "pattern", []),
    ("contains", {"words": ["a", ""]}, "reward-setting-value", "words", []),
    ("json_schema", {"schema": {"type": "objekt"}}, "reward-setting-value", "schema", ["'objekt'"]),
    ("json_schema", {"schema": "none.json"}, "reward-setting-value", "schema", ["none.json"]),
    ("vader", {"part": "joy"}, "reward-setting-value", "part", []),
    ("maths", {"seconds": 0}, "reward-setting-value", "seconds", []),
])  # fmt: skip
def test_wrong_settings_are_mistakes_before_anything_is_scored(
    rule: str, settings: dict[str, Any], code: str, name: str, words: list[object]
) -> None:
    with raises_error(code, where=f"reward.0.settings.{name}") as raised:
        reward(rule, settings=settings)
    assert has_words(raised.error.message, *words)


def test_a_misspelled_setting_is_named_with_the_one_that_was_meant() -> None:
    with raises_error("reward-setting-unknown", fix="did you mean max_length?"):
        reward("length", settings={"max_lenght": 3})


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for rule, library in (
        ("vader", "vaderSentiment.vaderSentiment"),
        ("json_schema", "jsonschema"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with raises_error(
            "library-missing", where="reward.0.settings", fix=install_command("rewards")
        ) as raised:
            reward(rule, settings={"schema": {}} if rule == "json_schema" else {})
        assert has_words(raised.error.message, rule)


@pytest.mark.parametrize("rule", RULES)
def test_every_setting_of_every_rule_is_explained(rule: str) -> None:
    assert RULES[rule].__doc__
    assert [
        name for name, field in settings_of(rule).model_fields.items() if not field.description
    ] == []
