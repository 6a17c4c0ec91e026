"""Write a recipe for a file of rows: the method by the kind of its rows, and the keys they need."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valence.config.load import load_recipe
from valence.data.audit import advised_weights
from valence.data.convert import CONVERSIONS
from valence.data.formats import UNDECIDED
from valence.data.importers.sources import command_name, detect_source, is_source, source_name
from valence.data.kind_names import METHOD_FOR, TEACHER_METHOD_FOR
from valence.data.kinds import KINDS
from valence.data.load import (
    DETECT_ROWS,
    DataFile,
    columns_of,
    load,
    load_split,
    recognize,
    stream,
)
from valence.data.sources import BadRow, Row, read_rows
from valence.data.split import PromptSplit
from valence.data.values import as_number, thumb
from valence.errors import UserError
from valence.files import check_path
from valence.jobs.row_job import replace_file
from valence.methods import Method, method_of
from valence.reports.verdict import rows_needed
from valence.types import Example, Judgement, Kind, plural

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model of a recipe that names no other: small enough for a laptop."""
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the prompts to hold out: the first one that holds out enough rows for a verdict."""
NEARLY = 0.75
"""Share of the rows that a verdict needs, from which on as many as possible are held out."""
SHOWN = 5
"""Values of a column that a message shows."""
SCALE = range(-10, 11)
"""Whole numbers that a rating may be."""
PLAIN = re.compile(r"[A-Za-z_.][\w./-]*")
WORDS = frozenset(["true", "false", "yes", "no", "on", "off", "y", "n", "null"])
"""Words that YAML 1.1 does not read as text."""

PURPOSES = {
    "kto": "learns from answers that were rated one at a time",
    "dpo": "learns from pairs of a better and a worse answer",
    "sft": "imitates the answers",
    "grpo": "learns from several scored answers to a prompt",
    "pointwise": "trains a reward model, which scores answers",
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What was seen in a file of rows.

    counts: rows by what they are, such as rated answers. bad: rows that cannot be used. others:
    rows of other kinds, which an export of a feedback tool has too.
    scores: different scores of answers that have nothing else, ascending. positions: of the prompts
    (``PromptSplit.position``).
    """

    file: DataFile
    kind: Kind
    counts: Counter[str]
    bad: Sequence[BadRow]
    scores: Sequence[float]
    threshold: float | None
    is_all_up: bool
    positions: Sequence[float]
    others: Counter[str]

    @property
    def summary(self) -> str:
        summary = f"{_listed(self.counts)}; {len(set(self.positions)):,} different prompts"
        return f"{summary}; not used: {_listed(self.others)}" if self.others else summary


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    """A recipe that was written, and what was seen in the file."""

    path: Path
    method: str
    facts: FileFacts


def write_recipe(
    file: DataFile, out: Path, *, model: str | None = None, method: str | None = None
) -> WrittenRecipe:
    """Look at a file of rows, and write a recipe that trains on it.

    Raises UserError if a file is there already, and if no recipe fits its rows.
    """
    check_output(out)
    if method in TEACHER_METHOD_FOR.values():
        raise UserError(
            f"{method} needs another model as its teacher, which a file cannot show",
            code="init-teacher",
            where="--method",
            fix="run `valence init --recipe distill`, and set method, teacher.model and data.train "
            "in the recipe",
        )
    file = _recognize(file)
    facts = look_at(file, method_of(method).kind if method else None)
    name, conversion = _choose(facts, method)
    text = "\n".join(_lines(facts, out, name, conversion, model or MODEL)) + "\n"
    replace_file(out, text)
    try:
        load_recipe(out)
    except UserError:
        out.unlink()
        raise
    return WrittenRecipe(out, name, facts)


def check_output(out: Path) -> None:
    """Raise UserError if no recipe can be written to this path, or if the file exists."""
    check_path(out)
    if out.suffix not in (".yaml", ".yml") or not out.parent.is_dir():
        raise UserError(
            "a recipe is a .yaml file in an existing folder",
            code="path-invalid-output",
            where=str(out),
            fix="choose another --out, such as recipe.yaml",
        )
    if out.exists():
        raise UserError(
            "the file already exists",
            code="path-exists",
            where=str(out),
            fix="choose another --out, or move this file away",
        )


# Look at the rows


