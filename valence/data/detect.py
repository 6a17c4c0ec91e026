"""Detect the format of rows from their columns and the notation of their chat turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from valence.data.formats import FORMATS, Format, has_failed, lookup
from valence.data.values import COLOSSAL, Dialect, as_number, dialect_of, thumb
from valence.errors import UserError

COLUMNS = frozenset(name for f in FORMATS.values() for name in f.columns)
CONTENT = frozenset(name for f in FORMATS.values() for name in f.required) - {"text"}
"""Columns that determine a format. Any row may also have a `text`."""
NESTED = frozenset(name for name in COLUMNS if "." in name)
"""Columns of formats that are nested in another column."""
OTHER_NAMES = {
    "prompt": "question query input instruction user request problem message",
    "completion": "answer response output reply assistant generation",
    "label": "verdict thumb thumbs vote feedback liked rating helpful useful csat satisfaction "
    "resolved solved",
    "score": "reward points grade stars",
    "chosen": "preferred accepted better winner good best",
    "rejected": "dispreferred refused worse loser bad worst",
    "messages": "conversation conversations chat dialog dialogue turns",
}
"""Column that a message may suggest -> names that files have for it, in lower case."""
MAX_COLUMNS = 20
"""Columns that a message lists at most."""


def detect(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str] | None = None) -> str:
    """The name of the format that most of these rows have.

    Raises UserError when none or several fit.
    """
    for key, column in (keys or {}).items():
        if key not in COLUMNS:
            is_reversed = column in COLUMNS and any(key in row for row in rows)
            hint = did_you_mean(
                [f"{{{column}: {key}}}"] if is_reversed else nearest(key, sorted(COLUMNS))
            )
            raise UserError(
                f"keys: no format has a column {key!r}",
                code="keys-unknown-column",
                fix=f"{hint}write keys as {{the format's name: the file's name}}; names of formats "
                f"are {', '.join(OTHER_NAMES)} and others",
            )
    filled = {
        key: column
        for key, column in {"label": "label", **(keys or {})}.items()
        if any(row.get(column) is not None for row in rows)
    }
    shapes = [_shape(row, keys or {}, filled) for row in rows]
    votes = Counter(names for names in (candidates(*shape) for shape in shapes) if names)
    if not votes:
        raise _unknown(rows, keys or {}, frozenset(name for names, _ in shapes for name in names))
    [(fitting, _)] = votes.most_common(1)
    if len(fitting) == 1:
        return fitting[0]
    raise UserError(
        f"the rows fit several formats: {', '.join(fitting)}",
        code="format-ambiguous",
        fix=f"set {' or '.join(f'format: {name}' for name in fitting)} on this file; columns that "
        "the chosen format does not read are ignored",
    )


def _unknown(
    rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str], names: frozenset[str]
) -> UserError:
    """names: the columns of formats that the rows have."""
    columns = sorted({name for row in rows for name, value in row.items() if value is not None})
    near = sorted(
        (len(f.required - names) - len(f.required & names), len(f.required - names), name)
        for name, f in FORMATS.items()
        if f.required & names
    )[:3]
    nearest_formats = "; ".join(
        f"{name}, which also needs {', '.join(sorted(FORMATS[name].required - names))}"
        if count
        else f"{name} (to use it, set format: {name}; it is not detected because of other columns "
        "or of the names in chat turns)"
        for _, count, name in near
    )
    suggested = suggested_keys(rows, keys)
    mapping = ", ".join(f"{part}: {column}" for part, column in suggested.items())
    return UserError(
        f"no format fits the columns {listed(map(repr, columns))}"
        if columns
        else "the first rows have no values",
        code="format-unknown-columns",
        fix=(
            (f"did you mean keys: {{{mapping}}}? otherwise " if suggested else "")
            + ("" if columns else "write values into columns such as prompt and completion, or ")
            + "map your columns next to the path: {path: FILE, keys: {prompt: COLUMN, "
            "completion: COLUMN, label: COLUMN}}"
            + (f". Nearest formats: {nearest_formats}" if nearest_formats else "")
        ),
    )


def suggested_keys(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> Mapping[str, str]:
    """``keys`` that probably map the columns of these rows; empty unless a format then fits one."""
    columns = sorted({name for row in rows for name, value in row.items() if value is not None})
    suggested = dict(keys)
    for part, others in OTHER_NAMES.items():
        free = [name for name in columns if name not in suggested.values()]
        column = None if part in columns else _column_called(free, part, others.split())
        key: str = part
        if column is not None and part == "label":
            key = _rating_part(column, [row.get(column) for row in rows])
        if column is not None and key and key not in columns:
            suggested.setdefault(key, column)
    fitting = (candidates_of(row, suggested) for row in rows)
    return suggested if any(len(names) == 1 for names in fitting) else {}


def _column_called(columns: Sequence[str], part: str, others: Sequence[str]) -> str | None:
    """The column with the name of a part or another one of its names, or the only column that has
    one of them as a word, such as ``bot_reply`` and ``good_answer``.
    """
    names = [part, *others]
    cutoff = 0.95 if part == "messages" else 0.85  # a message is not a conversation
    lower = {column: column.strip().lower() for column in columns}
    exact = [c for c in columns if get_close_matches(lower[c], names, n=1, cutoff=cutoff)]
    if exact or part == "messages":
        return exact[0] if exact else None
    # the first word says which answer of a pair it is, the last one what kind of text
    place = 0 if part in ("chosen", "rejected") else -1
    words = {c: re.findall(r"[^\W_]+", lower[c]) or [""] for c in columns}
    named = [c for c in columns if words[c][place] in names]
    return named[0] if len(named) == 1 else None


def _rating_part(column: str, cells: Sequence[object]) -> Literal["label", "score", ""]:
    """What a column with the name of a label holds: labels, scores, or comments (""). Other words
    count as labels, so that they are reported.
    """
    filled = [cell for cell in cells if cell is not None and str(cell).strip()]
    numbers = [cell for cell in filled if as_number(cell) is not None]
    if filled and 2 * len(numbers) >= len(filled):
        return "label" if all(thumb(cell) is not None for cell in numbers) else "score"
    if 2 * sum(thumb(cell) is not None for cell in filled) >= max(len(filled), 1):
        return "label"
    return "" if "feedback" in column.lower() else "label"


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """The name that is spelled most similarly, quoted; empty if none is similar."""
    by_lower = {known.lower(): known for known in names}
    return [repr(by_lower[match]) for match in get_close_matches(name.lower(), by_lower, n=1)]


def did_you_mean(names: Sequence[str]) -> str:
    """The beginning of a fix; empty without names."""
    return f"did you mean {' and '.join(names)}? " if names else ""


def listed(names: Iterable[str]) -> str:
    """The first names, with a count of the rest."""
    names = list(names)
    more = len(names) - MAX_COLUMNS
    return ", ".join(names[:MAX_COLUMNS]) + (f" and {more:,} more" if more > 0 else "")


def _shape(
    row: Mapping[str, Any], keys: Mapping[str, str], filled: Mapping[str, str]
) -> tuple[frozenset[str], Dialect | None]:
    """The columns of a row, by the format's names, and the dialect of its chat turns (None: it has
    none).

    filled: the label and those of ``keys`` whose column other rows fill, so that this row may leave
    it empty.
    """
    mapped = {part for column in keys.values() for part in (column, column.partition(".")[0])}
    names = {key for key, column in keys.items() if lookup(row, column) is not None}
    names |= {key for key, column in filled.items() if column in row}
    free = COLUMNS - mapped - keys.keys()
    names |= {name for name, value in row.items() if value is not None and name in free}
    names |= {name for name in NESTED & free if lookup(row, name) is not None}
    if has_failed(row, keys):
        names.add("score")
    for name in sorted((CONTENT | {"text"}) & names):
        part = lookup(row, keys.get(name, name))
        turn = part[0] if isinstance(part, list) and part else part
        dialect = dialect_of(turn) if isinstance(turn, dict) else None
        if dialect:
            return frozenset(names), dialect
    return frozenset(names), None


def candidates_of(row: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[str, ...]:
    """The formats that fit a row."""
    return candidates(*_shape(row, keys, {}))


def is_another_format(name: str, value: Mapping[str, Any], keys: Mapping[str, str]) -> str | None:
    """The format of this row if it is not ``name``; else None."""
    fitting = candidates_of(value, keys)
    return None if not fitting or name in fitting else fitting[0]


@lru_cache(maxsize=1024)
def candidates(names: frozenset[str], dialect: Dialect | None) -> tuple[str, ...]:
    """The formats that fit, without those of which another fitting format reads more columns."""
    fits = {
        name: f
        for name, f in FORMATS.items()
        if f.required <= names
        and _reads_dialect(f, dialect)
        and (f.gives != "prompt" or names & CONTENT == f.required & CONTENT)
    }

    def is_covered(name: str) -> bool:
        required, columns = fits[name].required, set(fits[name].columns)
        return any(required <= set(f.columns) and not f.required <= columns for f in fits.values())

    return tuple(name for name in fits if not is_covered(name))


def _reads_dialect(f: Format, dialect: Dialect | None) -> bool:
    """Whether the format reads turns of this dialect.

    OpenAI's and ShareGPT's turns are distinguished one by one, and read by the same formats.
    """
    return (f.dialect is COLOSSAL) is (dialect is COLOSSAL)
