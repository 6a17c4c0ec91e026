"""Messages and conversations of LibreChat, as mongoexport writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import only_vote, read_all, write_json, write_jsonl
from tests.errors import raises_error
from valence.data.importers.librechat import ROOT, read
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import make_rows
from valence.types import Origin

PROMPT = "u: Capital of France?"
UP = {"rating": "thumbsUp"}
DOWN = {"rating": "thumbsDown"}


def message(id: str, parent: str, text: str, **extra: Any) -> dict[str, Any]:
    return {
        "_id": {"$oid": f"oid-{id}"},
        "messageId": id,
        "conversationId": "c1",
        "parentMessageId": parent,
        "user": "u1",
        "sender": "User",
        "text": text,
        "isCreatedByUser": False,
        "unfinished": False,
        "error": False,
        "createdAt": {"$date": "2026-01-02T03:04:05.000Z"},
        "updatedAt": {"$date": "2026-01-02T03:04:06.000Z"},
        **extra,
    }


QUESTION = message("m1", ROOT, "Capital of France?", isCreatedByUser=True)


def rated(**extra: Any) -> dict[str, Any]:
    return message("m2", "m1", "Paris", model="gpt", feedback=UP) | extra


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"text": "", "content": list(content)}


TEXT = {"type": "text", "text": "Paris"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, (PROMPT, "Paris", True), id="up"),
        pytest.param({"feedback": DOWN}, (PROMPT, "Paris", False), id="down"),
        pytest.param({"feedback": {"rating": None, "tags": ["x"]}}, "no_vote", id="tags-alone"),
        pytest.param({"isCreatedByUser": True}, "not_assistant", id="user"),
        pytest.param({"unfinished": True}, "unfinished", id="unfinished"),
        pytest.param({"finish_reason": "length"}, "unfinished", id="length"),
        pytest.param({"error": True}, "failed", id="failed"),
        pytest.param({"text": ""}, "empty", id="empty"),
        pytest.param({"parentMessageId": "m9"}, "no_conversation", id="parent-missing"),
        pytest.param(parts(TEXT), (PROMPT, "Paris", True), id="content"),
        pytest.param(
            parts({"type": "text", "text": {"value": "Paris"}}), (PROMPT, "Paris", True), id="value"
        ),
        pytest.param(
            parts({"type": "think", "think": "hm"}, {"type": "agent_update"}, TEXT),
            (PROMPT, "Paris", True),
            id="thoughts-and-agents",
        ),
        pytest.param(parts({"type": "tool_call", "tool_call": {}}, TEXT), "context", id="tools"),
        pytest.param(
            parts({"type": "image_file", "image_file": {}}, TEXT), "image", id="image-part"
        ),
        pytest.param({"files": [{"type": "image/png"}]}, "image", id="files"),
        pytest.param(parts({"type": "error", "error": "x"}), "failed", id="error-part"),
        pytest.param(
            {"text": ":::thinking\nhm\n:::\nParis"}, (PROMPT, "Paris", True), id="thinking-block"
        ),
    ],
)
def test_one_message(tmp_path: Path, changes: dict[str, Any], expected: object) -> None:
    path = write_jsonl(tmp_path / "messages.jsonl", [QUESTION, rated(**changes)])
    assert read_all(read, path) == [expected]


def test_all_fields_of_feedback_are_in_the_vote(tmp_path: Path) -> None:
    feedback = DOWN | {"tag": {"key": "inaccurate", "label": "Inaccurate"}, "text": "wrong"}
    path = write_json(tmp_path / "messages.json", [QUESTION, rated(feedback=feedback)])
    assert only_vote(read, path) == Vote(
        source="librechat",
        id="m2",
        updated_at=1767323046.0,
        rater="u1",
        prompt=({"role": "user", "content": "Capital of France?"},),
        completion={"role": "assistant", "content": "Paris"},
        message="m2",
        parent="m1",
        label=False,
        comment="wrong",
        tags=("inaccurate",),
        model="gpt",
        session="c1",
        origin=Origin(path, 2),
    )


@pytest.mark.parametrize(
    ("feedback", "tags"),
    [
        ({"tag": "inaccurate"}, ("inaccurate",)),
        ({"tags": ["a", "b"]}, ("a", "b")),
        ({}, ()),
    ],
)
def test_tags_of_all_versions(
    tmp_path: Path, feedback: dict[str, Any], tags: tuple[str, ...]
) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", [QUESTION, rated(feedback=UP | feedback)])
    assert only_vote(read, path).tags == tags


def test_numbers_of_extended_json_are_times(tmp_path: Path) -> None:
    date = {"$date": {"$numberLong": "1767323046000"}}
    path = write_jsonl(tmp_path / "messages.jsonl", [QUESTION, rated(updatedAt=date)])
    assert only_vote(read, path).updated_at == 1767323046.0


def test_the_system_prompt_is_in_the_conversations(tmp_path: Path) -> None:
    messages = write_jsonl(tmp_path / "messages.jsonl", [QUESTION, rated()])
    conversation = {"conversationId": "c1", "title": "France", "promptPrefix": "Be brief."}
    conversations = write_jsonl(tmp_path / "conversations.jsonl", [conversation])
    assert read_all(read, conversations, messages) == [(f"s: Be brief. | {PROMPT}", "Paris", True)]


def test_the_prompt_is_the_branch_of_the_rated_message(tmp_path: Path) -> None:
    rows = [
        QUESTION,
        message("m2", "m1", "Paris"),
        message("m3", "m1", "Lyon"),
        message("m4", "m3", "Sure?", isCreatedByUser=True),
        message("m5", "m4", "Yes", feedback=UP),
        message("m6", "m5", "Thanks", isCreatedByUser=True),
    ]
    path = write_jsonl(tmp_path / "messages.jsonl", rows)
    assert read_all(read, path) == [(f"{PROMPT} | a: Lyon | u: Sure?", "Yes", True)]


def test_regenerated_answers_with_opposite_thumbs_give_a_pair(tmp_path: Path) -> None:
    rows = [QUESTION, rated(), message("m3", "m1", "Lyon", feedback=DOWN)]
    path = write_jsonl(tmp_path / "messages.jsonl", rows)
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    (pair,) = make_rows(votes).rows["pairs"]
    assert (pair["chosen"], pair["rejected"]) == ("Paris", "Lyon")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [{"text": "x"}]))


PARIS = ("Paris", None, "And Spain?")
UNRATED = message("m2", "m1", "Paris", model="gpt")
SPAIN = message("m3", "m2", "And Spain?", isCreatedByUser=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([rated(), SPAIN], [("Paris", True, "And Spain?")], id="rated"),
        pytest.param([rated(feedback=None), SPAIN], ["withdrawn", PARIS], id="withdrawn"),
        pytest.param([UNRATED, SPAIN], [PARIS], id="unrated"),
        pytest.param([UNRATED], [], id="last-message"),
        pytest.param([UNRATED, SPAIN | {"text": " "}], [], id="blank"),
        pytest.param(
            [UNRATED, SPAIN | {"text": "", "content": [{"type": "text", "text": "And Spain?"}]}],
            [PARIS],
            id="content",
        ),
        pytest.param(
            [
                UNRATED,
                SPAIN,
                SPAIN | {"messageId": "m4", "text": "Why?", "createdAt": "2026-02-01"},
            ],
            [("Paris", None, "Why?")],
            id="edited-message",
        ),
        pytest.param(
            [
                UNRATED,
                UNRATED | {"messageId": "m5", "text": "Lyon"},
                SPAIN | {"parentMessageId": "m5"},
            ],
            [("Lyon", None, "And Spain?")],
            id="regenerated-answer",
        ),
        pytest.param([UNRATED | {"error": True}, SPAIN], ["failed"], id="failed"),
    ],
)
def test_the_users_next_message_in_the_branch_is_the_follow_up(
    tmp_path: Path, rows: list[dict[str, Any]], expected: list[Any]
) -> None:
    path = write_jsonl(tmp_path / "messages.jsonl", [QUESTION, *rows])
    records = [*read([path], ReadOptions(includes_unlabelled=True))]
    assert [
        (r.completion["content"], r.label, r.follow_up) if isinstance(r, Vote) else r.reason
        for r in records
    ] == expected
    labelled = [r for r in read([path], ReadOptions()) if isinstance(r, Vote)]
    assert labelled == [r for r in records if isinstance(r, Vote) and r.label is not None]
