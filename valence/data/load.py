"""From the files of a recipe to Examples of one kind, with an account of every row."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from valence.data import values
from valence.data.convert import Conversion
from valence.data.detect import (
    COLUMNS,
    RATING,
    did_you_mean,
    is_another_format,
    is_rated,
    listed,
    nearest,
    rating_part,
    resolve,
    suggested_keys,
)
from valence.data.example_store import ExampleStore
from valence.data.format_table import FORMATS
from valence.data.formats import (
    LEFT_OUT,
    TURNS_DIFFER,
    TURNS_DIFFER_FIX,
    UNDECIDED,
    UNRATED,
    columns_read,
    lookup,
    read_example,
)
from valence.data.importers.records import SKIP_REASONS, ReadOptions
from valence.data.importers.rows import KIND_OF, ROW_KINDS, ImportedRows, import_votes
from valence.data.importers.sources import (
    PARTS,
    SOURCES,
    command_name,
    detect_source,
    is_source,
    read_votes,
    source_name,
)
from valence.data.kinds import conversion_to, imported_examples, of_kind
from valence.data.objects import Rows, paths_from, rows_from
from valence.data.sources import BadRow, Row, read_rows
from valence.data.split import PromptSplit
from valence.errors import UserError
from valence.types import Content, Example, Judgement, Kind, Origin, Preference, Ranking
from valence.user_code.attempt import Raised, attempt
from valence.user_code.load import definition_place, describe_raised
from valence.user_code.plugins import is_plugin, load_plugin, plugin_paths

DETECT_ROWS = 20
"""Rows at the start of a file that its format is detected from."""
KNOWN = COLUMNS.union(*(others for f in FORMATS.values() for others in f.others.values()))
"""Names of columns that formats read, with their other names."""
ROWS_COUNTED = 100_000
"""Rows after a bad one in which others with the same problem are counted."""
HELD_OUT = "its prompt is held out by data.eval"
"""Why a row of `mix` is left out."""

OnBadRow = Literal["stop", "skip"]
R = TypeVar("R")


class Source(Protocol):
    """A file to read, as a recipe describes it."""

    @property
    def path(self) -> str: ...
    @property
    def split(self) -> str | None: ...
    @property
    def subset(self) -> str | None: ...
    @property
    def format(self) -> str | None: ...
    @property
    def keys(self) -> Mapping[str, str]: ...
    @property
    def weight(self) -> float: ...
    @property
    def limit(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to read, named by a program."""

    path: str
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    weight: float = 1.0
    limit: int | None = None

    @classmethod
    def of(cls, source: Source) -> DataFile:
        """The file of a section of a recipe, without its weight and limit."""
        return cls(source.path, source.split, source.subset, source.format, source.keys)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Rows that a program holds, in place of a file.

    Their origin is ``path`` and their number; Examples keep their own.
    """

    rows: Rows | Sequence[Row]
    path: str = "rows in memory"
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    weight: float = 1.0
    limit: int | None = None

    def read(self, limit: int | None) -> Iterator[Row | BadRow | Example]:
        for number, value in enumerate(islice(rows_from(self.rows), limit), 1):
            origin = Origin(self.path, number)
            if isinstance(value, Mapping):
                yield Row(dict(value), origin)
            elif isinstance(value, Example | Row):
                yield value
            else:
                yield BadRow(
                    origin,
                    f"the row is a {type(value).__name__}, not a dictionary",
                    "pass rows as dictionaries or Examples",
                    "row-not-an-object",
                )


def sources_from(rows: object) -> Sequence[Source]:
    """What a program gives as its rows: sources as they are, paths as files, anything else as rows
    in memory.
    """
    if isinstance(rows, list | tuple) and all(
        hasattr(row, "path") and hasattr(row, "keys") for row in rows
    ):
        return rows
    paths = paths_from(rows)
    return [InMemory(rows_from(rows))] if paths is None else [DataFile(path) for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What became of one file's rows: each was used, or bad, or left unused by a conversion.

    path: the file, or ``owner/name[split]``. format: None when no row could be read. rows: how many
    were read.
    examples: how many Examples have their origin here. unused: reason -> rows.
    ignored_columns: column that the format does not read -> rows that have it.
    notes: how the file was read, where that had to be decided.
    """

    path: str
    format: str | None
    rows: int
    bad: int
    examples: int = 0
    unused: Mapping[str, int] = field(default_factory=dict[str, int])
    ignored_columns: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Examples of one kind in the order of the files, and the account of them.

    ``unused``: rows that a conversion made nothing of, each with the reason.
    """

    examples: ExampleStore
    files: tuple[File, ...]
    bad: tuple[BadRow, ...]
    unused: tuple[tuple[Origin, str], ...] = ()

    @property
    def sources(self) -> Sequence[str]:
        """The file of each Example."""
        return self.examples.sources

    @property
    def ignored_columns(self) -> dict[str, int]:
        """Column that no format read -> rows that have it, over all files."""
        return dict(sum((Counter(f.ignored_columns) for f in self.files), Counter[str]()))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all files before any conversion.

    skipped: votes of an export without a row, and rows left out, each with the reason.
    """

    examples: ExampleStore
    files: Sequence[File]
    bad: Sequence[BadRow]
    skipped: Sequence[tuple[Origin, str]]


