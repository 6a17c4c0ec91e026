"""The command that shows a row in all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from valence import completion
from valence.cli.common import Overrides, Step, app, console
from valence.errors import UserError
from valence.terminal import json_line, write_line


@app.command()
def inspect(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe, or a run folder.",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    row: Annotated[
        int,
        typer.Option(
            "--row",
            min=1,
            metavar="N",
            help="Number of the row, from 1. All files count, and bad rows.",
        ),
    ] = 1,
    stage: Annotated[
        Literal["row", "example", "tokens", "all"], typer.Option(help="What to show.")
    ] = "all",
    list_name: Annotated[
        Literal["train", "eval", "test"],
        typer.Option(
            "--list", help="Files of the recipe. They are data.train, data.eval or data.test."
        ),
    ] = "train",
    signal: Annotated[
        bool,
        typer.Option(
            "--signal",
            help="Colour each token by the signal of the teacher. For methods with a teacher. "
            "Green: the teacher finds it more likely. Red: less likely.",
        ),
    ] = False,
    step: Step = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the tokens, with --signal also their signals, as a JSON object.",
        ),
    ] = False,
) -> None:
    """Show a row as it is read, its training examples, and their tokens, the trained ones coloured;
    or why a bad row cannot be used.
    """
    from valence.cli.inspect_rows import RowSelection, show_stages, tokens_as_json

    if step is not None and not signal:
        raise UserError(
            "only --signal loads a checkpoint",
            code="option-unused",
            where="--step",
            fix="remove --step, or add --signal",
        )
    selection = RowSelection(target, overrides or [], list_name, row, step)
    if as_json:
        for example in tokens_as_json(selection, signal=signal):
            write_line(json_line(example))
        return
    for part in show_stages(selection, stage=stage, signal=signal):
        console.print(part)
