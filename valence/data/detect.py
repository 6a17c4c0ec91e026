"""Detect the format of rows: look their columns up in the table of formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal

from valence.data import values
from valence.data.convert import threshold_setting
from valence.data.format_table import (
    FORMATS,
    MARKS,
    SHAPES,
    Format,
    is_not_one_message,
    is_unimportant,
)
from valence.data.formats import comparison_settings, has_failed, lookup, winner_error
from valence.errors import UserError
from valence.types import Kind

TEXTS = ("prompt", "completion", "chosen", "rejected", "first", "second")
COLUMNS = frozenset(name for f in FORMATS.values() for name in f.columns)
CONTENT = frozenset(
    name
    for key, f in FORMATS.items()
    for name in f.required
    if key not in SHAPES or (f.parts[name] in TEXTS[2:] and not f.loose)
) - {"text"}
"""Columns that determine a format. Any row may also have a `text`."""
CONTENT_OR_TEXT = CONTENT | {"text"}
RATING = "rating"
OTHER_RATINGS = ("label", "score", "scores")
"""A rating is not read in a file that has one of these columns."""
SIDES = ("score_first", "score_second", "lead", "strength")
"""Parts of two compared answers whose names have the same marks as that of the first answer."""
SIZES = {"completions": 2, "scores": 2, "ranks": 2, "history": 0, "messages": 1}
"""Parts that are lists, with their smallest length."""
NESTED = frozenset(name for name in COLUMNS if "." in name)
"""Columns of formats that are nested in another column."""
OTHER_NAMES = {
    "messages": "conversation conversations chat dialog dialogue turns",
    "prompt": "question query input instruction user request problem message",
    "completion": "answer response output reply assistant generation",
    "label": "verdict thumb thumbs vote feedback liked rating helpful useful csat satisfaction "
    "resolved solved",
    "score": "reward points grade stars",
    "chosen": "preferred accepted better winner good best",
    "rejected": "dispreferred refused worse loser bad worst",
}
"""Column that a message may suggest -> names that files have for it, in lower case."""
MAX_COLUMNS = 20
"""Columns that a message lists at most."""


Match = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]
"""A format, the keys for it, and the columns that it does not read, though they may matter."""
NO_MATCH: Match = ("", (), ())


def detect(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str] | None = None) -> str:
    """The name of the format that most of these rows have. Raises UserError as ``resolve`` does."""
    return resolve(rows, keys or {})[0]


def resolve(
    rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str], kind: Kind | None = None
) -> tuple[str, Mapping[str, str]]:
    """The format that most of these rows have, and ``keys`` with the other names of its columns.

    kind: what the method reads, if it is known. Raises UserError when none or several fit.
    """
    for key, column in keys.items():
        if key not in COLUMNS:
            is_reversed = column in COLUMNS and any(key in row for row in rows)
            names = [f"{{{column}: {key}}}"] if is_reversed else nearest(key, sorted(COLUMNS))
            raise UserError(
                f"keys: no format has a column {key!r}",
                code="keys-unknown-column",
                fix=f"{did_you_mean(names)}write keys as {{the format's name: the file's name}}; "
                f"names of formats are {', '.join(OTHER_NAMES)} and others",
            )
    present = {name for row in rows for name, value in row.items() if value is not None}
    filled = {key: name for key, name in {"label": "label", **keys}.items() if name in present}
    votes = Counter(filter(None, (candidates_of(row, keys, kind, filled) for row in rows)))
    # rows without what the method reads are left out, also if most rows are such
    fitting = max(votes, key=lambda names: (_reads_kind(names, kind), votes[names]), default=())
    gives = {FORMATS[name].gives for name in fitting}
    is_partial = gives == {"prompt"} and kind != "prompt"
    is_partial |= gives == {"demonstration"} and kind not in (None, "demonstration", "prompt")
    if not fitting or is_partial:
        matches = Counter(_match_other_names(row, keys, kind) for row in rows)
        name, names, ignored = max(matches, key=lambda match: matches[match], default=NO_MATCH)
        is_sure = name and not ignored
        if is_sure and (not fitting or kind or FORMATS[name].gives != "demonstration"):
            _check_verdicts(rows, name, dict(names))
            return name, dict(names)
        is_rated = is_partial and not {"label", "score"}.isdisjoint(suggested_keys(rows, keys))
        if not fitting or is_rated or (kind and gives == {"prompt"} and _compared_fix(rows, keys)):
            raise _unknown(rows, keys, kind, dict(names), ignored)
    if len(fitting) == 1:
        row = next(row for row in rows if candidates_of(row, keys, kind, filled) == fitting)
        names = _other_names(FORMATS[fitting[0]], row, keys)
        if FORMATS[fitting[0]].gives == "preference" and "prompt" in names.keys() - keys.keys():
            with suppress(UserError):  # the prompt is in the answers: the column may differ from it
                answers = {side: row.get(side) for side in ("chosen", "rejected")}
                values.split_shared_prompt(answers, values.OPENAI)
                del names["prompt"]
        _check_verdicts(rows, fitting[0], names)
        return fitting[0], names
    raise UserError(
        f"the rows fit several formats: {', '.join(fitting)}",
        code="format-ambiguous",
        fix=f"set {' or '.join(f'format: {name}' for name in fitting)} on this file; columns that "
        "the chosen format does not read are ignored",
    )


def _reads_kind(names: Sequence[str], kind: Kind | None) -> bool:
    """Whether one of these formats reads feedback or labels, and the method needs them."""
    return kind in ("feedback", "judgement") and any(
        FORMATS[name].only == kind or "label" in FORMATS[name].required for name in names
    )


def _check_verdicts(rows: Sequence[Mapping[str, Any]], name: str, keys: Mapping[str, str]) -> None:
    """Raise UserError if numbers that may be thumbs say which of two answers is better. They are
    the numbers of the answers only if a 2 is among them, or if their column says so.
    """
    parts = {part: keys.get(column, column) for column, part in FORMATS[name].parts.items()}
    column = parts.get("winner")
    if column is None:
        return
    cells = (lookup(row, column) for row in rows)
    numbers = [cell for cell in cells if values.as_number(cell) is not None]
    if column in ("label", "preference") and numbers and 2 not in map(values.as_number, numbers):
        raise winner_error(parts, numbers)
    sides = (parts["first"], parts["second"])
    unknown = [n for n in numbers if values.verdict(n, sides, (None, None)) is None]
    if unknown:
        below_zero = [n for n in numbers if (values.as_number(n) or 0) < 0]
        raise winner_error(parts, below_zero or unknown[:1])


def _names_of(
    row: Mapping[str, Any], keys: Mapping[str, str], filled: Mapping[str, str] | None = None
) -> frozenset[str]:
    """The columns of a row, by the names that formats have for them.

    filled: the label and those of ``keys`` whose column other rows fill, so that this row may leave
    it empty.
    """
    mapped = {part for column in keys.values() for part in (column, column.partition(".")[0])}
    free = COLUMNS - mapped - keys.keys() if keys else COLUMNS
    names = {key for key, column in keys.items() if lookup(row, column) is not None}
    names |= {key for key, column in (filled or {}).items() if column in row}
    names |= {name for name, value in row.items() if value is not None and name in free}
    nested = (name for name in NESTED & free if name in row or name.partition(".")[0] in row)
    names |= {name for name in nested if lookup(row, name) is not None}
    return frozenset({*names, "score"} if has_failed(row, keys) else names)


def candidates_of(
    row: Mapping[str, Any],
    keys: Mapping[str, str],
    kind: Kind | None = None,
    filled: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The formats that fit a row by their own names of columns, without those of which another
    one reads more columns.
    """
    names = _names_of(row, keys, filled)
    cells = [lookup(row, keys.get(name, name)) for name in sorted(CONTENT_OR_TEXT & names)]
    firsts = [cell[0] if isinstance(cell, list) and cell else cell for cell in cells]
    dialects = filter(None, map(values.dialect_of, firsts))
    is_colossal = next(dialects, None) is values.COLOSSAL
    fits = {
        name: f
        for name, f in FORMATS.items()
        if f.required <= names
        and not f.loose
        and _accepts(f, row, keys, kind)
        # OpenAI's and ShareGPT's turns are distinguished one by one
        and (f.dialect is values.COLOSSAL) is is_colossal
        and ((f.gives != "prompt" and not f.only) or names & CONTENT <= f.columns.keys())
    }
    return tuple(name for name, f in fits.items() if not any(_covers(g, f) for g in fits.values()))