def load(
    sources: Sequence[Source],
    kind: Kind,
    *,
    convert: str | None = None,
    threshold: float | None = None,
    top_n: int = 1,
    mask_truncated: bool = True,
    limit: int | None = None,
    on_bad_row: OnBadRow = "stop",
    leave_out: Callable[[Content], bool] | None = None,
) -> Loaded:
    """The Examples of these files, all of the kind asked for.

    A file's weight multiplies the weight of its rows. Of the kind ``scored`` are judgements that
    all have a label, or all a score, or all attributes.

    ``limit``: rows read in all, before any conversion. ``convert`` turns rows of another kind into
    ``kind``, and puts them after those that are of that kind already; ``top_n`` and
    ``mask_truncated`` are for best_to_demonstrations. ``leave_out``: rows with such a prompt are
    not used.

    Raises UserError at the first row that cannot be used, unless ``on_bad_row`` is "skip"; when
    rows are of another kind than asked for; and when nothing remains.
    """
    conversion = conversion_to(kind, convert, threshold, top_n, mask_truncated)
    rows = _read_all(sources, kind, conversion, limit, on_bad_row)
    if leave_out is not None:
        used, others = _divide(rows, (leave_out(e.prompt) for e in rows.examples))
        left_out = [(example.origin, HELD_OUT) for example in others.examples]
        rows = replace(used, skipped=[*used.skipped, *left_out])
    return _account(rows, kind, conversion, threshold)


def load_split(
    sources: Sequence[Source],
    kind: Kind,
    split: PromptSplit,
    *,
    where: str,
    convert: str | None = None,
    threshold: float | None = None,
    top_n: int = 1,
    mask_truncated: bool = True,
    limit: int | None = None,
    on_bad_row: OnBadRow = "stop",
) -> tuple[Loaded, Loaded]:
    """The Examples to train on and those that are held out, both as ``load`` returns them.

    Bad rows are listed with those to train on. where: the setting of the split, for messages.
    """
    conversion = conversion_to(kind, convert, threshold, top_n, mask_truncated)
    rows = _read_all(sources, kind, conversion, limit, on_bad_row)
    positions = [split.position(example.prompt) for example in rows.examples]
    if positions:
        split.check(positions, where)
    parts = _divide(rows, (position < split.share for position in positions))
    train, held_out = (_account(part, kind, conversion, threshold) for part in parts)
    return train, held_out


