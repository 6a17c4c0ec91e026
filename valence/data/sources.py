"""Rows from files and hub data sets, each with the place it came from.

What a row means is decided in formats.py.

A problem of one row is yielded as a ``BadRow``; a problem of the whole file is raised as a
``UserError``.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from valence.data.hub import hub_rows
from valence.data.strict_json import StrictDecoder
from valence.errors import UserError
from valence.files import is_hub_id
from valence.types import Origin

BUFFER = 1 << 16
"""Bytes of a file that can be looked at before it is read."""
SAMPLE_ROWS = 20
"""Rows of a table that are compared with its header to find the delimiter."""
BOM = b"\xef\xbb\xbf"
JSON_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file: its columns by name."""

    value: dict[str, Any]
    origin: Origin


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: where it is, what is wrong with it, and how to fix it.

    code: of a UserError about this row.
    """

    origin: Origin
    reason: str
    fix: str
    code: str


def read_rows(
    path: str | Path,
    *,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    notes: list[str] | None = None,
) -> Iterator[Row | BadRow]:
    """The rows, or the first ``limit`` rows, of a file or a hub data set ``owner/name``.

    An origin's line is the line of the file (jsonl, csv, json arrays) or the number of the row
    (parquet, hub, and json without line breaks). What had to be decided about the file, such as its
    delimiter, is added to ``notes``. Raises UserError when the file as a whole cannot be read or
    has no rows.
    """
    return islice(_rows(str(path), split, subset, [] if notes is None else notes), limit)


def _rows(
    path: str, split: str | None, subset: str | None, notes: list[str]
) -> Iterator[Row | BadRow]:
    file = Path(os.path.expanduser(path))
    if is_hub_dataset(path):
        rows = (Row(value, origin) for origin, value in hub_rows(path, split, subset))
    elif split is not None or subset is not None:
        name = "subset" if split is None else "split"
        raise UserError(
            f"{name}: {split or subset} is set for a file, and only hub data sets have {name}s",
            code="split-not-a-hub-dataset",
            where=path,
            fix=f"remove {name}, and put the rows of each {name} into a separate file",
        )
    else:
        rows = _file(path, file, notes)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(
            "the file has no rows",
            code="file-empty",
            where=path,
            fix="use a file with at least one row",
        )


def is_hub_dataset(path: str) -> bool:
    """Whether a path means a data set on the hub.

    It is ``owner/name``, does not end like a file of rows, and ``owner`` is no folder here.
    """
    file = Path(path)
    is_id = "/" in path and is_hub_id(path)
    return is_id and _suffix(file) not in READERS and not file.parent.exists()


# Files


def _file(path: str, file: Path, notes: list[str]) -> Iterator[Row | BadRow]:
    try:
        _check_is_file(path, file)
        with file.open("rb", buffering=BUFFER) as raw:
            stream = _unpacked(cast(io.BufferedReader, raw))
            reader = _reader(path, file, stream)
            yield from reader(path, stream, notes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"the gzip file is damaged or cut short ({error})",
            code="file-damaged",
            where=path,
            fix="copy or compress the file again",
        ) from error
    except PermissionError as error:
        raise UserError(
            "no permission to read this file",
            code="file-not-readable",
            where=path,
            fix=f"allow it: chmod +r {path}",
        ) from error
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror or error})",
            code="file-not-readable",
            where=path,
            fix="check the path and the disk",
        ) from error


def _check_is_file(path: str, file: Path) -> None:
    if file.is_file():
        return
    if file.is_dir():
        inside = sorted(f.name for f in file.iterdir() if _suffix(f) in READERS)
        raise UserError(
            "this is a folder, and a file is needed",
            code="path-is-folder",
            where=path,
            fix=f"use a file in it, such as {inside[0]}" if inside else "use a data file",
        )
    if file.exists():
        raise UserError(
            "this is neither a file nor a folder",
            code="file-not-regular",
            where=path,
            fix="use a regular file",
        )
    if not file.parent.is_dir():
        raise UserError(
            f"there is no such file, nor a folder {file.parent}",
            code="file-not-found",
            where=path,
            fix="check the path; a relative one starts at the folder that the command runs in",
        )
    names = sorted(f.name for f in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=2, cutoff=0.5)
    data_files = [name for name in names if _suffix(Path(name)) in READERS][:5]
    raise UserError(
        "there is no such file",
        code="file-not-found",
        where=path,
        fix=(
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the folder {file.parent} has {', '.join(data_files) or 'no data files'}; check "
            f"the path"
        ),
    )


def _suffix(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _unpacked(raw: io.BufferedReader) -> io.BufferedReader:
    """The content, whatever the file's name says about compression."""
    packed = raw.peek(2)[:2] == b"\x1f\x8b"
    if not packed:
        return raw
    return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER)  # pyright: ignore[reportArgumentType]


