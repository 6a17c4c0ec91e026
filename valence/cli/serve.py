"""The command that serves a reward over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from valence.cli.common import (
    AllowedHost,
    Host,
    Port,
    app,
    require_server_libraries,
)
from valence.errors import UserError
from valence.terminal import escape_control, write_line

if TYPE_CHECKING:
    from valence.apps.serve.reward_batches import Limits
    from valence.apps.serve.reward_server import Service
    from valence.config.schema import RewardSettings
    from valence.rewards.calls import CallBackend

MEGABYTE = 1_000_000


@app.command(name="serve-reward")
def serve_reward(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FUNCTION|RULE",
            help="Reward model (folder or hub id), function (`package.module:function`) or rule.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the reward, as in the reward section of a recipe, e.g. "
            "settings.answer=label. `valence rewards RULE` lists those of a rule.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 5000,
    allowed_host: AllowedHost = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable that contains the bearer token clients must send.",
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Maximum answers per call of the reward.")
    ] = 64,
    max_wait_ms: Annotated[
        float,
        typer.Option(
            min=0.0, help="Maximum milliseconds that an answer waits for others to share its call."
        ),
    ] = 5.0,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="Maximum size of a request body, in megabytes.")
    ] = 32.0,
    max_items: Annotated[int, typer.Option(min=1, help="Maximum answers per request.")] = 1024,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum waiting answers over all requests. Requests beyond it are refused."
        ),
    ] = 16384,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Maximum requests per second per client. Default: unlimited."),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Concurrent calls of the reward. A function gets this many worker processes.",
        ),
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Time limit of a request, in seconds. Answers without a score by then fail.",
        ),
    ] = 60.0,
    max_cached: Annotated[
        int,
        typer.Option(
            min=0,
            help="Scores of a deterministic reward to cache in memory. 0: no cache.",
        ),
    ] = 65536,
    end: Annotated[
        list[str] | None,
        typer.Option(
            "--end",
            metavar="TEXT",
            help="Text to remove from the end of answers. Can be repeated. Default: common end "
            "tokens.",
        ),
    ] = None,
) -> None:
    """Serve a reward over HTTP for recipes with `reward: http://...` and for OpenRLHF
    (POST /get_reward).
    """
    require_server_libraries("serve-reward", "prometheus_client")
    from valence.apps.serve.reward_batches import Limits
    from valence.apps.serve.reward_server import serve

    limits = Limits(
        max_batch=max_batch,
        max_wait=max_wait_ms / 1000,
        concurrency=concurrency,
        timeout=timeout,
        max_items=max_items,
        max_waiting=max_waiting,
        max_body=int(max_body * MEGABYTE),
        rate=rate,
    )
    service = reward_service(
        reward, overrides or [], limits, token=token_of(token_env), ends=end, keep=max_cached
    )
    serve(
        service,
        host=host,
        port=port,
        allowed_hosts=allowed_host or [],
        log=lambda line: write_line(escape_control(line)),
    )


def reward_service(
    target: str,
    overrides: list[str],
    limits: Limits,
    *,
    token: str | None,
    ends: list[str] | None,
    keep: int,
) -> Service:
    """Load the reward. Raises UserError if it cannot be served."""
    from valence.apps.serve.reward_server import ENDS, Service
    from valence.apps.serve.reward_workers import WorkerPool
    from valence.config.load import load_reward
    from valence.rewards import reward_of
    from valence.rewards.build import is_server

    settings = [
        f"timeout={limits.timeout}",
        f"batch_size={limits.max_batch}",
        f"concurrency={limits.concurrency}",
        "retries=0",
    ]
    spec = load_reward(target, [*settings, *overrides])
    if is_server(spec.reward):
        raise UserError(
            "this is already the address of a reward server",
            code="reward-not-servable",
            where=spec.reward,
            fix="set `reward` in the recipe to this address, or serve a model, a function or a "
            "rule",
        )
    if target == "length" and spec.settings.get("unit", "tokens") == "tokens":
        raise UserError(
            "the reward `length` counts tokens, but requests contain only text",
            code="reward-needs-tokens",
            where="settings.unit",
            fix="add settings.unit=characters or settings.unit=words",
        )
    loaded, pools = list[str](), list[WorkerPool]()

    def model(name: str, settings: Mapping[str, Any], where: str) -> CallBackend:
        from valence.jobs.reward_queries import query_model

        loaded.append(name)
        return query_model(name, settings, where)

    def function(spec: RewardSettings, where: str) -> CallBackend:
        pool = WorkerPool(
            spec.reward,
            spec.settings,
            spec.timeout,
            spec.concurrency,
            where,
            _log,
            max_wait=limits.timeout,
        )
        pool.start()
        if "completion_ids" in pool.parameters:
            raise UserError(
                "the function has a parameter completion_ids, but requests contain only text",
                code="reward-needs-tokens",
                where=target,
                fix="remove the parameter completion_ids from the function",
            )
        pools.append(pool)
        return pool

    reward = reward_of([spec], model=model, function=function, keep=keep)
    return Service(
        reward, limits, token=token, reads_query=bool(loaded), ends=ENDS if ends is None else ends,
        probe=pools[0].probe if pools else None,
    )  # fmt: skip


def _log(line: str) -> None:
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]  # `2>&-`
        write_line(escape_control(line), sys.stderr)


def token_of(variable: str | None) -> str | None:
    """The value of an environment variable. Raises UserError when it is empty."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise UserError(
            f"the environment variable {variable} is not set",
            code="environment-variable-missing",
            where="--token-env",
            fix=f"set it to a long random string, for example: "
            f"export {variable}=$(openssl rand -hex 32)",
        )
    return token
