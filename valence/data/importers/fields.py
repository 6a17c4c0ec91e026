"""Fields of exported rows: JSON in cells, times, dotted paths and labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from valence.data.strict_json import JSONError, StrictDecoder
from valence.data.values import as_number, thumb

CSV_DANGER = re.compile(r"[=+@\t\n-]|.*,[=+@\t\n-]", re.DOTALL)
"""Text that CSV writers protect with an apostrophe, because a spreadsheet may run it."""
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Unit of a time -> how many there are in a second."""
YEAR_10000 = 253402300800.0
"""Seconds from 1970 to the first time that no datetime can hold."""


# Cells


def decode_json(cell: object) -> Any:
    """Decode a cell that holds a JSON list or object as text. Other cells are returned as they are,
    also those whose JSON has a fault, such as NaN or a name that appears twice.
    """
    value, fault = _parse_json(cell)
    return cell if fault is not None else value


def is_json(text: str) -> bool:
    """Whether a text is a JSON list or object, even one with a fault."""
    value, fault = _parse_json(text)
    return value is not text or fault is not None


def _parse_json(cell: object) -> tuple[Any, JSONError | None]:
    """The decoded cell, or the cell itself where it is no JSON; and the fault of the JSON."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(("[", "{")):
        return cell, None
    decoder, text = StrictDecoder(), cell.strip()
    try:
        value, end = decoder.value_at(text, 0)
    except ValueError:
        return cell, None
    return (value, decoder.fault) if end == len(text) else (cell, None)


def undo_csv_protection(cell: str) -> str:
    """The cell without the apostrophe that keeps spreadsheets from running it."""
    return cell[1:] if cell.startswith("'") and CSV_DANGER.match(cell, 1) else cell


def is_blank(value: object) -> bool:
    """Whether nothing was recorded."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


# Places


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, through lists and JSON in cells; None when there is none.

    Names that hold dots come first. Lists are indexed from 0, or from -1 at their end.
    """
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = decode_json(value)
        if isinstance(value, list) and name.removeprefix("-").isdecimal():
            index = int(name)
            value = value[index] if -len(value) <= index < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return value


def first_value(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these columns that has a value; None if none has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def object_at(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The object in the first of these columns that has a value; empty if that has none."""
    value = decode_json(first_value(row, *names))
    return value if isinstance(value, dict) else {}


def objects_at(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects of the list in a column; none when there is no list."""
    values = decode_json(row.get(name))
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, Mapping)]


def text_list(value: object) -> tuple[str, ...]:
    """The texts of a list, such as tags; or one text alone."""
    values = value if isinstance(value, list) else [value]
    return tuple(text for text in values if isinstance(text, str) and text)


# Times and labels


def timestamp(value: object, unit: str | None = None) -> float:
    """Seconds since 1970 (UTC) of a time that is ISO 8601, a datetime, or a number; 0 if it is none
    from 1970 to 9999.

    unit: of numbers: s, ms, us or ns. Without it, the magnitude decides: times from 1973 to 5138
    are distinguished. Times without a zone are UTC.
    """
    number = as_number(value)
    if number is not None:
        unit = unit or next((u for u, n in UNITS.items() if number < 1e11 * n), "ns")
        seconds = number / UNITS[unit]
    else:
        try:
            time = datetime.fromisoformat(value.strip()) if isinstance(value, str) else value
        except ValueError:
            return 0.0
        if not isinstance(time, datetime):
            return 0.0
        seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return seconds if 0 <= seconds < YEAR_10000 else 0.0


def label_of(value: object, labels: Mapping[str, bool]) -> bool | None:
    """Thumbs up or down: a truth value, or a word or number that the user gave a meaning to.

    labels: categories and what they mean; upper and lower case are the same.
    """
    if value is None or isinstance(value, bool):
        return value
    number = as_number(value)
    is_integer = number is not None and number.is_integer()
    word = f"{number:.0f}" if is_integer else str(value).strip().casefold()
    meanings = {name.strip().casefold(): label for name, label in labels.items()}
    return meanings.get(word, {"true": True, "false": False}.get(word))


def word_label(value: object, labels: Mapping[str, bool]) -> bool | None:
    """``label_of``, and the words that mean thumbs up or down in every tool. Numbers are scores."""
    label = label_of(value, labels)
    return label if label is not None or as_number(value) is not None else thumb(value)


def thumb_label(value: object, labels: Mapping[str, bool]) -> bool | None:
    """``word_label``, and 1, 0 and -1, where these are the thumbs of a tool."""
    label = label_of(value, labels)
    return thumb(value) if label is None else label
