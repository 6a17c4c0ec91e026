"""The command that collects feedback on a model in a web page."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from valence.serving.app import ChatService

READING = {"temperature": 0.7, "max_new_tokens": 512}


@app.command()
def collect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="The model to talk to: a run's folder, or a model's folder or hub id.",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Write thumbs to this file of rows; pairs and corrections go to files beside it. "
            "Votes are added to what is there.",
        ),
    ] = Path("feedback.jsonl"),
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            help="A file of prompts that raters work through; may be given several times.",
        ),
    ] = None,
    rater: Annotated[
        list[str] | None,
        typer.Option(
            "--rater",
            help="Print a link for this rater; may be given several times. Names are hashed in "
            "the files.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 for other machines too.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")
    ] = 8765,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another host name under which the page is opened."),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let everybody on this machine open the page.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Of sampling; 0: the likeliest tokens.")
    ] = READING["temperature"],
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of nucleus sampling.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = int(
        READING["max_new_tokens"]
    ),
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Collect feedback on a model in a web page: thumbs, comparisons, corrections, comments.

    The files that it writes can be trained on as they are. The same address offers
    POST /v1/chat/completions and POST /feedback for an app of your own.
    """
    for library in ("fastapi", "uvicorn"):
        if find_spec(library) is None:
            raise UserError(
                f"{library} is not installed",
                code="library-missing",
                where="collect",
                fix=install_command("serve"),
            )
    from valence.distributed.single import Single
    from valence.lifecycle.restore import open_run
    from valence.rollouts import Sampling
    from valence.serving.app import ChatService
    from valence.serving.chat import ChatModel
    from valence.serving.feedback import FeedbackStore
    from valence.serving.prompts import PromptQueue
    from valence.serving.run import serve

    raters = rater or [""]
    if len(set(raters)) < len(raters):
        raise UserError(
            "two raters have the same name",
            code="rater-duplicate",
            where="--rater",
            fix="give each rater a name",
        )
    if no_token and rater:
        raise UserError(
            "without tokens, raters cannot be told apart",
            code="option-conflict",
            where="--no-token",
            fix="leave out --no-token or --rater",
        )
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    ours = allow_remote_code(trust_remote_code, overrides)
    print_message(console, f"loading {target}")
    trainer = open_run(target, ours, group=Single(), at=checkpoint_of(step), console=console)
    model = ChatModel(trainer, Path(target).name)
    tokens = {} if no_token else {secrets.token_urlsafe(16): name for name in raters}
    store = FeedbackStore(out, model.encoder)
    queue = PromptQueue(prompts or [], store.has_voted)
    service: ChatService = ChatService(model, store, sampling, queue, tokens=tokens)
    serve(
        service,
        host=host,
        port=port,
        allowed_hosts=allowed_host or [],
        tell=lambda line: write_line(escape_control(line)),
    )
