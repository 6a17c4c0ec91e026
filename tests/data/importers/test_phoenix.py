"""Phoenix's annotations with its spans."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.exports import (
    Rows,
    assistant,
    only_reason,
    only_vote,
    results,
    user,
    write_csv,
    write_jsonl,
    write_parquet,
)
from tests.errors import raises_error
from valence.data.importers.phoenix import read
from valence.data.importers.records import ReadOptions, Skipped, Vote

NOON = "2026-05-01T12:00:00+00:00"


def annotation(**changes: Any) -> dict[str, Any]:
    """As an application writes it, following Phoenix's guide."""
    row = {
        "id": "a1",
        "name": "user-feedback",
        "annotator_kind": "HUMAN",
        "span_id": "llm1",
        "result": {"label": "positive", "score": 1.0, "explanation": "short"},
        "metadata": {},
        "identifier": "",
        "created_at": NOON,
        "updated_at": NOON,
        "source": "API",
        "user_id": None,
    }
    return row | changes


def thumbs(**changes: Any) -> dict[str, Any]:
    """As the UI's thumbs write it."""
    row = annotation(
        name="user_feedback", trace_id="t1", source="APP", identifier="px-app:v1", user_id="v1"
    )
    del row["span_id"]
    return row | changes


def span(name: str = "llm1", **changes: Any) -> dict[str, Any]:
    """As GET /v1/projects/{project}/spans returns it: all names of attributes are joined."""
    row = {
        "id": f"global-{name}",
        "name": "call",
        "context": {"trace_id": "t1", "span_id": name},
        "span_kind": "LLM",
        "parent_id": "root",
        "start_time": "2026-05-01T10:00:01+00:00",
        "status_code": "OK",
        "attributes": {
            "llm.model_name": "tiny",
            "llm.input_messages.0.message.role": "system",
            "llm.input_messages.0.message.content": "Be brief.",
            "llm.input_messages.1.message.role": "user",
            "llm.input_messages.1.message.content": "Hi",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": f"Hello from {name}",
            "session.id": "c1",
            "user.id": "u1",
        },
    }
    return row | changes


ROOT_ATTRIBUTES = {"input.value": "Hi", "output.value": "Hello from root"}
PROMPT = ({"role": "system", "content": "Be brief."}, user("Hi"))


def root(**changes: Any) -> dict[str, Any]:
    return span("root", span_kind="CHAIN", parent_id=None, attributes=ROOT_ATTRIBUTES) | changes


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., list[str]]:
    def write(annotations: Rows, spans: Rows) -> list[str]:
        return [
            write_jsonl(tmp_path / "annotations.jsonl", annotations),
            write_jsonl(tmp_path / "spans.jsonl", spans),
        ]

    return write


Export = Callable[[Rows, Rows], list[str]]


def test_everything_of_a_vote(export: Export) -> None:
    vote = only_vote(read, export([annotation()], [root(), span()]))
    assert (vote.source, vote.id, vote.message) == ("phoenix", "a1", "llm1")
    assert vote.updated_at == datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
    assert (vote.model, vote.session, vote.rater) == ("tiny", "c1", "u1")
    assert (vote.prompt, vote.completion) == (PROMPT, assistant("Hello from llm1"))
    assert (vote.label, vote.score, vote.comment) == (True, None, "short")


def test_thumbs_of_the_ui_are_about_the_call_with_the_output_of_the_root(export: Export) -> None:
    spans = [
        span("llm2", start_time="2026-05-01T10:00:05+00:00"),
        span("title", start_time="2026-05-01T10:00:07+00:00"),
        span("llm1"),
        root(attributes=ROOT_ATTRIBUTES | {"output.value": "Hello from llm2"}),
        span("tool", span_kind="TOOL", start_time="2026-05-01T10:00:09+00:00"),
    ]
    vote = only_vote(read, export([thumbs()], spans))
    assert (vote.message, vote.rater) == ("llm2", "px-app:v1")


def test_an_annotation_of_a_chain_is_about_the_call_inside(export: Export) -> None:
    later = span("llm2", parent_id="other", start_time="2026-05-01T10:00:05+00:00")
    paths = export([annotation(span_id="root")], [root(), span(), later])
    assert only_vote(read, paths).message == "llm1"