def _covers(f: Format, other: Format) -> bool:
    """Whether a format reads more columns of a row than another format that also fits it."""
    if f.required == other.required:
        return f.only is not None and other.only is None
    return other.required <= f.columns.keys() and not f.required <= other.columns.keys()


def _accepts(f: Format, row: Mapping[str, Any], keys: Mapping[str, str], kind: Kind | None) -> bool:
    """Whether a format is detected for methods that read this kind, and for the values of a row
    that has its columns.
    """
    if (f.only or kind) != kind or f.not_for == (kind or ""):
        return False
    return not f.test or f.test({**row, **{key: lookup(row, name) for key, name in keys.items()}})


def _match_other_names(row: Mapping[str, Any], keys: Mapping[str, str], kind: Kind | None) -> Match:
    """The format that reads most columns of a row by their other names, the keys for it, and
    columns that may change what the row means, but are not read.
    """
    matches: dict[int, Match] = {}
    for name, f in FORMATS.items():
        names = _other_names(f, row, keys)
        if (
            (f.gives == "demonstration" and kind not in (None, "demonstration"))
            or (f.gives == "prompt") != (kind == "prompt")
            or (names == keys and not f.loose)
            or any(lookup(row, names.get(column, column)) is None for column in f.required)
            or not _accepts(f, row, names, kind)
        ):
            continue
        columns = {names.get(column, column).partition(".")[0] for column in f.columns}
        read = {column for column, value in row.items() if column in columns and value is not None}
        left = [c for c in sorted(row.keys() - columns) if _matters(f, c, row[c])]
        matches.setdefault(len(read), (name, tuple(names.items()), tuple(left)))
    return matches[max(matches)] if matches else NO_MATCH