Reader = Callable[[str, io.BufferedReader, list[str]], Iterator[Row | BadRow]]
"""Yields the rows of a file, given its path and its content, and adds to a list what had to be
decided.
"""


def _reader(path: str, file: Path, stream: io.BufferedReader) -> Reader:
    """The function that reads a file, by its suffix unless the content is plainly another."""
    head = stream.peek(4096)[:4096]
    if head.startswith(b"PAR1"):
        return _parquet
    suffix = _suffix(file)
    if suffix not in READERS:
        raise UserError(
            f"files ending in {suffix or 'nothing'} are not supported",
            code="file-suffix-unknown",
            where=path,
            fix=f"use one of {', '.join(READERS)} (each may also end in .gz)",
        )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            "the file is UTF-16 or UTF-32, not UTF-8",
            code="file-encoding",
            where=path,
            fix=f"convert it: {_iconv('UTF-16')}",
        )
    if b"\0" in head and suffix != ".parquet":
        raise UserError(
            "the file is binary, not text",
            code="file-binary",
            where=path,
            fix="unpack or export it to jsonl, csv or parquet (text must be UTF-8)",
        )
    if suffix in (".jsonl", ".ndjson") and head.removeprefix(BOM).lstrip().startswith(b"["):
        return _json
    return READERS[suffix]


