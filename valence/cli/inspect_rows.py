"""Show a row as read, as examples, and as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from valence.config.load import LoadedRecipe
from valence.config.needs import method_in
from valence.config.schema import SourceSettings
from valence.data.encode import Encoder
from valence.data.encoded_set import EncodedSet
from valence.data.load import load, read_sources
from valence.data.rendering import describe_rendering
from valence.data.sources import BadRow, Row
from valence.distributed.process_group import SingleProcess
from valence.errors import UserError
from valence.reports.run_record import is_run
from valence.reports.show import (
    encoded_as_json,
    show_encoded,
    show_example,
    show_row,
    show_signals,
)
from valence.targets import load_target, without_rows
from valence.training.prepare import prepare
from valence.types import Example, Origin, TokenizedExample

Stage = Literal["row", "example", "tokens", "all"]


@dataclass(frozen=True)
class RowSelection:
    """A row of one of a recipe's lists, and whose model measures its signal.

    target: a recipe, or the folder of a run. number: of the row, from 1, bad rows included. step:
    the checkpoint of a run.
    """

    target: Path
    overrides: Sequence[str]
    list_name: Literal["train", "eval", "test"]
    number: int
    step: str | None = None


def show_stages(
    selection: RowSelection, *, stage: Stage, signal: bool = False
) -> Iterator[RenderableType]:
    """Render a row. signal: load the model, and show the signal of each token.

    Raises UserError if there is no such row, or, after the stages that it reaches, if the row is
    not used.
    """
    source = _load(selection)
    data = source.recipe.data
    files, row = _find_row(source, selection)
    if isinstance(row, Row) and stage in ("row", "all"):
        yield show_row(row.value, row.origin)
    examples = _examples(source, files, row.origin)
    is_train = selection.list_name == "train"
    if data.split and is_train and data.split.is_held_out(examples[0].prompt):
        yield Text(f"This row is held out (data.eval: {data.split.share:g}).")
    if stage in ("example", "all"):
        yield from map(show_example, examples)
    if stage in ("tokens", "all") or signal:
        encoder = _encoder(source)
        encoded = _encode(encoder, examples)
        if stage in ("tokens", "all"):
            yield from map(Text, describe_rendering(encoder, data.chat_template))
            for unit in encoded.units:
                yield show_encoded(unit, encoder.tokenizer)
        _refuse_unusable(encoded)
        if signal:
            units = list(encoded.units)
            for unit, signals in zip(units, _signals(source, selection, units), strict=True):
                yield show_signals(unit, signals, encoder.tokenizer)


def tokens_as_json(selection: RowSelection, *, signal: bool = False) -> Iterator[dict[str, Any]]:
    """The tokens of a row's examples as plain data, with the signal of each token if ``signal``.

    Raises UserError if there is no such row, or if it is not used.
    """
    source = _load(selection)
    files, row = _find_row(source, selection)
    examples = {example.id: example for example in _examples(source, files, row.origin)}
    encoder = _encoder(source)
    encoded = _encode(encoder, list(examples.values()))
    _refuse_unusable(encoded)
    units = list(encoded.units)
    signals = _signals(source, selection, units) if signal else [None] * len(units)
    for unit, values in zip(units, signals, strict=True):
        yield encoded_as_json(unit, examples[unit.id], encoder.tokenizer, values)


def _load(selection: RowSelection) -> LoadedRecipe:
    source = load_target(str(selection.target), selection.overrides)
    if is_run(selection.target):
        from valence.training.open_run import refuse_formats

        refuse_formats(source)
    return source


def _find_row(
    source: LoadedRecipe, selection: RowSelection
) -> tuple[Sequence[SourceSettings], Row | BadRow | Example]:
    """The files of the list, and the row. Raises UserError if there is no such row."""
    data, list_name, number = source.recipe.data, selection.list_name, selection.number
    files = data.files(list_name)
    if list_name == "eval" and data.split is not None:
        raise UserError(
            f"these rows are held out from data.train (data.eval: {data.split.share:g})",
            code="list-not-in-recipe",
            where="data.eval",
            fix="show rows of data.train, with --list train",
        )
    if not files:
        raise UserError(
            "the recipe has no files in this list",
            code="list-not-in-recipe",
            where=f"data.{list_name}",
            fix="set it in the recipe, or show another list with --list",
        )
    rows = list(read_sources(files, data.limit))
    if number > len(rows):
        raise UserError(
            f"data.{list_name} has only {len(rows)} rows",
            code="row-number-out-of-range",
            where=f"--row {number}",
            fix=f"use a number from 1 to {len(rows)}",
        )
    return files, rows[number - 1]


def _examples(
    source: LoadedRecipe, files: Sequence[SourceSettings], origin: Origin
) -> list[Example]:
    """The examples from the row. Raises UserError with the reason if there is none."""
    data = source.recipe.data
    # bad rows elsewhere must not prevent showing this one
    loaded = load(
        files, method_in(source.recipe).kind,
        convert=data.convert, threshold=data.threshold, top_n=data.top_n,
        mask_truncated=data.mask_truncated, limit=data.limit, on_bad_row="skip",
    )  # fmt: skip
    for bad in loaded.bad:
        if bad.origin == origin:
            raise UserError(bad.reason, code=bad.code, where=str(origin), fix=bad.fix)
    examples = [example for example in loaded.examples if example.origin == origin]
    if not examples:
        reason = next((reason for unused, reason in loaded.unused if unused == origin), "")
        code = "row-not-convertible" if reason else "row-in-other-example"
        reason = reason or "its answer is part of an example that is listed under another row"
        raise UserError(
            f"data.convert: {data.convert} creates no example from this row: {reason}",
            code=code,
            where=str(origin),
            fix="inspect another row of the same prompt",
        )
    return examples


def _encoder(source: LoadedRecipe) -> Encoder:
    prepared = prepare(without_rows(source), rewards=False)
    return prepared.encoder_for(prepared.method)


def _encode(encoder: Encoder, examples: Sequence[Example]) -> EncodedSet:
    return encoder.encode_all(examples, [example.origin.path for example in examples])


def _refuse_unusable(encoded: EncodedSet) -> None:
    """Raise UserError if an example is not used."""
    for unit in encoded.unusable:
        raise UserError(
            f"this row is not used: {unit.reason}",
            code=unit.code,
            where=str(unit.origin),
            fix=unit.fix,
        )


def _signals(
    source: LoadedRecipe, selection: RowSelection, units: Sequence[TokenizedExample]
) -> list[list[float]]:
    """The signal of each trained token. Raises UserError for a method without a teacher."""
    if not method_in(source.recipe).loss.needs_teacher:
        raise UserError(
            f"method: {source.recipe.method} has no teacher, so its tokens have no signal",
            code="option-unused",
            where="--signal",
            fix="remove --signal, or use a recipe with method: hindsight or distill",
        )
    from valence.cli.models import open_run_or_recipe

    run = open_run_or_recipe(
        selection.target, list(selection.overrides), group=SingleProcess(), lists=(),
        step=selection.step,
    )  # fmt: skip
    with run.state.evaluation_weights():
        return run.state.objective.token_signals(units)
