"""LangSmith: feedback, joined to the runs that it is about, as the API and the SDK return them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from valence.data.importers.exports import load_kind, rows_of_kind
from valence.data.importers.fields import (
    decode_json,
    first_value,
    label_of,
    object_at,
    timestamp,
    word_label,
)
from valence.data.importers.messages import Exchange, answer_text, tools_of
from valence.data.importers.records import ReadOptions, Skipped, SkipReason, Vote, Winner
from valence.data.importers.traces import Step, Traces, combine_votes, exchange_in, vote_on
from valence.data.sources import Row
from valence.data.values import as_number

SOURCE = "langsmith"
THUMBS = {"user_liked": True, "user_disliked": False}
"""Keys that are thumbs by themselves, whatever their score."""
NAMES = ("user_feedback", "user-feedback", *THUMBS)
"""Keys of the feedback that is of users by convention."""
MACHINE = ("model", "auto_eval")
"""Types of feedback sources that are no persons. The second, of online evaluators, is not in the
SDK.
"""
NEEDED = {"feedback": "feedback", "runs": "runs"}


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of an export: files of feedback and of runs."""
    rows, bad = load_kind("feedback", paths, "LangSmith", _kinds, NEEDED)
    yield from bad
    run_ids = {str(row.value.get("run_id")) for row in rows}
    trace_ids = {str(row.value["trace_id"]) for row in rows if row.value.get("trace_id")}
    for row in rows_of_kind("runs", paths, _kinds):
        if str(row.value["id"]) in run_ids:
            trace_ids.add(_trace_id(row.value))
    runs = (row.value for row in rows_of_kind("runs", paths, _kinds))
    traces = Traces(_step(run) for run in runs if _trace_id(run) in trace_ids)
    singles = [row for row in rows if not row.value.get("feedback_group_id")]
    yield from combine_votes(_vote(row, traces, options) for row in singles)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if group := row.value.get("feedback_group_id"):
            groups[str(group), str(row.value["key"])].append(row)
    for group in groups.values():
        yield from _comparisons(group, traces, options)


