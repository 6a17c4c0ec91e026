"""Sampling from a vLLM server that receives the policy's weights: token ids in, token ids and
log-probabilities out.

A server that was killed comes back with the weights it was started with. Every version of the
weights has a unique label. Before each round of requests and in each reply the label is read; a
server without the newest weights receives them again first.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from valence.errors import UserError
from valence.rollouts.client import RequestRefused, ServerClient, ServerLost, ignore_message
from valence.rollouts.protocol import (
    Named,
    Pair,
    Sampling,
    check_request,
    completion_seed,
    ignore_progress,
)
from valence.rollouts.transports import PREFIX, WeightTransfer, narrow
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTE = "/inference/v1/generate"

MIN_LOGP = -9000.0
"""vLLM reports a log-probability that is not finite as -9999."""

KEY = "VLLM_API_KEY"


class VLLMGenerator:
    """A vLLM server at ``url``.

    transport: how it receives weights. end_ids: tokens that end a completion. concurrency:
    completions that are requested at the same time. See ``ServerClient`` for timeout, revive and
    log. One thread may ``sync`` while another generates: running completions continue with the new
    weights, and each token has its version.
    """

    gives_tokens = True

    def __init__(
        self,
        url: str,
        transport: WeightTransfer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        timeout: float = 600.0,
        concurrency: int = 256,
        revive: Callable[[], None] | None = None,
        log: Callable[[str], None] = ignore_message,
    ) -> None:
        self.client = ServerClient(
            url, timeout, os.environ.get(KEY), is_lost=_is_lost, revive=revive, log=log
        )
        self.transport, self.tokenizer, self.end_ids = transport, tokenizer, sorted(end_ids)
        self.concurrency, self.log = concurrency, log
        self.version, self.label = 0, ""
        self._versions: dict[str, int] = {}
        self._run_label = f"{PREFIX}-{secrets.token_hex(4)}"
        self._sync_lock = threading.RLock()
        self._logps_are_processed = False

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Send new weights (see ``Served.sync``).

        After a failed update the server keeps running, but its completions are not accepted.
        """
        with self._sync_lock:
            label = f"{self._run_label}-{len(self._versions)}-v{version}"
            dtype = self.weight_dtype if adapter is None else None
            self.transport.keep(label, lambda: narrow(weights(), dtype), adapter)
            # completions may have the new label before the last request of the update returns
            self._versions[label] = version
            self.version, self.label = version, label
            self.client.retry(lambda: self.transport.send(self.client, label))

    def sleep(self) -> None:
        """Free the server's GPU memory until ``wake``.

        Its weights move to the memory of its host (level 1), so that they remain valid.
        """
        self._send_or_explain("/sleep?level=1")

    def wake(self) -> None:
        """Give the server its GPU memory again. Does nothing if it is awake."""
        self._send_or_explain("/wake_up")

    def _send_or_explain(self, path: str) -> None:
        try:
            self.client.retry(lambda: self.client.send(path))
        except RequestRefused as error:
            raise UserError(
                f"the server cannot free its GPU memory: {error.message}",
                code="rollout-server-cannot-sleep",
                where=error.where,
                fix="start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or set "
                "rollout.sleep: false",
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

        The same seed gives the same random numbers to the same completion. Raises UserError if the
        server refuses, hangs, or is lost for longer than ``timeout``, and FloatingPointError if
        log-probabilities are not finite.
        """
        check_request(prompts, n)
        self._check_logps(sampling)
        completions: dict[int, list[Completion]] = {}

        def make_body(i: int) -> dict[str, Any]:
            return {
                "token_ids": list(prompts[i]),
                "sampling_params": self._parameters(n, sampling, i),
            }

        def handle(i: int, reply: Any, label: str) -> None:
            completions[i] = self._completions(prompts[i], n, reply, label)
            progress(n)

        self._post_all(range(len(prompts)), make_body, handle, max(1, self.concurrency // n))
        return [completions[i] for i in range(len(prompts))]

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

        def handle(i: int, reply: Any, label: str) -> None:
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
        """The dtype of the server's weights, as torch names it; empty if the server does not report
        it in time.
        """
        try:
            # the reply describes the machine as well, which takes seconds
            info = self.client.get("/server_info?config_format=json", seconds=30.0)
        except (ServerLost, UserError):
            return ""
        return str(info["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")

    def close(self) -> None:
        """Close connections and remove folders. The server keeps running."""
        self.transport.close(self.client)
        self.client.close()

    def _check_logps(self, sampling: Sampling) -> None:
        """Raise UserError if the server reports log-probabilities of another distribution than the
        one it samples from.
        """
        is_plain = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1
        if self._logps_are_processed or is_plain:
            return
        # the only token of a nucleus is certain; before the nucleus is applied it hardly is
        parameters = self._parameters(1, Sampling(top_p=1e-9, max_new_tokens=1), 0)
        logps: list[float] = []

        def handle(i: int, reply: Any, label: str) -> None:
            logps.append(float(reply["choices"][0]["logprobs"]["content"][0]["logprob"]))

        body = {"token_ids": self.end_ids[:1] or [0], "sampling_params": parameters}
        self._post_all([0], lambda i: body, handle, 1)
        self._logps_are_processed = logps[0] > -1e-6
        if not self._logps_are_processed:
            raise UserError(
                "the server reports log-probabilities without temperature and top_p",
                code="rollout-logps-unprocessed",
                where=self.client.url,
                fix="start the server with --logprobs-mode processed_logprobs",
            )

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
        self, prompt: Sequence[int], n: int, reply: Any, label: str
    ) -> list[Completion]:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise self._protocol_error(f"the reply has {len(choices)} answers instead of {n}")
        return [self._completion(prompt, choice, label) for choice in choices]

    def _completion(self, prompt: Sequence[int], choice: Any, label: str) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ServerLost(f"{self.client.url}: an answer ended with {reason!r}")
        tokens, content = tuple(choice["token_ids"]), choice["logprobs"]["content"]
        if not tokens or [entry["token_id"] for entry in content] != list(tokens):
            raise self._protocol_error(
                "the tokens and the log-probabilities in the reply do not match"
            )
        logps = tuple(float(entry["logprob"]) for entry in content)
        if min(logps) < MIN_LOGP:
            raise FloatingPointError("the server's logits are not finite")
        has_ended = tokens[-1] in self.end_ids
        if reason == "stop" and not has_ended:
            raise self._protocol_error(
                f"an answer stopped at token {tokens[-1]}, which is not an end token"
            )
        versions = self._token_versions(choice, len(tokens), label)
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

    def _token_versions(self, choice: Any, length: int, label: str) -> tuple[int, ...]:
        """The version of each token. Raises ServerLost for weights that were not sent."""
        if not label:
            return (self.version,) * length
        if self.transport.model_name(label) is not None:
            return (self._versions[label],) * length
        versions: list[int] = []
        for span in choice["weight_versions"] or []:
            if span["version"] not in self._versions:
                raise ServerLost(
                    f"{self.client.url}: an answer came from weights {span['version']!r}, which "
                    f"were not sent"
                )
            versions += [self._versions[span["version"]]] * (span["end"] - span["start"])
        if len(versions) != length:
            raise self._protocol_error(
                "the reply does not contain the version of the weights for each token"
            )
        return tuple(versions)

    def _protocol_error(self, message: str) -> UserError:
        return UserError(
            message,
            code="rollout-server-version",
            where=self.client.url + ROUTE,
            fix="use a version of vLLM that docs/vllm.md lists",
        )

    def _ensure_weights(self) -> str:
        """Send the newest weights to a server without them, such as a restarted one.

        Returns their label.
        """
        with self._sync_lock:
            if not self.label:
                return ""
            label = self.transport.server_label(self.client)
            if label != self.label:
                is_foreign = label.startswith(f"{PREFIX}-") and label not in self._versions
                if is_foreign and not label.startswith(self._run_label):
                    self.log(f"{self.client.url} had weights of another run ({label})")
                self.transport.send(self.client, self.label)
                self.log(
                    f"{self.client.url} had other weights ({label or 'not from this run'}): sent "
                    f"version {self.version} again"
                )
            return self.label

    def _post_all(
        self,
        positions: Sequence[int],
        make_body: Callable[[int], dict[str, Any]],
        handle: Callable[[int, Any, str], None],
        concurrency: int,
    ) -> None:
        """Post a request for every position. ``handle`` also receives the label of its weights."""
        label = ""

        def make_bodies(remaining: Collection[int]) -> dict[int, object]:
            nonlocal label
            label = self._ensure_weights()
            extra: dict[str, Any] = {}
            if label:
                # with the salt no version reads the prefix cache of another
                model = self.transport.model_name(label)
                extra = {"cache_salt": label, **({"model": model} if model else {})}
            return {i: {**make_body(i), **extra} for i in remaining}

        self.client.post_all(
            ROUTE, positions, make_bodies, lambda i, reply: handle(i, reply, label), concurrency
        )


def _is_lost(response: httpx.Response) -> bool:
    """Whether the server's engine ended, which is reported once, or a restarted server does not
    have the adapter.
    """
    is_unknown = response.status_code == 404 and "does not exist" in response.text
    return response.status_code == 500 or is_unknown
