"""Texts, cells and times, as tools write them."""

from __future__ import annotations

from typing import Any

import pytest

from valence.data.importers.records import SkipReason
from valence.data.importers.texts import (
    UnusableVote,
    branch,
    merge_turns,
    prompt_of,
    strip_reasoning,
    text_of,
    turns_of,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\nParis", "Paris"),
        ("  <think>hm</think>Paris", "Paris"),
        ("hm, so\n</think>\n\nParis", "Paris"),
        ("<think>\nhm, and so on", ""),
        ("<think>a</think>\nFirst\n<think>b</think>\nSecond", "First\nSecond"),
        ('<details type="reasoning" done="false">\nhm', ""),
        ('First\n<details type="tool_calls" id="x">\ny\n</details>\nSecond', "First\nSecond"),
        (
            '<details type="code">x</details>',
            '<details type="code">x</details>',
        ),
        ("Write </think> to end it.", "Write </think> to end it."),
        ("  Paris\n", "  Paris\n"),
    ],
)
def test_reasoning_is_stripped(text: str, expected: str) -> None:
    assert strip_reasoning(text) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("Paris", "Paris"),
        (["a", {"type": "text", "text": "b"}, {"text": "c"}], "a\nb\nc"),
        ({"type": "output_text", "text": "a"}, "a"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a"),
    ],
)
def test_content_as_text(content: object, expected: str) -> None:
    assert text_of(content) == expected


def test_thoughts_are_kept_on_request() -> None:
    content = [{"type": "think", "think": "hm"}, {"type": "text", "text": "a"}]
    kept = text_of(content, keeps_reasoning=True)
    assert kept == "<think>\nhm\n</think>\n\na"
    assert strip_reasoning(kept) == "a"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {}}], "image"),
        ([{"type": "input_audio", "input_audio": {}}], "image"),
        ([{"document": {"name": "x"}}], "image"),
        ([{"toolUse": {}}], "shape_unknown"),
        ([{"type": "text", "text": 7}], "shape_unknown"),
        ([7], "shape_unknown"),
        (7, "shape_unknown"),
    ],
)
def test_content_that_is_no_text(content: object, reason: SkipReason) -> None:
    with pytest.raises(UnusableVote) as info:
        text_of(content)
    assert info.value.reason == reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hi", ["Hi"]),
        ([{"role": "user", "content": "Hi"}], ["Hi"]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, ["Hi"]),
        ('[{"role": "user", "content": "Hi"}]', ["Hi"]),
    ],
)
def test_prompts(value: object, expected: list[str]) -> None:
    assert [turn["content"] for turn in prompt_of(value)] == expected


@pytest.mark.parametrize("value", ["", "  ", None, [], {}])
def test_no_prompt(value: object) -> None:
    with pytest.raises(UnusableVote) as info:
        prompt_of(value)
    assert info.value.reason == "no_prompt"


def test_reasoning_is_stripped_from_the_assistants_turns_alone() -> None:
    text = "<think>\nhm\n</think>\nParis"
    turns = turns_of([{"role": role, "content": text} for role in ("user", "assistant")])
    assert [turn["content"] for turn in turns] == [text, "Paris"]


def test_messages_of_the_assistant_in_a_row_are_one_turn() -> None:
    texts = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
    merged = merge_turns([{"role": role, "content": text} for role, text in texts])
    assert [turn["content"] for turn in merged] == ["a", "b", "c\n\nd", "e"]


@pytest.mark.parametrize(
    ("message", "parents", "expected"),
    [
        ("c", {"a": None, "b": "a", "c": "a"}, ["a", "c"]),
        ("x", {"a": None}, "message_missing"),
        ("", {"a": None}, "message_missing"),
        ("b", {"b": "a"}, "no_conversation"),
        ("b", {"a": "b", "b": "a"}, "no_conversation"),
    ],
)
def test_branches(message: str, parents: dict[str, str | None], expected: Any) -> None:
    messages = {name: {"name": name, "parent": parent} for name, parent in parents.items()}
    try:
        found: object = [each["name"] for each in branch(messages, message, "parent")]
    except UnusableVote as error:
        found = error.reason
    assert found == expected
