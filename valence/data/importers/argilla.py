"""Argilla: records as ``to_json`` writes them (structured), or flat ones with columns of responses.

A structured export has lost the status of each response. Of these, only records that are completed
are read; export with ``flatten=True`` or ``to_datasets`` to leave out drafts one by one. Questions
named ``generation-i-rating`` are about the field ``generation-i``, as distilabel writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from valence.data.importers.exports import Columns, export_rows, guess_parts, votes_or_skipped
from valence.data.importers.fields import decode_json, object_at, objects_at, value_at, word_label
from valence.data.importers.messages import assistant, prompt_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number
from valence.types import content_id

SOURCE = "argilla"
COMMENTS = ("comment", "feedback", "reason", "rationale", "notes")
GENERATION = re.compile(r"(generation-\d+)-(rating|rationale)")
GENERATION_SCALE = (1.0, 5.0)


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of each user on each record, and of each agent where machines are included."""
    for row in export_rows(paths, "Argilla", lambda row: _is_structured(row) or _is_flat(row)):
        if isinstance(row, Skipped):
            yield row
        else:
            yield from _record(row, options)


def _is_structured(row: Columns) -> bool:
    return isinstance(row.get("fields"), Mapping) and "responses" in row


def _is_flat(row: Columns) -> bool:
    return any(name.endswith((".responses", ".suggestion")) for name in row)


@dataclass(frozen=True, slots=True)
class _Response:
    """What one user, or an agent, answered to one question."""

    question: str
    value: Any
    rater: str
    status: str = "submitted"
    is_machine: bool = False


def _record(row: Row, options: ReadOptions) -> Iterator[Vote | Skipped]:
    is_structured = _is_structured(row.value)
    responses = list(
        _structured_responses(row.value) if is_structured else _flat_responses(row.value)
    )
    fields = object_at(row.value, "fields") if is_structured else row.value
    if not responses:
        yield Skipped("no_vote", row.origin)
    by_rater: dict[tuple[str, bool, str], dict[str, Any]] = {}
    for response in responses:
        rater = (response.rater, response.is_machine, response.status)
        by_rater.setdefault(rater, {})[response.question] = decode_json(response.value)
    for (rater, is_machine, status), answers in by_rater.items():
        if is_machine and not options.includes_machine:
            yield Skipped("machine", row.origin, rater)
        elif status != "submitted":
            reason = "cancelled" if status == "discarded" else "draft"
            yield Skipped(reason, row.origin, status)
        else:
            common = {
                "source": SOURCE,
                "rater": rater,
                "is_machine": is_machine,
                "origin": row.origin,
            }
            record = str(row.value.get("id") or row.value.get("_server_id") or content_id(fields))
            votes = _votes(record, fields, answers, common, options)
            yield from votes_or_skipped(votes, row.origin)


def _structured_responses(row: Columns) -> Iterator[_Response]:
    status = "submitted" if row.get("status") == "completed" else "draft"
    responses = object_at(row, "responses")
    for question in responses:
        for answer in objects_at(responses, question):
            yield _Response(question, answer.get("value"), str(answer.get("user_id") or ""), status)
    suggestions = object_at(row, "suggestions")
    for question in suggestions:
        answer = object_at(suggestions, question)
        yield _Response(
            question, answer.get("value"), str(answer.get("agent") or ""), is_machine=True
        )


def _flat_responses(row: Columns) -> Iterator[_Response]:
    for name in row:
        if name.endswith(".responses"):
            question = name.removesuffix(".responses")
            values = decode_json(row[name])
            users, statuses = (
                decode_json(row.get(f"{name}.users")),
                decode_json(row.get(f"{name}.status")),
            )
            if not isinstance(values, list):
                continue
            if not isinstance(users, list) or len(users) != len(values):
                users = [""] * len(values)
            if not isinstance(statuses, list) or len(statuses) != len(values):
                statuses = ["unknown"] * len(values)
            for value, user, status in zip(values, users, statuses, strict=True):
                yield _Response(question, value, str(user), str(status))
        elif name.endswith(".suggestion") and row[name] is not None:
            agent = str(row.get(f"{name}.agent") or "")
            question = name.removesuffix(".suggestion")
            yield _Response(question, row[name], agent, is_machine=True)


