"""Numbers about every answer in files of rows, written beside the rows: for looking at data, and
for cleaning it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from valence.batching.micro_batches import StepPacker
from valence.config.load import LISTS, LoadedRecipe
from valence.config.schema import Recipe, SourceSettings
from valence.data.detect import COLUMNS
from valence.data.encode import Encoder
from valence.data.load import stream
from valence.data.sources import BadRow, Row
from valence.distributed.process_group import (
    Group,
    SingleProcess,
    check_ranks_agree,
    gather_objects,
)
from valence.errors import UserError
from valence.jobs.lines import ANEW, Lines, as_line
from valence.lifecycle.scorers import CompletionScorer, Numbers, load_scorer
from valence.reports.console import Progress
from valence.runs.signals import Stop
from valence.terminal import Terminal, print_message, warn_on_stderr
from valence.trainer.prepare import prepare
from valence.trainer.targets import is_run, with_files
from valence.types import Example, Preference, Prompt, content_id
from valence.version import __version__

WINDOW = 32
"""Rows that are read, scored and written together: what is lost at most when the program is
killed.
"""
TOKENS = 8192
"""Tokens that run at once, unless something else is asked for."""
COLUMN = "valence"
"""The new column."""
NOT_FINITE = "look at the row; if it is sound, give --dtype float32"
SHOWN = 3
"""Rows without numbers that are named at the end."""

Pair = tuple[Row | BadRow, Example | BadRow]
Said = dict[str, Any]
"""What the new column says of a row: its origin, its id if it is an example, and its answers'
numbers or else an error.
"""


@dataclass
class Tally:
    """What became of the rows: ``earlier`` were in the file already; ``failed`` have an error in
    place of numbers.
    """

    rows: int = 0
    earlier: int = 0
    failed: int = 0
    first: list[str] = field(default_factory=list[str])

    def add(self, said: Said) -> None:
        self.rows += 1
        if "error" in said:
            self.failed += 1
            self.first += [f"{said['origin']}: {said['error']}"] if len(self.first) < SHOWN else []


def score_rows(
    target: str,
    data: Sequence[str],
    out: Path,
    *,
    overrides: Sequence[str] = (),
    format: str | None = None,
    beta: float | None = None,
    tokens: int | None = None,
    column: str = COLUMN,
    fresh: bool = False,
    console: Console | None = None,
    quiet: bool = False,
    group: Group | None = None,
) -> Tally:
    """Writes every row of these files with what a model says of its answers, one JSON object a
    line, in the order of the rows.

    target: a model's folder or hub id, an adapter's folder, a run's folder (its newest weights, and
    what it is compared with), or a recipe (the model it starts from). data: files, or sections as
    in a recipe. overrides: settings, of which those under model, reference and data count. out:
    what an interrupted call wrote there is kept and gone on from; ``fresh`` moves it aside.
    beta: of the reward, by default the recipe's, or 0.1; not of a run, which is scored with the
    reward that it trains. tokens: that run at once. column: the name of the new one. group: of
    processes that each score a share; rank 0 writes.

    Raises UserError for a mistake in the request, or when none of the rows can be scored.
    """
    group, console = group or SingleProcess(), console or Terminal()
    with Stop(console).listening():
        source = with_files(target, data, overrides, format=format)
        sources = source.recipe.data.eval
        refuse_inputs(out, sources)
        lines = Lines(out, WINDOW, fresh=fresh) if group.rank == 0 else None
        total, seen = _read_through(sources, column)
        source = _without_rows(source)
        encoder = prepare(source, rewards=False).encoder
        if lines:
            lines.agree(_facts(sources, source, encoder, column))
        if not quiet:
            print_message(console, f"{total:,} rows; loading and checking {target}")
        judge = _judge(target, source, encoder, beta, overrides)
        fix = "let all processes read the same files, as from a disk that they share"
        check_ranks_agree(group, lambda: {"file of rows": seen, "model": judge.facts}, fix)
        if lines:
            lines.agree(judge.facts)
        with lines.open(total) if lines else nullcontext():
            writer = _Writer(lines, encoder, judge, tokens or _budget(source), column, group)
            pairs = chain.from_iterable(map(stream, sources))
            tally = writer.skip(pairs)
            if lines:
                lines.go_on(
                    {
                        "model": target,
                        "reference": source.recipe.reference.model,
                        "valence": __version__,
                    }
                )
            writer.run(pairs, tally, total, console, quiet)
    say(tally, out, console, quiet)
    return tally


# Before a model is loaded


def refuse_inputs(out: Path, sources: Sequence[SourceSettings]) -> None:
    if any(os.path.exists(s.path) and Path(s.path).resolve() == out.resolve() for s in sources):
        raise UserError(
            "this file is read and cannot be written as well",
            code="output-is-input",
            where=str(out),
            fix="give another --out",
        )


def _read_through(sources: Sequence[SourceSettings], column: str) -> tuple[int, str]:
    """How many rows there are, and a digest of them.

    Raises UserError for what is wrong with a whole file, and when the new column is no new one.
    """
    if column in COLUMNS:
        raise UserError(
            f"formats of rows have a column {column!r}",
            code="column-reserved",
            where="--column",
            fix="choose another name",
        )
    total, digest = 0, hashlib.sha256()
    for row, example in chain.from_iterable(map(stream, sources)):
        total += 1
        digest.update(repr(row).encode(errors="backslashreplace"))
        if isinstance(row, Row) and column in row.value:
            what = f"the row has a column {column!r} already"
            raise UserError(
                what,
                code="row-column-taken",
                where=str(row.origin),
                fix="give the new one another name with --column",
            )
        if isinstance(example, Prompt):
            raise UserError(
                "the rows are prompts without answers, of which there is nothing to score",
                code="row-not-scorable",
                where=str(example.origin),
                fix="name the column that holds the answers: --data '{path: FILE, keys: "
                "{completion: COLUMN}}'",
            )
    return total, digest.hexdigest()


def _facts(
    sources: Sequence[SourceSettings], source: LoadedRecipe, encoder: Encoder, column: str
) -> dict[str, Any]:
    """What the numbers depend on besides the models."""
    given = [s.model_dump(mode="json", exclude_defaults=True) for s in sources]
    return {
        "data": given,
        "column": column,
        **facts_of_tokens(source.recipe, encoder),
        "window": WINDOW,
    }


def facts_of_tokens(recipe: Recipe, encoder: Encoder) -> dict[str, Any]:
    """What it depends on which tokens a row becomes."""
    data, tokenizer = recipe.data, encoder.tokenizer
    return {
        "max_length": data.max_length,
        "long_rows": data.long_rows,
        "train_on": data.train_on,
        "as_chat": encoder.as_chat,
        "chat_template_kwargs": data.chat_template_kwargs,
        "tokenizer": content_id(sorted(tokenizer.get_vocab().items()), tokenizer.chat_template),
    }


def _budget(source: LoadedRecipe) -> int:
    asked = source.recipe.train.micro_batch_tokens
    return asked if isinstance(asked, int) else TOKENS


def _without_rows(source: LoadedRecipe) -> LoadedRecipe:
    none = source.recipe.data.model_copy(update={name: [] for name in LISTS})
    return replace(source, recipe=source.recipe.model_copy(update={"data": none}))


def _judge(
    target: str,
    source: LoadedRecipe,
    encoder: Encoder,
    beta: float | None,
    overrides: Sequence[str],
) -> CompletionScorer:
    run = Path(target) if is_run(target) else None
    empty = [*overrides, *(f"data.{name}=[]" for name in LISTS), "reference.cache=off"]
    return load_scorer(source, encoder.tokenizer, beta=beta, run=run, overrides=empty)


# Rows to lines


@dataclass
class _Writer:
    """Makes one line of each row, and numbers for a window of rows at once.

    ``lines``: of rank 0.
    """

    lines: Lines | None
    encoder: Encoder
    judge: CompletionScorer
    tokens: int
    column: str
    group: Group

    def run(
        self, pairs: Iterator[Pair], tally: Tally, total: int, console: Console, quiet: bool
    ) -> None:
        """Scores these rows. They are read a window at a time."""
        seen = 0
        with Progress(console, "scoring", total, start=tally.rows, quiet=quiet) as bar:
            while window := list(islice(pairs, WINDOW)):
                made = _Window(window, self.encoder)
                # there is nothing to compute for the others
                done = tally.rows + len(window) - len(set(made.places))
                for units, tokens in made.score(self.judge, self.tokens, self.group):
                    done, seen = done + units, seen + tokens
                    bar.update(min(done, tally.rows + len(window)), tokens=seen)
                lines = [made.line(i, self.column) for i in range(len(window))]
                if self.lines:
                    self.lines.write([line for line, _ in lines])
                for _, said in lines:
                    tally.add(said)
                bar.update(tally.rows, tokens=seen)

    def skip(self, pairs: Iterator[Pair]) -> Tally:
        """Takes the rows that have their lines already.

        Raises UserError for a line that is not of its row.
        """
        if self.lines is None:
            kept = self.group.broadcast(None)
            return Tally(rows=len(list(islice(pairs, kept))), earlier=kept)
        tally = self._skip(self.lines, pairs)
        self.group.broadcast(tally.rows)
        return tally

    def _skip(self, lines: Lines, pairs: Iterator[Pair]) -> Tally:
        tally = Tally(earlier=lines.kept)
        # In this order: after the last line no row is taken.
        for number, (line, (row, example)) in enumerate(zip(lines.read(), pairs, strict=False), 1):
            said = _said(line, self.column)
            if said is None:
                raise lines.foreign(number)
            if (said["origin"], said.get("id")) != (str(row.origin), _id(example)):
                raise UserError(
                    f"{lines.path}:{number} is not of this row, but of {said['origin']} as that "
                    f"was: the data has changed",
                    code="output-rows-changed",
                    where=str(row.origin),
                    fix=ANEW,
                )
            tally.add(said)
        return tally


class _Window:
    """Rows that are scored together."""

    def __init__(self, window: Sequence[Pair], encoder: Encoder) -> None:
        self.rows = [row for row, _ in window]
        self.examples = [example for _, example in window]
        # One by one: places do not tell rows apart where several stand in a line.
        self.encoded = [
            None if isinstance(e, BadRow) else encoder.encode_all([e]) for e in self.examples
        ]
        # A place for each unit: a conversation may have been split into several.
        self.places = [
            i for i, encoded in enumerate(self.encoded) if encoded for _ in encoded.units
        ]
        self.units = [unit for encoded in self.encoded if encoded for unit in encoded.units]
        self.numbers: list[list[Numbers]] = [[] for _ in window]

    def score(
        self, judge: CompletionScorer, tokens: int, group: Group
    ) -> Iterator[tuple[int, int]]:
        """Each process scores a share. Yields how many units and tokens were run, each time."""
        own: list[tuple[int, Numbers]] = []
        packer = StepPacker(self.units, device=judge.device)
        packed = packer.pack(packer.example_indices, tokens)
        for dealt in packed[group.rank :: group.size]:
            batch = packer.micro_batch(dealt)
            try:
                numbers = judge(batch)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"there is no memory for {len(batch.tokens)} tokens at once",
                    code="out-of-memory",
                    where=str(self.units[dealt[0]].origin),
                    fix="give fewer --tokens; the same command goes on from here",
                ) from error
            own += zip(batch.unit.tolist(), numbers, strict=True)
            yield len(dealt), len(batch.tokens)
        for share in gather_objects(group, own):
            for k, found in share:  # the sides of a unit are in order, and together
                self.numbers[self.places[k]].append(found)

    def line(self, i: int, column: str) -> tuple[str, Said]:
        """A row with what is said of it, as JSON.

        A row that is no object has an error alone in its line.
        """
        row, said = self.rows[i], self._said(i)
        if isinstance(row, BadRow):
            return as_line(said), said
        try:
            return as_line({**row.value, column: said}), said
        except ValueError as error:
            said = self._error(i, f"the row cannot be written as JSON ({error})", "correct the row")
            return as_line(said), said

    def _said(self, i: int) -> Said:
        example, encoded = self.examples[i], self.encoded[i]
        if isinstance(example, BadRow) or encoded is None:
            assert isinstance(example, BadRow)
            return self._error(i, example.reason, example.fix)
        if encoded.unusable:
            return self._error(i, encoded.unusable[0].reason, encoded.unusable[0].fix)
        if not all(map(_finite, self.numbers[i])):
            return self._error(i, "a score of the row is not finite", NOT_FINITE)
        said: Said = {
            "id": example.id,
            "origin": str(self.rows[i].origin),
            "answers": _answers(example, self.numbers[i]),
        }
        return said | {"notes": list(encoded.notes)} if encoded.notes else said

    def _error(self, i: int, what: str, fix: str | None) -> Said:
        name = _id(self.examples[i])
        return (
            {"origin": str(self.rows[i].origin)}
            | ({} if name is None else {"id": name})
            | {"error": what, "fix": fix}
        )


def _said(line: Mapping[str, Any], column: str) -> Said | None:
    """What a line that is there says of its row; None when it was not written by this command."""
    said = line.get(column, line)
    if not isinstance(said, dict) or not isinstance(said.get("origin"), str):
        return None
    scored = said is not line and isinstance(said.get("answers"), list)
    return said if scored or said.keys() - {"id"} == {"origin", "error", "fix"} else None


def _answers(example: Example, numbers: Sequence[Numbers]) -> list[dict[str, Any]]:
    names = (
        ("chosen", "rejected")
        if isinstance(example, Preference)
        else ("completion",) * len(numbers)
    )
    return [{"answer": name, **_rounded(found)} for name, found in zip(names, numbers, strict=True)]


def _rounded(value: Any) -> Any:
    return (
        {name: _rounded(each) for name, each in value.items()}
        if isinstance(value, dict)
        else round(value, 6)
    )


def _finite(value: Any) -> bool:
    return all(map(_finite, value.values())) if isinstance(value, dict) else math.isfinite(value)


def _id(example: Example | BadRow) -> str | None:
    return None if isinstance(example, BadRow) else example.id


def say(tally: Tally, out: Path, console: Console, quiet: bool) -> None:
    """Print how many rows were scored; if ``quiet``, only how many were not, on standard error.

    Raises UserError when not a single row was scored.
    """
    if tally.failed == tally.rows:
        raise UserError(
            f"none of {tally.rows} rows could be scored; the first: {tally.first[0]}",
            code="no-usable-rows",
            where=str(out),
            fix="see the file",
        )
    earlier = f" ({tally.earlier:,} of the rows were there already)" if tally.earlier else ""
    if not quiet:
        print_message(
            console,
            f"{tally.rows - tally.failed:,} of {tally.rows:,} rows are scored in {out}{earlier}",
        )
    if tally.failed:
        first = [
            *(f"  {each}" for each in tally.first),
            *(["  ..."] if tally.failed > len(tally.first) else []),
        ]
        failures = "\n".join([f"{tally.failed:,} have an error there instead:", *first])
        if quiet:
            warn_on_stderr(console, f"{out}: of {tally.rows:,} rows {failures}")
        else:
            print_message(console, failures)