def _other_names(f: Format, row: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, str]:
    """``keys``, and the other names that columns of a format have in this row. Answers that are
    compared have names of the same place in their lists.
    """
    names, place = dict(keys), 0
    for column, others in f.others.items():
        part = f.parts[column]
        if column in keys or _can_be(part, row.get(column)):
            continue
        places = [
            i
            for i, name in enumerate(others, 1)
            if name not in names.values()
            and _can_be(part, lookup(row, name))
            and (part != "first" or _can_be(part, row.get(f.others["response_b"][i - 1])))
            and (part != "second" or i == place)
            and (part not in SIDES or i % len(MARKS) == place % len(MARKS))
        ]
        if len(places) == 1:
            [i] = places
            names[column] = others[i - 1]
            place = i if part == "first" else place
    return names


def _can_be(part: str, value: object) -> bool:
    """Whether a value can be this part of a row."""
    if part in SIZES:
        return isinstance(value, list) and len(value) >= SIZES[part]
    if part in TEXTS:
        is_turn = values.dialect_of(value) is not None
        return is_turn or (isinstance(value, str | list) and bool(value))
    if part == "score":
        return values.as_number(value) is not None
    return value is not None and (part != "label" or values.thumb(value) is not None)


def _matters(f: Format, column: str, value: object) -> bool:
    """Whether a column that a format does not read may change what its row means: texts, and values
    that may be a rating of a row without one. All columns of a prompt are kept.
    """
    if is_unimportant(column) or value is None or value == "" or f.gives == "prompt":
        return False
    is_rated = "label" in f.required or f.gives not in ("judgement", "demonstration")
    if isinstance(value, str) and values.as_number(value) is None:
        return len(value.split()) > 1 or (not is_rated and values.thumb(value) is not None)
    is_number = isinstance(value, int | float) and f.gives == "demonstration"
    return isinstance(value, list | dict) or (not is_rated and (type(value) is bool or is_number))