def look_at(file: DataFile, kind: Kind | None = None) -> FileFacts:
    """Read all rows of a file that ``recognize`` returned.

    kind: of the rows to use of an export that has several kinds; by default the most frequent one.
    Raises UserError if most rows cannot be used.
    """
    examples: list[Example] = []
    bad: list[BadRow] = []
    has_feedback = kind in (None, "feedback") and _has_only_feedback(file)
    for _, example in stream(file, kind="feedback" if has_feedback else None):
        if isinstance(example, BadRow):
            bad += [] if example.code in UNDECIDED else [example]
        else:
            examples.append(example)
    if len(bad) > len(examples):  # the columns were probably not understood
        first, count = bad[0], f"{len(bad):,} of {len(bad) + len(examples):,} rows cannot be used"
        raise UserError(
            f"{count}; the first: {first.reason}",
            code=first.code,
            where=str(first.origin),
            fix=first.fix,
        )
    kinds = Counter[Kind](_kind(example) for example in examples)
    if not kinds:
        _refuse_empty(file)
    if len(kinds) > 1 and not is_source(file.format):
        raise UserError(
            f"the rows are of several kinds: {_listed(Counter(map(plural, kinds.elements())))}",
            code="kind-mismatch",
            where=file.path,
            fix="put each kind into a separate file, and write a recipe for each",
        )
    if kind is None or kind not in kinds:
        kind = kinds.most_common(1)[0][0]
    others = Counter(_described(e) for e in examples if _kind(e) != kind)
    examples = [e for e in examples if _kind(e) == kind]
    scores = [e.score for e in examples if isinstance(e, Judgement) and e.score is not None]
    labels = [e.label for e in examples if isinstance(e, Judgement)]
    split = PromptSplit(SHARES[0])
    return FileFacts(
        file,
        kind,
        Counter(map(_described, examples)),
        bad,
        sorted(set(scores)),
        _threshold(scores) if kind == "scored" and scores else None,
        bool(labels) and all(labels),
        [split.position(example.prompt) for example in examples],
        others,
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def _recognize(file: DataFile) -> DataFile:
    """``recognize``, also of exports of feedback tools, with a command to paste where no format
    fits.
    """
    try:
        return recognize(file)
    except UserError as error:
        if file.format is None and not file.keys and (tool := detect_source(_head(file))):
            return replace(file, format=tool)
        if error.code != "format-unknown-columns":
            raise
        fix = _command_to_name_columns(file)
        raise UserError(error.message, code=error.code, where=error.where, fix=fix) from error


def _refuse_empty(file: DataFile) -> None:
    """Raise UserError with the reasons why nothing in the file can be used."""
    try:
        load([file], "judgement", on_bad_row="skip")
    except UserError as error:
        if file.format is None or not is_source(file.format):
            raise
        tool = command_name(source_name(file.format))
        command = shlex.join(["valence", "import", tool, file.path, "OTHER_FILE"])
        raise UserError(
            error.message,
            code=error.code,
            where=error.where,
            fix=f"export the conversations too; if they are in another file, run `{command} --out "
            "feedback.jsonl`, then `valence init feedback.jsonl`",
        ) from error


def _command_to_name_columns(file: DataFile) -> str:
    keys = "{prompt: COLUMN, completion: COLUMN, label: COLUMN}"
    section = f"{{path: {_text(file.path)}, keys: {keys}}}"
    return (
        f"name the columns: `valence init {shlex.quote(section)}`; instead of completion and "
        "label, pairs have chosen and rejected"
    )


def _unread_columns(file: DataFile) -> list[str]:
    """Columns with text or numbers that no part of the rows is read from."""
    read = set(columns_of(file).values())
    names = {
        name
        for row in _head(file)
        for name, value in row.items()
        if isinstance(value, str | int | float)
    }
    return sorted(names - read - {"id"})


def _head(file: DataFile) -> list[dict[str, Any]]:
    rows = read_rows(file.path, split=file.split, subset=file.subset, limit=DETECT_ROWS)
    return [row.value for row in rows if isinstance(row, Row)]


def _has_only_feedback(file: DataFile) -> bool:
    """Whether rows have feedback in words and no rating, so that not all answers are good."""
    if file.format is not None:
        return False
    columns = {name for row in _head(file) for name, value in row.items() if value is not None}
    return "feedback" in columns and columns.isdisjoint(("label", "score", "scores", "chosen"))


def _kind(example: Example) -> Kind:
    if isinstance(example, Judgement) and example.label is None:
        return "feedback" if example.feedback else "scored"
    return KINDS[type(example)]


def _described(example: Example) -> str:
    if isinstance(example, Judgement) and example.label is not None:
        return "thumbs up" if example.label else "thumbs down"
    return plural(_kind(example))


def _threshold(scores: Sequence[float]) -> float:
    """The score from which on answers are good: the one that divides the answers most evenly."""
    candidates = sorted(set(scores))[1:] or [scores[0]]
    half = len(scores) / 2
    return min(candidates, key=lambda c: (abs(sum(score >= c for score in scores) - half), -c))


# Choose a method


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Settings of the section ``data`` that turn the rows into those that the method reads.

    share: of the prompts to hold out; None if there are too few.
    """

    name: str | None
    threshold: float | None
    share: float | None


def _choose(facts: FileFacts, method: str | None) -> tuple[str, _Conversion]:
    """The method, and the first conversion with which it can read the rows."""
    table_row = method_of(method) if method else None
    unread = _unread_columns(facts.file) if facts.kind == "prompt" else []
    if unread:
        raise UserError(
            f"only prompts are read, not the columns {', '.join(map(repr, unread))}",
            code="init-prompts",
            where=facts.file.path,
            fix=_command_to_name_columns(facts.file),
        )
    if facts.kind == "prompt":
        raise UserError(
            "the rows have prompts and no answers, so that training needs a reward, which a file "
            "cannot show",
            code="init-prompts",
            where=facts.file.path,
            fix="start from a recipe with a reward (`valence init --recipe online_grpo`), or "
            "collect rated answers with `valence collect`",
        )
    if facts.kind == "demonstration" and (table_row is None or table_row.kind != "demonstration"):
        _refuse_unread_rating(facts.file)
    table_row = table_row or method_of(_usual(facts))
    problem: UserError | None = None
    for name in (None, *CONVERSIONS):
        conversion = CONVERSIONS[name] if name else None
        if conversion is not None and not conversion.serves(table_row.kind):
            continue
        threshold = None
        if conversion is not None and "threshold" in conversion.required:
            threshold = facts.threshold
        try:
            return table_row.name, _Conversion(
                name, threshold, _share(facts, table_row, name, threshold)
            )
        except UserError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _refuse_unread_rating(file: DataFile) -> None:
    """Raise UserError for a column that looks like a rating and is not read: bad answers are no
    examples to imitate.
    """
    values = _head(file)
    for column in _unread_columns(file):
        filled = (row[column] for row in values if row.get(column) is not None)
        cells = [cell for cell in filled if str(cell).strip()]
        different = sorted(set(map(str, cells)))
        numbers = [as_number(cell) for cell in cells]
        is_scale = all(number in SCALE for number in numbers)
        are_thumbs = all(thumb(cell) is not None for cell in cells)
        is_rating = is_scale or are_thumbs or len(different) == 2
        if not is_rating or not 1 < len(different) < len(cells):
            continue
        part = "score" if is_scale and not are_thumbs else "label"
        names = {name for row in values for name in row}
        keys = {key: name for key, name in columns_of(file).items() if name in names}
        keys[part] = column
        section = f"{{path: {_text(file.path)}, keys: {_mapping(keys)}}}"
        raise UserError(
            f"the column {column!r} looks like a rating ({', '.join(different[:SHOWN])}), but is "
            "not read",
            code="init-rating",
            where=file.path,
            fix=f"if it is a rating, run `valence init {shlex.quote(section)}`; if all answers are "
            "to be imitated, add --method sft",
        )


def _usual(facts: FileFacts) -> str:
    """The method for rows of this kind."""
    if facts.is_all_up:
        return METHOD_FOR["demonstration"]  # without thumbs down there is nothing to compare with
    if facts.threshold is not None:
        return METHOD_FOR["judgement"]
    return METHOD_FOR[facts.kind]


def _share(
    facts: FileFacts, method: Method, conversion: str | None, threshold: float | None
) -> float | None:
    """The share of the prompts to hold out with which the rows can be read.

    Raises UserError if the method cannot read the rows with this conversion.
    """
    options: dict[str, Any] = {"convert": conversion, "threshold": threshold}
    options["on_bad_row"] = "skip" if facts.bad else "stop"
    load([facts.file], method.kind, **options)
    needed = _rows_needed(facts, method)
    num_rows = facts.counts.total()
    enough = [share for share in SHARES if share * num_rows >= needed]
    if not enough and SHARES[-1] * num_rows >= NEARLY * needed:
        enough = [SHARES[-1]]
    for wanted in (*enough, *SHARES):
        share = PromptSplit(wanted).nearest_share(facts.positions)
        with suppress(UserError):  # for example, no prompt on one side has a pair
            if share is not None:
                split = PromptSplit(share)
                load_split([facts.file], method.kind, split, where="data.eval", **options)
                return share
    return None


def _rows_needed(facts: FileFacts, method: Method) -> int:
    """Held-out rows that a verdict needs."""
    if method.kind == "preference":
        return rows_needed(None)
    if method.kind != "judgement":
        return 0
    ups = facts.counts["thumbs up"] / facts.counts.total()
    return rows_needed(ups if 0 < ups < 1 else 0.5)


# The text


def _lines(
    facts: FileFacts, out: Path, method: str, conversion: _Conversion, model: str
) -> Iterator[str]:
    file, is_reward_model = facts.file, method_of(method).is_reward_model
    yield f"# Written by `valence init`. {facts.file.path}: {facts.summary}."
    yield f"# `valence check {out.name} --all` lists every other setting with its default."
    purpose = f"{PURPOSES[method]}; " if method in PURPOSES else ""
    yield f"method: {method}  # {purpose}`valence docs` lists all methods"
    yield "model:"
    yield f"  name: {_text(model)}  # the id of a model on the Hugging Face hub, or a folder"
    yield "  lora: {rank: 16}  # train a small adapter instead of all weights: saves memory"
    yield "data:"
    path = os.path.relpath(file.path, out.parent) if _is_local(file) else file.path
    section = {"path": path} | {
        name: value
        for name, value in (("format", file.format), ("split", file.split), ("subset", file.subset))
        if value
    }
    entries = [f"{name}: {_text(value)}" for name, value in section.items()]
    if file.keys:
        entries.append(f"keys: {_mapping(file.keys)}")
    yield f"  train: {{{', '.join(entries)}}}"
    if conversion.name is not None:
        yield f"  convert: {conversion.name}  # {CONVERSIONS[conversion.name].description}"
    if conversion.threshold is not None:
        lowest, highest = facts.scores[0], facts.scores[-1]
        yield (
            f"  threshold: {conversion.threshold:g}  # this score or more is good; the scores go "
            f"from {lowest:g} to {highest:g}"
        )
    if facts.bad:
        first = facts.bad[0]
        yield (
            f"  on_bad_row: skip  # rows that cannot be used: {len(facts.bad):,}, the first is "
            f"{first.origin}"
        )
    yield from _evaluation_lines(conversion.share)
    thumbs = [facts.counts[f"thumbs {name}"] for name in ("up", "down")]
    if method_of(method).loss.balances is not None and advised_weights(*thumbs).change:
        yield "loss:"
        yield "  class_weights: auto  # the smaller class counts as much as the larger one"
    yield "run:"
    yield f"  dir: runs/{'first' if out.stem == 'recipe' else out.stem}"
    if conversion.share is not None and not is_reward_model:
        yield "  samples: {prompts: 4}  # answers before and after training, for the report"
    if conversion.share is not None and method == "hindsight":
        yield "  keep_best: {metric: eval/signal/size}  # the policy nearest to its teacher"


def _evaluation_lines(share: float | None) -> Iterator[str]:
    if share is None:
        yield "  # eval: 0.1  # holds out a tenth of the prompts, once there are enough of them"
        return
    part = "a tenth" if share == SHARES[0] else f"{share:.0%}"
    yield f"  eval: {share:g}  # evaluate on about {part} of the prompts, and train on the others"


def _mapping(names: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{_text(part)}: {_text(name)}' for part, name in names.items())}}}"


def _is_local(file: DataFile) -> bool:
    return Path(file.path).exists() and not Path(file.path).is_absolute()


def _text(text: str) -> str:
    """A text in a flow mapping of YAML."""
    is_plain = PLAIN.fullmatch(text) and text.lower() not in WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


__all__ = ["MODEL", "FileFacts", "WrittenRecipe", "look_at", "write_recipe"]
