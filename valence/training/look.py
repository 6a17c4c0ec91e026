"""One row at every stage of its way: as read, as understood, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from valence.config.load import load_recipe
from valence.data.encode import Unusable
from valence.data.sources import Row, read_rows
from valence.errors import UserError
from valence.report.show import show_encoded, show_example, show_row
from valence.training.methods import method_of
from valence.training.setup import prepare

Stage = Literal["row", "example", "tokens", "all"]


def look(
    recipe: Path, overrides: Sequence[str], *, which: Literal["train", "eval", "test"], number: int, stage: Stage
) -> Iterator[RenderableType]:
    """What to print about example ``number`` (from 1) of one of a recipe's lists. Raises UserError when there is none such."""
    # A bad row elsewhere should not keep anybody from looking at this one.
    source = load_recipe(recipe, [*overrides, "data.on_bad_row=skip"], method_of=method_of, training=False)
    prepared = prepare(source)
    corpus = prepared.corpora.get(which)
    examples = corpus.loaded.examples if corpus else ()
    if not 1 <= number <= len(examples):
        raise UserError(
            f"data.{which} has {len(examples)} examples", where=f"--row {number}", fix=f"a number up to {len(examples)}"
        )
    example = examples[number - 1]
    if stage in ("row", "all"):
        rows = read_rows(example.origin.path.split("[")[0])
        row = next((r for r in rows if isinstance(r, Row) and r.origin.line == example.origin.line), None)
        if row is not None:
            yield show_row(row.value, row.origin)
    if stage in ("example", "all"):
        yield show_example(example)
    if stage in ("tokens", "all"):
        encoded = prepared.encoder.encode(example, example.origin.path)
        if isinstance(encoded, Unusable):
            raise UserError(f"this row makes no tokens: {encoded.reason}", where=str(encoded.origin), fix=encoded.fix)
        yield show_encoded(encoded, prepared.tokenizer)
