"""Helicone: requests and responses with the rating of each, as its exporter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from valence.data.importers.exports import load_kind
from valence.data.importers.fields import first_value, is_blank, object_at, timestamp
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.traces import Step, vote_on
from valence.data.sources import Row
from valence.data.values import as_number, thumb
from valence.errors import UserError

SOURCE = "helicone"
NEEDED = {"requests": "requests"}


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of an export: files of requests with their bodies."""
    rows, bad = load_kind("requests", paths, "Helicone", _kinds, NEEDED)
    yield from bad
    _check_columns(rows)
    for row in rows:
        yield _vote(row, options)


def _kinds(row: Mapping[str, Any]) -> tuple[str, ...]:
    is_request = "request_id" in row and bool({"response_status", "feedback_rating"} & row.keys())
    return ("requests",) if is_request else ()


def _check_columns(rows: list[Row]) -> None:
    """Raise UserError where ratings or bodies were left out of an export, as its CSV does."""
    for path in dict.fromkeys(row.origin.path for row in rows):
        requests = [row.value for row in rows if row.origin.path == path]
        rated = [request for request in requests if request.get("feedback_rating") is not None]
        has_ratings = any("feedback_rating" in request for request in requests)
        has_bodies = not rated or any(
            not is_blank(request.get("response_body")) for request in rated
        )
        if not has_ratings or not has_bodies:
            raise UserError(
                f"the export has no {'bodies of responses' if has_ratings else 'ratings'}",
                code="import-columns-missing",
                where=path,
                fix="export again: npx @helicone/export --include-body --format jsonl",
            )


def _vote(row: Row, options: ReadOptions) -> Vote | Skipped:
    request, origin = row.value, row.origin
    label = thumb(request.get("feedback_rating"))
    if label is None:
        return Skipped("no_vote", origin)
    status = as_number(request.get("response_status"))
    if is_blank(request.get("request_body")) and is_blank(request.get("response_body")):
        return Skipped("no_conversation", origin, str(request["request_id"]))
    properties = object_at(request, "request_properties", "properties")
    identifier = str(request["request_id"])
    step = Step(
        id=identifier,
        trace=identifier,
        is_generation=True,
        is_failed=status is not None and status != 200,
        inputs=request.get("request_body"),
        answer=request.get("response_body"),
        model=str(first_value(request, "response_model", "request_model", "model") or ""),
        session=str(properties.get("Helicone-Session-Id") or ""),
        rater=str(request.get("request_user_id") or ""),
        row=request,
    )
    return vote_on(
        step,
        options,
        origin,
        source=SOURCE,
        rater=None,
        id=str(request.get("feedback_id") or identifier),
        updated_at=timestamp(first_value(request, "feedback_created_at", "request_created_at")),
        label=label,
    )
