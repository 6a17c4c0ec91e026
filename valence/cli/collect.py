"""The command that collects feedback on a model in a web page."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, closing
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
    require_server_libraries,
    with_options,
)
from valence.errors import UserError
from valence.options import PageOptions
from valence.terminal import escape_control, print_message, write_line


@app.command()
@with_options
def collect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="Model to collect feedback on. It is a run folder, a model folder or a hub id.",
        ),
    ],
    rival: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="Second model. Raters compare the answers of both without seeing their models.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="File for rows with thumbs; other feedback goes to files next to it. Feedback is "
            "added to existing rows.",
        ),
    ] = Path("feedback.jsonl"),
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            help="File of prompts for the raters. Can be repeated.",
        ),
    ] = None,
    page: PageOptions = PageOptions(),
    temperature: Annotated[
        float,
        typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 takes the most likely token."),
    ] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Sample from the smallest set of tokens with this total probability.",
        ),
    ] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace output files that were edited or not written by Valence.",
        ),
    ] = False,
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Collect feedback on a model in a web page: thumbs, comparisons, corrections and comments.
    With two models, collect blind comparisons.

    You can train on the output files directly. Your app can use the same server, as with `valence
    serve`.
    """
    require_server_libraries("collect")
    from valence.apps.serve.app import FeedbackService, log_error
    from valence.apps.serve.chat import ChatModel
    from valence.apps.serve.feedback import FeedbackStore
    from valence.apps.serve.http_server import open_socket
    from valence.apps.serve.prompts import PromptQueue
    from valence.apps.serve.run import serve
    from valence.distributed.process_group import SingleProcess
    from valence.rollouts import Sampling
    from valence.training.open_run import open_run

    if rival is not None and "=" in rival and not Path(rival).exists():
        rival, overrides = None, [rival, *(overrides or [])]
    names = model_names(target, rival, step)
    tokens = make_tokens(page, with_owner=rival is not None)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    allowed = allow_remote_code(trust_remote_code, overrides)
    queue = PromptQueue(prompts or [])
    # find errors before the model is loaded, which takes long
    with (
        ExitStack() as stack,
        open_socket(page.host, page.port, has_tokens=bool(tokens)) as listener,
        closing(FeedbackStore(out, overwrite=overwrite, on_error=log_error)) as store,
    ):
        models: list[ChatModel] = []
        for name, folder in zip(names, filter(None, (target, rival)), strict=True):
            print_message(console, f"loading {folder}")
            checkpoint = None if models else checkpoint_of(step)
            trainer = open_run(
                folder, allowed, group=SingleProcess(), at=checkpoint, console=console
            )
            model = ChatModel(trainer, name)
            stack.callback(model.close)
            models.append(model)
        serve(
            FeedbackService(
                models[0],
                store,
                sampling,
                queue,
                rival=models[1] if len(models) > 1 else None,
                tokens=tokens,
            ),
            listener,
            host=page.host,
            allowed_hosts=page.allowed_host or [],
            print_line=lambda line: write_line(escape_control(line)),
        )


def model_names(target: str, rival: str | None, step: str | None) -> list[str]:
    """The names of one or two models in votes. Raises UserError if both are the same model."""
    if rival is None:
        return [Path(target).name]
    names = [Path(target).name, Path(rival).name]
    if names[0] == names[1]:
        names = [target, rival]
    if Path(target).resolve() == Path(rival).resolve():
        if step is None:
            raise UserError(
                "both models are the same, so their answers cannot be compared",
                code="models-identical",
                where=rival,
                fix="choose two models, or use an earlier checkpoint of the first model: --step N",
            )
        names[0] = f"{target} (step {step})"
    return names


def make_tokens(page: PageOptions, *, with_owner: bool = False) -> dict[str, str]:
    """The names of raters by their secret tokens; a single rater without a name by default.

    with_owner: add the owner of the service, who has no name and may see results. Raises UserError
    for invalid or duplicate names.
    """
    names = page.rater
    if page.no_token and names:
        raise UserError(
            "--no-token cannot be combined with --rater, because the token in each link "
            "identifies the rater",
            code="option-conflict",
            where="--no-token",
            fix="remove --no-token or --rater",
        )
    if len(set(names)) < len(names):
        raise UserError(
            f"two raters have the name {next(name for name in names if names.count(name) > 1)!r}",
            code="rater-duplicate",
            where="--rater",
            fix="use a different name for each rater",
        )
    for name in names:
        if not (name.strip() and name.isprintable()):
            raise UserError(
                f"the rater name {name!r} is empty or contains control characters",
                code="rater-name-invalid",
                where="--rater",
                fix="use letters, digits and spaces",
            )
    if page.no_token:
        return {}
    raters = names or [""]
    if with_owner and raters != [""]:
        raters = [*raters, ""]
    return {secrets.token_urlsafe(16): name for name in raters}
