"""The command that converts the votes of a feedback tool into rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import Quiet, app, console, json_console, stoppable
from valence.errors import UserError
from valence.terminal import json_line, write_line

CATEGORIES = {"up": True, "down": False}


def _path_option(name: str, meaning: str) -> typer.models.OptionInfo:
    """An option for the place of one part of a row in an export."""
    return typer.Option(
        f"--{name}", metavar="PATH", help=f"Dotted path of {meaning} in the export."
    )


@app.command("import")
def import_(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Tool that the export is from, or the import path of an importer. --list shows "
            "all tools.",
            autocompletion=complete.feedback_sources,
        ),
    ] = None,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files of the export.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Write the rows to this .jsonl file, and rows of other kinds to files next to it. "
            "Repeat the command to add newer votes.",
        ),
    ] = Path("feedback.jsonl"),
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="DATE|last",
            help="Skip older votes: an ISO date, or `last` for the newest vote in --out.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Skip votes on completions of other models."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Read from the tool's server instead of from files."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            "--token-env",
            metavar="NAME",
            help="With --url: environment variable that contains the server's API key. Default: "
            "the tool's own variable, such as LANGSMITH_API_KEY.",
        ),
    ] = None,
    prompt: Annotated[str | None, _path_option("prompt", "the prompt")] = None,
    completion: Annotated[str | None, _path_option("completion", "the rated completion")] = None,
    left: Annotated[
        str | None, _path_option("left", "the first of two compared completions")
    ] = None,
    right: Annotated[str | None, _path_option("right", "the second compared completion")] = None,
    correction: Annotated[str | None, _path_option("correction", "a corrected completion")] = None,
    label: Annotated[str | None, _path_option("label", "the vote")] = None,
    score_name: Annotated[
        list[str] | None,
        typer.Option(
            "--score-name", help="Name of a score to import as feedback. Can be repeated."
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(
            "--category",
            metavar="NAME=up|down",
            help="Import a category as thumbs up or down, e.g. good=up. Can be repeated.",
        ),
    ] = None,
    include_machine: Annotated[
        bool,
        typer.Option("--include-machine", help="Also import scores that models and programs gave."),
    ] = False,
    keep_reasoning: Annotated[
        bool, typer.Option("--keep-reasoning", help="Keep reasoning blocks in completions.")
    ] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The export contains all votes of the tool: remove stored votes that are not in "
            "it, because they were withdrawn.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace output files that were edited.")
    ] = False,
    list_sources: Annotated[
        bool, typer.Option("--list", help="List the supported tools and exit.")
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the summary as a JSON object. Other output goes to standard error.",
        ),
    ] = False,
) -> None:
    """Convert the votes of a chat or annotation tool into rows for training. Import a newer export
    into the same file to add new votes and update changed ones.
    """
    if list_sources:
        console.print(_table())
        return
    from valence.apps.feedback.import_rows import import_feedback, print_summary
    from valence.data.importers.records import ReadOptions

    if source is None:
        raise UserError(
            "missing arguments: the name of the tool and the files that it exported",
            code="import-input",
            where="SOURCE",
            fix="write `valence import TOOL FILE...`; `valence import --list` shows the tools",
        )
    parts = {
        "prompt": prompt,
        "completion": completion,
        "left": left,
        "right": right,
        "correction": correction,
        "label": label,
    }
    options = ReadOptions(
        paths={name: path for name, path in parts.items() if path},
        score_names=tuple(score_name or ()),
        labels=dict(map(_category, category or ())),
        includes_machine=include_machine,
        keeps_reasoning=keep_reasoning,
    )
    terminal = json_console() if as_json else console
    try:
        with stoppable("stopped; rerun the same command to repeat the import"):
            summary = import_feedback(
                source,
                files or [],
                out,
                url=url,
                token_env=token_env,
                since=since,
                model=model,
                options=options,
                is_complete=complete,
                overwrite=overwrite,
                console=terminal,
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **summary.to_dict()}))
    else:
        print_summary(summary, terminal)


def _category(text: str) -> tuple[str, bool]:
    name, _, word = text.rpartition("=")
    if not name or word not in CATEGORIES:
        raise UserError(
            f"{text!r} does not map a category to up or down",
            code="category-invalid",
            where="--category",
            fix="write NAME=up or NAME=down",
        )
    return name, CATEGORIES[word]


def _table() -> Table:
    from valence.data.importers.sources import SOURCES, command_name

    table = Table("tool", "feedback", "rows", "--url", "files", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, tool in SOURCES.items():
        table.add_row(
            command_name(name),
            tool.description,
            tool.main,
            "yes" if tool.is_pullable else "no",
            tool.files,
        )
    return table
