"""The rows of a tool's export, and why some of them give no vote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from valence.data.importers.messages import check_prompt
from valence.data.importers.records import Skipped, UnusableVote, Vote
from valence.data.sources import BadRow, Row, read_rows
from valence.errors import UserError
from valence.types import Origin

Columns = Mapping[str, Any]
T = TypeVar("T")

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
    for row in _recognized_rows(paths, tool, is_export_row):
        yield row if isinstance(row, Skipped) else row[0]


def _recognized_rows(
    paths: list[str], tool: str, recognize: Callable[[Columns], T]
) -> Iterator[tuple[Row, T] | Skipped]:
    """The rows for which ``recognize`` returns something true, each with that value."""
    for path in paths:
        is_recognized = False
        for row in read_rows(path):
            if isinstance(row, BadRow):
                yield Skipped("shape_unknown", row.origin, row.reason)
            elif kinds := recognize(row.value):
                is_recognized = True
                yield row, kinds
            elif is_recognized:
                columns = ", ".join(list(row.value)[:5])
                yield Skipped("shape_unknown", row.origin, f"columns {columns}")
            else:
                raise not_an_export(tool, row.origin, list(row.value))


def not_an_export(tool: str, origin: Origin, columns: list[str]) -> UserError:
    """The error about a file of another form."""
    names = ", ".join(name if len(name) <= 40 else f"{name[:37]}..." for name in columns[:8])
    return UserError(
        f"the file is not an export of {tool}: its columns are {names or 'none'}",
        code="import-not-an-export",
        where=str(origin),
        fix=f"pass a file that {tool} exported, or name the tool that exported this file",
    )


def load_kind(
    kind: str,
    paths: list[str],
    tool: str,
    kinds_of: Callable[[Columns], Collection[str]],
    needed: Mapping[str, str],
) -> tuple[list[Row], list[Skipped]]:
    """The rows of one kind in the files of an export, and the rows that cannot be read.

    kinds_of: the kinds of a row; none if it is not of this export. needed: kinds that must be there
    -> the export that has them. Raises UserError as ``export_rows`` does, and where a kind of rows
    is missing.
    """
    rows: list[Row] = []
    skipped: list[Skipped] = []
    present: set[str] = set()
    for item in _recognized_rows(paths, tool, kinds_of):
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        row, kinds = item
        present |= set(kinds)
        if kind in kinds:
            rows.append(row)
    for name, export in needed.items():
        if name not in present:
            raise UserError(
                f"no file contains {export}",
                code="import-file-missing",
                where=", ".join(paths),
                fix=f"export {export} from {tool} as well, and pass that file too",
            )
    return rows, skipped


def rows_of_kind(
    kind: str, paths: list[str], kinds_of: Callable[[Columns], Collection[str]]
) -> Iterator[Row]:
    """The rows of one kind, for another pass over files that may not fit into memory."""
    for path in paths:
        for row in read_rows(path):
            if isinstance(row, Row) and kind in kinds_of(row.value):
                yield row


def votes_or_skipped(
    votes: Iterator[Vote | Skipped], origin: Origin, vote_id: str = ""
) -> Iterator[Vote | Skipped]:
    """The votes, until one is unusable. vote_id: of this one, if it is known."""
    try:
        for vote in votes:
            if isinstance(vote, Vote):
                check_prompt(vote.prompt)
            yield vote
    except UnusableVote as error:
        yield Skipped(error.reason, origin, error.example, vote_id)


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
