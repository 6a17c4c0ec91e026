"""Serve a reward over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from valence.errors import UserError
from valence.terminal import escape_control, write_line

if TYPE_CHECKING:
    from valence.apps.serve.reward_batches import Limits
    from valence.apps.serve.reward_server import Service
    from valence.config.schema import RewardSettings
    from valence.rewards.calls import CallBackend


def serve_reward(
    target: str,
    overrides: list[str],
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    token: str | None,
    ends: list[str] | None,
    limits: Mapping[str, float | None],
) -> None:
    """Serve a reward over HTTP until the process is stopped.

    limits: fields of ``Limits``; None keeps the default.
    """
    from valence.apps.serve.reward_batches import Limits
    from valence.apps.serve.reward_server import serve

    changes: dict[str, Any] = {k: value for k, value in limits.items() if value is not None}
    serve(
        reward_service(target, overrides, Limits(**changes), token=token, ends=ends),
        host=host,
        port=port,
        allowed_hosts=allowed_hosts,
        log=lambda line: write_line(escape_control(line)),
    )


def reward_service(
    target: str,
    overrides: list[str],
    limits: Limits,
    *,
    token: str | None,
    ends: list[str] | None,
) -> Service:
    """Load the reward. Raises UserError if it cannot be served.

    overrides: settings of the reward. Its concurrency and batch_size limit the calls of the server.
    """
    from valence.apps.serve.reward_server import ENDS, Service
    from valence.apps.serve.reward_workers import WorkerPool
    from valence.config.load import load_reward
    from valence.rewards import reward_of
    from valence.rewards.build import is_server

    defaults = [
        f"timeout={limits.timeout}",
        f"batch_size={limits.max_batch}",
        f"concurrency={limits.concurrency}",
        "retries=0",
    ]
    spec = load_reward(target, [*defaults, *overrides])
    limits = replace(limits, max_batch=spec.batch_size, concurrency=spec.concurrency)
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

    reward = reward_of([spec], model=model, function=function)
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