def _kinds(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "key" in row and "run_id" in row:
        return ("feedback",)
    return ("runs",) if "run_type" in row and "id" in row else ()


def _trace_id(run: Mapping[str, Any]) -> str:
    return str(run.get("trace_id") or run["id"])


def _source(feedback: Mapping[str, Any]) -> dict[str, Any]:
    return object_at(feedback, "feedback_source")


def _verdict(feedback: Mapping[str, Any], options: ReadOptions) -> dict[str, Any]:
    """The fields of a vote that feedback has; none if it is not a vote."""
    verdict: dict[str, Any] = {}
    key, score = feedback["key"], feedback.get("score")
    if key in (options.score_names or NAMES):
        number = as_number(score)
        label = label_of(score, options.labels)
        if label is None and score is None:
            label = word_label(feedback.get("value"), options.labels)
        if key in THUMBS:
            is_set = label is not False and number != 0
            label, number = THUMBS[key] if is_set else None, None
        verdict = {"score": number} if label is None else {"label": label}
    if (correction := answer_text(feedback.get("correction"))) is not None:
        verdict["correction"] = correction
    return {name: value for name, value in verdict.items() if value is not None}


def _vote(row: Row, traces: Traces, options: ReadOptions) -> Vote | Skipped:
    feedback, origin = row.value, row.origin
    key, source = str(feedback["key"]), _source(feedback)
    is_machine = source.get("type") in MACHINE
    if is_machine and not options.includes_machine:
        return Skipped("machine", origin, key)
    verdict = _verdict(feedback, options)
    vote_id = str(feedback.get("id") or "")
    updated_at = timestamp(first_value(feedback, "modified_at", "created_at"))
    if not verdict:
        if key in THUMBS:
            return Skipped("withdrawn", origin, key, vote_id, updated_at)
        is_correction = bool(feedback.get("correction"))
        shown = f"{key}: {feedback.get('correction' if is_correction else 'score')}"
        return Skipped("shape_unknown" if is_correction else "no_vote", origin, shown, vote_id)
    return vote_on(
        _rated_step(feedback, traces),
        options,
        origin,
        source=SOURCE,
        rater=_rater(source),
        id=vote_id,
        updated_at=updated_at,
        is_machine=is_machine,
        comment=str(feedback.get("comment") or ""),
        **verdict,
    )


def _rater(source: Mapping[str, Any]) -> str | None:
    """The user of LangSmith's UI; None for a vote that an application sent for its user."""
    return str(source.get("user_id") or "") if source.get("type") == "app" else None


def _comparisons(
    group: list[Row], traces: Traces, options: ReadOptions
) -> Iterator[Vote | Skipped]:
    """Votes between runs that were compared with each other. The better one has the higher score.

    Comparisons are feedback whatever their key, unless names are asked for.
    """
    head = group[0]
    key, source = str(head.value["key"]), _source(head.value)
    is_machine = source.get("type") in MACHINE
    if is_machine and not options.includes_machine:
        yield Skipped("machine", head.origin, key)
    elif options.score_names and key not in options.score_names:
        yield Skipped("no_vote", head.origin, key)
    elif len(group) < 2:
        yield Skipped("message_missing", head.origin, key)
    else:
        for first_row, second_row in combinations(group, 2):
            yield _comparison(first_row, second_row, traces, options)


def _comparison(this: Row, other: Row, traces: Traces, options: ReadOptions) -> Vote | Skipped:
    scores = [_comparable(row.value.get("score")) for row in (this, other)]
    if scores[0] is None or scores[1] is None:
        return Skipped("no_vote", this.origin, f"{this.value['key']}: no score")
    sample = _step_and_exchange(this, traces, options)
    if not isinstance(sample, tuple):
        return Skipped(sample, this.origin)
    other_sample = _step_and_exchange(other, traces, options)
    if not isinstance(other_sample, tuple):
        return Skipped(other_sample, other.origin)
    (step, exchange), (other_step, other_exchange) = sample, other_sample
    if exchange.prompt != other_exchange.prompt:
        return Skipped("multi_turn", this.origin, str(this.value.get("feedback_group_id")))
    better: Winner = "this" if scores[0] > scores[1] else "other"
    return vote_on(
        step,
        options,
        this.origin,
        source=SOURCE,
        rater=_rater(_source(this.value)),
        id=f"{this.value.get('id')}/{other.value.get('id')}",
        updated_at=max(
            timestamp(first_value(row.value, "modified_at", "created_at")) for row in (this, other)
        ),
        is_machine=_source(this.value).get("type") in MACHINE,
        comment=str(this.value.get("comment") or other.value.get("comment") or ""),
        other=other_exchange.completion,
        other_message=other_step.id,
        other_model=other_step.model,
        winner="tie" if scores[0] == scores[1] else better,
    )


def _step_and_exchange(
    row: Row, traces: Traces, options: ReadOptions
) -> tuple[Step, Exchange] | SkipReason:
    step = _rated_step(row.value, traces)
    if not isinstance(step, Step):
        return step
    exchange = exchange_in(step, options)
    return (step, exchange) if isinstance(exchange, Exchange) else exchange


def _rated_step(feedback: Mapping[str, Any], traces: Traces) -> Step | SkipReason:
    return traces.rated_step(str(feedback.get("run_id") or ""), str(feedback.get("trace_id") or ""))


def _comparable(score: object) -> float | None:
    return float(score) if isinstance(score, bool) else as_number(score)


def _step(run: Mapping[str, Any]) -> Step:
    extra = object_at(run, "extra")
    metadata, call = object_at(extra, "metadata"), object_at(extra, "invocation_params")
    inputs = decode_json(run.get("inputs"))
    model = first_value(metadata, "ls_model_name") or first_value(call, "model", "model_name")
    if model is None and isinstance(inputs, dict):
        model = inputs.get("model")
    return Step(
        id=str(run["id"]),
        trace=_trace_id(run),
        parent=str(run.get("parent_run_id") or ""),
        start=timestamp(run.get("start_time")),
        is_generation=run["run_type"] == "llm",
        is_failed=bool(run.get("error")),
        inputs=inputs,
        answer=run.get("outputs"),
        tools=tools_of(call),
        model=str(model or ""),
        # The conversation that a run belongs to has one of these names.
        session=str(first_value(metadata, "session_id", "thread_id", "conversation_id") or ""),
        rater=str(metadata.get("user_id") or ""),
        row=run,
    )
