"""The command that writes a recipe for a file of rows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from valence import completion
from valence.cli.common import app, console, data_file, print_bad_rows
from valence.errors import UserError
from valence.terminal import print_message


@app.command()
def init(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="File of rows. It is a .jsonl, .json, .csv, .tsv or .parquet file (also .gz), or "
            "a section as in a recipe: '{path: FILE, keys: {...}}'.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="Write a recipe that comes with Valence, such as online_grpo. `valence docs` "
            "lists them.",
            autocompletion=completion.shipped_recipes,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Hub id or folder of the model. Default: HuggingFaceTB/SmolLM2-135M-Instruct.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Method. Default: kto for thumbs and scores, dpo for pairs, sft for "
            "demonstrations.",
            autocompletion=completion.methods,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="New file for the recipe.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe for a file of rows: choose the method by its rows, and hold out some prompts
    to evaluate on.
    """
    if recipe is not None:
        _write_shipped(recipe, out, {"FILE": file, "--model": model, "--method": method})
        return
    if file is None:
        raise UserError(
            "the file of rows is missing",
            code="argument-missing",
            where="init",
            fix="add it, as in `valence init feedback.csv`, or name a recipe: `valence init "
            "--recipe kto`",
        )
    from valence.jobs.write_recipe import write_recipe

    written = write_recipe(data_file(file), out, model=model, method=method)
    print_message(console, f"{written.facts.file.path}: {written.facts.summary}")
    print_bad_rows(written.facts.bad, "that cannot be used")
    print_message(console, f"wrote {written.path} (method {written.method})")
    _print_next(written.path)


def _write_shipped(name: str, out: Path, others: dict[str, str | None]) -> None:
    """Write a recipe that comes with the package."""
    from valence.jobs.row_job import replace_file
    from valence.jobs.write_recipe import check_output
    from valence.shipped import recipe_text

    if used := [option for option, value in others.items() if value is not None]:
        raise UserError(
            f"{used[0]} has no effect on a recipe that comes with Valence",
            code="option-conflict",
            where=used[0],
            fix=f"remove {used[0]} and edit the recipe, or remove --recipe",
        )
    text = recipe_text(name)
    check_output(out)
    replace_file(out, text)
    print_message(console, f"wrote {out}")
    _print_next(out)


def _print_next(recipe: Path) -> None:
    path = shlex.quote(str(recipe))
    print_message(console, f"Next: valence check {path}, then valence train {path}")
