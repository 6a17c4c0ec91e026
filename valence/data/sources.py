"""Rows from files and hub data sets, each with the place it came from.

What a row means is decided in formats.py.

A problem of one row is yielded as a ``BadRow``; a problem of the whole file is raised as a
``UserError``.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import io
import json
import os
import re
import shlex
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
from valence.data.strict_json import JSONError, StrictDecoder
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
        names = [
            f"{name}: {value}"
            for name, value in (("split", split), ("subset", subset))
            if value is not None
        ]
        raise UserError(
            f"{' and '.join(names)} cannot be applied to a file: only data sets of the hub have "
            "splits and subsets",
            code="split-not-a-hub-dataset",
            where=path,
            fix=f"remove {' and '.join(names)}; to use only a part of the rows, put it into a "
            "separate file",
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
            fix="add rows to it, or use another file",
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
        check_is_file(path, file)
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
            fix=f"allow it: chmod +r {shlex.quote(str(file))}",
        ) from error
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror or error})",
            code="file-not-readable",
            where=path,
            fix="check the path and the disk",
        ) from error


def check_is_file(path: str, file: Path) -> None:
    """Raise UserError unless a path is that of a regular file. path: as it was written."""
    if file.is_file():
        return
    if file.is_dir():
        inside = sorted(f.name for f in file.iterdir() if _suffix(f) in READERS)
        raise UserError(
            "the path is a folder, but must be a file",
            code="path-is-folder",
            where=path,
            fix=f"use a file in it, such as {os.path.join(path, inside[0])}"
            if inside
            else f"use a file that ends in one of {', '.join(READERS)}",
        )
    if file.exists():
        raise UserError(
            "the path is not a regular file, but for example a pipe or a device",
            code="file-not-regular",
            where=path,
            fix="copy the data into a regular file, and use that file",
        )
    if not file.parent.is_dir():
        raise UserError(
            f"the file does not exist, and neither does its folder {file.parent}",
            code="file-not-found",
            where=path,
            fix=f"correct the path; a relative path starts at the current folder, {Path.cwd()}",
        )
    data_files = sorted(f.name for f in file.parent.iterdir() if _suffix(f) in READERS)
    near = difflib.get_close_matches(file.name, data_files, n=2, cutoff=0.5)
    raise UserError(
        "the file does not exist",
        code="file-not-found",
        where=path,
        fix=(
            f"did you mean {' or '.join(os.path.join(os.path.dirname(path), n) for n in near)}?"
            if near
            else f"correct the path; the folder {file.parent.resolve()} contains "
            f"{', '.join(data_files[:5]) or 'no data files'}"
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
    if suffix in (".yaml", ".yml"):
        raise UserError(
            "a recipe is not a file of rows",
            code="recipe-not-rows",
            where=path,
            fix="name the file or the section in its data.train; `valence check` reads recipes",
        )
    if suffix not in READERS:
        raise UserError(
            f"files ending in {suffix} are not supported"
            if suffix
            else "the format of the file is unknown, because its name has no suffix",
            code="file-suffix-unknown",
            where=path,
            fix=f"convert the file to one of {', '.join(READERS)} (each also with .gz), or rename "
            "it if it has such content already",
        )
    marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
    marks |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
    encoding = next((encoding for mark, encoding in marks.items() if head.startswith(mark)), None)
    if encoding is not None:
        raise UserError(
            f"the file is {encoding}, not UTF-8",
            code="file-encoding",
            where=path,
            fix=_conversion(path, encoding),
        )
    if b"\0" in head and suffix != ".parquet":
        raise UserError(
            "the file is binary, not text",
            code="file-binary",
            where=path,
            fix="export the data as jsonl, csv or parquet (UTF-8); if it is an archive, unpack it",
        )
    if suffix in (".jsonl", ".ndjson") and head.removeprefix(BOM).lstrip().startswith(b"["):
        return _json
    return READERS[suffix]


def _conversion(path: str, encoding: str) -> str:
    """The fix for a file in another encoding than UTF-8."""
    file = Path(os.path.expanduser(path))
    suffixes = "".join(file.suffixes[-2:] if file.suffix.lower() == ".gz" else file.suffixes[-1:])
    new = file.with_name(f"{file.name.removesuffix(suffixes)}.utf8{suffixes}")
    old, new = shlex.quote(str(file)), shlex.quote(str(new))
    iconv = f"iconv -f {encoding} -t UTF-8"
    is_packed = suffixes.lower().endswith(".gz")
    command = f"gunzip -c {old} | {iconv} | gzip > {new}" if is_packed else f"{iconv} {old} > {new}"
    return f"convert it ({command}), and use the new file"


def _not_utf8(path: str) -> str:
    """The fix for a file with bytes that are not UTF-8."""
    return f"if the file is Latin-1 or Windows-1252 text, {_conversion(path, 'WINDOWS-1252')}"


# JSON

JSON_TYPES = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
"""Type of a value in Python -> its name in JSON; any other value is a number."""


def _row(value: object, fault: JSONError | None, origin: Origin) -> Row | BadRow:
    if fault is not None:
        return BadRow(origin, str(fault), fault.fix, "json-invalid")
    if not isinstance(value, dict):
        return BadRow(
            origin,
            f"the row is {JSON_TYPES.get(type(value), 'a number')}, not a JSON object",
            'write the row as {"column": value, ...}',
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
            _not_utf8(origin.path),
            "file-encoding",
        )
    except json.JSONDecodeError as error:
        return BadRow(
            origin,
            f"the line is not valid JSON: {error.msg}, at column {error.colno}",
            f"write each object on one line: jq -c . {shlex.quote(origin.path)} > NEW.jsonl"
            if line == b"{"
            else "write one complete JSON object per line, with names and text in double quotes",
            "json-syntax",
        )
    except JSONError as error:
        return BadRow(origin, f"the line cannot be read as JSON: {error}", error.fix, "json-limits")
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
            fix="correct it there: write one array of objects, or one object per line, with names "
            "and text in double quotes",
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
            fix=_not_utf8(path),
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
        origin = Origin(path, number if one_line else line)
        value, end = _value_at(decoder, text, position, origin)
        yield _row(value, decoder.fault, origin)
        position = _skip(text, end)
        mark = text[position : position + 1]
        if mark not in (",", "]"):
            raise json.JSONDecodeError(
                "Expecting ',' or ']'" if mark else "The array is not closed", text, position
            )
        position, closed = _skip(text, position + 1), mark == "]"
    if text[position:].strip():
        raise json.JSONDecodeError("Extra data after the array", text, position)


def _value_at(decoder: StrictDecoder, text: str, position: int, origin: Origin) -> tuple[Any, int]:
    try:
        return decoder.value_at(text, position)
    except JSONError as error:
        raise UserError(
            f"the value cannot be read as JSON: {error}",
            code="json-limits",
            where=str(origin),
            fix=error.fix,
        ) from error


def _skip(text: str, position: int) -> int:
    return JSON_SPACE.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]


def _document(path: str, text: str, start: int) -> Iterator[Row | BadRow]:
    """One object: a wrapper around one list of rows, or itself the only row."""
    decoder = StrictDecoder()
    value, end = _value_at(decoder, text, start, Origin(path, 1))
    if text[end:].strip():
        raise json.JSONDecodeError(
            "More text follows the first value",
            text,
            _skip(text, end),
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
            fix="put each list into a separate file, and list the files that you need",
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
    # Lines without a field are rows where there is one column, but not at the end of the file.
    empty: list[int] = []
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
        reason, fix = str(error), 'put the field in double quotes, and write " inside it as ""'
        if "new-line character" in reason:
            reason = "a carriage return (CR) that no line feed follows is outside double quotes"
            fix += "; if all lines end like this, convert them: tr '\\r' '\\n' < OLD > NEW"
        elif "unexpected end" in reason:
            reason, fix = "a double quote is never closed", 'close it, or write it as ""'
        raise UserError(
            f"the record that starts here cannot be read: {reason}",
            code="csv-syntax",
            where=f"{path}:{start}",
            fix=fix,
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
        f"the record has {len(cells)} fields, but the header has {len(header)}",
        f"put fields that contain {delimiter!r} in double quotes"
        if len(cells) > len(header)
        else f"write all fields, with {delimiter!r} between them also where they are empty",
        "csv-field-count",
    )


def _empty_rows(path: str, lines: list[int]) -> Iterator[BadRow]:
    """The empty rows of a table with one column, which are taken from the list."""
    for line in lines:
        yield BadRow(
            Origin(path, line),
            "the row is empty",
            "remove the line, or write the row",
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
    counts = Counter(header)
    twice = sorted(name for name, count in counts.items() if count > 1 and name)
    if twice or counts[""] > 1:
        raise UserError(
            f"the header names a column twice: {', '.join(twice[:5])}"
            if twice
            else f"{counts['']} columns have no name in the header",
            code="column-duplicate",
            where=f"{path}:{line}",
            fix="give every column a unique name"
            if twice
            else "name these columns, or remove them (also the separators at the end of a line)",
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
            counts = Counter(table.schema_arrow.names)
            raise UserError(
                f"several columns have the name {max(counts, key=lambda name: counts[name])!r}",
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
            f"the parquet file cannot be read from row {number + 1} on "
            f"({str(error).splitlines()[0]})",
            code="file-damaged",
            where=path,
            fix="export or copy the file again; if it is not parquet, rename it",
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
