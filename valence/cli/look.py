"""Commands that explain: a row on its way, a loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import Overrides, RecipeArg, app, console, table_of_settings
from valence.terminal import print_message

if TYPE_CHECKING:
    from valence.cli.explain import Doc
    from valence.trainer.methods import Method


@app.command()
def inspect(
    recipe: RecipeArg,
    overrides: Overrides = None,
    row: Annotated[
        int,
        typer.Option(
            "--row", min=1, help="Which row, counted from 1 over the list's files, bad rows too."
        ),
    ] = 1,
    stage: Annotated[
        Literal["row", "example", "tokens", "all"], typer.Option(help="How far along its way.")
    ] = "all",
    which: Annotated[
        Literal["train", "eval", "test"],
        typer.Option("--list", help="Which of the recipe's lists."),
    ] = "train",
) -> None:
    """Show a row as it is read, the examples made of it, and their tokens with the trained ones
    coloured; or why it is bad.
    """
    from valence.cli.inspect_rows import show_stages

    for part in show_stages(recipe, overrides or [], which=which, number=row, stage=stage):
        console.print(part)


@app.command()
def losses(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One loss or method, with its settings.", autocompletion=complete.methods
        ),
    ] = None,
) -> None:
    """List the losses, or explain one; also methods that there are with a reward only, as
    `rejection`.
    """
    from valence.cli.explain import read_doc
    from valence.trainer.methods import METHODS, ONLINE, method_of
    from valence.types import plural

    if name is not None:
        _explain(METHODS.get(name) or method_of(name, online=True))
        return
    table = Table("loss", "reads", "reference", "what it does", box=None, pad_edge=False)
    for method in METHODS.values():
        summary = read_doc(method.loss.fn.__doc__ or "").summary
        table.add_row(
            method.name, plural(method.kind), "yes" if method.needs_reference else "no", summary
        )
    console.print(table)
    print_message(
        console, f"\nWith a reward, on the policy's own answers to prompts: {', '.join(ONLINE)}."
    )


def _explain(method: Method) -> None:
    """A method, and what a reward makes of it or of its loss."""
    from valence.cli.explain import (
        added,
        facts,
        loss_name,
        own_doc,
        own_facts,
        read_doc,
        with_reward,
    )

    own, doc = with_reward(method), read_doc(method.loss.fn.__doc__ or "")
    if method.online:
        _say(
            "With a reward: the policy answers prompts, and learns from the verdicts.",
            own_doc(method),
        )
        _say(f"The loss is {loss_name(method)}:")
    _say(doc)
    _facts(facts(method))
    _settings(method)
    if method.online or own is None:
        return
    console.print()
    _say(
        f"With a reward (method: {own.name}), on the policy's own answers to prompts:", own_doc(own)
    )
    _facts(own_facts(own))
    _settings(own, added(own))


def _say(*said: str | Doc) -> None:
    for each in said:
        for part in filter(
            None, (each,) if isinstance(each, str) else (each.summary, each.formula, each.source)
        ):
            print_message(console, f"{' '.join(part.split())}\n")


def _facts(found: Mapping[str, str]) -> None:
    told = Table(box=None, pad_edge=False, show_header=False)
    told.add_column(no_wrap=True)
    for heading, words in found.items():
        told.add_row(heading, words)
    console.print(told)


def _settings(method: Method, only: Collection[str] | None = None) -> None:
    """A table of those of its loss, or of the ones with these names; nothing where there are
    none.
    """
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
