"""Which format rows have: told by their columns, and by how their chat turns are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from valence.data.formats import FORMATS, Format, has_failed, lookup
from valence.data.values import COLOSSAL, Dialect, dialect_of
from valence.errors import UserError

COLUMNS = frozenset(name for f in FORMATS.values() for name in f.columns)
CONTENT = frozenset(name for f in FORMATS.values() for name in f.required) - {"text"}
"""Columns that tell what a row is. Any row may have a `text` besides."""
NESTED = frozenset(name for name in COLUMNS if "." in name)
"""Columns of formats that are inside another one."""
USUAL = ("prompt", "completion", "label", "score", "chosen", "rejected", "messages")
"""Columns that a message names where any format may be meant."""
COLUMNS_SHOWN = 20
"""Columns that a message lists."""


def detect(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str] | None = None) -> str:
    """The name of the format that most of these rows have.

    Raises UserError when none or several fit.
    """
    for ours, theirs in (keys or {}).items():
        if ours not in COLUMNS:
            is_reversed = theirs in COLUMNS and any(ours in row for row in rows)
            hint = did_you_mean(
                [f"{{{theirs}: {ours}}}"] if is_reversed else nearest(ours, sorted(COLUMNS))
            )
            raise UserError(
                f"keys: no format has a column {ours!r}",
                code="keys-unknown-column",
                fix=f"{hint}write keys as {{Valence's name: the file's name}}, with names such "
                f"as {', '.join(USUAL)}",
            )
    filled = {
        ours: theirs
        for ours, theirs in (keys or {}).items()
        if any(row.get(theirs) is not None for row in rows)
    }
    shapes = [_shape(row, keys or {}, filled) for row in rows]
    votes: Counter[tuple[str, ...]] = Counter(
        found for found in (candidates(*shape) for shape in shapes) if found
    )
    if not votes:
        found = sorted({name for row in rows for name, value in row.items() if value is not None})
        raise _unknown(found, frozenset(name for names, _ in shapes for name in names))
    [(fitting, _)] = votes.most_common(1)
    if len(fitting) == 1:
        return fitting[0]
    raise UserError(
        f"the rows fit several formats: {', '.join(fitting)}",
        code="format-ambiguous",
        fix=f"set format: {' or '.join(fitting)}; the columns that it does not read are left aside",
    )


def _unknown(found: Sequence[str], names: frozenset[str]) -> UserError:
    near = sorted(
        (len(f.required - names) - len(f.required & names), len(f.required - names), name)
        for name, f in FORMATS.items()
        if f.required & names
    )[:3]
    lacks = "; ".join(
        f"{name}, which also needs {', '.join(sorted(FORMATS[name].required - names))}"
        if count
        else f"{name}, if you name it (but other columns or the form of the chat turns speak "
        f"against it)"
        for _, count, name in near
    )
    return UserError(
        f"no format fits the columns {listed(map(repr, found)) or '(none)'}",
        code="format-unknown-columns",
        fix=(
            "map your columns next to the path: {path: FILE, keys: {prompt: question, label: "
            "verdict}}" + (f". Nearest formats: {lacks}" if lacks else "")
        ),
    )


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """The one of these names that is spelled most like another, quoted; empty if none is alike."""
    by_lower = {each.lower(): each for each in names}
    return [repr(by_lower[each]) for each in get_close_matches(name.lower(), by_lower, n=1)]


def did_you_mean(names: Sequence[str]) -> str:
    """The beginning of a fix; empty without names."""
    return f"did you mean {' and '.join(names)}? " if names else ""


def listed(names: Iterable[str]) -> str:
    """The names, cut to a readable number, with a count of the rest."""
    every = list(names)
    more = len(every) - COLUMNS_SHOWN
    return ", ".join(every[:COLUMNS_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _shape(
    row: Mapping[str, Any], keys: Mapping[str, str], filled: Mapping[str, str]
) -> tuple[frozenset[str], Dialect | None]:
    """The columns that a row has, by the format's names, and how its chat turns are written (None:
    it has none).

    filled: those of ``keys`` whose column other rows fill, so that the row has it though its own is
    empty.
    """
    taken = {part for theirs in keys.values() for part in (theirs, theirs.partition(".")[0])}
    names = {ours for ours, theirs in keys.items() if lookup(row, theirs) is not None}
    names |= {ours for ours, theirs in filled.items() if theirs in row}
    names |= {
        n
        for n, v in row.items()
        if v is not None and n in COLUMNS and n not in taken and n not in keys
    }
    names |= {n for n in NESTED if n not in keys and n not in taken and lookup(row, n) is not None}
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
    """The formats that a row fits."""
    return candidates(*_shape(row, keys, {}))


def is_another_format(name: str, value: Mapping[str, Any], keys: Mapping[str, str]) -> str | None:
    """The format that this row has when it is not ``name``."""
    fitting = candidates_of(value, keys)
    return None if not fitting or name in fitting else fitting[0]


@lru_cache(maxsize=1024)
def candidates(names: frozenset[str], dialect: Dialect | None) -> tuple[str, ...]:
    """The formats that fit, less those of which another fitting one reads more."""
    fits = {
        name: f
        for name, f in FORMATS.items()
        if f.required <= names
        and _speaks(f, dialect)
        and (f.gives != "prompt" or names & CONTENT == f.required & CONTENT)
    }

    def covered(name: str) -> bool:
        mine = fits[name]
        return any(
            mine.required <= {*f.columns} and not f.required <= {*mine.columns}
            for f in fits.values()
        )

    return tuple(name for name in fits if not covered(name))


def _speaks(f: Format, dialect: Dialect | None) -> bool:
    """Whether the format reads turns of this dialect.

    Those of OpenAI and ShareGPT are distinguished turn by turn.
    """
    return (f.dialect is COLOSSAL) is (dialect is COLOSSAL)
