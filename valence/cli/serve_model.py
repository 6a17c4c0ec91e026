"""The commands that serve a run to apps, and show the result of an A/B test of two."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from valence.cli.collect import model_names
from valence.cli.common import (
    AllowedHost,
    Host,
    ModelOverrides,
    Port,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    console,
    require_server_libraries,
)
from valence.cli.serve import token_of
from valence.errors import UserError
from valence.terminal import escape_control, print_message, print_table, write_line

if TYPE_CHECKING:
    from valence.apps.serve.experiment import AbResult

DEFAULT_SHARE = 0.5


@app.command()
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="The model to serve: the folder of a run or a model, or a hub id.",
        ),
    ],
    rival: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A second model, for an A/B test: each user gets one of the two models.",
        ),
    ] = None,
    overrides: ModelOverrides = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="File for rows with thumbs. Pairs and corrections go to files in the same folder. "
            "New feedback is added to existing rows.",
        ),
    ] = Path("feedback.jsonl"),
    share: Annotated[
        float | None,
        typer.Option(
            "--share",
            help="Fraction of users who get the second model, between 0 and 1. Default: 0.5.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    allowed_host: AllowedHost = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable that contains the bearer token clients must send.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=2.0,
            help="Temperature of requests without one; 0 takes the most likely token.",
        ),
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="top_p of requests without one; 1: all tokens.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens per answer of requests without max_tokens.")
    ] = 512,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Answers per model to sample at the same time.")
    ] = 8,
    drain: Annotated[
        int,
        typer.Option(
            min=0, help="Seconds that running requests have to finish after SIGTERM or Ctrl-C."
        ),
    ] = 120,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace output files that were edited, or that Valence did not write.",
        ),
    ] = False,
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model to your app: POST /v1/chat/completions, compatible with OpenAI's API, and POST
    /feedback. With two models, run an A/B test; `valence ab FILE` shows its result.
    """
    require_server_libraries("serve", "prometheus_client")
    from valence.apps.serve.app import log_error
    from valence.apps.serve.chat import ChatModel
    from valence.apps.serve.experiment import Experiment, ServedRun, ab_path
    from valence.apps.serve.feedback import FeedbackStore
    from valence.apps.serve.model_service import ModelService
    from valence.apps.serve.prompts import PromptQueue
    from valence.apps.serve.run import open_socket
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
                port,
                has_tokens=token is not None,
                danger="other machines could use the model and vote",
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
                folder, allowed, group=SingleProcess(), at=checkpoint, console=console
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
        raise UserError(
            "the share of users applies only to an A/B test of two models",
            code="option-unused",
            where="--share",
            fix="add a second model, or remove --share",
        )
    if share is not None and not 0 < share < 1:
        raise UserError(
            f"the fraction of users who get the second model is {share:g}, but must be above 0 and "
            "below 1",
            code="ab-share-invalid",
            where="--share",
            fix="use, for example, --share 0.2 for 20 % of the users",
        )


@app.command()
def ab(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The --out of `valence serve` with two models.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a JSON object.")
    ] = False,
) -> None:
    """Show the result of an A/B test: thumbs of both sides, and whether one is better.

    You may look at any time, also while the server runs: the error probability stays at most 5 %.
    """
    from valence.apps.serve.experiment import read_result

    result = read_result(file)
    if as_json:
        write_line(json.dumps(result.to_dict()))
        return
    print_table(console, _table(result))
    print_message(console, result.verdict)
    if result.better is None:
        highest = max(result.e_values)
        print_message(
            console, f"e-value {highest:.3g}; {result.threshold:g} establishes a difference"
        )


def _table(result: AbResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("side")
    table.add_column("model", overflow="fold")
    for column in ("step", "share", "thumbs up", "down", "voters", "up", "95 % interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, side, share in (
        ("A", result.a, 1 - result.share),
        ("B", result.b, result.share),
    ):
        low, high = side.interval
        table.add_row(
            name,
            escape_control(side.run),
            str(side.step),
            f"{share:.0%}",
            str(side.thumbs_up),
            str(side.thumbs_down),
            str(side.votes),
            "" if side.rate is None else f"{side.rate:.0%}",
            f"{low:.0%} to {high:.0%}",
        )
    return table
