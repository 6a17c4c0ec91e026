"""The command that collects feedback on a model in a web page."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import (
    AllowedHost,
    Host,
    Overrides,
    Port,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    console,
    require_server_libraries,
)
from valence.errors import UserError
from valence.terminal import escape_control, print_message, write_line

# Options of commands that serve a page.
Rater = Annotated[
    list[str] | None,
    typer.Option("--rater", help="Print a link for this rater; may be given several times."),
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
    rival: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A second model, whose answers raters compare with those of the first one without "
            "knowing which is which.",
        ),
    ] = None,
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
    """Collect feedback on a model in a web page: thumbs, comparisons, corrections, comments. Of two
    models, collect blind comparisons.

    You can train on the files as they are. Your own app can use the same address with
    POST /v1/chat/completions and POST /feedback.
    """
    require_server_libraries("collect")
    from valence.distributed.process_group import SingleProcess
    from valence.lifecycle.restore import open_run
    from valence.rollouts import Sampling
    from valence.serving.app import FeedbackService, log_error
    from valence.serving.chat import ChatModel
    from valence.serving.feedback import FeedbackStore
    from valence.serving.prompts import PromptQueue
    from valence.serving.run import open_socket, serve

    if rival is not None and "=" in rival and not Path(rival).exists():
        rival, overrides = None, [rival, *(overrides or [])]
    names = model_names(target, rival, step)
    tokens = make_tokens(rater or [], no_token=no_token, with_owner=rival is not None)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    allowed = allow_remote_code(trust_remote_code, overrides)
    queue = PromptQueue(prompts or [])
    # all that may be wrong is looked at before the model is loaded, which takes long
    with (
        open_socket(host, port, has_tokens=bool(tokens)) as place,
        closing(FeedbackStore(out, overwrite=overwrite, on_error=log_error)) as store,
    ):
        models: list[ChatModel] = []
        for name, folder in zip(names, filter(None, (target, rival)), strict=True):
            print_message(console, f"loading {folder}")
            checkpoint = None if models else checkpoint_of(step)
            trainer = open_run(
                folder, allowed, group=SingleProcess(), at=checkpoint, console=console
            )
            models.append(ChatModel(trainer, name))
        serve(
            FeedbackService(
                models[0],
                store,
                sampling,
                queue,
                rival=models[1] if len(models) > 1 else None,
                tokens=tokens,
            ),
            place,
            host=host,
            allowed_hosts=allowed_host or [],
            print_line=lambda line: write_line(escape_control(line)),
        )


def model_names(target: str, rival: str | None, step: str | None) -> list[str]:
    """The names under which votes are on one or two models. Raises UserError for the same model
    twice.
    """
    if rival is None:
        return [Path(target).name]
    names = [Path(target).name, Path(rival).name]
    if names[0] == names[1]:
        names = [target, rival]
    if Path(target).resolve() == Path(rival).resolve():
        if step is None:
            raise UserError(
                "a model cannot be compared with itself",
                code="models-identical",
                where=rival,
                fix="name two models, or an earlier checkpoint of the first one with --step",
            )
        names[0] = f"{target} (step {step})"
    return names


def make_tokens(names: list[str], *, no_token: bool, with_owner: bool = False) -> dict[str, str]:
    """Raters by their secret tokens; one without a name if there are no others. Raises UserError.

    with_owner: add the owner of the service, who has no name and may see results.
    """
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
    if no_token:
        return {}
    raters = names or [""]
    if with_owner and raters != [""]:
        raters = [*raters, ""]
    return {secrets.token_urlsafe(16): name for name in raters}
