"""The command that converts the votes of a feedback tool into rows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from valence import completion
from valence.cli.common import Quiet, app, console, json_console, stoppable, with_options
from valence.errors import UserError
from valence.options import ImportOptions
from valence.terminal import json_line, write_line


@app.command("import")
@with_options
def import_(
    options: ImportOptions,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Tool of the export (--list shows all), or import path of an importer.",
            autocompletion=completion.feedback_sources,
        ),
    ] = None,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files of the export.")
    ] = None,
    list_sources: Annotated[bool, typer.Option("--list", help="List the supported tools.")] = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the summary as a JSON object. Other output goes to standard error.",
        ),
    ] = False,
) -> None:
    """Convert the votes of a chat or annotation tool into rows. A newer export into the same file
    adds new votes and updates changed ones.
    """
    if list_sources:
        console.print(_table())
        return
    from valence.apps.feedback.import_rows import import_feedback, print_summary

    if source is None:
        raise UserError(
            "missing arguments: the name of the tool and the files that it exported",
            code="import-input",
            where="SOURCE",
            fix="write `valence import TOOL FILE...`; `valence import --list` shows the tools",
        )
    terminal = json_console() if as_json else console
    try:
        with stoppable("stopped; rerun the same command to repeat the import"):
            summary = import_feedback(source, files or [], options, console=terminal)
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **summary.to_dict()}))
    else:
        print_summary(summary, terminal)


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