def _read_all(
    sources: Sequence[Source],
    kind: Kind,
    conversion: Conversion | None,
    limit: int | None,
    on_bad_row: OnBadRow,
) -> _Rows:
    skipped: list[tuple[Origin, str]] = []

    def select(imported: ImportedRows) -> list[Example]:
        skipped.extend(
            (skipped_row.origin, SKIP_REASONS[skipped_row.reason])
            for skipped_row in imported.unused
        )
        located = _located(imported)
        if kind == "feedback":
            return [
                read_example(kind, row.value, row.origin)
                for row, _ in located
                if row.value.get("feedback")
            ]
        examples = [example for _, example in located]
        return imported_examples(examples, kind, conversion)

    sources = _with_exports(sources, select)
    files: list[File] = []
    examples, bad = ExampleStore(), list[BadRow]()
    for source in sources:
        left = None if limit is None else limit - sum(file.rows for file in files)
        files += _read(source, kind, left, on_bad_row, examples, bad, skipped)
    twice = [path for path, count in Counter(f.path for f in files).items() if count > 1]
    if twice:
        raise UserError(
            "this file is listed twice",
            code="file-listed-twice",
            where=twice[0],
            fix="list it once; if its rows should count twice, set weight: 2 on it",
        )
    return _Rows(examples, files, bad, skipped)


def _divide(rows: _Rows, sides: Iterable[bool]) -> tuple[_Rows, _Rows]:
    """The rows to train on and those to hold out. sides: whether each example is held out.

    Rows without an example stay with those to train on.
    """
    train, held_out = ExampleStore(), ExampleStore()
    for example, is_held_out in zip(rows.examples, sides, strict=True):
        (held_out if is_held_out else train).append(example)
    counts = Counter(held_out.sources)
    remaining = [replace(file, rows=file.rows - counts[file.path]) for file in rows.files]
    others = [
        File(path=file.path, format=file.format, rows=counts[file.path], bad=0)
        for file in rows.files
        if counts[file.path]
    ]
    return replace(rows, examples=train, files=remaining), _Rows(held_out, others, (), ())


def _account(
    rows: _Rows, kind: Kind, conversion: Conversion | None, threshold: float | None
) -> Loaded:
    """The rows as examples of a kind, and what became of each file's rows."""
    files, bad, skipped = rows.files, rows.bad, rows.skipped
    examples, unused = of_kind(rows.examples, kind, conversion, threshold)
    left_out = (*((e.origin, str(why)) for e, why in unused), *skipped)
    if not examples:
        num_rows = sum(f.rows for f in files) + len(skipped)
        raise _nothing_left(num_rows, files, bad, left_out, is_converted=conversion is not None)
    num_examples = Counter(examples.sources)
    num_skipped = Counter(origin.path for origin, _ in skipped)
    return Loaded(
        examples=examples,
        bad=tuple(bad),
        unused=left_out,
        files=tuple(
            replace(
                f,
                rows=f.rows + num_skipped[f.path],
                examples=num_examples[f.path],
                unused=dict(Counter(why for origin, why in left_out if origin.path == f.path)),
            )
            for f in files
        ),
    )


# One file


def read_sources(
    sources: Sequence[Source], limit: int | None = None
) -> Iterator[Row | BadRow | Example]:
    """The rows of these files as they are read, before anything is made of them."""
    sources = _with_exports(sources, lambda imported: [row for row, _ in _located(imported)])
    return islice(chain.from_iterable(_rows(source, source.limit) for source in sources), limit)


def stream(
    source: Source, *others: Source, kind: Kind | None = None
) -> Iterator[tuple[Row | BadRow, Example | BadRow]]:
    """Each row of a file with the Example of whatever kind that it holds, or why it holds none,
    read when it is asked for.

    others: further files of an export, see ``read_together``. kind: what the method reads, if it is
    known. Of the export of a feedback tool, the
    rows that are made of its votes. Raises UserError where the file as a whole is at fault; when
    ``keys`` name a column of no row, at its end.
    """
    if is_source(source.format):
        for row, example in islice(_located(_read_export([source, *others])), source.limit):
            yield row, _weighted(example, source.weight)
        return
    head, rest = _head(_rows(source, source.limit), "skip")
    layout = _layout(source, [row.value for row in head if isinstance(row, Row)], kind)
    absent, present = set(source.keys.values()), set[str]()
    for row in chain(head, rest):
        if isinstance(row, Row) and layout.format:
            present |= row.value.keys()
            absent = {
                path for path in absent if path not in row.value and lookup(row.value, path) is None
            }
            yield row, _example(row, layout)
        elif isinstance(row, BadRow):
            yield row, row
    if absent and source.limit is None:
        raise _no_such_columns(source.path, sorted(absent), present)