def _iconv(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 OLD > NEW"


# JSON


JSON_FAULT_FIX = (
    "write each name once in an object, null for a missing number, and whole characters"
)


def _row(value: object, fault: str | None, origin: Origin) -> Row | BadRow:
    if fault is not None:
        return BadRow(origin, fault, JSON_FAULT_FIX, "json-invalid")
    if not isinstance(value, dict):
        return BadRow(
            origin,
            f"the row is a JSON {type(value).__name__}, not an object",
            'write rows as {"column": value, ...}',
            "row-not-an-object",
        )
    return Row(value, origin)


def _jsonl(path: str, stream: BinaryIO, notes: list[str]) -> Iterator[Row | BadRow]:
    decoder = StrictDecoder()
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(BOM).strip()
        if line:
            yield _jsonl_row(decoder, line, Origin(path, number))


def _jsonl_row(decoder: StrictDecoder, line: bytes, origin: Origin) -> Row | BadRow:
    try:
        text = line.decode()
        value, end = decoder.value_at(text, 0)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except UnicodeDecodeError as error:
        return BadRow(
            origin,
            f"the line is not UTF-8 text (byte {line[error.start]:#04x})",
            f"if the file is Latin-1, convert it: {_iconv('LATIN1')}",
            "file-encoding",
        )
    except json.JSONDecodeError as error:
        return BadRow(
            origin,
            f"the line is not valid JSON: {error.msg}, at column {error.colno}",
            "write one complete JSON object per line, with names and text in double quotes",
            "json-syntax",
        )
    except ValueError as error:
        return BadRow(
            origin,
            f"the line cannot be read as JSON: {error}",
            "write shorter numbers and flatter objects",
            "json-limits",
        )
    return _row(value, decoder.fault, origin)


def _json(path: str, stream: BinaryIO, notes: list[str]) -> Iterator[Row | BadRow]:
    data = stream.read().removeprefix(BOM)
    text = _text(path, data, 1)
    start = _skip(text, 0)
    try:
        if text[start : start + 1] == "[":
            yield from _array(path, text, start + 1)
        elif _is_jsonl(text):
            yield from _jsonl(path, io.BytesIO(data), notes)
        elif text[start:]:
            yield from _document(path, text, start)
    except json.JSONDecodeError as error:
        raise UserError(
            f"the file is not valid JSON: {error.msg}, at column {error.colno}",
            code="json-syntax",
            where=f"{path}:{error.lineno}",
            fix=f"correct that place; python -m json.tool {path} checks a whole file",
        ) from error
    except ValueError as error:
        raise UserError(
            f"the file cannot be read as JSON: {error}",
            code="json-limits",
            where=path,
            fix="write shorter numbers and flatter objects",
        ) from error


def _text(path: str, data: bytes, line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = line + data.count(b"\n", 0, error.start)
        raise UserError(
            f"the file is not UTF-8 text (byte {data[error.start]:#04x})",
            code="file-encoding",
            where=f"{path}:{where}",
            fix=f"if it is Latin-1, convert it: {_iconv('LATIN1')}",
        ) from error


def _is_jsonl(text: str) -> bool:
    """Are there several lines, the first of which is a whole object?"""
    first, _, rest = text.strip().partition("\n")
    if not rest:
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _array(path: str, text: str, start: int) -> Iterator[Row | BadRow]:
    decoder, number, line, counted = StrictDecoder(), 0, 1, 0
    one_line = "\n" not in text.strip()
    position, closed = _skip(text, start), False
    if text[position : position + 1] == "]":
        position, closed = position + 1, True
    while not closed:
        number, line, counted = number + 1, line + text.count("\n", counted, position), position
        value, end = decoder.value_at(text, position)
        yield _row(value, decoder.fault, Origin(path, number if one_line else line))
        position = _skip(text, end)
        mark = text[position : position + 1]
        if mark not in (",", "]"):
            raise json.JSONDecodeError(
                "Expecting ',' or ']'" if mark else "The array is not closed", text, position
            )
        position, closed = _skip(text, position + 1), mark == "]"
    if text[position:].strip():
        raise json.JSONDecodeError("Extra data after the array", text, position)


def _skip(text: str, position: int) -> int:
    return JSON_SPACE.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]


def _document(path: str, text: str, start: int) -> Iterator[Row | BadRow]:
    """One object: a wrapper around one list of rows, or itself the only row."""
    decoder = StrictDecoder()
    value, end = decoder.value_at(text, start)
    if text[end:].strip():
        raise json.JSONDecodeError(
            "Extra data: neither one array nor one object per line", text, _skip(text, end)
        )
    lists = (
        []
        if not isinstance(value, dict)
        else [name for name, part in value.items() if _is_list_of_rows(part)]
    )
    if len(lists) > 1:
        raise UserError(
            f"the file contains several lists of rows: {', '.join(lists)}",
            code="file-several-lists",
            where=path,
            fix="put each list into a separate file",
        )
    if not lists:
        yield _row(value, decoder.fault, Origin(path, 1))
        return
    for number, row in enumerate(value[lists[0]], 1):
        yield _row(row, decoder.fault, Origin(path, number))


def _is_list_of_rows(part: object) -> bool:
    """A list of objects that are not chat turns."""
    return (
        isinstance(part, list)
        and bool(part)
        and all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in part)
    )


# Tables

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def _csv(
    path: str, stream: io.BufferedReader, notes: list[str], *, usual: str
) -> Iterator[Row | BadRow]:
    """usual: the delimiter that the suffix stands for."""
    # the default, 131,072 characters, is less than a long conversation
    csv.field_size_limit(2**31 - 1)
    delimiter = _delimiter(stream.peek(BUFFER), usual)
    if delimiter != usual:
        notes.append(f"fields are separated by {DELIMITERS[delimiter]}")
    lines = (_text(path, line.removeprefix(BOM), number) for number, line in enumerate(stream, 1))
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    empty: list[
        int
        # lines without a field, which are rows where there is one column, but not at the end of the
        # file
    ] = []
    start = 1
    try:
        for cells in records:
            blank = len(cells) < 2 and not "".join(cells).strip()
            if not header:
                header = [] if blank else _header(path, start, cells)
            elif blank and len(header) == 1:
                empty.append(start)
                yield from _empty_rows(path, empty) if cells else ()
            elif not blank:
                yield from _empty_rows(path, empty)
                yield _record(path, start, cells, header, delimiter)
            start = records.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"the record cannot be read: {error}",
            code="csv-syntax",
            where=f"{path}:{start}",
            fix='put the field in double quotes, and write " inside it as ""',
        ) from error


