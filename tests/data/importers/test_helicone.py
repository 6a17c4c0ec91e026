"""Helicone's requests with their ratings."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.exports import (
    assistant,
    only_reason,
    only_vote,
    results,
    user,
    write_csv,
    write_jsonl,
)
from tests.errors import raises_error
from valence.data.importers.helicone import read
from valence.data.importers.records import ReadOptions, Skipped, Vote

NOON = "2026-05-01T12:00:00.000Z"


def request(**changes: Any) -> dict[str, Any]:
    row = {
        "request_id": "r1",
        "request_created_at": "2026-05-01T10:00:00.000Z",
        "request_body": {"model": "tiny", "messages": [user("Hi")]},
        "request_user_id": "u1",
        "request_properties": {"Helicone-Session-Id": "c1"},
        "request_model": "tiny",
        "response_id": "p1",
        "response_body": {"choices": [{"message": assistant("Hello"), "finish_reason": "stop"}]},
        "response_status": 200,
        "response_model": "tiny-2026",
        "feedback_created_at": NOON,
        "feedback_id": "f1",
        "feedback_rating": True,
        "scores": {},
        "signed_body_url": "https://bodies.invalid/r1",
    }
    return row | changes


def written(tmp_path: Path, *rows: dict[str, Any]) -> list[str]:
    return [write_jsonl(tmp_path / "requests.jsonl", rows)]


def test_everything_of_a_vote(tmp_path: Path) -> None:
    vote = only_vote(read, written(tmp_path, request()))
    assert (vote.source, vote.id, vote.message) == ("helicone", "f1", "r1")
    assert vote.updated_at == datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
    assert (vote.rater, vote.session, vote.model) == ("u1", "c1", "tiny-2026")
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello"))
    assert vote.label is True


TOOL = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}


def test_requests_of_anthropic(tmp_path: Path) -> None:
    body = {"model": "m", "system": "Be brief.", "messages": [user("Hi")], "tools": [TOOL]}
    reply = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
    }
    row = request(request_body=body, response_body=reply, feedback_rating=False)
    vote = only_vote(read, written(tmp_path, row))
    assert vote.prompt == ({"role": "system", "content": "Be brief."}, user("Hi"))
    assert (vote.completion, vote.label) == (assistant("Hello"), False)
    assert [tool["function"]["name"] for tool in vote.tools] == ["weather"]


def test_bodies_that_are_text(tmp_path: Path) -> None:
    row = request()
    row |= {name: json.dumps(row[name]) for name in ("request_body", "response_body")}
    assert only_vote(read, written(tmp_path, row)).completion == assistant("Hello")


SKIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "not rated": ({"feedback_rating": None}, "no_vote"),
    "an error": ({"response_status": 500}, "failed"),
    "a cancelled request": ({"response_status": -3}, "failed"),
    "a stream that was not put together": (
        {"response_body": {"streamed_data": "data: {}"}},
        "shape_unknown",
    ),
    "no content": ({"response_body": {"choices": [{"message": assistant("")}]}}, "empty"),
    "cut": (
        {"response_body": {"choices": [{"message": assistant("H"), "finish_reason": "length"}]}},
        "unfinished",
    ),
    "an embedding": ({"request_body": {"model": "m", "input": ["Hi"]}}, "shape_unknown"),
    "no bodies": ({"request_body": None, "response_body": None}, "no_conversation"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case: str, tmp_path: Path) -> None:
    changes, reason = SKIPPED[case]
    first, second = request(request_id="r0"), request(**changes)
    vote, skipped = results(read, written(tmp_path, first, second))
    assert isinstance(vote, Vote)
    assert isinstance(skipped, Skipped)
    assert skipped.reason == reason


def test_paths_of_prompt_and_completion(tmp_path: Path) -> None:
    row = request(request_body={"prompt": "Hi"}, response_body={"generated_text": "Hello"})
    paths = {"prompt": "request_body.prompt", "completion": "response_body.generated_text"}
    assert only_reason(read, written(tmp_path, row)) == "shape_unknown"
    vote = only_vote(read, written(tmp_path, row), ReadOptions(paths=paths))
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello"))


def test_csv_lacks_required_columns(tmp_path: Path) -> None:
    row = request()
    for name in ("response_body", "feedback_rating"):
        del row[name]
    path = write_csv(tmp_path / "requests.csv", [row])
    with raises_error("import-columns-missing", where=path, fix="--format jsonl"):
        results(read, [path])


@pytest.mark.parametrize("absent", [{"response_body": None}, {"response_body": {}}])
def test_an_export_without_bodies(absent: dict[str, Any], tmp_path: Path) -> None:
    paths = written(tmp_path, request(**absent), request(request_id="r2", **absent))
    with raises_error("import-columns-missing", where=paths[0], fix="--include-body"):
        results(read, paths)


def test_an_export_without_ratings_has_no_votes(tmp_path: Path) -> None:
    assert only_reason(read, written(tmp_path, request(feedback_rating=None))) == "no_vote"


def test_another_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "a"}])
    with raises_error("import-not-an-export", where=path):
        results(read, [path])


def test_rows_of_another_form_are_reported(tmp_path: Path) -> None:
    vote, skipped = sorted(
        results(read, written(tmp_path, request(), {"total": 1})),
        key=lambda item: isinstance(item, Skipped),
    )
    assert isinstance(vote, Vote)
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.example) == ("shape_unknown", "columns total")
