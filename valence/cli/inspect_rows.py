"""Show a row as read, as examples, and as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from valence.config.load import LoadedRecipe, load_recipe
from valence.config.needs import method_in
from valence.config.schema import SourceSettings
from valence.data.encode import Encoder
from valence.data.load import load, read_sources
from valence.data.rendering import describe_rendering
from valence.data.sources import Row
from valence.errors import UserError
from valence.reports.show import show_encoded, show_example, show_row
from valence.targets import without_rows
from valence.training.prepare import prepare
from valence.types import Example, Origin

Stage = Literal["row", "example", "tokens", "all"]


def show_stages(
    recipe: Path,
    overrides: Sequence[str],
    *,
    list_name: Literal["train", "eval", "test"],
    number: int,
    stage: Stage,
) -> Iterator[RenderableType]:
    """Render row ``number`` (from 1, bad rows included) of the files of one of a recipe's lists.

    Raises UserError if there is no such row, or, after the stages that it reaches, if the row is
    not used.
    """
    source = load_recipe(recipe, overrides, training=False)
    data = source.recipe.data
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
    row = rows[number - 1]
    if isinstance(row, Row) and stage in ("row", "all"):
        yield show_row(row.value, row.origin)
    examples = _examples(source, files, row.origin)
    if data.split and list_name == "train" and data.split.is_held_out(examples[0].prompt):
        yield Text(f"This row is held out (data.eval: {data.split.share:g}).")
    if stage in ("example", "all"):
        yield from map(show_example, examples)
    if stage in ("tokens", "all"):
        encoder = _encoder(source)
        yield from map(Text, describe_rendering(encoder, data.chat_template))
        yield from _tokens(encoder, examples)


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
    return prepare(without_rows(source), rewards=False).encoder


def _tokens(encoder: Encoder, examples: Sequence[Example]) -> Iterator[RenderableType]:
    encoded = encoder.encode_all(examples, [example.origin.path for example in examples])
    for unit in encoded.units:
        yield show_encoded(unit, encoder.tokenizer)
    for unit in encoded.unusable:
        raise UserError(
            f"this row is not used: {unit.reason}",
            code=unit.code,
            where=str(unit.origin),
            fix=unit.fix,
        )