def _votes(
    record: str,
    fields: Columns,
    answers: Mapping[str, Any],
    common: Mapping[str, Any],
    options: ReadOptions,
) -> Iterator[Vote]:
    keeps = options.keeps_reasoning
    parts = guess_parts(fields, options.paths)
    prompt = prompt_of(value_at(fields, parts.get("prompt", "")))
    vote = content_id(record, common["rater"])
    base = {**common, "prompt": prompt, "parent": record, "session": record}
    num_votes = 0
    for question, value in answers.items():
        match = GENERATION.fullmatch(question)
        score = as_number(value)
        if match and match[2] == "rating" and score is not None and fields.get(match[1]):
            num_votes += 1
            yield Vote(
                **base,
                id=f"{vote}/{match[1]}",
                completion=assistant(fields[match[1]], keeps_reasoning=keeps),
                message=match[1],
                score=score,
                scale=GENERATION_SCALE,
                comment=str(answers.get(f"{match[1]}-rationale") or ""),
            )
        for better, worse, winner in _rank_pairs(value, fields, parts):
            num_votes += 1
            yield Vote(
                **base,
                id=f"{vote}/{question}",
                completion=assistant(fields[better], keeps_reasoning=keeps),
                message=better,
                other=assistant(fields[worse], keeps_reasoning=keeps),
                other_message=worse,
                winner=winner,
            )
    path = parts.get("completion")
    label, score, correction = _single(answers, options)
    if path and (label is not None or score is not None or correction is not None):
        num_votes += 1
        comments = [str(answers[name]) for name in COMMENTS if answers.get(name)]
        yield Vote(
            **base,
            id=vote,
            completion=assistant(value_at(fields, path), keeps_reasoning=keeps),
            message=path,
            label=label,
            score=score,
            correction=correction,
            comment="\n".join(comments),
        )
    if not num_votes:
        raise UnusableVote("no_vote", f"questions {', '.join(answers)}")


def _rank_pairs(
    value: object, fields: Columns, parts: Mapping[str, str]
) -> Iterator[tuple[str, str, Winner]]:
    """The comparisons of a ranking: the better field, the worse one, and whether they tie.

    value: names of fields, best first; objects with ``value`` and ``rank``; or the name of the
    better one of two fields.
    """
    pair = [parts[side] for side in ("left", "right") if side in parts]
    if isinstance(value, str) and value in pair and len(pair) == 2:
        yield value, pair[pair[0] == value], "this"
    if not isinstance(value, list):
        return
    ranks: dict[str, float] = {}
    for position, option in enumerate(value):
        name, rank = option, float(position)
        if isinstance(option, Mapping):
            name, rank = option.get("value"), as_number(option.get("rank"))
        if isinstance(name, str) and rank is not None and fields.get(name):
            ranks[name] = rank
    for first, second in combinations(sorted(ranks, key=lambda name: ranks[name]), 2):
        yield first, second, "tie" if ranks[first] == ranks[second] else "this"


def _single(
    answers: Mapping[str, Any], options: ReadOptions
) -> tuple[bool | None, float | None, str | None]:
    """Label, score and correction of the one completion."""
    label: bool | None = None
    score: float | None = None
    chosen = options.paths.get("label")
    corrected = options.paths.get("correction", "correction")
    for question, value in answers.items():
        if question in (corrected, *COMMENTS) or GENERATION.fullmatch(question):
            continue
        if chosen not in (None, question):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            score = float(value)
        elif label is None and not isinstance(value, list):
            label = word_label(value, options.labels)
    correction = answers.get(corrected)
    return label, score, correction if isinstance(correction, str) and correction else None
