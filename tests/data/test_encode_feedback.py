"""Rows with feedback: the prompt of the teacher, whose completion has the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.data.encoding import bad, chat, encoded, encoder, text, turn
from tests.errors import raises_error
from tests.tiny import BOS, CHATML, CHATML_TOOLS, INST, NO_END
from valence.data.encode import Encoder, Unusable
from valence.data.hindsight import TeacherContext
from valence.data.load import InMemory, load
from valence.types import Chat, Content, Ids, Judgement, Origin

CONTEXT = TeacherContext(template="The user wrote: {feedback}")


def row(prompt: Content = "Is it wet?", completion: Content = "Yes.", **more: Any) -> Judgement:
    more = {"feedback": "too short"} | more
    return Judgement(prompt=prompt, completion=completion, origin=Origin("a", 1), **more)


def teacher(template: str | None = CHATML, **options: Any) -> Encoder:
    return encoder(template, **options).with_teacher(CONTEXT)


@pytest.mark.parametrize("template", [CHATML, CHATML_TOOLS, INST, BOS, NO_END])
def test_the_feedback_ends_the_last_user_turn_and_the_completion_stays(template: str) -> None:
    example = row(chat("hello", "hello world", "Is it wet?"), chat("Yes.", first="assistant"))
    unit = encoded(teacher(template), example)
    plain = encoded(encoder(template), example)
    assert (unit.prompt_ids, unit.answers) == (plain.prompt_ids, plain.answers)
    assert unit.kind == "feedback"
    changed = text(teacher(template), unit.teacher_ids)
    assert changed == text(teacher(template), unit.prompt_ids).replace(
        "Is it wet?", "Is it wet?\n\nThe user wrote: too short"
    )
    with_feedback = chat("hello", "hello world", "Is it wet?\n\nThe user wrote: too short")
    assert unit.teacher_ids == teacher(template).encode_prompt(with_feedback)


def test_a_turn_of_tools_and_a_turn_of_parts() -> None:
    called = {**turn("assistant", ""), "tool_calls": [{"name": "clock"}]}
    prompt = Chat((turn("user", "When?"), called, turn("tool", "12:00")))
    unit = encoded(teacher(CHATML_TOOLS), row(prompt, "Noon."))
    assert "When?\n\nThe user wrote: too short" in text(teacher(), unit.teacher_ids)
    parts = Chat(({"role": "user", "content": [{"type": "text", "text": "Is it wet?"}]},))
    last = CONTEXT.prompt(parts, "too short", None)
    assert isinstance(last, Chat)
    assert last.messages[-1]["content"][-1] == {
        "type": "text",
        "text": "The user wrote: too short",
    }


def test_plain_text_and_tokens() -> None:
    unit = encoded(teacher(None), row())
    assert text(teacher(None), unit.teacher_ids).endswith("The user wrote: too short\n\nIs it wet?")
    ids = encoded(teacher(), row())
    prompt, completion = Ids(ids.prompt_ids, readable=chat("Is it wet?")), Ids(ids.answers[0].ids)
    same = encoded(teacher(), row(prompt, completion))
    assert (same.teacher_ids, same.answers[0].ids) == (ids.teacher_ids, ids.answers[0].ids)
    bad(teacher(), row(Ids(ids.prompt_ids), completion), "feedback_without_text")


def test_the_default_says_how_the_user_rated() -> None:
    context = TeacherContext()
    assert len({context.text("no", label) for label in (None, True, False)}) == 3
    assert all("no" in context.text("no", label) for label in (None, True, False))
    assert TeacherContext("demonstration").text("no", None) != context.text("no", None)
    with_braces = context.text("{feedback} {x}", None)
    assert with_braces.count("{feedback} {x}") == 1


def test_a_row_that_is_too_long_only_with_its_feedback() -> None:
    unit = encoded(teacher(), row())
    longest = len(unit.teacher_ids) + len(unit.answers[0].ids)
    encoded(teacher(max_length=longest), row())
    result = teacher(max_length=longest - 1).encode(row())
    assert isinstance(result, Unusable)
    assert result.dropped
    without = len(unit.prompt_ids) + len(unit.answers[0].ids)
    assert f"{longest} tokens with its feedback, and {without} without" in result.reason


@pytest.mark.parametrize("long_rows", ["cut_completion", "cut_prompt"])
def test_cut_rows_have_the_same_completion_for_both(long_rows: Any) -> None:
    prompt = chat("hello " * 9, "hello", "hello " * 9, "world", "Is it wet?")
    example = row(prompt, "sun " * 12)
    full = encoded(teacher(), example)
    limit = len(full.teacher_ids) + 5
    unit = encoded(teacher(max_length=limit, long_rows=long_rows), example)
    assert len(unit.teacher_ids) + len(unit.answers[0].ids) <= limit
    assert len(unit.answers) == 1
    if long_rows == "cut_completion":
        assert unit.teacher_ids == full.teacher_ids
        assert unit.answers[0].ids == full.answers[0].ids[:5]
    else:
        assert unit.answers == full.answers
        assert len(full.teacher_ids) - len(unit.teacher_ids) == len(full.prompt_ids) - len(
            unit.prompt_ids
        )


def test_other_methods_encode_no_teacher() -> None:
    example = row(label=True)
    assert encoded(encoder(), example).teacher_ids == ()
    assert encoded(encoder(), example).kind == "judgement"
    assert encoded(teacher(), replace(example, feedback="")).teacher_ids == ()


def test_stored_examples_have_their_teacher() -> None:
    units = teacher().encode_all([row(), row(feedback="no"), row("hello", "world")]).units
    assert [units[i] for i in range(3)] == [
        encoded(teacher(), e) for e in (row(), row(feedback="no"), row("hello", "world"))
    ]
    assert units.answer_column("num_tokens").tolist() == [len(u.answers[0].ids) for u in units]
    assert len(set(units.columns["fingerprint"].tolist())) == 3
    assert units.last_tokens == {units[0].answers[0].ids[-1]}


ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "b", "label": True},
    {"prompt": "c", "completion": "d", "feedback": "too long"},
    {"prompt": "e", "completion": "f", "label": False, "feedback": "no"},
    {"prompt": "g", "completion": "h", "label": None, "feedback": " in French "},
    {"prompt": "i", "completion": "j", "label": True, "feedback": None},
    {"prompt": "k", "completion": "l", "label": True, "feedback": " "},
    {"prompt": "m", "completion": "n", "label": True},
]


def test_one_file_serves_methods_for_feedback_and_for_labels() -> None:
    loaded = load([InMemory(ROWS)], "feedback")
    judgements = [e for e in loaded.examples if isinstance(e, Judgement)]
    assert [(e.prompt, e.feedback, e.label) for e in judgements] == [
        ("c", "too long", None),
        ("e", "no", False),
        ("g", "in French", None),
    ]
    assert sum(loaded.files[0].unused.values()) == 4
    labelled = load([InMemory(ROWS)], "judgement")
    assert [e.prompt for e in labelled.examples] == ["a", "e", "i", "k", "m"]
    assert sum(labelled.files[0].unused.values()) == 2
    ids = [e.id for e in labelled.examples]
    assert ids == [e.id for e in load([InMemory([r for r in ROWS if r.get("label") is not None])],
                                      "judgement").examples]  # fmt: skip


def test_rows_without_any_feedback_are_an_error() -> None:
    with raises_error("kind-mismatch"):
        load([InMemory(ROWS[:1])], "feedback")
    with raises_error("no-usable-rows"):
        load([InMemory([{"prompt": "a", "completion": "b", "feedback": ""}])], "feedback")


def test_a_demonstration_in_the_column_of_feedback() -> None:
    rows = [{"prompt": "a", "completion": "b", "good": "c"}]
    loaded = load([InMemory(rows, keys={"feedback": "good"})], "feedback")
    [example] = loaded.examples
    assert isinstance(example, Judgement)
    assert example.feedback == "c"


def test_scored_rows_with_tokens_and_the_text_of_a_reward() -> None:
    """As `valence score` writes them."""
    row = {
        "prompt": "a",
        "completion": "b",
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "logps": [-1.0],
        "sampled": {"temperature": 1.0},
        "score": 0.5,
        "feedback": "no",
        "stop": "eos",
    }
    [example] = load([InMemory([row])], "feedback").examples
    assert isinstance(example, Judgement)
    assert (example.feedback, example.score, example.completion) == ("no", 0.5, Ids((3,)))
    assert load([InMemory([row])], "scored").files[0].format == "scored_ids"