def _record(
    path: str, line: int, cells: list[str], header: list[str], delimiter: str
) -> Row | BadRow:
    if len(cells) == len(header):
        return Row(
            {name: cell or None for name, cell in zip(header, cells, strict=True)},
            Origin(path, line),
        )
    return BadRow(
        Origin(path, line),
        f"the record has {len(cells)} fields, and the header has {len(header)}",
        f"put fields that contain {delimiter!r} in double quotes",
        "csv-field-count",
    )


def _empty_rows(path: str, lines: list[int]) -> Iterator[BadRow]:
    """The empty rows of a table with one column, which are taken from the list."""
    for line in lines:
        yield BadRow(
            Origin(path, line),
            "the row is empty",
            "remove its line, or write its text",
            "row-empty",
        )
    lines.clear()


def _delimiter(start: bytes, usual: str) -> str:
    """The character between the fields of a table, found in its first bytes.

    Of the characters that part the header into several fields, the one that parts most rows into as
    many; of equals, the usual one, and without any, the usual one too.
    """
    text = start.removeprefix(BOM).decode(errors="replace")
    is_complete = len(start) < BUFFER
    shares: dict[str, float] = {}
    for delimiter in dict.fromkeys((usual, *DELIMITERS)):
        records: list[list[str]] = []
        with suppress(csv.Error):
            records += islice(
                (r for r in csv.reader(io.StringIO(text), delimiter=delimiter) if r),
                SAMPLE_ROWS + 1,
            )
        if len(records) < SAMPLE_ROWS + 1 and not is_complete and len(records) > 1:
            records.pop()  # it may be cut
        if records and len(records[0]) > 1:
            rows = records[1:]
            shares[delimiter] = sum(len(r) == len(records[0]) for r in rows) / max(len(rows), 1)
    return max(shares, key=lambda d: shares[d], default=usual)


def _header(path: str, line: int, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    twice = sorted(name for name, count in Counter(header).items() if count > 1)
    if twice:
        raise UserError(
            f"the header names a column twice: {', '.join(twice[:5])}",
            code="column-duplicate",
            where=f"{path}:{line}",
            fix="give every column a unique name",
        )
    return header


@dataclass(frozen=True, slots=True, repr=False)
class Unreadable:
    """A value of a table that Python cannot hold. It is an error only where the column is used."""

    why: str

    def __repr__(self) -> str:
        return f"unreadable ({self.why})"


def _parquet(path: str, stream: BinaryIO, notes: list[str]) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        table = pq.ParquetFile(stream, page_checksum_verification=True)
        if len(set(table.schema_arrow.names)) < len(table.schema_arrow.names):
            raise UserError(
                "two columns have the same name",
                code="column-duplicate",
                where=path,
                fix="give every column a unique name",
            )
        for batch in table.iter_batches():
            for value in _batch_rows(batch):
                number += 1
                yield Row(value, Origin(path, number))
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the parquet file cannot be read after row {number} ({str(error).splitlines()[0]})",
            code="file-damaged",
            where=path,
            fix="write the file again, or check that it is parquet",
        ) from error


def _batch_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a record batch of Arrow."""
    try:
        return batch.to_pylist()
    except (
        ValueError,
        OverflowError,
        KeyError,
    ):  # a date out of range, a time zone or text that is none
        columns = [_values(column) for column in batch.columns]
        return [
            dict(zip(batch.schema.names, cells, strict=True))
            for cells in zip(*columns, strict=True)
        ]


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, KeyError):
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, KeyError) as error:
        return Unreadable(f"{scalar.type}: {str(error).splitlines()[0]}")


READERS: dict[str, Reader] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": partial(_csv, usual=","),
    ".tsv": partial(_csv, usual="\t"),
    ".parquet": _parquet,
}
