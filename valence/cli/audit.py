"""The commands that find wrong labels in rated rows, and select prompts to label next."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from valence.cli.collect import make_tokens
from valence.cli.common import (
    TrustRemoteCode,
    allow_remote_code,
    app,
    console,
    json_console,
    require_server_libraries,
    stoppable,
    with_options,
)
from valence.errors import UserError
from valence.options import AuditOptions, PageOptions, SelectOptions, changed_options
from valence.terminal import escape_control, json_line, print_message, write_line


@app.command()
@with_options
def audit(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files of rows with thumbs, scores or pairs. They can also be sections as in a "
            "recipe: '{path: FILE, keys: {...}}'.",
        ),
    ],
    options: AuditOptions,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the audit as a JSON object. Other output goes to standard error."
        ),
    ] = False,
    page: PageOptions = PageOptions(),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check labels: contradictions, agreement between raters, labels that length or format alone
    predict and, with --model, labels that are likely wrong.

    With --review, you keep, flip or drop the suspicious rows in a web page.
    """
    terminal = json_console() if as_json else console
    allowed = allow_remote_code(trust_remote_code, None)
    if options.review:
        if as_json:
            raise UserError(
                "--json cannot be combined with --review, which opens a web page",
                code="option-conflict",
                where="--json",
                fix="remove --json or --review",
            )
        _review(files, options, page, allowed)
        return
    if used := ", ".join(changed_options(page)):
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

            result = audit_labels(files, options, overrides=allowed, console=terminal)
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **result.to_dict()}))
    else:
        print_audit(result, terminal)
    if options.out is not None and result.out is None:
        reason = "the model cannot tell which labels are wrong"
        print_message(terminal, f"{options.out} was not written, because {reason}.", "yellow")


def _review(
    files: list[str], options: AuditOptions, page: PageOptions, overrides: list[str]
) -> None:
    """Audit the rows, and serve the page until it is stopped."""
    out = options.out
    if out is None:
        raise UserError(
            "a review needs a file for the reviewed rows",
            code="out-missing",
            where="--review",
            fix="add --out FILE.jsonl",
        )
    tokens = make_tokens(page)
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
    with open_socket(page.host, page.port, has_tokens=bool(tokens), danger=danger) as listener:
        with stoppable("stopped; nothing was written"):
            result = audit_rows(files, options, overrides=overrides, console=console)
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
                host=page.host,
                allowed_hosts=page.allowed_host or [],
                print_line=lambda line: write_line(escape_control(line)),
            )


@app.command()
@with_options
def select(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files of prompts, with or without answers. The answers have no label.",
        ),
    ],
    options: SelectOptions,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result as a JSON object. Other output goes to standard error."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Select the prompts to label next, for `valence collect --prompts`.

    With unlabelled answers, prompts come first if a classifier is least sure about their answers;
    without, if they are least similar to the labelled prompts.
    """
    terminal = json_console() if as_json else console
    try:
        with stoppable("stopped; nothing was written"):
            from valence.apps.feedback.audit_summary import print_selection
            from valence.apps.feedback.select_prompts import select_prompts

            overrides = allow_remote_code(trust_remote_code, None)
            result = select_prompts(files, options, overrides=overrides, console=terminal)
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    if as_json:
        write_line(json_line({"status": "done", **result.to_dict()}))
    else:
        print_selection(result, terminal)
