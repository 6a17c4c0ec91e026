"""The commands that find wrong labels in rated rows, and select prompts to label next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from valence import completion
from valence.cli.collect import NoToken, Rater, make_tokens
from valence.cli.common import (
    AllowedHost,
    Host,
    Port,
    TrustRemoteCode,
    allow_remote_code,
    app,
    console,
    json_console,
    require_server_libraries,
    stoppable,
)
from valence.errors import UserError
from valence.terminal import escape_control, json_line, print_message, write_line


@app.command()
def audit(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files of rows with thumbs, scores or pairs, or sections as in a recipe "
            "('{path: FILE, keys: {...}}').",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL|RUN",
            help="Model folder, hub id, run or recipe. Lists labels that contradict a classifier "
            "on this model's hidden states.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    review: Annotated[
        bool,
        typer.Option(
            "--review",
            help="Review the suspicious rows in a web page, and write all rows to --out.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="With --model: write the rows to this .jsonl file, the most suspicious first, "
            "with the findings in `info.audit`. With --review: write the reviewed rows to this "
            "file.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Number of suspicious rows to list.")
    ] = 20,
    format: Annotated[
        str | None,
        typer.Option("--format", help="Format of the files, or the tool that exported them."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the audit as a JSON object. Other output goes to standard error."
        ),
    ] = False,
    rater: Rater = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    allowed_host: AllowedHost = None,
    no_token: NoToken = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check the labels of rated rows: contradictions, agreement between raters, labels that can be
    predicted from length or format alone and, with --model, labels that are likely wrong.

    With --review, a web page shows the suspicious rows, and you keep, flip or drop each of them.
    """
    terminal = json_console() if as_json else console
    allowed = allow_remote_code(trust_remote_code, None)
    if review:
        if as_json:
            raise UserError(
                "--json cannot be combined with --review, which opens a web page",
                code="option-conflict",
                where="--json",
                fix="remove --json or --review",
            )
        if out is None:
            raise UserError(
                "a review needs a file for the reviewed rows",
                code="out-missing",
                where="--review",
                fix="add --out FILE.jsonl",
            )
        tokens = make_tokens(rater or [], no_token=no_token)
        _review(files, model, out, top, format, allowed, tokens, host, port, allowed_host or [])
        return
    options = {
        "--rater": bool(rater),
        "--host": host != "127.0.0.1",
        "--port": port != 8765,
        "--allowed-host": bool(allowed_host),
        "--no-token": no_token,
    }
    if any(options.values()):
        used = ", ".join(name for name, is_set in options.items() if is_set)
        raise UserError(
            f"{used} can only be used with --review",
            code="option-conflict",
            where=used,
            fix=f"add --review, or remove {used}",
        )
    try:
        with stoppable("stopped; nothing was written"):
            from valence.apps.feedback.audit_labels import audit_labels
            from valence.apps.feedback.audit_summary import print_audit

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
    if out is not None and result.out is None:
        message = f"{out} was not written, because the model cannot tell which labels are wrong."
        print_message(terminal, message, "yellow")


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
    from valence.apps.feedback.audit_labels import audit_rows
    from valence.apps.feedback.audit_summary import counted, print_audit
    from valence.apps.feedback.review_labels import LabelReview, check_review_path
    from valence.apps.serve.app import log_error
    from valence.apps.serve.http_server import open_socket
    from valence.apps.serve.review import ReviewService
    from valence.apps.serve.run import serve

    check_review_path(out)
    danger = "other machines could read the rows and change their labels"
    # open the port first: running the model takes long
    with open_socket(host, port, has_tokens=bool(tokens), danger=danger) as listener:
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
            if review.num_obsolete:
                decisions = counted(review.num_obsolete, "earlier decision")
                message = f"{decisions} on rows that are no longer in the files"
                print_message(console, message, "yellow")
            if not review.cases:
                print_message(console, f"\nNo row is suspicious. All rows are in {out}.")
                return
            num_rows = counted(len(review.suspicions), "suspicious row")
            print_message(console, f"\n{num_rows} to review")
            serve(
                ReviewService(review, tokens=tokens),
                listener,
                host=host,
                allowed_hosts=allowed_hosts,
                print_line=lambda line: write_line(escape_control(line)),
            )


@app.command()
def select(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of prompts, or of prompts with unlabelled answers."
        ),
    ],
    rated: Annotated[
        list[str],
        typer.Option("--rated", help="File of rated rows. Can be repeated."),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL|RUN",
            help="Model folder, hub id, run or recipe. Prompts and answers are compared by this "
            "model's hidden states.",
            autocompletion=completion.run_folders,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="Write the selected prompts to this .jsonl file, in order."),
    ],
    num: Annotated[int, typer.Option("--num", min=1, help="Number of prompts to select.")] = 100,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result as a JSON object. Other output goes to standard error."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Select the prompts to label next, for `valence collect --prompts`.

    With unlabelled answers, prompts come first if a classifier is least sure about their answers.
    With prompts alone, those come first that are least similar to the labelled prompts.
    """
    terminal = json_console() if as_json else console
    try:
        with stoppable("stopped; nothing was written"):
            from valence.apps.feedback.audit_summary import print_selection
            from valence.apps.feedback.select_prompts import select_prompts

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
