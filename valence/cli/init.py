"""The command that writes a recipe for a file of rows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from valence.cli import complete
from valence.cli.common import app, console, data_file
from valence.terminal import print_message

BAD_ROWS = 3
"""Rows that cannot be used, of which the command prints the reasons."""


@app.command()
def init(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="File of rows (.jsonl, .json, .csv, .tsv or .parquet, also .gz), or a section as "
            "in a recipe ('{path: FILE, keys: {...}}').",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Hub id or folder of the model to train. Default: "
            "HuggingFaceTB/SmolLM2-135M-Instruct.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Method to train with. Default: by the rows (kto for thumbs and scores, dpo for "
            "pairs, sft for demonstrations).",
            autocompletion=complete.methods,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Write the recipe to this file, which must not exist.")
    ] = Path("recipe.yaml"),
) -> None:
    """Write a recipe for a file of rows: look at its columns and rows, choose the method, and hold
    out a part of the prompts to evaluate on.
    """
    from valence.jobs.write_recipe import write_recipe

    recipe = write_recipe(data_file(file), out, model=model, method=method)
    print_message(console, f"{recipe.facts.file.path}: {recipe.facts.summary}")
    if bad := recipe.facts.bad:
        print_message(console, f"{len(bad):,} rows cannot be used:", "yellow")
        for row in bad[:BAD_ROWS]:
            print_message(console, f"  {row.origin}: {row.reason}", "yellow")
    print_message(console, f"wrote {recipe.path} (method {recipe.method})")
    path = shlex.quote(str(recipe.path))
    print_message(console, f"Next: valence check {path}, then valence train {path}")