def _unknown(
    rows: Sequence[Mapping[str, Any]],
    keys: Mapping[str, str],
    kind: Kind | None,
    certain: Mapping[str, str],
    ignored: Sequence[str],
) -> UserError:
    """The error for rows that no format fits. certain: keys that read all of them but for the
    columns in ignored.
    """
    columns = sorted({name for row in rows for name, value in row.items() if value is not None})
    if any("text" in row and not is_not_one_message(row) for row in rows):
        return _single_messages(columns)
    names = frozenset().union(*(_names_of(row, keys) for row in rows))
    lacking = {
        name: ", ".join(sorted(f.required - names))
        for name, f in FORMATS.items()
        if f.required & names and not f.loose
    }
    near = sorted(lacking, key=lambda name: len(FORMATS[name].required - names))
    nearest_formats = "; ".join(
        f"{name}, which also needs {lacking[name]}"
        if lacking[name]
        else f"{name} (to use it, set format: {name}; its other columns or chat turns differ)"
        for name in near[:3]
    )
    suggested = suggested_keys(rows, keys)
    details = "" if suggested else f", which ignores {', '.join(ignored)}"
    suggested = suggested or certain
    flags = [name for name in columns if all(isinstance(row.get(name), bool) for row in rows)]
    if suggested and len(flags) == 1 and not {"label", "score"} & {*columns, *suggested}:
        suggested, details = {**suggested, "label": flags[0]}, ""
    numbers = map(values.as_number, _filled(rows, suggested.get("score", "")))
    scores = [number for number in numbers if number is not None]
    if scores and kind == "judgement" and "label" not in suggested:
        details += f" with data.convert: scores_to_judgements and {threshold_setting(scores)}"
    mapping = ", ".join(f"{part}: {column}" for part, column in suggested.items())
    fix = _compared_fix(rows, keys) or (
        (f"did you mean keys: {{{mapping}}}{details}? otherwise " if suggested else "")
        + ("" if columns else "write values into columns such as prompt and completion, or ")
        + "map your columns next to the path: {path: FILE, keys: {prompt: COLUMN, "
        "completion: COLUMN, label: COLUMN}}"
        + (f". Nearest formats: {nearest_formats}" if nearest_formats else "")
    )
    return UserError(
        f"no format fits the columns {listed(map(repr, columns))}"
        if columns
        else "the first rows have no values",
        code="format-unknown-columns",
        fix=fix,
    )


def _single_messages(columns: Iterable[str]) -> UserError:
    """The error for rows of which each is one message of a conversation."""
    return UserError(
        f"each row is one message of a conversation (columns {listed(columns)})",
        code="format-unknown-columns",
        fix="write all messages of a conversation into one row, as a list in a column messages; "
        "for prompts, keep only the user's first message of each conversation, and set format: "
        "text_prompt on this file; to train on the text of every row by itself, set format: "
        "plain_text",
    )