def recognize(file: DataFile) -> DataFile:
    """The file, with ``keys`` for columns that have other names than those of a format.

    Raises UserError where the file as a whole is at fault, or if no format fits.
    """
    if file.format is not None or file.keys:
        return file
    head, _ = _head(_rows(file, None), "skip")
    values = [row.value for row in head if isinstance(row, Row)]
    keys = suggested_keys(values, {})
    try:
        layout = _layout(file, values)
    except UserError as error:
        unread = {name for row in values for name in row if isinstance(row[name], bool)}
        is_rated = not {"label", "score", "chosen"}.isdisjoint(keys)
        if error.code != "format-unknown-columns" or not keys or (unread and not is_rated):
            raise  # a flag may be a rating: bad answers are not examples to imitate
        return replace(file, keys=keys)
    # a part under another name: answers that were rated bad are not examples to imitate
    gives = FORMATS[layout.format].gives if layout.format in FORMATS else None
    parts = {"demonstration": {"label", "score"}, "prompt": {"completion", "chosen"}}
    is_partial = gives in parts and not keys.keys().isdisjoint(parts[gives])
    return replace(file, keys=keys) if is_partial else file


def columns_of(source: Source) -> dict[str, str]:
    """The column of a file that holds each part of its rows.

    Raises UserError where the file as a whole is at fault.
    """
    if is_source(source.format):
        return {part: part for kind in KIND_OF.values() for part in columns_read(kind, {})}
    head, _ = _head(_rows(source, source.limit), "skip")
    layout = _layout(source, [row.value for row in head if isinstance(row, Row)])
    return columns_read(layout.format, layout.keys) if layout.format in FORMATS else {}


def fitting_mapping(
    file: Source, others: Iterable[Source]
) -> tuple[str | None, dict[str, str]] | None:
    """The format and the keys of the first of other files' sections that fit the columns of this
    file.

    Keys of columns that the file does not have are left out. None when none fit, or when the file
    cannot be read.
    """
    try:
        rows = read_rows(file.path, split=file.split, subset=file.subset, limit=DETECT_ROWS)
        head = [row.value for row in rows if isinstance(row, Row)]
    except UserError:
        return None
    for other in others:
        keys = {ours: theirs for ours, theirs in other.keys.items() if _has_column(head, theirs)}
        name = file.format or other.format
        if (keys or other.format) and _fits(head, name, keys):
            return name, keys
    return None


def _fits(head: Sequence[Mapping[str, object]], name: str | None, keys: Mapping[str, str]) -> bool:
    """Whether rows have all columns that a format needs; without a name, those of any format.

    Of an export of a feedback tool, whether it is recognized as one of that tool.
    """
    if name and is_source(name):
        return detect_source(head) == source_name(name)
    try:
        name, keys = (name, keys) if name else resolve(head, keys)
        columns_read(name, keys)
    except UserError:
        return False
    return all(_has_column(head, keys.get(column, column)) for column in FORMATS[name].required)


def _has_column(head: Sequence[Mapping[str, object]], path: str) -> bool:
    return any(lookup(value, path) is not None for value in head)


def _with_exports(
    sources: Sequence[Source], select: Callable[[ImportedRows], list[Example] | list[Row]]
) -> list[Source]:
    """The sources, with rows in memory in place of exports of feedback tools."""
    return [
        InMemory(
            select(_read_export(group)),
            path=group[0].path,
            format=source_name(group[0].format),
            weight=group[0].weight,
            limit=group[0].limit,
        )
        if group[0].format and is_source(group[0].format)
        else group[0]
        for group in read_together(sources)
    ]


