"""The command that explains reward rules."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import app, console, table_of_settings
from valence.terminal import print_message


@app.command()
def rewards(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Rule to explain.", autocompletion=complete.rules),
    ] = None,
) -> None:
    """List the built-in reward rules, or explain one with its settings.

    A recipe can also use a function, a reward model or a server as its reward.
    """
    from valence.config.describe import settings_table
    from valence.rewards.build import KINDS
    from valence.rewards.rules import RULES, settings_of, unknown_rule

    if name is None:
        table = Table("rule", "score", box=None, pad_edge=False)
        for rule, make in RULES.items():
            table.add_row(rule, " ".join((make.__doc__ or "").partition("\n\n")[0].split()))
        console.print(table)
        print_message(console, f"\nThe setting `reward` accepts {KINDS}.")
        return
    if name not in RULES:
        raise unknown_rule(name)
    *parts, _ = (RULES[name].__doc__ or "").split("\n\n")  # the last one is in the table
    for part in parts:
        print_message(console, " ".join(part.split()) + "\n")
    table = table_of_settings("type", "default", "meaning")
    for line in settings_table(settings_of(name), "settings."):
        table.add_row(line.name, line.type, line.default, line.meaning)
    console.print(table)
