"""Arize Phoenix: annotations, joined to the spans or traces that they are about.

Reads the API's JSON, data frames of its client, and the UI's download of spans, which may hold the
annotations itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import load_kind, rows_of_kind
from valence.data.importers.fields import (
    decode_json,
    first_value,
    is_blank,
    object_at,
    timestamp,
    word_label,
)
from valence.data.importers.messages import tools_of
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.traces import Step, Traces, combine_votes, vote_on
from valence.data.values import as_number
from valence.types import Origin

SOURCE = "phoenix"
NAMES = ("user_feedback", "user-feedback")
"""Names of the annotations that are feedback: of Phoenix's own thumbs, and of its guide for
applications.
"""
ANONYMOUS = "px-app:anonymous"
"""Whom the UI names as the rater where nobody has to log in."""
NEEDED = {"annotations": "annotations", "spans": "spans"}


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of an export: files of annotations and of spans."""
    rows, bad = load_kind("annotations", paths, "Phoenix", _kinds, NEEDED)
    yield from bad
    annotations = [(a, row.origin) for row in rows for a in _annotations(row.value)]
    trace_ids = {annotation["trace_id"] for annotation, _ in annotations}
    span_ids = {annotation["span_id"] for annotation, _ in annotations} - {""}
    for row in rows_of_kind("spans", paths, _kinds) if span_ids else ():
        if _ids(row.value)[0] in span_ids:
            trace_ids.add(_ids(row.value)[1])
    spans = (row.value for row in rows_of_kind("spans", paths, _kinds))
    traces = Traces(_step(span) for span in spans if _ids(span)[1] in trace_ids)
    yield from combine_votes(_vote(a, origin, traces, options) for a, origin in annotations)


