"""The rows of a tool's export, and why some of them give no vote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from valence.data.importers.records import Skipped, Vote
from valence.data.importers.texts import UnusableVote
from valence.data.sources import BadRow, Row, read_rows
from valence.errors import UserError
from valence.types import Origin

Columns = Mapping[str, Any]

PROMPT_COLUMNS = (
    "prompt",
    "instruction",
    "question",
    "input",
    "chat",
    "messages",
    "context",
)
COMPLETION_COLUMNS = ("completion", "response", "answer", "output", "generation", "text")
PAIR_COLUMNS = (
    ("answer1", "answer2"),
    ("response_a", "response_b"),
    ("response1", "response2"),
    ("response-1", "response-2"),
    ("generation-0", "generation-1"),
    ("text1", "text2"),
    ("left", "right"),
)
"""Names that annotation projects give to the parts of a row, the likelier ones first."""


def export_rows(
    paths: list[str], tool: str, is_export_row: Callable[[Columns], bool]
) -> Iterator[Row | Skipped]:
    """The rows of files. Raises UserError when a file's first row is not the tool's."""
    for path in paths:
        is_recognized = False
        for row in read_rows(path):
            if isinstance(row, BadRow):
                yield Skipped("shape_unknown", row.origin, row.reason)
            elif is_export_row(row.value):
                is_recognized = True
                yield row
            elif is_recognized:
                columns = ", ".join(list(row.value)[:5])
                yield Skipped("shape_unknown", row.origin, f"columns {columns}")
            else:
                raise not_an_export(tool, row.origin, list(row.value))


def not_an_export(tool: str, origin: Origin, columns: list[str]) -> UserError:
    """The error about a file of another form."""
    return UserError(
        f"the file is not an export of {tool}: its columns are {', '.join(columns[:8]) or 'none'}",
        code="import-not-an-export",
        where=str(origin),
        fix=f"name a file that {tool} exported, or another tool",
    )


def votes_or_skipped(votes: Iterator[Vote | Skipped], origin: Origin) -> Iterator[Vote | Skipped]:
    """The votes, until one is unusable."""
    try:
        for vote in votes:
            if isinstance(vote, Vote):
                check_prompt(vote)
            yield vote
    except UnusableVote as error:
        yield Skipped(error.reason, origin, error.example)


def check_prompt(vote: Vote) -> None:
    """Raise UnusableVote for a completion that answers nothing, such as a greeting."""
    if not vote.prompt or vote.prompt[-1]["role"] not in ("user", "tool"):
        raise UnusableVote("no_prompt")


def guess_parts(columns: Columns, paths: Mapping[str, str]) -> dict[str, str]:
    """Where a row keeps its prompt, and its completion or its left and right ones.

    paths: the parts that the user named. The others are guessed by their names.
    """
    parts = {
        part: path
        for part, path in paths.items()
        if part in ("prompt", "completion", "left", "right")
    }
    if "prompt" not in parts and (name := _first_filled(columns, PROMPT_COLUMNS)):
        parts["prompt"] = name
    if {"left", "right", "completion"} & parts.keys():
        return parts
    for left, right in PAIR_COLUMNS:
        if left in columns and right in columns:
            return parts | {"left": left, "right": right}
    if name := _first_filled(columns, COMPLETION_COLUMNS):
        parts["completion"] = name
    return parts


def _first_filled(columns: Columns, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if columns.get(name) not in (None, "")), None)
