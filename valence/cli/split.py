"""The command that divides a file into rows to train on and rows to hold out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import app, console, data_file, print_bad_rows
from valence.terminal import print_message


@app.command()
def split(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="File of rows. It is a .jsonl, .csv, .tsv or .parquet file (also .gz), or a "
            "section as in a recipe.",
        ),
    ],
    share: Annotated[
        float,
        typer.Option("--share", help="Share of the prompts to hold out. It is between 0 and 1."),
    ] = 0.1,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Another number holds out other prompts.")
    ] = 0,
    train: Annotated[
        Path | None,
        typer.Option(
            "--train",
            metavar="FILE",
            help="File for the rows to train on. Default: FILE with `_train` in its name.",
        ),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            "--held-out",
            metavar="FILE",
            help="File for the others. Default: FILE with `_held_out` in its name.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that exist.")
    ] = False,
) -> None:
    """Divide a file by its prompts into rows to train on and rows to evaluate on. `data.eval: 0.1`
    in a recipe holds out the same rows without files. Rows that cannot be used are not held out.
    """
    from valence.data.split import PromptSplit
    from valence.errors import UserError
    from valence.jobs.split_rows import split_rows

    if not 0 < share < 1:
        raise UserError(
            f"{share:g} is not a share between 0 and 1",
            code="option-value",
            where="--share",
            fix=f"write {share / 100:g} for {share:g} %"
            if 1 < share < 100
            else "write 0.1 for 10 %",
        )
    summary = split_rows(
        data_file(file),
        PromptSplit(share, seed),
        train,
        held_out,
        overwrite=overwrite,
    )
    for path, rows, prompts in zip(
        (summary.train, summary.held_out), summary.num_rows, summary.num_prompts, strict=True
    ):
        print_message(console, f"{path}: {rows:,} rows, {prompts:,} prompts")
    print_bad_rows(summary.bad, f"in {summary.train} that cannot be used")
