"""Logs of chats without votes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import write_jsonl
from valence.data.importers.chats import read
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.rows import import_votes


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


HI, YO, SHORTER, OK = user("Hi"), assistant("Yo"), user("Shorter"), assistant("K")
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TOOL = {"role": "tool", "content": "12:00", "tool_call_id": "c"}
FIRST = ("u: Hi", "Yo", "Shorter")
SECOND = ("u: Hi | a: Yo | u: Shorter", "K", "Thanks")


def write_log(path: Path) -> str:
    """A chat whose first answer has a follow-up, and one without a follow-up."""
    return write_jsonl(path, [{"messages": [HI, YO, SHORTER, OK]}, {"messages": [HI, YO]}])


def read_rows(path: Path, *rows: dict[str, Any], **paths: str) -> list[Any]:
    """The prompt, the completion and the follow-up of each record, or the reason to skip it."""
    items = read([write_jsonl(path / "log.jsonl", rows)], ReadOptions(paths=paths))
    return [item.reason if isinstance(item, Skipped) else compact(item) for item in items]


def compact(vote: Vote) -> tuple[str, str, str]:
    assert not vote.has_verdict
    prompt = " | ".join(f"{turn['role'][0]}: {turn['content']}" for turn in vote.prompt)
    return prompt, vote.completion["content"], vote.follow_up


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([HI, YO, SHORTER, OK], [FIRST], id="one"),
        pytest.param([HI, YO, SHORTER, OK, user("Thanks")], [FIRST, SECOND], id="two"),
        pytest.param([HI, YO], ["no_vote"], id="no-follow-up"),
        pytest.param([HI, YO, user("  \n")], ["no_vote"], id="blank"),
        pytest.param([HI, YO, user(""), SHORTER], [FIRST], id="blank-then-text"),
        pytest.param([HI, YO, user([IMAGE])], ["no_vote"], id="image-alone"),
        pytest.param(
            [HI, YO, user([{"type": "text", "text": "Shorter"}, IMAGE]), OK, user("Thanks")],
            [FIRST, "image"],
            id="text-and-image",
        ),
        pytest.param(
            [HI, YO, SHORTER, user("Please"), OK],
            [("u: Hi", "Yo", "Shorter\n\nPlease")],
            id="several-follow-ups",
        ),
        pytest.param(
            [{"role": "system", "content": "Be brief."}, HI, YO, SHORTER],
            [("s: Be brief. | u: Hi", "Yo", "Shorter")],
            id="system-first",
        ),
        pytest.param(
            [HI, YO, {"role": "system", "content": "It is noon."}, SHORTER],
            [FIRST],
            id="system-between",
        ),
        pytest.param(
            [HI, {**assistant(""), "tool_calls": [CALL]}, TOOL, YO, SHORTER],
            [("u: Hi | a:  | t: 12:00", "Yo", "Shorter")],
            id="tool-before-the-answer",
        ),
        pytest.param(
            [HI, {**assistant("Wait"), "tool_calls": [CALL]}, TOOL, SHORTER],
            ["no_vote"],
            id="tool-between-answer-and-user",
        ),
        pytest.param([YO, SHORTER], ["no_prompt"], id="greeting"),
        pytest.param([HI, assistant(" "), SHORTER], ["empty"], id="empty-answer"),
        pytest.param([HI, {**YO, "weight": 0}, SHORTER], ["no_vote"], id="context-alone"),
    ],
)
def test_an_answer_that_a_user_message_follows_is_a_record(
    tmp_path: Path, turns: list[Any], expected: list[Any]
) -> None:
    assert read_rows(tmp_path, {"messages": turns}) == expected


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Yo"},
                    {"from": "human", "value": "Shorter"},
                ]
            },
            id="sharegpt",
        ),
        pytest.param(
            {"conversation": [{"human": "Hi", "assistant": "Yo"}, {"human": "Shorter"}]},
            id="rounds",
        ),
        pytest.param({"dialog": ["Hi", "Yo", "Shorter"]}, id="texts"),
        pytest.param({"messages": json.dumps([HI, YO, SHORTER])}, id="json-in-a-cell"),
        pytest.param(
            {"text": "\n\nHuman: Hi\n\nAssistant: Yo\n\nHuman: Shorter\n\nAssistant: K"},
            id="transcript",
        ),
        pytest.param({"chat": {"messages": [HI, YO, SHORTER]}}, id="nested"),
        pytest.param(
            {
                "messages": [
                    {"type": "human", "content": "Hi"},
                    {"type": "ai", "content": "Yo"},
                    {"type": "human", "content": "Shorter"},
                ]
            },
            id="langchain",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "human", "content": [{"type": "text", "text": "Hi"}]},
                    {"role": "bot", "content": "Yo"},
                    SHORTER,
                ]
            },
            id="other-roles",
        ),
    ],
)
def test_conversations_may_have_any_shape_of_data_files(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    assert read_rows(tmp_path, row) == [FIRST]


def test_the_path_of_the_conversation_can_be_set(tmp_path: Path) -> None:
    row = {"log": {"turns": [HI, YO, SHORTER]}}
    assert read_rows(tmp_path, row, prompt="log.turns") == [FIRST]


def test_equal_answers_in_several_chats_remain_apart(tmp_path: Path) -> None:
    """What users write after a greeting does not become one text."""
    rows = [{"messages": [HI, YO, user(text)]} for text in ("Shorter", "Longer", "Shorter")]
    imported = import_votes(read([write_jsonl(tmp_path / "log.jsonl", rows)], ReadOptions()))
    assert [row["feedback"] for row in imported.rows["unlabelled"]] == ["Shorter", "Longer"]
    assert all("label" not in row for row in imported.rows["unlabelled"])