def _filled(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    """The values of a column that are not missing."""
    return [cell for row in rows if (cell := lookup(row, column)) is not None]


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The columns of a row; in place of one that holds an object, the dotted paths into it."""
    for name, value in row.items():
        is_nested = isinstance(value, dict) and values.dialect_of(value) is None
        if is_nested and "." not in name:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}"


def _compared_fix(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> str:
    """What to set for rows with two answers, from their only column that may be a verdict; empty
    for other rows.
    """
    names = _other_names(FORMATS["comparison"], rows[0], keys) if rows else {}
    first, second, prompt = (names.get(c, c) for c in ("response_a", "response_b", "prompt"))
    if not rows or not all(
        isinstance(row.get(c), str | list) for row in rows for c in (first, second)
    ):
        return ""
    parts = {"first": first, "second": second, "prompt": prompt}
    columns = {name for row in rows for name in row if not is_unimportant(name)}
    columns = {name for name in columns if values.TIES.isdisjoint(name.casefold().split("_"))}
    settings = (
        comparison_settings(parts, column, _filled(rows, column))
        for column in sorted(columns - set(parts.values()))
    )
    settings = [*filter(None, settings)]
    if len(settings) == 1:
        return settings[0]
    return (
        f"the rows have two answers: if {first} is always the better one, set keys: {{chosen: "
        f"{first}, rejected: {second}, prompt: {prompt}}}; if a column is 1 where it is and 0 "
        f"where {second} is, without ties, set format: pairwise_feedback, keys: {{output_A: "
        f"{first}, output_B: {second}, label: COLUMN, prompt: {prompt}}}; if both have a column "
        "with a score, or with 1 where it is the better one, set format: comparison_scores, keys: "
        f"{{response_a: {first}, response_b: {second}, score_a: COLUMN, score_b: COLUMN, prompt: "
        f"{prompt}}}"
    )


def suggested_keys(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> Mapping[str, str]:
    """``keys`` that probably map the columns of these rows; empty unless a format then fits one."""
    columns = sorted({path for row in rows for path in _leaves(row)})
    suggested = dict(keys)
    for part, others in OTHER_NAMES.items():
        free = [name for name in columns if name not in suggested.values()]
        column = _column_called(free, part, others.split())
        if part in columns or column is None:
            continue
        key = _rating_part(column, _filled(rows, column)) if part == "label" else part
        if key and key not in columns:
            suggested.setdefault(key, column)
    fitting = (candidates_of(row, suggested) for row in rows)
    return suggested if any(len(names) == 1 for names in fitting) else {}


def _column_called(columns: Sequence[str], part: str, others: Sequence[str]) -> str | None:
    """The column with the name of a part or another one of its names, or the only column that has
    one of them as a word, such as ``bot_reply`` and ``good_answer``.
    """
    names = [part, *others]
    cutoff = 0.95 if part == "messages" else 0.85  # a message is not a conversation
    lower = {column: column.rpartition(".")[2].strip().lower() for column in columns}
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
    numbers = [cell for cell in filled if values.as_number(cell) is not None]
    if filled and 2 * len(numbers) >= len(filled):
        return "label" if all(values.thumb(cell) is not None for cell in numbers) else "score"
    are_words = 2 * sum(values.thumb(cell) is not None for cell in filled) < max(len(filled), 1)
    return "" if are_words and "feedback" in column.lower() else "label"


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


def is_another_format(
    name: str, value: Mapping[str, Any], keys: Mapping[str, str], kind: Kind | None = None
) -> str | None:
    """The format of this row if it is not ``name``; else None."""
    fitting = () if FORMATS[name].loose else candidates_of(value, keys, kind)
    return None if not fitting or name in fitting else fitting[0]


# Ratings


def is_rated(row: Mapping[str, Any], keys: Mapping[str, str]) -> bool:
    """Whether a row is a rated answer if its rating is the label."""
    is_mapped = RATING in keys.values() or any(part in keys for part in OTHER_RATINGS)
    if row.get(RATING) is None or is_mapped or any(row.get(p) is not None for p in OTHER_RATINGS):
        return False
    as_label = {**keys, "label": RATING}
    names = candidates_of(row, as_label) or _match_other_names(row, as_label, None)[:1]
    return len(names) == 1 and names[0] in FORMATS and "label" in FORMATS[names[0]].required


def rating_part(ratings: Iterable[object], path: str) -> Literal["label", "score"]:
    """Whether the ratings of a file are labels: words, or only 1 and one of -1 and 0. Otherwise
    they are scores.

    Raises UserError if every rating is the same 0 or 1, which may be a thumb or the end of a scale.
    """
    cells = list(ratings)
    numbers = {number for value in cells if (number := values.as_number(value)) is not None}
    if any(values.as_number(value) is None and values.thumb(value) is not None for value in cells):
        return "label"
    if numbers in ({0.0}, {1.0}):
        raise UserError(
            f"every rating is {min(numbers):g}, which may be a thumb or a score on a scale",
            code="rating-ambiguous",
            where=path,
            fix=f"set keys: {{label: {RATING}}} for thumbs, or keys: {{score: {RATING}}} for a "
            "scale",
        )
    return "label" if numbers <= {-1.0, 1.0} or numbers <= {0.0, 1.0} else "score"
