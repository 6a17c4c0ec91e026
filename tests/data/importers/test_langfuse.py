"""Langfuse's scores with its traces and observations."""

from __future__ import annotations

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
from valence.data.importers.langfuse import read
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.rows import make_rows

NOON = "2026-05-01T12:00:00.000Z"
SECONDS = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()


def score(**changes: Any) -> dict[str, Any]:
    """As version 2 of the API returns it."""
    row = {
        "id": "s1",
        "traceId": "t1",
        "observationId": "g1",
        "sessionId": None,
        "name": "user-feedback",
        "value": 1,
        "stringValue": "True",
        "dataType": "BOOLEAN",
        "source": "API",
        "authorUserId": None,
        "comment": "short",
        "timestamp": "2026-05-01T11:00:00.000Z",
        "updatedAt": NOON,
    }
    return row | changes


def observation(name: str = "g1", **changes: Any) -> dict[str, Any]:
    row = {
        "id": name,
        "traceId": "t1",
        "type": "GENERATION",
        "startTime": "2026-05-01T10:00:00.000Z",
        "parentObservationId": None,
        "input": [user("Hi")],
        "output": assistant(f"Hello from {name}"),
        "model": "tiny",
        "level": "DEFAULT",
    }
    return row | changes


def trace(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "t1",
        "timestamp": "2026-05-01T10:00:00.000Z",
        "name": "chat",
        "userId": "u1",
        "sessionId": "c1",
        "input": "Hi",
        "output": "Hello from the trace",
    }
    return row | changes


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes scores and steps to two files."""

    def write(scores: Rows, steps: Rows) -> list[str]:
        return [
            write_jsonl(tmp_path / "scores.jsonl", scores),
            write_jsonl(tmp_path / "steps.jsonl", steps),
        ]

    return write


Export = Callable[[Rows, Rows], list[str]]


def test_everything_of_a_vote(export: Export) -> None:
    vote = only_vote(read, export([score()], [trace(), observation()]))
    assert (vote.source, vote.id, vote.updated_at) == ("langfuse", "s1", SECONDS)
    assert (vote.rater, vote.session, vote.model, vote.message) == ("u1", "c1", "tiny", "g1")
    assert vote.prompt == (user("Hi"),)
    assert vote.completion == assistant("Hello from g1")
    assert (vote.label, vote.score, vote.comment) == (True, None, "short")
    assert not vote.is_machine
    assert vote.origin.line == 1


BOOLEANS: dict[str, tuple[dict[str, Any], bool]] = {
    "1": ({"value": 1}, True),
    "0": ({"value": 0, "stringValue": "False"}, False),
    "floats of Parquet": ({"value": 0.0, "stringValue": None}, False),
    "text of CSV": ({"value": "0", "stringValue": "False"}, False),
    "text alone": ({"value": None, "stringValue": "False"}, False),
    "version 3": ({"value": False, "stringValue": None}, False),
}


@pytest.mark.parametrize("case", BOOLEANS)
def test_booleans(case: str, export: Export) -> None:
    changes, label = BOOLEANS[case]
    assert only_vote(read, export([score(**changes)], [observation()])).label is label


def test_both_names_of_feedback_are_read(export: Export) -> None:
    votes = results(read, export([score(), score(id="s2", name="user_feedback")], [observation()]))
    assert [type(vote) for vote in votes] == [Vote, Vote]


def test_other_names_are_read_when_they_are_asked_for(export: Export) -> None:
    paths = export([score(name="helpful"), score()], [observation()])
    (skipped,) = [r for r in results(read, paths) if isinstance(r, Skipped)]
    assert (skipped.reason, skipped.example) == ("no_vote", "helpful: True")
    result = results(read, paths, ReadOptions(score_names=("helpful",)))
    assert [r.reason for r in result if isinstance(r, Skipped)] == ["no_vote"]
    assert [r.origin.line for r in result if isinstance(r, Vote)] == [1]


LABELS = ReadOptions(labels={"Good": True, "bad": False, "1": True, "0": False})


@pytest.mark.parametrize(("text", "label"), [("good", True), ("Bad", False)])
def test_categories_have_the_meaning_of_the_users_mapping(
    text: str, label: bool, export: Export
) -> None:
    paths = export([score(dataType="CATEGORICAL", value=0, stringValue=text)], [observation()])
    assert only_vote(read, paths, LABELS).label is label
    assert only_reason(read, paths) == "no_vote"


def test_a_category_of_version_3(export: Export) -> None:
    row = score(dataType="CATEGORICAL", value="good")
    del row["stringValue"]
    assert only_vote(read, export([row], [observation()]), LABELS).label is True


def test_a_category_without_a_meaning(export: Export) -> None:
    paths = export([score(dataType="CATEGORICAL", stringValue="so-so")], [observation()])
    assert only_reason(read, paths, LABELS) == "no_vote"


@pytest.mark.parametrize("value", [0.7, "0.7"])
def test_numbers_are_scores(value: object, export: Export) -> None:
    paths = export([score(dataType="NUMERIC", value=value, stringValue=None)], [observation()])
    vote = only_vote(read, paths)
    assert (vote.score, vote.label) == (0.7, None)


def test_numbers_are_labels_if_the_user_maps_them(export: Export) -> None:
    paths = export([score(dataType="NUMERIC", value=1.0, stringValue=None)], [observation()])
    assert only_vote(read, paths).score == 1.0
    vote = only_vote(read, paths, LABELS)
    assert (vote.score, vote.label) == (None, True)


@pytest.mark.parametrize(
    "value",
    [{"value": 0, "stringValue": "Hey"}, {"value": "Hey"}, {"value": 0, "longStringValue": "Hey"}],
)
def test_corrections(value: dict[str, Any], export: Export) -> None:
    """Of version 2, of version 3, and as they are stored."""
    row = score(name="output", dataType="CORRECTION", source="ANNOTATION", stringValue=None) | value
    vote = only_vote(read, export([row], [observation()]))
    assert (vote.correction, vote.label) == ("Hey", None)


def test_a_vote_and_a_correction_of_one_rater_are_one(export: Export) -> None:
    """The later one does not replace the other."""
    vote = score(source="ANNOTATION", authorUserId="a1", value=0, stringValue="False")
    corrected = vote | {
        "id": "s2",
        "name": "output",
        "dataType": "CORRECTION",
        "stringValue": "Hey",
    }
    result = only_vote(read, export([vote, corrected], [observation()]))
    assert (result.label, result.correction) == (False, "Hey")
    rows = make_rows([result]).rows
    assert [len(rows[kind]) for kind in rows] == [1, 0, 1, 1, 0]


def test_a_changed_vote_remains_two(export: Export) -> None:
    first = score(authorUserId="a1", updatedAt="2026-05-01T11:00:00Z")
    second = score(id="s2", authorUserId="a1", value=0, stringValue="False")
    votes = results(read, export([second, first], [observation()]))
    assert [vote.label for vote in votes if isinstance(vote, Vote)] == [True, False]
    result = make_rows([vote for vote in votes if isinstance(vote, Vote)])
    assert result.num_replaced == 1
    assert [row["label"] for row in result.rows["thumbs"]] == [False]


SKIPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an evaluator": ({"source": "EVAL"}, {}, "machine"),
    "text": ({"dataType": "TEXT", "stringValue": "fine"}, {}, "no_vote"),
    "an empty correction": (
        {"dataType": "CORRECTION", "value": "", "stringValue": ""},
        {},
        "no_vote",
    ),
    "a session": ({"traceId": None, "observationId": None}, {}, "no_conversation"),
    "a trace that is missing": ({"traceId": "t9", "observationId": None}, {}, "no_conversation"),
    "an observation that is missing": ({"observationId": "g9"}, {}, "message_missing"),
    "an error": ({}, {"level": "ERROR"}, "failed"),
    "no output": ({}, {"output": None}, "empty"),
    "any JSON": ({}, {"input": {"question": "Hi"}}, "shape_unknown"),
    "an image": (
        {},
        {"input": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image",
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case: str, export: Export) -> None:
    score_changes, changes, reason = SKIPPED[case]
    steps = [observation(**changes)]
    assert only_reason(read, export([score(**score_changes)], steps)) == reason


def test_evaluators_are_read_when_they_are_asked_for(export: Export) -> None:
    paths = export([score(source="EVAL")], [observation()])
    assert only_vote(read, paths, ReadOptions(includes_machine=True)).is_machine


def test_the_generation_with_the_output_of_the_trace_is_rated(export: Export) -> None:
    """Not the first, not a later one that writes a title, and not one without an output."""
    steps = [
        observation("g3", startTime="2026-05-01T10:00:09Z", output=None),
        observation("title", startTime="2026-05-01T10:00:10Z", output=assistant("Greeting")),
        observation("g2", startTime="2026-05-01T10:00:05Z"),
        observation("g1"),
        observation("tool", type="TOOL", startTime="2026-05-01T10:00:08Z"),
        observation("g4", traceId="t2", startTime="2026-05-01T10:00:07Z"),
        trace(output="Hello from g2"),
    ]
    assert only_vote(read, export([score(observationId=None)], steps)).message == "g2"
    assert (
        only_reason(read, export([score(observationId=None)], [*steps[:-1], trace()])) == "unclear"
    )


def test_a_score_of_an_enclosing_step_is_about_the_generation_inside(export: Export) -> None:
    steps = [
        observation("span", type="SPAN"),
        observation("inner", type="SPAN", parentObservationId="span"),
        observation("g1", parentObservationId="inner"),
        observation("g2", startTime="2026-05-01T10:00:05Z"),
    ]
    assert only_vote(read, export([score(observationId="span")], steps)).message == "g1"


def test_a_trace_without_generations_is_rated_itself(export: Export) -> None:
    steps = [trace(), observation("span", type="SPAN")]
    vote = only_vote(read, export([score(observationId=None)], steps))
    assert (vote.message, vote.completion["content"]) == ("t1", "Hello from the trace")


def test_subjects_of_version_3(export: Export) -> None:
    observed = score(subject={"kind": "observation", "id": "g1", "traceId": "t1"})
    traced = score(subject={"kind": "trace", "id": "t1"}, id="s2")
    session = score(subject={"kind": "session", "id": "c1"}, id="s3")
    rows = [observed, traced, session]
    for row in rows:
        del row["traceId"], row["observationId"]
    steps = [observation(), observation("g2", startTime=NOON), trace(output="Hello from g2")]
    result = results(read, export(rows, steps))
    assert [r.message for r in result if isinstance(r, Vote)] == ["g1", "g2"]
    assert [r.reason for r in result if isinstance(r, Skipped)] == ["no_conversation"]


def test_an_observation_of_version_3_may_have_no_trace(export: Export) -> None:
    row = score(traceId=None, observationId=None, subject={"kind": "observation", "id": "span"})
    steps = [observation("span", type="SPAN"), observation("g1", parentObservationId="span")]
    assert only_vote(read, export([row], steps)).message == "g1"


def test_a_trace_of_the_api_holds_its_observations(export: Export) -> None:
    full = trace(observations=[observation()], scores=[score()])
    vote = only_vote(read, export([score(observationId=None)], [full]))
    assert (vote.message, vote.rater, vote.session) == ("g1", "u1", "c1")


SNAKE = {
    "traceId": "trace_id",
    "observationId": "observation_id",
    "sessionId": "session_id",
    "dataType": "data_type",
    "stringValue": "string_value",
    "updatedAt": "updated_at",
    "startTime": "start_time",
    "parentObservationId": "parent_observation_id",
    "model": "provided_model_name",
}


def snake(row: dict[str, Any]) -> dict[str, Any]:
    """As exports to blob storage name the columns."""
    return {SNAKE.get(name, name): value for name, value in row.items()}


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet])
def test_blob_storage(write: Callable[[Path, Rows], str], tmp_path: Path) -> None:
    suffix = write.__name__.removeprefix("write_")
    rows = [
        snake(score(updatedAt="2026-05-01 12:00:00.000")),
        snake(score(id="s2", value=0, stringValue="False", source="EVAL")),
    ]
    paths = [
        write(tmp_path / f"scores.{suffix}", rows),
        write(tmp_path / f"observations.{suffix}", [snake(observation())]),
    ]
    vote, skipped = sorted(results(read, paths), key=lambda r: isinstance(r, Skipped))
    assert isinstance(vote, Vote)
    assert isinstance(skipped, Skipped)
    assert (vote.label, vote.updated_at, vote.model) == (True, SECONDS, "tiny")
    assert vote.prompt == (user("Hi"),)
    assert skipped.reason == "machine"


def test_paths_of_prompt_and_completion(export: Export) -> None:
    steps = [observation(input={"question": "Hi"}, output={"answer": {"text": "Hello"}})]
    paths = {"prompt": "input.question", "completion": "output.answer.text"}
    vote = only_vote(read, export([score()], steps), ReadOptions(paths=paths))
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello"))


def test_the_annotator_is_not_the_user(export: Export) -> None:
    rows = [
        score(source="ANNOTATION", authorUserId="a1"),
        score(id="s2", source="ANNOTATION"),
        score(id="s3"),
    ]
    votes = results(read, export(rows, [trace(), observation()]))
    assert [vote.rater for vote in votes if isinstance(vote, Vote)] == ["a1", "", "u1"]


def test_a_missing_file(export: Export, tmp_path: Path) -> None:
    scores, steps = export([score()], [trace()])
    with raises_error("import-file-missing", where="scores.jsonl", fix="traces or observations"):
        results(read, [scores])
    with raises_error("import-file-missing", where="steps.jsonl", fix="scores"):
        results(read, [steps])
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "a"}])
    with raises_error("import-not-an-export", where="other.jsonl"):
        results(read, [scores, steps, other])


def test_a_line_that_cannot_be_read(export: Export) -> None:
    scores, steps = export([score()], [trace(), observation()])
    with Path(scores).open("a", encoding="utf-8") as file:
        file.write("{]\n")
    skipped, vote = results(read, [scores, steps])
    assert isinstance(skipped, Skipped)
    assert (skipped.reason, skipped.origin.line) == ("shape_unknown", 2)
    assert isinstance(vote, Vote)
