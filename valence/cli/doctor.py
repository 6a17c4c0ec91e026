"""The command that checks the machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from valence import completion
from valence.cli.common import MISTAKE, Overrides, app, console
from valence.terminal import json_line, print_message, write_line

STYLES = {"ok": "green", "missing": "dim", "problem": "yellow"}


@app.command()
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Also check what this recipe needs.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Also check whether the hub can be reached. It waits at most 3 seconds.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per check.")
    ] = False,
) -> None:
    """Check whether this machine is ready to train, and how to fix problems.

    Each check is ok, missing (something optional is not there) or a problem. The exit status is 2
    if a problem must be fixed, else 0.
    """
    from pathlib import Path

    from valence.cli.doctor_checks import examine
    from valence.cli.doctor_recipe import examine_recipe

    checks = list(examine(network=network))
    checks += examine_recipe(Path(recipe), overrides or []) if recipe else []
    if as_json:
        for item in checks:
            write_line(json_line(item.to_dict()))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for overflow in ("fold", "fold", "ellipsis", "fold"):
            table.add_column(overflow=overflow)  # type: ignore[arg-type]
        section = ""
        for item in checks:
            detail = Text(item.detail)
            if item.fix and item.state != "ok":
                detail.append(f"\nto fix it: {item.fix}", style="bold" if item.needed else "")
            table.add_row(
                "" if item.section == section else item.section,
                item.name,
                Text(item.state, STYLES[item.state]),
                detail,
            )
            section = item.section
        console.print(table)
        problems = [item for item in checks if item.state == "problem"]
        num_required = sum(item.needed for item in problems)
        summary = (
            f"problems: {len(problems)}, of which {num_required} must be fixed"
            if problems
            else "no problems"
        )
        print_message(console, f"\n{summary}")
    if any(item.needed and item.state == "problem" for item in checks):
        raise typer.Exit(MISTAKE)
