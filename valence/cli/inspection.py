"""Commands that explain a row or a loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import Overrides, RecipeArg, app, console, table_of_settings
from valence.errors import UserError
from valence.terminal import print_message

if TYPE_CHECKING:
    from valence.cli.explain import Doc
    from valence.methods import Method


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


@app.command()
def losses(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Loss or method to explain.", autocompletion=complete.methods
        ),
    ] = None,
) -> None:
    """List the losses, or explain one loss or online method."""
    from valence.cli.explain import method_doc
    from valence.methods import METHODS, ONLINE, method_of
    from valence.types import plural

    if name is not None:
        try:
            method = method_of(name)
        except UserError as error:
            if error.code != "method-needs-reward":
                raise
            method = method_of(name, online=True)
        _explain(method)
        return
    table = Table("loss", "reads", "reference", "what it does", box=None, pad_edge=False)
    for method in METHODS.values():
        table.add_row(
            method.name,
            plural(method.kind),
            "yes" if method.needs_reference else "no",
            method_doc(method).summary,
        )
    console.print(table)
    print_message(console, f"\nOnline methods, which need a reward: {', '.join(ONLINE)}.")


def _explain(method: Method) -> None:
    """Print a method, and the online method with the same loss."""
    from valence.cli.explain import (
        added,
        builder_doc,
        facts,
        loss_name,
        method_doc,
        online_facts,
        online_method,
    )

    online = online_method(method)
    if method.online:
        _print_text("Trains on completions that the policy samples and a reward scores.")
        _print_doc(builder_doc(method))
        _print_text(f"The loss is {loss_name(method)}:")
    _print_doc(method_doc(method))
    _print_facts(facts(method))
    _settings(method)
    if method.online or online is None:
        return
    console.print()
    _print_text(f"With a reward, the method is {online.name}, which samples completions:")
    _print_doc(builder_doc(online))
    _print_facts(online_facts(online))
    _settings(online, added(online))


def _print_text(text: str) -> None:
    print_message(console, f"{' '.join(text.split())}\n")


def _print_doc(doc: Doc) -> None:
    for text in (doc.summary, doc.formula, doc.source):
        if text:
            _print_text(text)


def _print_facts(facts: Mapping[str, str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for heading, text in facts.items():
        table.add_row(heading, text)
    console.print(table)


def _settings(method: Method, only: Collection[str] | None = None) -> None:
    """Print a table of the settings of the loss, or of those in ``only``, if there are any."""
    from valence.config.describe import settings_table

    rows = [
        line
        for line in settings_table(method.settings, "loss.")
        if only is None or line.name.split(".")[1] in only
    ]
    if not rows:
        return
    table = table_of_settings("type", "default", "meaning")
    for line in rows:
        table.add_row(line.name, line.type, line.default, line.meaning)
    console.print(table)
