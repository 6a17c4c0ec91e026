"""The command that looks for wrong labels in rated rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valence.cli import complete
from valence.cli.common import TrustRemoteCode, allow_remote_code, app, console, stoppable
from valence.errors import UserError
from valence.terminal import Terminal, json_line, write_line


@app.command()
def audit(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files of thumbs or pairs, or sections as in YAML."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL|RUN",
            help="Look for labels that this model's hidden states contradict: a folder, a hub id, "
            "a run, or a recipe.",
            autocompletion=complete.run_folders,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="With --model: write the rows again to this .jsonl, the most suspicious first, "
            "with `info.audit`.",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Suspicious rows to list.")] = 20,
    format: Annotated[
        str | None,
        typer.Option("--format", help="Format of the files, or the tool that exported them."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the audit as a JSON object; all else goes to stderr."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check the labels of rated rows: contradictions, agreement between raters, labels that follow
    from length or format alone and, with --model, labels that are likely wrong.
    """
    terminal = Terminal(stderr=True) if as_json else console
    try:
        with stoppable("stopped; nothing was written"):
            from valence.jobs.audit_labels import audit_labels
            from valence.jobs.audit_summary import print_audit

            found = audit_labels(
                files,
                model=model,
                out=out,
                top=top,
                format=format,
                overrides=allow_remote_code(trust_remote_code, None),
                console=terminal,
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **found.to_dict()}))
    else:
        print_audit(found, terminal)
