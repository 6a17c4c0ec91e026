"""Sampling from a vLLM server, whose weights are kept up to date: token ids go in, token ids and
log-probabilities come out.

A server that was killed and comes back has the weights it was started with. Every version that is
sent has a label of its own; before each request and in each answer the label is read, and a server
without the newest weights is sent them again first.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from valence.errors import UserError
from valence.rollouts.asking import Asking, seed_of, unsaid
from valence.rollouts.protocol import Named, Pair, Sampling, check_request, unheard
from valence.rollouts.transports import PREFIX, WeightTransfer
from valence.rollouts.wire import Lost, Wire
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTE = "/inference/v1/generate"

NOT_A_NUMBER = -9000.0
"""vLLM reports a log-probability that is not finite as -9999."""

KEY = "VLLM_API_KEY"


class VLLMGenerator:
    """A vLLM server at ``url``, and the way in which it is sent weights.

    end_ids: tokens that end an answer. timeout: seconds for one request, and for a server that is
    gone to come back.
    concurrency: answers that are asked for at once. revive: starts the server again when it is
    gone. say: hears of what was mended. One thread may ``sync`` while another generates: the
    answers under way go on with the new weights, each token labelled.
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
        say: Callable[[str], None] = unsaid,
    ) -> None:
        self.wire = Wire(url, timeout, os.environ.get(KEY))
        self.transport, self.tokenizer, self.end_ids = transport, tokenizer, sorted(end_ids)
        self.concurrency, self.say = concurrency, say
        self.asking = Asking(self.wire, ROUTE, gone=gone, revive=revive, say=say)
        self.version, self.label = 0, ""
        self._versions: dict[str, int] = {}
        self._name = f"{PREFIX}-{secrets.token_hex(4)}"
        self._alone = threading.RLock()
        self._processed = False

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Sends new weights (see ``Served.sync``).

        A failed update leaves the server running, with answers that none accepts.
        """
        with self._alone:
            label = f"{self._name}-{len(self._versions)}-v{version}"
            self.transport.keep(label, weights, adapter)
            # Answers may carry the new label before the last request of the update has returned.
            self._versions[label] = version
            self.version, self.label = version, label
            self.asking.persist(lambda: self.transport.send(self.wire, label))

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = unheard,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        The same seed gives the same random numbers to the same answer.

        Raises UserError where the server refuses, hangs, or is gone for longer than ``timeout``,
        and FloatingPointError when log-probabilities are not finite.
        """
        check_request(prompts, n)
        self._can(sampling)
        answers: dict[int, list[Completion]] = {}

        def body(i: int) -> dict[str, Any]:
            return {
                "token_ids": list(prompts[i]),
                "sampling_params": self._parameters(n, sampling, i),
            }

        def take(i: int, answer: Any, label: str) -> None:
            answers[i] = self._completions(prompts[i], n, answer, label)
            progress(n)

        self._all(range(len(prompts)), body, take, max(1, self.concurrency // n))
        return [answers[i] for i in range(len(prompts))]

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """The server's log-probability of each token of each answer (nats) at temperature 1,
        computed as one reads a prompt.
        """
        found: dict[int, list[float]] = {}

        def body(i: int) -> dict[str, Any]:
            prompt, answer = pairs[i]
            settings = {
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            }
            return {"token_ids": [*prompt, *answer], "sampling_params": settings}

        def take(i: int, answer: Any, label: str) -> None:
            prompt, tokens = pairs[i]
            rows = answer["prompt_logprobs"][len(prompt) :]
            found[i] = [
                float(row[str(token)]["logprob"]) for token, row in zip(tokens, rows, strict=True)
            ]

        # On a CPU an adapter and log-probabilities of prompts of several requests at once end the
        # server (vLLM 0.32).
        alone = self.transport.model(self.label) is not None
        self._all(range(len(pairs)), body, take, 1 if alone else self.concurrency)
        return [found[i] for i in range(len(pairs))]

    @property
    def dtype(self) -> str:
        """Of the server's weights, as torch names it; empty where the server does not say, or takes
        long to.
        """
        try:
            # It tells all about its machine with it, which takes seconds.
            info = self.wire.get("/server_info?config_format=json", seconds=30.0)
        except (Lost, UserError):
            return ""
        return str(info["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")

    def close(self) -> None:
        """Gives back connections and folders. The server goes on."""
        self.transport.close(self.wire)
        self.wire.close()

    def _can(self, sampling: Sampling) -> None:
        """Raises UserError when the server would report log-probabilities of another distribution
        than it draws from.
        """
        if self._processed or (sampling.temperature in (0.0, 1.0) and sampling.top_p == 1):
            return
        # Of a nucleus that holds one token this token is certain, before the nucleus is cut out it
        # hardly is.
        settings = self._parameters(1, Sampling(top_p=1e-9, max_new_tokens=1), 0)
        found: list[float] = []

        def take(i: int, answer: Any, label: str) -> None:
            found.append(float(answer["choices"][0]["logprobs"]["content"][0]["logprob"]))

        self._all(
            [0],
            lambda i: {"token_ids": self.end_ids[:1] or [0], "sampling_params": settings},
            take,
            1,
        )
        self._processed = found[0] > -1e-6
        if not self._processed:
            raise UserError(
                "the server reports log-probabilities before temperature and top_p",
                code="rollout-logps-unprocessed",
                where=self.wire.url,
                fix="start it with --logprobs-mode processed_logprobs",
            )

    def _parameters(self, n: int, sampling: Sampling, position: int) -> dict[str, Any]:
        # Everything that a model's own generation config could change behind our back is named.
        return {
            "n": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed_of(sampling.seed, position),
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # of the server's idea of it: end_ids are what ends an answer
            "logprobs": 0,
            "detokenize": False,
        }

    def _completions(
        self, prompt: Sequence[int], n: int, answer: Any, label: str
    ) -> list[Completion]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise self._strange(f"it was asked for {n} answers and gave {len(choices)}")
        return [self._completion(prompt, choice, label) for choice in choices]

    def _completion(self, prompt: Sequence[int], choice: Any, label: str) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Lost(f"{self.wire.url}: an answer ended with {reason!r}")
        tokens = tuple(choice["token_ids"])
        logged = choice["logprobs"]["content"]
        if not tokens or [each["token_id"] for each in logged] != list(tokens):
            raise self._strange("tokens and log-probabilities do not belong together")
        logps = tuple(float(each["logprob"]) for each in logged)
        if min(logps) < NOT_A_NUMBER:
            raise FloatingPointError("the server's logits are not finite")
        if (tokens[-1] in self.end_ids) != (reason == "stop") and reason == "stop":
            raise self._strange(f"an answer stopped at token {tokens[-1]}, which ends none")
        versions = self._labelled(choice, len(tokens), label)
        return Completion(
            prompt_id=content_id("prompt", Ids(tuple(prompt))),
            tokens=tokens,
            logps=logps,
            text=str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)),
            stop="eos" if tokens[-1] in self.end_ids else "length",
            version=min(versions),
            versions=() if len(set(versions)) == 1 else versions,
            index=choice["index"],
        )

    def _labelled(self, choice: Any, length: int, label: str) -> tuple[int, ...]:
        """The version of each token. Raises Lost where the weights were not ones that were sent."""
        if not label:
            return (self.version,) * length
        if self.transport.model(label) is not None:
            return (self._versions[label],) * length
        out: list[int] = []
        for span in choice["weight_versions"] or []:
            if span["version"] not in self._versions:
                raise Lost(
                    f"{self.wire.url}: an answer came from weights {span['version']!r}, which "
                    f"were not sent"
                )
            out += [self._versions[span["version"]]] * (span["end"] - span["start"])
        if len(out) != length:
            raise self._strange("it does not say which weights each token came from")
        return tuple(out)

    def _strange(self, what: str) -> UserError:
        return UserError(
            what,
            code="rollout-server-version",
            where=self.wire.url + ROUTE,
            fix="use a version of vLLM that docs/vllm.md names",
        )

    def _current(self) -> str:
        """The label of the newest weights, once the server has them: one that was started again is
        sent them first.
        """
        with self._alone:
            if self.label and (has := self.transport.label(self.wire)) != self.label:
                if (
                    has.startswith(f"{PREFIX}-")
                    and not has.startswith(self._name)
                    and has not in self._versions
                ):
                    self.say(f"{self.wire.url} had weights of another run ({has})")
                self.transport.send(self.wire, self.label)
                self.say(
                    f"{self.wire.url} had other weights ({has or 'none of ours'}): version "
                    f"{self.version} was sent again"
                )
            return self.label

    def _all(
        self,
        positions: Sequence[int],
        body: Callable[[int], dict[str, Any]],
        take: Callable[[int, Any, str], None],
        most: int,
    ) -> None:
        """Asks for every position. ``take`` is also told the label under which it was asked for."""
        label = ""

        def bodies(left: Collection[int]) -> dict[int, object]:
            nonlocal label
            label = self._current()
            return {i: {**body(i), **self._naming(label)} for i in left}

        self.asking.all(positions, bodies, lambda i, answer: take(i, answer, label), most)

    def _naming(self, label: str) -> dict[str, Any]:
        if not label:
            return {}
        model = self.transport.model(label)
        # With the salt no version reads what another left in the prefix cache.
        return {"cache_salt": label, **({"model": model} if model else {})}


def gone(response: httpx.Response) -> bool:
    """A server whose engine died says so once, and goes; one that was started again does not know
    the adapter.
    """
    return response.status_code == 500 or (
        response.status_code == 404 and "does not exist" in response.text
    )
