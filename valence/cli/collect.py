"""The command that collects feedback on a model in a web page."""

from __future__ import annotations

import secrets
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import (
    Overrides,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    console,
)
from valence.errors import UserError, install_command
from valence.terminal import escape_control, print_message, write_line

# Options of commands that serve a page.
Rater = Annotated[
    list[str] | None,
    typer.Option("--rater", help="Print a link for this rater; may be given several times."),
]
Host = Annotated[
    str, typer.Option(help="Address to listen at; 0.0.0.0: other machines can connect too.")
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another host name that browsers use for this machine; may be given several times.",
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="Let everybody on this machine open the page, without a secret link."
    ),
]


@app.command()
def collect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="The model to talk to: the folder of a run or a model, or a hub id.",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="File of rows for thumbs; pairs and corrections go to files in the same folder. "
            "New votes are added to those that are there.",
        ),
    ] = Path("feedback.jsonl"),
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            help="A file of prompts that raters work through; may be given several times.",
        ),
    ] = None,
    rater: Rater = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    allowed_host: AllowedHost = None,
    no_token: NoToken = False,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0: always the likeliest token."),
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Nucleus sampling; 1: all tokens.")
    ] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace files of rows that were edited, or that no import wrote."
        ),
    ] = False,
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Collect feedback on a model in a web page: thumbs, comparisons, corrections, comments.

    You can train on the files as they are. Your own app can use the same address with
    POST /v1/chat/completions and POST /feedback.
    """
    require_web_libraries("collect")
    from valence.distributed.single import Single
    from valence.lifecycle.restore import open_run
    from valence.rollouts import Sampling
    from valence.serving.app import FeedbackService, log_error
    from valence.serving.chat import ChatModel
    from valence.serving.feedback import FeedbackStore
    from valence.serving.prompts import PromptQueue
    from valence.serving.run import open_socket, serve

    tokens = make_tokens(rater or [], no_token=no_token)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    allowed = allow_remote_code(trust_remote_code, overrides)
    queue = PromptQueue(prompts or [])
    # all that may be wrong is looked at before the model is loaded, which takes long
    with (
        open_socket(host, port, has_tokens=bool(tokens)) as place,
        closing(FeedbackStore(out, overwrite=overwrite, on_error=log_error)) as store,
    ):
        print_message(console, f"loading {target}")
        trainer = open_run(target, allowed, group=Single(), at=checkpoint_of(step), console=console)
        model = ChatModel(trainer, Path(target).name)
        serve(
            FeedbackService(model, store, sampling, queue, tokens=tokens),
            place,
            host=host,
            allowed_hosts=allowed_host or [],
            tell=lambda line: write_line(escape_control(line)),
        )


def require_web_libraries(command: str) -> None:
    """Raises UserError when a library that serves pages is missing."""
    for library in ("fastapi", "uvicorn"):
        if find_spec(library) is None:
            raise UserError(
                f"{library} is not installed",
                code="library-missing",
                where=command,
                fix=install_command("serve"),
            )


def make_tokens(names: list[str], *, no_token: bool) -> dict[str, str]:
    """Raters by their secret tokens; one without a name where none is given. Raises UserError."""
    if no_token and names:
        raise UserError(
            "without tokens, raters cannot be told apart",
            code="option-conflict",
            where="--no-token",
            fix="leave out --no-token or --rater",
        )
    if len(set(names)) < len(names):
        raise UserError(
            "two raters have the same name",
            code="rater-duplicate",
            where="--rater",
            fix="give each rater a name of their own",
        )
    for name in names:
        if not (name.strip() and name.isprintable()):
            raise UserError(
                f"a rater is called {name!r}",
                code="rater-name-invalid",
                where="--rater",
                fix="use letters, digits and spaces",
            )
    return {} if no_token else {secrets.token_urlsafe(16): name for name in names or [""]}
