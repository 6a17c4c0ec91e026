"""Personal data in the texts of rows, and what their feedback contains."""

from __future__ import annotations

from typing import Any

import pytest

from valence.data.audit_words import (
    QUOTED_WORDS,
    PersonalData,
    RowTexts,
    audit_feedback,
    language_of,
    personal_data,
    texts_of,
)
from valence.types import Origin

LONG = " ".join(f"word{n}" for n in range(QUOTED_WORDS + 3))


def texts(*rows: dict[str, Any]) -> list[RowTexts]:
    return [texts_of(row, {}, Origin("f.jsonl", n)) for n, row in enumerate(rows, 1)]


def kinds(text: str) -> list[str]:
    return [item.kind for item in personal_data(texts({"feedback": text}))]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Write to ann.lee+x@mail.example.org, please", "e-mail address"),
        ("Call +49 30 123456-78", "phone number"),
        ("Call (030) 123 456 78", "phone number"),
        ("Call 555-123-4567.", "phone number"),
        ("My account is DE89 3704 0044 0532 0130 00", "IBAN"),
        ("My account is DE89370400440532013000.", "IBAN"),
        ("4111 1111 1111 1111 is my card", "card number"),
        ("I am at 8.8.8.8", "IP address"),
    ],
)
def test_personal_data_is_recognized_by_its_form(text: str, kind: str) -> None:
    assert kinds(text) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "Too long, 3 @ most",
        "On 2026-11-25 at 10:16 it cost 1,234,567.89",
        "DE89 3704 0044 0532 0130 01 fails its check",
        "4111 1111 1111 1112 fails its check",
        "0000 0000 0000 0000",
        "Version 1.2.3, at 127.0.0.1 and 192.168.1.1 or 999.1.1.1",
        "00000000-0000-4000-8000-000000000001",
        "f(x) = (1 + 2) * 3",
        "+1",
    ],
)
def test_other_numbers_are_no_personal_data(text: str) -> None:
    assert kinds(text) == []


def test_personal_data_is_searched_in_all_texts_of_a_row() -> None:
    mail = "a@example.org"
    rows = texts(
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": mail}]}]},
        {"messages": [{"from": "human", "value": mail}]},
        {"chosen": mail, "rejected": "no", "info": {"comment": mail, "votes": [mail]}},
        {"prompt": "q", "completion": f"{mail} {mail}", "feedback": mail},
        {"prompt": "q", "completion": mail, "id": mail},
    )
    findings = personal_data(rows)
    assert findings[0] == PersonalData(
        "e-mail address", "completion", 2, ("f.jsonl:4", "f.jsonl:5")
    )
    assert {(item.part, item.count) for item in findings[1:]} == {
        ("prompt", 1),
        ("messages", 1),
        ("chosen", 1),
        ("info.comment", 1),
        ("feedback", 1),
    }


def test_columns_may_have_other_names() -> None:
    row = {"q": "a", "a": "b", "words": "c", "prompt": "ids"}
    columns = {"prompt": "prompt_ids", "prompt_text": "q", "completion": "a", "feedback": "words"}
    parts = texts_of(row, columns, Origin("f.jsonl", 1)).parts
    assert parts == {"prompt": "a", "completion": "b", "feedback": "c"}


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("This is not what you said.", "English"),
        ("Das ist nicht richtig, bitte kürzer.", "German"),
        ("Ce n'est pas ce que je veux.", "French"),
        ("No es lo que pedí, por favor.", "Spanish"),
        ("Слишком длинно", "Cyrillic script"),
        ("太长了", "Chinese"),
        ("長すぎます", "Japanese"),
        ("Ok", ""),
        ("", ""),
        ("42", ""),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert language_of(text) == language


def test_feedback_that_repeats_or_is_in_another_language_is_counted() -> None:
    answer = "This is what you asked for."
    result = audit_feedback(
        texts(
            {"prompt": "1", "completion": answer, "feedback": "Thanks"},
            {"prompt": "2", "completion": answer, "feedback": " Thanks\n"},
            {"prompt": "3", "completion": answer, "feedback": "Das ist nicht richtig"},
            {"prompt": "4", "completion": answer},
        )
    )
    assert result is not None
    assert (result.rows, result.num_repeated, result.repeated) == (3, 2, (("Thanks", 2),))
    assert result.languages == {"unknown": 2, "German": 1}
    assert (result.num_other_language, result.num_quotes) == (1, 0)
    assert audit_feedback(texts({"prompt": "1", "completion": answer})) is None


def test_feedback_that_quotes_another_chat_is_named() -> None:
    first = {"prompt": "Summarize", "completion": f"So: {LONG}", "feedback": "Thanks"}
    rows = texts(first, {"prompt": "Hi", "completion": "Yo", "feedback": f"I read: {LONG}"})
    result = audit_feedback(rows)
    assert result is not None
    assert (result.quotes, result.num_quotes) == ((("f.jsonl:2", "f.jsonl:1"),), 1)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"prompt": f"Hi\nYo\n{LONG}", "completion": "K"}, id="the-chat-goes-on"),
        pytest.param({"prompt": "Hi", "completion": LONG}, id="another-answer"),
        pytest.param(
            {"prompt": "Q", "completion": LONG.rpartition(" word11")[0]}, id="fewer-words"
        ),
    ],
)
def test_the_same_chat_and_a_few_words_are_no_quotes(other: dict[str, Any]) -> None:
    rows = texts({"prompt": "Hi", "completion": "Yo", "feedback": LONG}, other)
    result = audit_feedback(rows)
    assert result is not None
    assert result.num_quotes == 0


def test_feedback_may_quote_its_own_chat() -> None:
    rows = texts(
        {"prompt": LONG, "completion": "Yo", "feedback": f"I said: {LONG}"},
        {"prompt": f"As before: {LONG}", "completion": "Yo"},
    )
    result = audit_feedback(rows)
    assert result is not None
    assert result.num_quotes == 0
