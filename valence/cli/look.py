"""Commands that explain: a row on its way, a loss."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from valence.cli.common import Overrides, RecipeArg, app, console, table_of_settings


@app.command()
def inspect(
    recipe: RecipeArg,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option("--row", min=1, help="Which row, counted from 1 over the list's files, bad rows too.")] = 1,
    stage: Annotated[Literal["row", "example", "tokens", "all"], typer.Option(help="How far along its way.")] = "all",
    which: Annotated[Literal["train", "eval", "test"], typer.Option("--list", help="Which of the recipe's lists.")] = "train",
) -> None:
    """Show a row as it is read, the examples made of it, and their tokens with the trained ones coloured; or why it is bad."""
    from valence.training.look import look

    for part in look(recipe, overrides or [], which=which, number=row, stage=stage):
        console.print(part)


@app.command()
def losses(name: Annotated[str | None, typer.Argument(help="One loss, with its settings.")] = None) -> None:
    """List the losses, or explain one."""
    from valence.config.describe import settings_table
    from valence.training.explain import facts, read_doc
    from valence.training.methods import METHODS, method_of
    from valence.types import plural

    if name is None:
        table = Table("loss", "reads", "reference", "what it does", box=None, pad_edge=False)
        for method in METHODS.values():
            summary = read_doc(method.loss.fn.__doc__ or "").summary
            table.add_row(method.name, plural(method.kind), "yes" if method.needs_reference else "no", escape(summary))
        console.print(table)
        return
    method = method_of(name)
    doc = read_doc(method.loss.fn.__doc__ or "")
    for part in filter(None, (doc.summary, doc.formula, doc.source)):
        console.print(f"{part}\n", markup=False, highlight=False)
    told = Table(box=None, pad_edge=False, show_header=False)
    told.add_column(no_wrap=True)
    for heading, words in facts(method).items():
        told.add_row(heading, escape(words))
    console.print(told)
    table = table_of_settings("type", "default", "meaning")
    for line in settings_table(method.settings, "loss."):
        table.add_row(*map(escape, (line.name, line.type, line.default, line.meaning)))
    console.print(table)
