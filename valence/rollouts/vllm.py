"""Sampling from vLLM servers that receive the policy's weights: token ids in, token ids and
log-probabilities out.

A server that was killed comes back with the weights it was started with. Every version of the
weights has a unique label. Before the first request to a server, again after it was lost, and in
each reply the label is read; a server without the newest weights receives them again first.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from valence.errors import UserError
from valence.rollouts.client import RequestRefused, ServerClient, ServerLost, ignore_message
from valence.rollouts.pool import ServerPool, Steps
from valence.rollouts.protocol import (
    Named,
    Pair,
    Sampling,
    TurnByTurn,
    check_request,
    completion_seed,
    ignore_progress,
    turn_seed,
)
from valence.rollouts.transports import PREFIX, WeightTransfer, narrow
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTE = "/inference/v1/generate"
INFO_SECONDS = 30.0
"""Time limit of a server's description of its model and machine, which takes seconds."""
MIN_LOGP = -9000.0
"""vLLM reports a log-probability that is not finite as -9999."""

KEY = "VLLM_API_KEY"


class VLLMGenerator:
    """vLLM servers of the same model, which share the requests.

    transport: how they receive weights. end_ids: tokens that end a completion. concurrency:
    completions that are requested of each server at the same time. See ``ServerClient`` for timeout
    and revive, ``ServerPool`` for log. One thread may ``sync`` while another generates: running
    completions continue with the new weights, and each token has its version.
    """

    gives_tokens = True

    def __init__(
        self,
        urls: str | Sequence[str],
        transport: WeightTransfer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        timeout: float = 600.0,
        concurrency: int = 256,
        revive: Callable[[], None] | None = None,
        log: Callable[[str], None] = ignore_message,
    ) -> None:
        key, urls = os.environ.get(KEY), [urls] if isinstance(urls, str) else urls
        self.pool = ServerPool(
            [
                ServerClient(url, timeout, key, is_lost=is_lost_engine, revive=revive)
                for url in urls
            ],
            log,
        )
        self.transport, self.tokenizer, self.end_ids = transport, tokenizer, sorted(end_ids)
        self.concurrency, self.log = concurrency, log
        self.version, self.label = 0, ""
        self._versions: dict[str, int] = {}
        self._run_label = f"{PREFIX}-{secrets.token_hex(4)}"
        self._sync_lock = threading.RLock()
        self._checked_urls: set[str] = set()

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Send new weights to all servers (see ``Served.sync``).

        A server that is lost receives them before it samples again. After a failed update the
        server keeps running, but its completions are not accepted.
        """
        with self._sync_lock:
            label = f"{self._run_label}-{len(self._versions)}-v{version}"
            dtype = self.weight_dtype if adapter is None else None
            self.transport.keep(label, lambda: narrow(weights(), dtype), adapter)
            # completions may have the new label before the last request of the update returns
            self._versions[label] = version
            self.version, self.label = version, label
            self.pool.ask_all(
                lambda client: self.transport.send(client, label),
                is_parallel=self.transport.is_stored,
            )
            self.transport.remove_old()

    def split_by_server(self) -> list[VLLMGenerator]:
        """A generator for each server that can be reached, which does not wait for a lost one."""
        generators = []
        for client in self.pool.reachable:
            generator = copy.copy(self)
            generator.pool = ServerPool([client], self.log, is_patient=len(self.pool.clients) == 1)
            generator.pool.lost = self.pool.lost
            generators.append(generator)
        return generators

    def sleep(self) -> None:
        """Free the servers' GPU memory until ``wake``.

        Their weights move to the memory of their hosts (level 1), so that they remain valid.
        """
        self._send_or_explain("/sleep?level=1")

    def wake(self) -> None:
        """Give the servers their GPU memory again. Does nothing if they are awake."""
        self._send_or_explain("/wake_up")

    def _send_or_explain(self, path: str) -> None:
        try:
            self.pool.ask_all(lambda client: client.send(path), is_parallel=True)
        except RequestRefused as error:
            raise UserError(
                f"the server refused to free its GPU memory or to take it back: {error.message}",
                code="rollout-server-cannot-sleep",
                where=error.where,
                fix="start it with the option --enable-sleep-mode and the environment variable "
                "VLLM_SERVER_DEV_MODE=1, or set rollout.sleep: false",
            ) from error

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        The same seed gives the same random numbers to the same completion, on any server. Raises
        UserError if a server refuses or is too slow, or if all are lost for longer than
        ``timeout``, and FloatingPointError if log-probabilities are not finite.
        """
        check_request(prompts, n)
        completions: dict[int, list[Completion]] = {}

        def make_body(i: int) -> dict[str, Any]:
            return {
                "token_ids": list(prompts[i]),
                "sampling_params": self._parameters(n, sampling, i),
            }

        def handle(i: int, reply: Any, server: AdmittedServer) -> None:
            completions[i] = self._completions(prompts[i], n, reply, server)
            progress(n)

        self._post_all(
            range(len(prompts)),
            make_body,
            handle,
            max(1, self.concurrency // n),
            needs_processed_logps=not is_plain(sampling),
        )
        return [completions[i] for i in range(len(prompts))]

    def sample_turns(
        self,
        items: Sequence[TurnByTurn],
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = ignore_progress,
    ) -> None:
        """Sample completions turn by turn, independently of each other. Errors as ``generate``."""

        class Started:
            async def start(self, position: int) -> bool:
                return await follow(items[position].start())

            async def close(self) -> None:
                await asyncio.gather(*(item.close() for item in items), return_exceptions=True)

        async def follow(work: Coroutine[Any, Any, bool]) -> bool:
            has_more = await work
            progress(0 if has_more else 1)
            return has_more

        def make_body(i: int) -> dict[str, Any]:
            item = items[i]
            parameters = self._parameters(1, sampling, 0) | {
                "seed": turn_seed(sampling.seed, item),
                "max_tokens": item.num_left,
            }
            return {"token_ids": item.context, "sampling_params": parameters}

        def handle(i: int, reply: Any, server: AdmittedServer) -> Coroutine[Any, Any, bool]:
            [turn] = self._completions(items[i].context, 1, reply, server)
            versions = turn.versions or (turn.version,) * len(turn.tokens)
            return follow(items[i].take_turn(turn.tokens, turn.logps, versions))

        self._post_all(
            range(len(items)),
            make_body,
            handle,
            self.concurrency,
            needs_processed_logps=not is_plain(sampling),
            steps=Started(),
        )

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """The server's log-probability of each token of each completion (nats) at temperature 1,
        computed as for a prompt.
        """
        logps: dict[int, list[float]] = {}
        parameters = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "detokenize": False,
        }

        def make_body(i: int) -> dict[str, Any]:
            prompt, tokens = pairs[i]
            return {"token_ids": [*prompt, *tokens], "sampling_params": parameters}

        def handle(i: int, reply: Any, server: AdmittedServer) -> None:
            prompt, tokens = pairs[i]
            rows = reply["prompt_logprobs"][len(prompt) :]
            logps[i] = [
                float(row[str(token)]["logprob"]) for token, row in zip(tokens, rows, strict=True)
            ]

        # with an adapter on a CPU, simultaneous requests for log-probabilities of prompts crash
        # the server (vLLM 0.32)
        has_adapter = self.transport.model_name(self.label) is not None
        self._post_all(range(len(pairs)), make_body, handle, 1 if has_adapter else self.concurrency)
        return [logps[i] for i in range(len(pairs))]

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype of the server's weights; None if unknown."""
        name = self.dtype
        return getattr(torch, name) if name else None

    @property
    def dtype(self) -> str:
        """The dtype of the servers' weights, as torch names it; empty if none reports it in time.

        Raises UserError if they differ.
        """
        dtypes: dict[str, str] = {}
        for client in self.pool.reachable:
            try:
                seconds = min(INFO_SECONDS, client.timeout)
                info = client.get("/server_info?config_format=json", seconds=seconds)
            except (ServerLost, UserError):
                continue
            name = str(info["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
            dtypes.setdefault(name, client.url)
        if len(dtypes) > 1:
            raise UserError(
                "the servers compute in different dtypes: "
                + ", ".join(f"{url} in {name}" for name, url in dtypes.items()),
                code="rollout-servers-differ",
                where="rollout.url",
                fix="start all of them with the same --dtype",
            )
        return next(iter(dtypes), "")

    def close(self) -> None:
        """Close connections and remove folders. The servers keep running."""
        self.transport.close(self.pool.clients)
        self.pool.close()

    def _check_logps(self, server: AdmittedServer) -> None:
        """Raise UserError if a server reports log-probabilities of another distribution than the
        one it samples from.
        """
        url = server.client.url
        if url in self._checked_urls:
            return
        # the only token of a nucleus is certain; before the nucleus is applied it hardly is
        parameters = self._parameters(1, Sampling(top_p=1e-9, max_new_tokens=1), 0)
        body = {"token_ids": self.end_ids[:1] or [0], "sampling_params": parameters}
        reply = server.client.post(ROUTE, {**body, **server.extra})
        logp = float(reply["choices"][0]["logprobs"]["content"][0]["logprob"])
        if logp <= -1e-6:
            raise UserError(
                "the server reports log-probabilities from before temperature and top_p are "
                "applied",
                code="rollout-logps-unprocessed",
                where=url,
                fix="start the server with --logprobs-mode processed_logprobs",
            )
        self._checked_urls.add(url)

    def _parameters(self, n: int, sampling: Sampling, position: int) -> dict[str, Any]:
        # name every parameter that a model's own generation config could change
        return {
            "n": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": completion_seed(sampling.seed, position),
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # the server's own end tokens: end_ids end a completion
            "logprobs": 0,
            "detokenize": False,
        }

    def _completions(
        self, prompt: Sequence[int], n: int, reply: Any, server: AdmittedServer
    ) -> list[Completion]:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise protocol_error(server, f"the reply has {len(choices)} answers instead of {n}")
        return [self._completion(prompt, choice, server) for choice in choices]

    def _completion(self, prompt: Sequence[int], choice: Any, server: AdmittedServer) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ServerLost(f"{server.client.url}: an answer ended with {reason!r}")
        tokens, content = tuple(choice["token_ids"]), choice["logprobs"]["content"]
        if not tokens or [entry["token_id"] for entry in content] != list(tokens):
            raise protocol_error(
                server, "the tokens and the log-probabilities in the reply do not match"
            )
        logps = tuple(float(entry["logprob"]) for entry in content)
        if min(logps) < MIN_LOGP:
            raise FloatingPointError("the server's logits are not finite")
        has_ended = tokens[-1] in self.end_ids
        if reason == "stop" and not has_ended:
            raise protocol_error(
                server, f"an answer stopped at token {tokens[-1]}, which is not an end token"
            )
        versions = self._token_versions(choice, len(tokens), server)
        return Completion(
            prompt_id=content_id("prompt", Ids(tuple(prompt))),
            tokens=tokens,
            logps=logps,
            text=str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)),
            stop="eos" if has_ended else "length",
            version=min(versions),
            versions=() if len(set(versions)) == 1 else versions,
            index=choice["index"],
        )

    def _token_versions(self, choice: Any, length: int, server: AdmittedServer) -> tuple[int, ...]:
        """The version of each token. Raises ServerLost for weights that were not sent."""
        if not server.label:
            return (self.version,) * length
        if self.transport.model_name(server.label) is not None:
            return (self._versions[server.label],) * length
        versions: list[int] = []
        for span in choice["weight_versions"] or []:
            if span["version"] not in self._versions:
                raise ServerLost(
                    f"{server.client.url}: an answer came from weights {span['version']!r}, which "
                    f"were not sent"
                )
            versions += [self._versions[span["version"]]] * (span["end"] - span["start"])
        if len(versions) != length:
            raise protocol_error(
                server, "the reply does not contain the version of the weights for each token"
            )
        return tuple(versions)

    def _ensure_weights(self, client: ServerClient) -> str:
        """Send the newest weights to a server without them, such as a restarted one.

        Returns their label.
        """
        with self._sync_lock:
            if not self.label:
                return ""
            label = self.transport.server_label(client)
            if label != self.label:
                is_foreign = label.startswith(f"{PREFIX}-") and label not in self._versions
                if is_foreign and not label.startswith(self._run_label):
                    self.log(f"{client.url} had weights of another run ({label})")
                self.transport.send(client, self.label)
                self.log(
                    f"{client.url} had other weights ({label or 'not from this run'}): sent "
                    f"version {self.version} again"
                )
            return self.label

    def _post_all(
        self,
        positions: Sequence[int],
        make_body: Callable[[int], dict[str, Any]],
        handle: Callable[[int, Any, AdmittedServer], Coroutine[Any, Any, bool] | None],
        concurrency: int,
        *,
        needs_processed_logps: bool = False,
        steps: Steps | None = None,
    ) -> None:
        """Post a request for every position. ``handle`` also receives the server that replied."""

        def admit(client: ServerClient) -> AdmittedServer:
            label = self._ensure_weights(client)
            server = AdmittedServer(client, label, label and self.transport.model_name(label))
            if needs_processed_logps:
                self._check_logps(server)
            return server

        self.pool.post_all(
            ROUTE,
            positions,
            lambda i, server: {**make_body(i), **server.extra},
            handle,
            concurrency,
            admit,
            steps,
        )


def is_plain(sampling: Sampling) -> bool:
    """Whether log-probabilities are those at temperature 1 without top_p."""
    return sampling.temperature in (0.0, 1.0) and sampling.top_p == 1


@dataclass(frozen=True)
class AdmittedServer:
    """A server with the newest weights. label: of the weights; empty if none were sent. model: the
    name of an adapter.
    """

    client: ServerClient
    label: str
    model: str | None

    @property
    def extra(self) -> dict[str, Any]:
        """Fields of a request for these weights."""
        if not self.label:
            return {}
        # with the salt no version reads the prefix cache of another
        return {"cache_salt": self.label, **({"model": self.model} if self.model else {})}


def protocol_error(server: AdmittedServer, message: str) -> UserError:
    """The error of a reply that lacks something."""
    return UserError(
        message,
        code="rollout-server-version",
        where=server.client.url + ROUTE,
        fix="use a version of vLLM that `valence docs vllm` lists",
    )


def is_lost_engine(response: httpx.Response) -> bool:
    """Whether the server's engine ended, which is reported once, or a restarted server does not
    have the adapter.
    """
    is_unknown = response.status_code == 404 and "does not exist" in response.text
    return response.status_code == 500 or is_unknown
