"""Langfuse: scores, joined to the observations and traces that they are about.

Reads the API's JSON (scores v2 and v3), the UI's batch exports, and blob storage exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import load_kind, rows_of_kind
from valence.data.importers.fields import first_value, label_of, object_at, objects_at, timestamp
from valence.data.importers.messages import tools_of
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.traces import Step, Traces, combine_votes, vote_on
from valence.data.sources import Row
from valence.data.values import as_number, thumb

SOURCE = "langfuse"
NAMES = ("user-feedback", "user_feedback")
"""Names of the scores that are feedback by convention."""
NEEDED = {"scores": "scores", "steps": "traces or observations"}


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of an export: files of scores, and of observations or traces or both."""
    scores, bad = load_kind("scores", paths, "Langfuse", _kinds, NEEDED)
    yield from bad
    subjects = [_subject(row.value) for row in scores]
    trace_ids = {trace_id for _, trace_id in subjects if trace_id}
    alone = {step_id for step_id, trace_id in subjects if not trace_id} - {""}
    if alone:  # version 3 may not name the trace
        rows = rows_of_kind("steps", paths, _kinds)
        trace_ids |= {s.trace for row in rows for s in _steps(row.value) if s.id in alone}
    rows = rows_of_kind("steps", paths, _kinds)
    steps = (step for row in rows for step in _steps(row.value))
    traces = Traces(step for step in steps if step.trace in trace_ids)
    yield from combine_votes(_vote(row, traces, options) for row in scores)


def _kinds(row: Mapping[str, Any]) -> tuple[str, ...]:
    if {"dataType", "data_type"} & row.keys() and {"name", "source"} <= row.keys():
        return ("scores",)
    is_observation = "type" in row and bool({"startTime", "start_time"} & row.keys())
    is_trace = "timestamp" in row and bool({"input", "output", "observations"} & row.keys())
    return ("steps",) if "id" in row and (is_observation or is_trace) else ()


def _vote(row: Row, traces: Traces, options: ReadOptions) -> Vote | Skipped:
    score, origin = row.value, row.origin
    name, data_type = str(score["name"]), first_value(score, "dataType", "data_type")
    if score["source"] == "EVAL" and not options.includes_machine:
        return Skipped("machine", origin, name)
    verdict = _verdict(score, data_type, name, options)
    if not verdict:
        value = first_value(score, "stringValue", "string_value", "value")
        return Skipped("no_vote", origin, f"{name}: {value}")
    step_id, trace_id = _subject(score)
    rater = first_value(score, "authorUserId", "author_user_id", "authorUserName")
    if score["source"] == "ANNOTATION":
        rater = rater or ""
    else:  # an application sends the votes of whom it serves
        rater = rater or first_value(score, "userId", "user_id")
    return vote_on(
        traces.rated_step(step_id, trace_id),
        options,
        origin,
        source=SOURCE,
        rater=None if rater is None else str(rater),
        id=str(score.get("id") or ""),
        updated_at=timestamp(first_value(score, "updatedAt", "updated_at", "timestamp")),
        is_machine=score["source"] == "EVAL",
        comment=str(score.get("comment") or ""),
        **verdict,
    )


def _verdict(
    score: Mapping[str, Any], data_type: object, name: str, options: ReadOptions
) -> dict[str, Any]:
    """The fields of a vote that a score has; none if it is not feedback."""
    text = first_value(score, "longStringValue", "stringValue", "string_value")
    if data_type == "CORRECTION":  # its name is always "output"
        correction = text or score.get("value")
        return {"correction": correction} if isinstance(correction, str) and correction else {}
    if name not in (options.score_names or NAMES):
        return {}
    value = score.get("value")
    if data_type == "BOOLEAN":
        label = thumb(value if thumb(value) is not None else text)
        return {} if label is None else {"label": label}
    if data_type == "CATEGORICAL":
        label = label_of(value if text is None else text, options.labels)
        return {} if label is None else {"label": label}
    number = as_number(value) if data_type == "NUMERIC" else None
    if number is None:
        return {}
    label = label_of(number, options.labels)
    return {"score": number} if label is None else {"label": label}


def _subject(score: Mapping[str, Any]) -> tuple[str, str]:
    """The ids of the observation and the trace that a score is about; "" for none."""
    if subject := object_at(score, "subject"):  # v3
        kind, identifier = subject.get("kind"), str(subject.get("id") or "")
        if kind == "observation":
            return identifier, str(subject.get("traceId") or "")
        return "", identifier if kind == "trace" else ""
    observation = first_value(score, "observationId", "observation_id")
    return str(observation or ""), str(first_value(score, "traceId", "trace_id") or "")


def _steps(row: Mapping[str, Any]) -> Iterator[Step]:
    """The step in a row, and those inside of it, as the API returns a whole trace."""
    if _kinds(row) != ("steps",):
        return
    is_trace = not {"startTime", "start_time"} & row.keys()
    identifier = str(row["id"])
    session = str(first_value(row, "sessionId", "session_id") or "")
    rater = str(first_value(row, "userId", "user_id") or "")
    for observation in objects_at(row, "observations"):
        defaults = {"traceId": identifier, "sessionId": session, "userId": rater}
        yield from _steps({**defaults, **observation})
    yield Step(
        id=identifier,
        trace=identifier if is_trace else str(first_value(row, "traceId", "trace_id") or ""),
        parent=str(first_value(row, "parentObservationId", "parent_observation_id") or ""),
        start=timestamp(first_value(row, "startTime", "start_time", "timestamp")),
        is_generation=row.get("type") == "GENERATION",
        is_failed=row.get("level") == "ERROR",
        inputs=row.get("input"),
        answer=row.get("output"),
        tools=tools_of(first_value(row, "toolDefinitions", "tool_definitions")),
        model=str(first_value(row, "providedModelName", "provided_model_name", "model") or ""),
        session=session,
        rater=rater,
        row=row,
    )
