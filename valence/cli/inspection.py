"""The command that shows a row in all stages."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from valence.cli.common import Overrides, RecipeArg, app, console


@app.command()
def inspect(
    recipe: RecipeArg,
    overrides: Overrides = None,
    row: Annotated[
        int,
        typer.Option(
            "--row",
            min=1,
            metavar="N",
            help="Number of the row, from 1, over all files of the list, including bad rows.",
        ),
    ] = 1,
    stage: Annotated[
        Literal["row", "example", "tokens", "all"], typer.Option(help="What to show.")
    ] = "all",
    list_name: Annotated[
        Literal["train", "eval", "test"],
        typer.Option(
            "--list", help="List of files in the recipe: data.train, data.eval or data.test."
        ),
    ] = "train",
) -> None:
    """Show a row as it is read, its training examples, and their tokens with the trained tokens
    coloured. For a bad row, show why it cannot be used.
    """
    from valence.cli.inspect_rows import show_stages

    for part in show_stages(recipe, overrides or [], list_name=list_name, number=row, stage=stage):
        console.print(part)
