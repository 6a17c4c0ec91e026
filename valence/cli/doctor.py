"""The command that looks at the machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from valence.cli import complete
from valence.cli.common import MISTAKE, Overrides, app, console
from valence.terminal import json_line, print_message, write_line

STYLES = {"ok": "green", "missing": "dim", "problem": "yellow"}


@app.command()
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="Also say what this recipe needs.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    network: Annotated[
        bool,
        typer.Option("--network", help="Also ask the hub whether it answers (3 seconds at most)."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line of the table.")
    ] = False,
) -> None:
    """Say whether this machine is ready to train, and how to fix what is not.

    ok: it is there; missing: something optional is not; problem: look at it. The exit status is 2
    when something that is needed is not there, else 0. The rows of a recipe are looked at by
    `valence check`.
    """
    from pathlib import Path

    from valence.cli.doctor_checks import examine
    from valence.cli.doctor_recipe import examine_recipe

    found = list(examine(network=network))
    found += examine_recipe(Path(recipe), overrides or []) if recipe else []
    if as_json:
        for each in found:
            write_line(json_line(each.to_dict()))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for overflow in ("fold", "fold", "ellipsis", "fold"):
            table.add_column(overflow=overflow)  # type: ignore[arg-type]
        about = ""
        for each in found:
            said = Text(each.said)
            if each.fix and each.state != "ok":
                said.append(f"\nto fix it: {each.fix}", style="bold" if each.needed else "")
            table.add_row(
                "" if each.about == about else each.about,
                each.name,
                Text(each.state, STYLES[each.state]),
                said,
            )
            about = each.about
        console.print(table)
        wrong = [each for each in found if each.state == "problem"]
        needed = sum(each.needed for each in wrong)
        said = (
            f"problems: {len(wrong)}; of these must be fixed: {needed}"
            if wrong
            else "nothing is wrong"
        )
        print_message(console, f"\n{said}")
    if any(each.needed and each.state == "problem" for each in found):
        raise typer.Exit(MISTAKE)