def read_together(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources, with exports of feedback tools that are read together in one list.

    These differ in nothing but their path: some tools write the votes and the conversations into
    different files.
    """
    groups: dict[tuple[object, ...], list[Source]] = {}
    for number, source in enumerate(sources):
        settings = (source.format, source.weight, source.limit, *sorted(source.keys.items()))
        groups.setdefault(settings if is_source(source.format) else (number,), []).append(source)
    return list(groups.values())


def _read_export(sources: Sequence[Source]) -> ImportedRows:
    """The rows that are made of the votes in an export. Raises UserError as its reader does."""
    first = sources[0]
    if refused := [name for name in ("split", "subset") if getattr(first, name) is not None]:
        raise UserError(
            f"{' and '.join(refused)} cannot be applied to the export of a feedback tool: only "
            "data sets of the hub have splits and subsets",
            code="split-not-a-hub-dataset",
            where=first.path,
            fix=f"remove {' and '.join(refused)}",
        )
    if unknown := [part for part in first.keys if part not in PARTS]:
        raise UserError(
            f"keys of an export of a feedback tool cannot contain {', '.join(map(repr, unknown))}",
            code="keys-unknown-column",
            where=first.path,
            fix=f"use only these names in keys: {', '.join(PARTS)}",
        )
    options = ReadOptions(paths=dict(first.keys))
    return import_votes(read_votes(first.format or "", [s.path for s in sources], options))


def _located(imported: ImportedRows) -> Iterator[tuple[Row, Example]]:
    """All rows that votes made, each with its place and its Example."""
    for kind in ROW_KINDS:
        for value, example in zip(imported.rows[kind], imported.examples[kind], strict=True):
            yield Row(value, example.origin), example


def _rows(
    source: Source, limit: int | None, notes: list[str] | None = None
) -> Iterator[Row | BadRow | Example]:
    """The rows of a source; those of a plugin's format as it writes them."""
    rows: Iterator[Row | BadRow | Example] = (
        source.read(limit)
        if isinstance(source, InMemory)
        else read_rows(
            source.path, split=source.split, subset=source.subset, limit=limit, notes=notes
        )
    )
    if source.format in FORMATS or not _uses_plugin(source):
        return rows
    convert = load_plugin("formats", source.format or "", source.path)
    return (_converted(row, convert) if isinstance(row, Row) else row for row in rows)


def _uses_plugin(source: Source) -> bool:
    name = source.format
    return name is not None and is_plugin("formats", name) and not is_source(name)


def _converted(row: Row, convert: Callable[[dict[str, Any]], Any]) -> Row | BadRow:
    """The row that a plugin makes of another one. One that it returns None for is left out."""
    value = attempt(lambda: convert(dict(row.value)))
    place = definition_place(convert)
    if isinstance(value, Raised):
        reason = f"the function of the format {describe_raised(value.error, __file__)}"
        return BadRow(row.origin, reason, "fix the row, or the function", "row-format-failed")
    if value is None:
        return BadRow(row.origin, "the function of the format leaves it out", "", LEFT_OUT)
    if not isinstance(value, Mapping):
        reason = f"the function of the format returned {type(value).__name__} ({place})"
        fix = "return a dictionary with the columns of a format, or None to leave the row out"
        return BadRow(row.origin, reason, fix, "row-format-failed")
    columns = dict(cast(Mapping[str, Any], value))
    for name in columns.keys() - KNOWN:
        close = difflib.get_close_matches(name, COLUMNS - columns.keys(), 1, 0.8)
        if close:
            reason = f"the function of the format returned the unknown column {name!r} ({place})"
            fix = f"did you mean {close[0]!r}? otherwise put it into the column info"
            return BadRow(row.origin, reason, fix, "row-format-failed")
    return Row(columns, row.origin)


def _read(
    source: Source,
    kind: Kind,
    limit: int | None,
    on_bad_row: OnBadRow,
    examples: ExampleStore,
    bad: list[BadRow],
    skipped: list[tuple[Origin, str]],
) -> list[File]:
    """Append the Examples, the bad rows and the ones left out of a file to those of the files
    before it.
    """
    first, first_bad = len(examples), len(bad)
    limit = min((n for n in (source.limit, limit) if n is not None), default=None)
    if isinstance(source, InMemory) and isinstance(source.rows, Iterator):
        source = replace(source, rows=list(islice(source.rows, limit)))  # rows may be read twice
    notes: list[str] = []
    head, rest = _head(_rows(source, limit, notes), on_bad_row)
    layout = _layout(source, [row.value for row in head if isinstance(row, Row)], kind)
    columns = columns_read(layout.format, layout.keys) if layout.format in FORMATS else {}
    zeros = _Zeros(columns.get("label"))
    counts: Counter[str] = Counter()
    absent = list(source.keys.values())
    # rows by file: Examples in memory name the one they came from
    path, rows = (
        str(source.path),
        Counter[str](),
    )
    unread = chain(head, rest)
    for row in unread:
        rows[row.origin.path] += 1
        if isinstance(row, Row) and layout.format:
            path = row.origin.path
            counts.update(column for column, value in row.value.items() if value is not None)
            absent = (
                [theirs for theirs in absent if lookup(row.value, theirs) is None]
                if absent
                else absent
            )
            zeros.add(row)
            row = _example(row, layout)
        elif isinstance(row, Example):
            row = _check_and_weight(row, source)
        if isinstance(row, BadRow) and row.code in UNDECIDED:
            rows[row.origin.path] -= 1  # those left out are added to the account of the file
            skipped.append((row.origin, row.reason))
        elif isinstance(row, BadRow):
            if on_bad_row == "stop":
                raise UserError(
                    row.reason + _similar_rows(row.code, unread, layout),
                    code=row.code,
                    where=str(row.origin),
                    fix=f"{row.fix}; or set data.on_bad_row: skip, which counts and lists such "
                    f"rows",
                )
            bad.append(row)
        elif not isinstance(row, Row):
            examples.append(row)
    if absent and len(examples) > first and limit is None:
        raise _no_such_columns(path, absent, counts)
    zeros.check()
    # a Prompt's info has its other columns
    carried = layout.format in FORMATS and FORMATS[layout.format].gives == "prompt"
    known = {part for column in columns.values() for part in (column, column.partition(".")[0])}
    ignored = {} if carried else {column: n for column, n in counts.items() if column not in known}
    refused = Counter(row.origin.path for row in bad[first_bad:])
    notes += layout.notes(examples[i] for i in range(first, len(examples)))
    return [
        File(
            path=p, format=layout.format, rows=n, bad=refused[p],
            ignored_columns=ignored if p == path else {}, notes=tuple(notes) if p == path else (),
        )
        for p, n in (rows or {path: 0}).items()
    ]  # fmt: skip


def _similar_rows(code: str, rows: Iterable[Row | BadRow | Example], layout: _Layout) -> str:
    """How many of the rows after a bad row have the same problem; empty if none has."""
    num_rows = count = 0
    with suppress(UserError):  # a problem of the file as a whole comes after the bad row
        for row in islice(rows, ROWS_COUNTED):
            num_rows += 1
            if isinstance(row, Row) and layout.format:
                row = _example(row, layout)
            count += isinstance(row, BadRow) and row.code == code
    return f", as in {count:,} of the next {num_rows:,} rows" if count else ""


def _head(rows: Iterator[R], on_bad_row: OnBadRow) -> tuple[list[R], Iterator[R]]:
    """The first rows, of which at least one is readable if any is, and the others.

    Examples have no format to detect.
    """
    head: list[R] = []
    readable = 0
    for row in rows:
        head.append(row)
        readable += isinstance(row, Row)
        is_bad = isinstance(row, BadRow) and row.code not in UNDECIDED
        if readable == DETECT_ROWS or (is_bad and on_bad_row == "stop"):
            break
    return head, rows


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the rows of a file are read.

    ``rating``: the part that the column ``rating`` holds, where that was decided here.
    """

    format: str | None
    keys: Mapping[str, str]
    weight: float
    is_named: bool
    rating: Literal["label", "score"] | None = None
    kind: Kind | None = None

    def notes(self, examples: Iterable[Example]) -> list[str]:
        """What to say in the audit about the rating of these examples."""
        if self.rating is None:
            return []
        judged = [(e.label, e.score) for e in examples if isinstance(e, Judgement)]
        if self.rating == "label":
            up = sum(label is True for label, _ in judged)
            return [f"{RATING} read as thumbs: {up:,} up, {len(judged) - up:,} down"]
        scores = [score for _, score in judged if score is not None]
        if scores:
            return [f"{RATING} read as scores from {min(scores):g} to {max(scores):g}"]
        return []


@dataclass(slots=True)
class _Zeros:
    """Find labels of 0 in a column that also has -1: they may mean that nobody voted."""

    column: str | None
    zero: Origin | None = None
    minus: Origin | None = None

    def add(self, row: Row) -> None:
        number = values.as_number(lookup(row.value, self.column)) if self.column else None
        if number == 0 and self.zero is None:
            self.zero = row.origin
        elif number == -1 and self.minus is None:
            self.minus = row.origin

    def check(self) -> None:
        """Raises UserError when there are both."""
        if self.zero and self.minus:
            raise UserError(
                f"{self.column} is 0 here and -1 at {self.minus}, so it is unclear whether 0 means "
                "thumbs down or no rating",
                code="label-zero-ambiguous",
                where=str(self.zero),
                fix="write the labels as true and false, and remove rows without a rating",
            )


def _layout(
    source: Source, head: Sequence[Mapping[str, object]], kind: Kind | None = None
) -> _Layout:
    """The format of a file, and the columns of its parts.

    kind: what the method reads, if it is known.

    Of a file with ratings all rows are read to decide what these are.
    """
    is_export = is_source(source.format) and not head  # whose rows are Examples already
    name = None if _uses_plugin(source) else source.format
    if name is not None and name not in FORMATS and not is_export:
        names = (*FORMATS, *SOURCES, *plugin_paths("formats"))
        near = difflib.get_close_matches(name, names, n=1)
        raise UserError(
            f"there is no format {name!r}",
            code="format-unknown",
            where=source.path,
            fix=f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}",
        )
    keys, named, rating = source.keys, name is not None, None
    if not head:
        return _Layout(name, keys, source.weight, named)
    try:
        if not named and any(is_rated(value, keys) for value in head):
            as_label = {**keys, "label": RATING}
            if "label" in FORMATS[resolve(head, as_label)[0]].required:
                ratings = (
                    row.value.get(RATING) for row in _rows(source, None) if isinstance(row, Row)
                )
                rating = rating_part(ratings, source.path)
                keys = as_label if rating == "label" else {**keys, "score": RATING}
        name, keys = (name, keys) if name else resolve(head, keys, kind)
        columns_read(name, keys)
    except UserError as error:
        absent = [
            theirs
            for theirs in source.keys.values()
            if all(theirs not in value and lookup(value, theirs) is None for value in head)
        ]
        if absent and COLUMNS.issuperset(source.keys):
            raise _no_such_columns(
                source.path, absent, (name for value in head for name in value)
            ) from error
        is_unknown = error.code == "format-unknown-columns"
        export, fix = detect_source(head) if is_unknown else None, error.fix
        if export:
            fix = (
                f"this looks like an export of {command_name(export)}: set format: {export} on "
                f"this file, or run `valence import {command_name(export)} {source.path}`"
            )
        elif is_unknown and Path(source.path.removesuffix(".gz")).suffix in (".csv", ".tsv"):
            fix = f"{fix}. If the first line is not a header, add one"
        raise UserError(
            error.message, code=error.code, where=error.where or source.path, fix=fix
        ) from error
    return _Layout(name, keys, source.weight, named, rating, kind)


def _no_such_columns(path: str, absent: Sequence[str], columns: Iterable[str]) -> UserError:
    known = sorted(set(columns))
    hint = did_you_mean([near for column in absent for near in nearest(column, known)])
    return UserError(
        f"keys: no row has a column {' or '.join(map(repr, absent))}",
        code="keys-missing-column",
        where=path,
        fix=f"{hint or 'correct the name: '}the file has the columns {listed(known)}",
    )


def _example(row: Row, layout: _Layout) -> Example | BadRow:
    assert layout.format is not None
    other = (
        None
        if layout.is_named
        else is_another_format(layout.format, row.value, layout.keys, layout.kind)
    )
    try:
        example = read_example(layout.format, row.value, row.origin, layout.keys)
    except UserError as error:
        hint = (
            f" (the row looks like the format {other})"
            if other and error.code not in ("row-rating-missing", UNRATED)
            else ""
        )
        return BadRow(
            row.origin,
            error.message + hint,
            error.fix or "correct or remove the row",
            error.code,
        )
    if other is not None:
        return BadRow(
            row.origin,
            f"the row has the format {other}, but the first rows of the file have the format "
            f"{layout.format}",
            f"put such rows into a separate file, or set format: {layout.format} on this file to "
            "read all rows in this format",
            "row-format-differs",
        )
    if layout.rating is None and not layout.is_named and is_rated(row.value, layout.keys):
        return BadRow(
            row.origin,
            f"the row has a {RATING}, but the first rows of the file have none",
            f"put rated rows into a separate file, or set format: {layout.format} on this file to "
            f"ignore the {RATING}",
            "row-format-differs",
        )
    return _weighted(example, layout.weight)


def _check_and_weight(example: Example, source: Source) -> Example | BadRow:
    """An Example that a program made, with its numbers checked as those of a file are."""
    try:
        _check_numbers(example)
    except UserError as error:
        return BadRow(
            example.origin, error.message, error.fix or "correct or remove the row", error.code
        )
    return _weighted(example, source.weight)


def _check_numbers(example: Example) -> None:
    match example:
        case Judgement(score=score, attributes=attributes):
            named = {
                name: number
                for name, number in {"score": score, **attributes}.items()
                if number is not None
            }
        case Preference(soft=soft):
            named = {"margin": example.margin}
            if soft is not None:
                values.probability(soft, "soft")
        case Ranking(scores=scores):
            named = {f"number {n} of scores": score for n, score in enumerate(scores, 1)}
            if len(scores) != len(example.completions) or len(scores) < 2:
                raise UserError(
                    f"the ranking has {len(example.completions)} completions and {len(scores)} "
                    f"scores",
                    code="row-length-mismatch",
                    fix="pass at least two completions, and one score for each",
                )
        case _:
            named = {}
    for name, number in named.items():
        values.number(number, name)


def _weighted(example: Example, weight: float) -> Example | BadRow:
    """The example with its weight multiplied by that of its file."""
    try:
        return replace(example, weight=values.weight(example.weight, "weight") * weight)
    except UserError as error:
        return BadRow(
            example.origin, error.message, error.fix or "correct or remove the row", error.code
        )


# What remains


def _nothing_left(
    num_rows: int,
    files: Sequence[File],
    bad: Sequence[BadRow],
    unused: Sequence[tuple[Origin, str]],
    *,
    is_converted: bool,
) -> UserError:
    reasons = Counter([*(row.reason for row in bad), *(why for _, why in unused)])
    why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
    where = (
        str(bad[0].origin if bad else unused[0][0])
        if bad or unused
        else ", ".join(f.path for f in files)
    )
    return UserError(
        f"none of {num_rows} rows can be used{f': {why}' if why else ''}",
        code="no-usable-rows",
        where=where or "data",
        fix=bad[0].fix
        if bad
        else TURNS_DIFFER_FIX
        if TURNS_DIFFER in reasons
        else "add rows without this problem"
        + (", or change data.convert or data.threshold" if is_converted else ""),
    )
