"""OpenAI: rows of preference fine-tuning, and stored completions.

Preference rows hold ``input``, ``preferred_output`` and ``non_preferred_output``; Azure, Fireworks
and Together use them as well. Stored completions have no field for feedback: it is where
``ReadOptions.paths["label"]`` says, such as a key of ``metadata``. Their prompts are in a column
``messages``, or in listings of ``/chat/completions/{id}/messages``, given as additional files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import (
    decode_json,
    label_of,
    object_at,
    objects_at,
    thumb_label,
    timestamp,
    value_at,
    word_label,
)
from valence.data.importers.messages import completion_of, prompt_of, tools_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.sources import Row
from valence.data.values import as_number, shown
from valence.errors import UserError
from valence.types import Message, content_id

SOURCE = "openai"


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of preference rows, then those of stored completions."""
    completions: list[Row] = []
    listings: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in export_rows(paths, "OpenAI", _is_row):
        if isinstance(row, Skipped):
            yield row
        elif "preferred_output" in row.value:
            yield from votes_or_skipped(_preference_votes(row, options), row.origin)
        elif _is_listing(row.value):
            for message in objects_at(row.value, "data"):
                # of the form COMPLETION-NUMBER
                listings[str(message.get("id")).rpartition("-")[0]].append(message)
        else:
            completions.append(row)
    if not completions:
        return
    values = [_feedback(row, options) for row in completions]
    numbers = {as_number(value) for value in values if label_of(value, options.labels) is None}
    is_scored = not numbers <= {None, -1.0, 0.0, 1.0}
    for row, value in zip(completions, values, strict=True):
        votes = _stored_votes(row, value, is_scored, listings, options)
        yield from votes_or_skipped(votes, row.origin)


def _is_row(row: Columns) -> bool:
    return (
        "preferred_output" in row
        or row.get("object") in ("chat.completion", "chat.completion.stored")
        or isinstance(row.get("choices"), list)
        or _is_listing(row)
    )


def _is_listing(row: Columns) -> bool:
    """Whether this is the list of a stored completion's messages."""
    return row.get("object") == "list" and any("role" in m for m in objects_at(row, "data"))


def _preference_votes(row: Row, options: ReadOptions) -> Iterator[Vote]:
    request = decode_json(row.value.get("input"))
    request = request if isinstance(request, Mapping) else {"messages": request}
    keeps = options.keeps_reasoning
    prompt = prompt_of(request.get("messages"))
    chosen = _output(row.value.get("preferred_output"), keeps)
    rejected = _output(row.value.get("non_preferred_output"), keeps)
    yield Vote(
        source=SOURCE,
        id=content_id(row.value),
        prompt=prompt,
        tools=tools_of(request),
        completion=chosen,
        other=rejected,
        winner="this",
        origin=row.origin,
    )


def _output(value: object, keeps_reasoning: bool) -> Message:
    """The one turn of an output."""
    value = decode_json(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise UnusableVote("empty")
    if len(value) > 1:
        raise UnusableVote("multi_turn", f"an output of {len(value)} turns")
    return _answer(value[0], keeps_reasoning)


def _answer(message: object, keeps_reasoning: bool) -> Message:
    if not isinstance(message, Mapping):
        raise UnusableVote("shape_unknown", f"output is {message!r}")
    if message.get("role", "assistant") != "assistant":
        raise UnusableVote("not_assistant", message.get("role"))
    content = message.get("content") or message.get("refusal")
    turn = {**message, "role": "assistant", "content": content}
    return completion_of(turn, keeps_reasoning=keeps_reasoning)


def _feedback(row: Row, options: ReadOptions) -> object:
    """The feedback on a stored completion; None where there is none."""
    path = options.paths.get("label")
    metadata = object_at(row.value, "metadata")
    if path is None:
        raise UserError(
            "stored completions have no fixed field for feedback, and --label is not set",
            code="import-path-missing",
            where=str(row.origin),
            fix="set the path of your feedback with --label PATH (in a recipe: keys: {label: "
            f"PATH}}); the metadata of this completion has {', '.join(metadata) or 'no keys'}",
        )
    value = value_at(row.value, path)
    return value_at(metadata, path) if value is None else value


def _stored_votes(
    row: Row,
    value: object,
    is_scored: bool,
    listings: Mapping[str, list[Mapping[str, Any]]],
    options: ReadOptions,
) -> Iterator[Vote]:
    if value is None or value == "":
        raise UnusableVote("no_vote")
    label = (word_label if is_scored else thumb_label)(value, options.labels)
    score = as_number(value) if label is None else None
    if score is None and label is None:
        raise UnusableVote("no_vote", shown(value))
    name = str(row.value.get("id") or "")
    choices = objects_at(row.value, "choices")
    if len(choices) != 1:
        raise UnusableVote("shape_unknown", f"choices of {name}")
    reason = choices[0].get("finish_reason")
    if reason == "length":
        raise UnusableVote("unfinished", "finish_reason length")
    if reason == "content_filter":
        raise UnusableVote("failed", "finish_reason content_filter")
    path = options.paths.get("prompt")
    messages = value_at(row.value, path) if path else row.value.get("messages")
    messages = messages or listings.get(name)
    if not messages:
        raise UnusableVote("no_conversation", name)
    keeps = options.keeps_reasoning
    yield Vote(
        source=SOURCE,
        id=name,
        updated_at=timestamp(row.value.get("created")),
        prompt=prompt_of(messages),
        tools=tools_of(row.value),
        completion=_answer(choices[0].get("message"), keeps),
        message=name,
        label=label,
        score=score,
        model=str(row.value.get("model") or ""),
        origin=row.origin,
    )
