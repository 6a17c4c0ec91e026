"""The command that serves a model or a reward over HTTP."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from valence.cli.collect import model_names
from valence.cli.common import (
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    console,
    require_server_libraries,
)
from valence.cli.serve_reward import serve_reward, token_of
from valence.errors import UserError, refuse_unused
from valence.options import AllowedHost, Host
from valence.terminal import escape_control, print_message, write_line

DEFAULT_SHARE = 0.5
REWARD_ONLY = ("timeout", "rate", "max_waiting", "end")
MODEL_ONLY = (
    "out",
    "share",
    "temperature",
    "top_p",
    "max_new_tokens",
    "max_batch",
    "drain",
    "overwrite",
    "step",
    "trust_remote_code",
)
"""Options that apply to a reward alone, and to a model alone."""


@app.command()
def serve(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="Model to serve. It is the folder of a run or a model, or a hub id.",
        ),
    ] = None,
    rival: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="Second model, for an A/B test. Each user gets one of the two models.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings to override; with --reward those of the reward, e.g. "
            "settings.answer=label. Without, e.g. data.as_chat=true.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="REWARD",
            help="Serve a reward model, a function or a rule instead (POST /get_reward). It is "
            "the folder or hub id of a reward model, `package.module:function`, or the name "
            "of a rule. For recipes with `reward: http://...` and for OpenRLHF.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="File for rows with thumbs; other feedback goes to files next to it. Feedback is "
            "added to existing rows.",
        ),
    ] = Path("feedback.jsonl"),
    share: Annotated[
        float | None,
        typer.Option(
            "--share",
            help="Fraction of users who get the second model. It is between 0 and 1. Default: 0.5.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on; 0: any free port. Default: 8000, or 5000 with --reward.",
        ),
    ] = None,
    allowed_host: AllowedHost = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the bearer token that clients must send.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=2.0,
            help="Temperature of requests without one. 0 takes the most likely token.",
        ),
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="top_p of requests without one. 1: all tokens.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="max_tokens of requests without it. These are the most tokens of an answer."
        ),
    ] = 512,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Answers per model to sample at a time.")
    ] = 8,
    drain: Annotated[
        int,
        typer.Option(min=0, help="Seconds for running requests after SIGTERM or Ctrl-C."),
    ] = 120,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace output files that were edited or not written by Valence.",
        ),
    ] = False,
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="With --reward: seconds per request. Default: 60.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="With --reward: maximum requests per second per client. Default: unlimited.",
        ),
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --reward: waiting answers beyond which requests are refused. Default: "
            "16384.",
        ),
    ] = None,
    end: Annotated[
        list[str] | None,
        typer.Option(
            "--end",
            metavar="TEXT",
            help="With --reward: text to remove from the end of answers. Can be repeated. "
            "Default: common end tokens.",
        ),
    ] = None,
) -> None:
    """Serve a model to your app: POST /v1/chat/completions, as in OpenAI's API, and POST /feedback.
    With two models, run an A/B test, whose result `valence report FILE` shows. With --reward, serve
    a reward to trainers.
    """
    require_server_libraries("serve", "prometheus_client")
    unused = [
        f"--{name.replace('_', '-')}"
        for name in (REWARD_ONLY if reward is None else MODEL_ONLY)
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if reward is None:
        refuse_unused(unused, "on a model", "add --reward")
    refuse_unused(unused, "on a reward")
    if reward is not None:
        serve_reward(
            reward,
            [setting for setting in (target, rival, *(overrides or [])) if setting is not None],
            host=host,
            port=5000 if port is None else port,
            allowed_hosts=allowed_host or [],
            token=token_of(token_env),
            ends=end,
            limits={"timeout": timeout, "rate": rate, "max_waiting": max_waiting},
        )
        return
    if target is None:
        raise UserError(
            "the model to serve is missing",
            code="argument-missing",
            where="serve",
            fix="add it, as in `valence serve runs/first`; to serve a reward, add --reward",
        )
    from valence.apps.serve.app import log_error
    from valence.apps.serve.chat import ChatModel
    from valence.apps.serve.experiment import Experiment, ServedRun, ab_path
    from valence.apps.serve.feedback import FeedbackStore
    from valence.apps.serve.http_server import open_socket
    from valence.apps.serve.model_service import ModelService
    from valence.apps.serve.prompts import PromptQueue
    from valence.apps.serve.run import serve as run_server
    from valence.distributed.process_group import SingleProcess
    from valence.models.digest import digests
    from valence.rollouts import Sampling
    from valence.training.open_run import open_run

    if rival is not None and "=" in rival and not Path(rival).exists():
        rival, overrides = None, [rival, *(overrides or [])]
    names = model_names(target, rival, step)
    check_share(share, has_rival=rival is not None)
    if rival is not None and ab_path(out) == out:
        raise UserError(
            "names that end in .ab.jsonl are for the votes of an A/B test, not for rows",
            code="path-invalid-output",
            where="--out",
            fix=f"use --out {out.name.removesuffix('.ab.jsonl') or 'feedback'}.jsonl",
        )
    token = token_of(token_env)
    sampling = Sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    allowed = allow_remote_code(trust_remote_code, overrides)
    with ExitStack() as stack:
        # the port and the files are checked before the model is loaded, which takes long
        place = stack.enter_context(
            open_socket(
                host,
                8000 if port is None else port,
                has_tokens=token is not None,
                fix="add --token-env NAME, or remove --host",
            )
        )
        store = stack.enter_context(
            closing(FeedbackStore(out, overwrite=overwrite, on_error=log_error))
        )
        models, runs = list[ChatModel](), list[ServedRun]()
        for name, folder in zip(names, filter(None, (target, rival)), strict=True):
            print_message(console, f"loading {folder}")
            checkpoint = None if models else checkpoint_of(step)
            trainer = open_run(
                folder, allowed, group=SingleProcess(), at=checkpoint, console=console, tools=False
            )
            models.append(ChatModel(trainer, name, max_batch=max_batch))
            # the weights of a folder can be replaced without another step
            weights = "" if rival is None else digests(trainer.policy, adapter=True).weights
            runs.append(ServedRun(str(Path(folder)), trainer.step, weights))
        experiment = None
        if rival is not None:
            experiment = Experiment(
                ab_path(out), (runs[0], runs[1]), DEFAULT_SHARE if share is None else share
            )
            stack.callback(experiment.close)
        service = ModelService(
            models[0],
            store,
            sampling,
            PromptQueue([]),
            rival=models[1] if rival is not None else None,
            tokens={} if token is None else {token: ""},
            runs=runs,
            experiment=experiment,
        )
        run_server(
            service,
            place,
            host=host,
            allowed_hosts=allowed_host or [],
            print_line=lambda line: write_line(escape_control(line)),
            shutdown_seconds=drain,
        )


def check_share(share: float | None, *, has_rival: bool) -> None:
    """Raise UserError for a share that is not between 0 and 1, or without a second model."""
    if share is not None and not has_rival:
        refuse_unused(["--share"], "without a second model", "add a second model")
    if share is not None and not 0 < share < 1:
        raise UserError(
            f"the fraction of users who get the second model is {share:g}, but must be above 0 and "
            "below 1",
            code="ab-share-invalid",
            where="--share",
            fix="use, for example, --share 0.2 for 20 % of the users",
        )