def _kinds(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "annotator_kind" in row and ("name" in row or "annotation_name" in row):
        return ("annotations",)
    if not _ids(row)[0] or "span_kind" not in row:
        return ()
    has_annotations = any(isinstance(a, dict) for a in _embedded(row))
    return ("spans", "annotations") if has_annotations else ("spans",)


def _ids(row: Mapping[str, Any]) -> tuple[str, str]:
    """The ids of a span and of its trace; "" for none."""
    context = object_at(row, "context")
    span = first_value(row, "context.span_id", "span_id") or context.get("span_id")
    trace = first_value(row, "context.trace_id", "trace_id") or context.get("trace_id")
    return str(span or ""), str(trace or "")


def _annotations(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The annotations of a row, each with the ids of its span or its trace."""
    span_id, trace_id = _ids(row)
    if "span_kind" not in row:
        columns = {n.removeprefix("result."): v for n, v in row.items() if n.startswith("result.")}
        fields = object_at(row, "result") or columns
        name = first_value(row, "annotation_name", "name")
        return [{**fields, **row, "name": name, "span_id": span_id, "trace_id": trace_id}]
    annotations: list[dict[str, Any]] = []
    for annotation in _embedded(row):
        on_trace = annotation.pop("on_trace")
        ids = {"span_id": "" if on_trace else span_id, "trace_id": trace_id}
        annotations.append({**annotation, **ids})
    return annotations


def _embedded(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The annotations among a span's attributes, as the UI's download has them."""
    attributes = _attributes(row)
    trace = attributes.get("trace")
    groups = {
        False: attributes.get("annotations"),
        True: trace.get("annotations") if isinstance(trace, dict) else None,
    }
    return [
        {**item["annotation"], "on_trace": on_trace}
        for on_trace, items in groups.items()
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and isinstance(item.get("annotation"), dict)
    ]


def _vote(
    annotation: Mapping[str, Any], origin: Origin, traces: Traces, options: ReadOptions
) -> Vote | Skipped:
    name, is_machine = str(annotation.get("name")), annotation["annotator_kind"] != "HUMAN"
    if is_machine and not options.includes_machine:
        return Skipped("machine", origin, name)
    verdict: dict[str, Any] = {}
    if name in (options.score_names or NAMES):
        label = word_label(annotation.get("label"), options.labels)
        number = as_number(annotation.get("score"))
        verdict = {"label": label} if label is not None else {"score": number}
    if not any(value is not None for value in verdict.values()):
        return Skipped("no_vote", origin, f"{name}: {annotation.get('label')}")
    span_id, trace_id = annotation["span_id"], annotation["trace_id"]
    identifier = str(annotation.get("identifier") or "")
    rater = identifier or (annotation.get("user_id") if annotation.get("source") == "APP" else None)
    return vote_on(
        traces.rated_step(span_id, trace_id),
        options,
        origin,
        source=SOURCE,
        rater="" if identifier == ANONYMOUS else rater,
        id=str(annotation.get("id") or f"{name}/{span_id or trace_id}/{identifier}"),
        updated_at=timestamp(first_value(annotation, "updated_at", "created_at")),
        is_machine=is_machine,
        comment=str(annotation.get("explanation") or ""),
        **verdict,
    )


def _step(row: Mapping[str, Any]) -> Step:
    attributes = _attributes(row)
    model = _child(attributes, "llm")
    messages = [_message(m) for m in _list(model.get("input_messages"))]
    answers = [_message(m) for m in _list(model.get("output_messages"))]
    tools = [_child(t, "tool").get("json_schema") for t in _list(model.get("tools"))]
    span_id, trace_id = _ids(row)
    return Step(
        id=span_id,
        trace=trace_id,
        parent=str(row.get("parent_id") or ""),
        start=timestamp(row.get("start_time")),
        is_generation=row["span_kind"] == "LLM",
        is_failed=row.get("status_code") == "ERROR",
        inputs=messages or _value(attributes, "input"),
        answer=answers or _value(attributes, "output"),
        tools=tools_of(tools),
        model=str(model.get("model_name") or ""),
        session=str(_child(attributes, "session").get("id") or ""),
        rater=str(_child(attributes, "user").get("id") or ""),
        row=row,
    )


def _value(attributes: Mapping[str, Any], name: str) -> Any:
    """What a span recorded as its input or output. Text that is not said to be JSON is a turn."""
    fields = _child(attributes, name)
    value = fields.get("value")
    if isinstance(value, str) and value and fields.get("mime_type") == "text/plain":
        return {"role": "user" if name == "input" else "assistant", "content": value}
    return value


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenInference as OpenAI writes it."""
    fields = _child(item, "message")
    message: dict[str, Any] = {"role": fields.get("role"), "content": fields.get("content")}
    if is_blank(message["content"]) and (parts := _list(fields.get("contents"))):
        message["content"] = [_child(part, "message_content") for part in parts]
    calls = [_child(call, "tool_call") for call in _list(fields.get("tool_calls"))]
    if calls:
        message["tool_calls"] = calls
    return message | {n: fields[n] for n in ("tool_call_id", "name") if fields.get(n)}


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    """A span's attributes as nested objects, whichever of their names are joined by dots."""
    flat = dict(object_at(row, "attributes"))
    for name, value in row.items():
        if name.startswith("attributes.") and not is_blank(value):
            flat[name.removeprefix("attributes.")] = value
    return _nested(flat)


def _nested(value: Any) -> Any:
    """``{"a.0.b": 1}`` as ``{"a": [{"b": 1}]}``, at every depth."""
    if isinstance(value, list):
        return [_nested(item) for item in value]
    if not isinstance(value, dict):
        return value
    tree: dict[str, Any] = {}
    for name, item in value.items():
        node, (*path, last) = tree, name.split(".")
        for part in path:
            inner = node.get(part)
            node[part] = inner if isinstance(inner, dict) else {}
            node = node[part]
        item = _nested(decode_json(item) if _is_structure(last) else item)
        both = isinstance(item, dict) and isinstance(node.get(last), dict)
        node[last] = {**node[last], **item} if both else item
    return _lists(tree)


def _is_structure(name: str) -> bool:
    """Whether an attribute holds messages or tools, which cells of a CSV file hold as JSON."""
    return name in ("input_messages", "output_messages", "tools", "llm", "input", "output")


def _lists(node: Any) -> Any:
    """Objects whose names count from 0 as lists."""
    if not isinstance(node, dict):
        return node
    items = {name: _lists(item) for name, item in node.items()}
    if items and all(name.isdecimal() for name in items):
        return [items[name] for name in sorted(items, key=int)]
    return items


def _child(node: Any, name: str) -> dict[str, Any]:
    child = node.get(name) if isinstance(node, dict) else None
    return child if isinstance(child, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
