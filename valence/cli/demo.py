"""The command that trains on the data that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import Overrides, Quiet, app, console
from valence.cli.runs import train
from valence.terminal import print_message


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files and the run.")] = Path(
        "demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Train a small model on examples of Valence, answers of an online shop's support. Downloads
    the model (270 MB) and takes about five minutes on two CPU cores. Rerun it to resume.
    """
    from valence.shipped import write_demo

    recipe = write_demo(out)
    print_message(console, f"The answers are in {out}. Running: valence train {recipe}")
    train(recipe, overrides, quiet=quiet)