def test_a_trace_without_calls_of_models_is_its_root(export: Export) -> None:
    vote = only_vote(read, export([thumbs()], [root()]))
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello from root"))


@pytest.mark.parametrize(
    ("identifier", "user_id", "source", "rater"),
    [
        ("px-app:v1", "v1", "APP", "px-app:v1"),
        ("px-app:anonymous", None, "APP", ""),
        ("", "v1", "APP", "v1"),
        ("", "owner of the key", "API", "u1"),
        ("someone", None, "API", "someone"),
    ],
)
def test_raters(
    identifier: str, user_id: str | None, source: str, rater: str, export: Export
) -> None:
    row = annotation(identifier=identifier, user_id=user_id, source=source)
    assert only_vote(read, export([row], [span()])).rater == rater


RESULTS: dict[str, tuple[dict[str, Any], bool | None, float | None]] = {
    "positive": ({"label": "positive", "score": 1}, True, None),
    "negative": ({"label": "negative", "score": 0}, False, None),
    "label alone": ({"label": "thumbs-down"}, False, None),
    "score alone": ({"score": 0.0}, None, 0.0),
    "a label of the user's own": ({"label": "Meh", "score": 1}, False, None),
    "a label without a meaning": ({"label": "four stars", "score": 4}, None, 4.0),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results(case: str, export: Export) -> None:
    result, label, score = RESULTS[case]
    options = ReadOptions(labels={"meh": False})
    vote = only_vote(read, export([annotation(result=result)], [span()]), options)
    assert (vote.label, vote.score) == (label, score)


IMAGE = {
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.type": "image",
    "llm.input_messages.0.message.contents.0.message_content.image.image.url": "data:,",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "A cat",
}
SKIPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a model": ({"annotator_kind": "LLM"}, {}, "machine"),
    "a program": ({"annotator_kind": "CODE"}, {}, "machine"),
    "a note": ({"name": "note", "result": {"explanation": "?"}}, {}, "no_vote"),
    "another name": ({"name": "correctness"}, {}, "no_vote"),
    "no result": ({"result": None}, {}, "no_vote"),
    "no span": ({"span_id": "llm9"}, {}, "no_conversation"),
    "an error": ({}, {"status_code": "ERROR"}, "failed"),
    "no output": ({}, {"attributes": {"input.value": "Hi"}}, "empty"),
    "any JSON": (
        {},
        {"attributes": {"input.value": '{"question": "Hi"}', "output.value": "Hello"}},
        "shape_unknown",
    ),
    "an image": ({}, {"attributes": IMAGE}, "image"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case: str, export: Export) -> None:
    annotation_changes, changes, reason = SKIPPED[case]
    paths = export([annotation(**annotation_changes)], [span(**changes)])
    assert only_reason(read, paths) == reason


def test_evaluators_are_read_when_they_are_asked_for(export: Export) -> None:
    paths = export([annotation(annotator_kind="LLM")], [span()])
    assert only_vote(read, paths, ReadOptions(includes_machine=True)).is_machine


def test_other_names_are_read_when_they_are_asked_for(export: Export) -> None:
    paths = export([annotation(name="correctness"), annotation()], [span()])
    result = results(read, paths, ReadOptions(score_names=("correctness",)))
    assert [(type(r), r.origin.line) for r in result] == [(Skipped, 2), (Vote, 1)]


def test_text_with_a_text_mime_type_is_not_parsed_as_json(export: Export) -> None:
    attributes = {
        "input.value": '{"question": "Hi"}',
        "input.mime_type": "text/plain",
        "output.value": '{"answer": 1}',
        "output.mime_type": "text/plain",
    }
    vote = only_vote(read, export([annotation()], [span(attributes=attributes)]))
    assert vote.prompt == (user('{"question": "Hi"}'),)
    assert vote.completion == assistant('{"answer": 1}')


def test_messages_are_in_the_order_of_their_numbers(export: Export) -> None:
    turns = [user(f"{n}") if n % 2 == 0 else assistant(f"{n}") for n in range(12)]
    attributes = {
        f"llm.{'input' if n < 11 else 'output'}_messages.{n if n < 11 else 0}.message.{name}": text
        for n, turn in reversed(list(enumerate(turns)))
        for name, text in turn.items()
    }
    vote = only_vote(read, export([annotation()], [span(attributes=attributes)]))
    assert [*vote.prompt, vote.completion] == turns


FUNCTION = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_tools_and_tool_calls(export: Export) -> None:
    schema = json.dumps({"type": "function", "function": FUNCTION})
    attributes = {
        "llm.tools.0.tool.json_schema": schema,
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "Hi",
        "llm.input_messages.1.message.role": "assistant",
        "llm.input_messages.1.message.tool_calls.0.tool_call.id": "c1",
        "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "weather",
        "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": "{}",
        "llm.input_messages.2.message.role": "tool",
        "llm.input_messages.2.message.content": "20 degrees",
        "llm.input_messages.2.message.tool_call_id": "c1",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.contents.0.message_content.type": "text",
        "llm.output_messages.0.message.contents.0.message_content.text": "Warm",
    }
    vote = only_vote(read, export([annotation()], [span(attributes=attributes)]))
    assert vote.tools == ({"type": "function", "function": FUNCTION},)
    assert vote.prompt == (
        user("Hi"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"},
    )
    assert vote.completion == assistant("Warm")


def frame_of_spans() -> dict[str, Any]:
    """As the client's data frame of spans has it."""
    return {
        "context.span_id": "llm1",
        "context.trace_id": "t1",
        "parent_id": None,
        "span_kind": "LLM",
        "start_time": NOON,
        "status_code": "OK",
        "attributes.llm.model_name": "tiny",
        "attributes.llm.input_messages": [{"message.role": "user", "message.content": "Hi"}],
        "attributes.llm.output_messages": [
            {"message.role": "assistant", "message.content": "Hello"}
        ],
        "attributes.input.value": "{}",
    }


def frame_of_annotations() -> dict[str, Any]:
    return {
        "span_id": "llm1",
        "id": "a1",
        "annotation_name": "user-feedback",
        "annotator_kind": "HUMAN",
        "result.label": "negative",
        "result.score": 0.0,
        "result.explanation": "long",
        "updated_at": NOON,
    }


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet])
def test_data_frames(write: Callable[[Path, Rows], str], tmp_path: Path) -> None:
    suffix = write.__name__.removeprefix("write_")
    paths = [
        write(tmp_path / f"annotations.{suffix}", [frame_of_annotations()]),
        write(tmp_path / f"spans.{suffix}", [frame_of_spans()]),
    ]
    vote = only_vote(read, paths)
    assert (vote.label, vote.comment, vote.model) == (False, "long", "tiny")
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello"))


def test_a_download_of_spans_holds_its_annotations(tmp_path: Path) -> None:
    annotated = root(
        attributes=ROOT_ATTRIBUTES
        | {
            "annotations.0.annotation.name": "correctness",
            "annotations.0.annotation.annotator_kind": "LLM",
            "annotations.0.annotation.label": "right",
            "trace.annotations.0.annotation.name": "user_feedback",
            "trace.annotations.0.annotation.annotator_kind": "HUMAN",
            "trace.annotations.0.annotation.label": "negative",
            "trace.annotations.0.annotation.identifier": "px-app:v1",
        }
    )
    path = write_jsonl(tmp_path / "spans.jsonl", [annotated, span()])
    skipped, vote = results(read, [path])
    assert isinstance(skipped, Skipped)
    assert isinstance(vote, Vote)
    assert skipped.reason == "machine"
    assert (vote.label, vote.message, vote.rater) == (False, "llm1", "px-app:v1")


def test_a_missing_file(export: Export) -> None:
    annotations, spans = export([annotation()], [span()])
    with raises_error("import-file-missing", where="annotations.jsonl", fix="spans"):
        results(read, [annotations])
    with raises_error("import-file-missing", where="spans.jsonl", fix="annotations"):
        results(read, [spans])
