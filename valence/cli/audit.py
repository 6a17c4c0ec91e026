"""The commands that look for wrong labels in rated rows, and for prompts to label next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from valence.cli import complete
from valence.cli.collect import NoToken, Rater, make_tokens
from valence.cli.common import (
    AllowedHost,
    Host,
    Port,
    TrustRemoteCode,
    allow_remote_code,
    app,
    console,
    require_server_libraries,
    stoppable,
)
from valence.errors import UserError
from valence.terminal import Terminal, escape_control, json_line, print_message, write_line


@app.command()
def audit(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of thumbs, scores or pairs, or sections as in YAML."
        ),
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
    review: Annotated[
        bool,
        typer.Option(
            "--review",
            help="Decide on the suspicious rows in a web page, and write all rows to --out.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="With --model: write the rows again to this .jsonl, the most suspicious first, "
            "with `info.audit`. With --review: write the reviewed rows to this .jsonl.",
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
    rater: Rater = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    allowed_host: AllowedHost = None,
    no_token: NoToken = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check the labels of rated rows: contradictions, agreement between raters, labels that follow
    from length or format alone and, with --model, labels that are likely wrong.

    With --review, a web page shows the suspicious rows, and you keep, flip or drop each of them.
    """
    terminal = Terminal(stderr=True) if as_json else console
    allowed = allow_remote_code(trust_remote_code, None)
    if review:
        if as_json:
            raise UserError(
                "a review prints links, and not one JSON object",
                code="option-conflict",
                where="--json",
                fix="leave out --json or --review",
            )
        if out is None:
            raise UserError(
                "the reviewed rows need a file",
                code="out-missing",
                where="--review",
                fix="name one with --out",
            )
        tokens = make_tokens(rater or [], no_token=no_token)
        _review(files, model, out, top, format, allowed, tokens, host, port, allowed_host or [])
        return
    if rater or allowed_host or no_token or host != "127.0.0.1" or port != 8765:
        raise UserError(
            "only a review serves a page",
            code="option-conflict",
            where="--rater, --host, --port, --allowed-host, --no-token",
            fix="add --review, or leave these options out",
        )
    try:
        with stoppable("stopped; nothing was written"):
            from valence.jobs.audit_labels import audit_labels
            from valence.jobs.audit_summary import print_audit

            result = audit_labels(
                files,
                model=model,
                out=out,
                top=top,
                format=format,
                overrides=allowed,
                console=terminal,
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **result.to_dict()}))
    else:
        print_audit(result, terminal)


def _review(
    files: list[str],
    model: str | None,
    out: Path,
    top: int,
    format: str | None,
    overrides: list[str],
    tokens: dict[str, str],
    host: str,
    port: int,
    allowed_hosts: list[str],
) -> None:
    """Audit the rows, and serve the page until it is stopped."""
    require_server_libraries("audit")
    from valence.jobs.audit_labels import audit_rows
    from valence.jobs.audit_summary import counted, print_audit
    from valence.jobs.review_labels import LabelReview, check_review_path
    from valence.serving.app import log_error
    from valence.serving.review import ReviewService
    from valence.serving.run import open_socket, serve

    check_review_path(out)
    danger = "other machines could read the rows, and change their labels"
    # the port is taken before the model runs, which takes long
    with open_socket(host, port, has_tokens=bool(tokens), danger=danger) as place:
        with stoppable("stopped; nothing was written"):
            result = audit_rows(
                files,
                model=model,
                out=out,
                may_exist=True,
                top=top,
                format=format,
                overrides=overrides,
                console=console,
            )
        print_audit(result.audit, console)
        with closing(LabelReview(result, out, on_error=log_error)) as review:
            if review.num_lost:
                num_lost = counted(review.num_lost, "earlier decision")
                message = f"{num_lost} on rows that are not in the files any more"
                print_message(console, message, "yellow")
            if not review.cases:
                print_message(console, f"\nNo row is suspicious. {out} has all rows.")
                return
            num_rows = counted(len(review.suspicions), "suspicious row")
            print_message(console, f"\n{num_rows} to review")
            serve(
                ReviewService(review, tokens=tokens),
                place,
                host=host,
                allowed_hosts=allowed_hosts,
                print_line=lambda line: write_line(escape_control(line)),
            )


@app.command()
def select(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files of prompts, or of answers without a label."),
    ],
    rated: Annotated[
        list[str],
        typer.Option("--rated", help="A file of rated rows; may be given several times."),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL|RUN",
            help="The model whose hidden states are compared: a folder, a hub id, a run, or a "
            "recipe.",
            autocompletion=complete.run_folders,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Write the prompts to this .jsonl, in their order.")
    ],
    num: Annotated[int, typer.Option("--num", min=1, help="Prompts to select.")] = 100,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as a JSON object; all else goes to stderr."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Select the prompts to label next, for `valence collect --prompts`.

    With unlabelled answers, prompts come first whose answers a classifier is least sure of; with
    prompts alone, those that are least like the labelled ones.
    """
    terminal = Terminal(stderr=True) if as_json else console
    try:
        with stoppable("stopped; nothing was written"):
            from valence.jobs.audit_summary import print_selection
            from valence.jobs.select_prompts import select_prompts

            result = select_prompts(
                files,
                rated,
                model,
                out,
                num=num,
                overrides=allow_remote_code(trust_remote_code, None),
                console=terminal,
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **result.to_dict()}))
    else:
        print_selection(result, terminal)
