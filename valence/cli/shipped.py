"""Commands for what comes with the package: the demo, the recipes and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from valence.cli.common import Overrides, Quiet, app, console
from valence.cli.runs import train
from valence.terminal import print_message, write_line


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option("--out", help="Write the files and the run to this folder.")
    ] = Path("demo"),
    quiet: Quiet = False,
) -> None:
    """Train a small model on examples that come with Valence: the answers of an online shop's
    support agents. Downloads the model (270 MB) and takes about five minutes on two CPU cores.

    If it was stopped, rerun it to resume.
    """
    from valence.shipped import write_demo

    recipe = write_demo(out)
    if not quiet:
        print_message(console, f"The answers are in {out}. Running: valence train {recipe}")
    train(recipe, overrides, quiet=quiet)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe.")] = None,
) -> None:
    """List the recipes that come with Valence, or print one: `valence recipes kto > recipe.yaml`.
    `valence init FILE` writes a shorter one for your file.
    """
    from valence.shipped import recipe_text, recipes

    if name is not None:
        write_line(recipe_text(name).rstrip())
    else:
        _print_titles("recipe", recipes())


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Show this page, such as `thumbs`.")
    ] = None,
) -> None:
    """List the pages of the documentation, or show one."""
    from valence.shipped import page_text, pages

    if page is None:
        _print_titles("page", pages())
    elif console.is_terminal:
        console.print(Markdown(page_text(page)))
    else:
        write_line(page_text(page).rstrip())


def _print_titles(kind: str, files: Mapping[str, Path]) -> None:
    from valence.shipped import title

    table = Table(kind, "", box=None, pad_edge=False)
    for name, path in files.items():
        table.add_row(name, title(path.read_text(encoding="utf-8")))
    console.print(table)
