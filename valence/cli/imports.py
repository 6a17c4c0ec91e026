"""The command that makes rows of the votes in a feedback tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import app, console, stoppable
from valence.errors import UserError
from valence.terminal import Terminal, json_line, write_line

CATEGORIES = {"up": True, "down": False}


def _path_option(name: str, meaning: str) -> typer.models.OptionInfo:
    """An option that says where rows of an export hold a part."""
    return typer.Option(
        f"--{name}", metavar="PATH", help=f"Where the export has {meaning}, as a dotted path."
    )


@app.command("import")
def import_(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="The tool that the export is from; --list lists them.",
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
            help="Write the rows to this .jsonl, and those of other kinds beside it. Repeat the "
            "command to add newer votes.",
        ),
    ] = Path("feedback.jsonl"),
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="DATE|last",
            help="Leave out older votes: an ISO date, or `last` for the newest vote in --out.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Leave out votes on completions of other models."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Read from the tool's server instead of files."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            "--token-env",
            metavar="NAME",
            help="With --url: the environment variable that has the server's key. Default: the "
            "tool's own, as LANGSMITH_API_KEY.",
        ),
    ] = None,
    prompt: Annotated[str | None, _path_option("prompt", "the prompt")] = None,
    completion: Annotated[str | None, _path_option("completion", "the rated completion")] = None,
    left: Annotated[
        str | None, _path_option("left", "the first of two compared completions")
    ] = None,
    right: Annotated[str | None, _path_option("right", "the second one")] = None,
    correction: Annotated[str | None, _path_option("correction", "a corrected completion")] = None,
    label: Annotated[str | None, _path_option("label", "the vote")] = None,
    score_name: Annotated[
        list[str] | None,
        typer.Option(
            "--score-name", help="Name of a score that is feedback. May be given several times."
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(
            "--category",
            metavar="NAME=up|down",
            help="Read a category as thumbs up or down, e.g. good=up. May be given several times.",
        ),
    ] = None,
    include_machine: Annotated[
        bool,
        typer.Option("--include-machine", help="Import scores of models and programs too."),
    ] = False,
    keep_reasoning: Annotated[
        bool, typer.Option("--keep-reasoning", help="Leave blocks of reasoning in completions.")
    ] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The export has all votes of the tool: drop stored ones that are not in it, which "
            "were withdrawn.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of rows that were edited.")
    ] = False,
    list_sources: Annotated[
        bool, typer.Option("--list", help="List the tools that can be read, and end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the summary as a JSON object; all else goes to stderr."),
    ] = False,
) -> None:
    """Turn the votes in a chat or annotation tool into rows for training. Importing a newer export
    into the same file adds new votes and updates changed ones.
    """
    if list_sources:
        console.print(_table())
        return
    from valence.data.importers.records import ReadOptions
    from valence.jobs.import_rows import import_feedback, print_summary

    if source is None:
        raise UserError(
            "name a tool and the files of its export",
            code="import-input",
            where="SOURCE",
            fix="see `valence import --list`",
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
    terminal = Terminal(stderr=True) if as_json else console
    try:
        with stoppable("stopped; the same command repeats the import"):
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
                quiet=quiet,
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **summary.to_dict()}))
    elif not quiet:
        print_summary(summary, terminal)


def _category(text: str) -> tuple[str, bool]:
    name, _, word = text.rpartition("=")
    if not name or word not in CATEGORIES:
        raise UserError(
            f"{text} does not say whether a category is up or down",
            code="category-invalid",
            where="--category",
            fix="write NAME=up or NAME=down",
        )
    return name, CATEGORIES[word]


def _table() -> Table:
    from valence.data.importers.sources import SOURCES, command_name

    table = Table("source", "what", "rows", "--url", "files", box=None, pad_edge=False)
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
