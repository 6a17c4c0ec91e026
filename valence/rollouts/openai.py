"""Sampling from any servers with OpenAI's completions API.

Their weights never change. If a server accepts and returns token ids (``return_token_ids``, as vLLM
does), completions have them. Otherwise prompts are sent as text, and completions are text alone:
enough for methods that train on completions, but not for a policy gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valence.errors import UserError
from valence.rollouts.client import RequestRefused, ServerClient, ServerLost, ignore_message
from valence.rollouts.pool import ServerPool
from valence.rollouts.protocol import (
    Named,
    Pair,
    Sampling,
    check_request,
    completion_seed,
    ignore_progress,
)
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTE = "/v1/completions"
KEY = "OPENAI_API_KEY"

MAX_LOSSES = 8
"""Maximum number of consecutive losses of a server, also by overload."""

MAX_STOPS = 4
"""Maximum number of stop strings in the API."""

PLAIN: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""Further parameters for a server with token ids, so that its defaults have no effect."""


class OpenAIGenerator:
    """Completions endpoints of the same model, which share the requests.

    end_ids: tokens that end a completion, the most important first. model: its name on the servers;
    default: the only one. prefix: tokens that a server, like the tokenizer, inserts before every
    text. concurrency: requests to each server at the same time. See ``ServerClient`` for timeout,
    ``ServerPool`` for log.
    """

    version, dtype = 0, ""

    def __init__(
        self,
        urls: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        model: str | None = None,
        prefix: Sequence[int] = (),
        timeout: float = 600.0,
        concurrency: int = 64,
        log: Callable[[str], None] = ignore_message,
    ) -> None:
        self.pool = ServerPool(
            [
                ServerClient(url, timeout, os.environ.get(KEY), "/v1/models", max_losses=MAX_LOSSES)
                for url in ([urls] if isinstance(urls, str) else urls)
            ],
            log,
        )
        self.tokenizer, self.end_ids = tokenizer, list(dict.fromkeys(end_ids))
        self.concurrency, self.prefix, self._model = concurrency, tuple(prefix), model

    @cached_property
    def model(self) -> str:
        """The model's name. Raises UserError when the server has several and none is named."""
        if self._model is not None:
            return self._model
        url, models = self.pool.ask_any(lambda client: (client.url, client.get("/v1/models")))
        names = [str(model["id"]) for model in models["data"]]
        if len(names) != 1:
            listed = f" ({', '.join(names[:8])})" if names else ""
            raise UserError(
                f"the server must have exactly one model, but has {len(names)}{listed}",
                code="rollout-model-ambiguous",
                where=url,
                fix="set rollout.url to a server with one model",
            )
        return names[0]

    @cached_property
    def gives_tokens(self) -> bool:
        """Whether the servers return token ids and log-probabilities.

        Requests one token, once.
        """
        body = self._body([self.end_ids[0]], Sampling(max_new_tokens=1), 0, with_tokens=True)
        try:
            choice = self.pool.ask_any(lambda client: client.post(ROUTE, body))["choices"][0]
        except RequestRefused as error:
            if error.status in (401, 403, 404):
                raise
            return False
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        return bool(choice.get("token_ids")) and len(logps) == 1

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        Without token ids (``gives_tokens``) prompts and completions are converted to text and back,
        and there are no log-probabilities.
        """
        check_request(prompts, n)
        completions: dict[int, Completion] = {}

        def make_body(k: int, _: object) -> dict[str, Any]:
            seed = completion_seed(sampling.seed, k // n) + k % n
            return self._body(prompts[k // n], sampling, seed, with_tokens=self.gives_tokens)

        def handle(k: int, reply: Any, client: ServerClient) -> None:
            choice = reply["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                raise ServerLost(f"{client.url}: an answer ended with {choice['finish_reason']!r}")
            completions[k] = self._completion(prompts[k // n], choice, k % n)
            progress(1)

        # one request per completion: not every server supports n
        self.pool.post_all(ROUTE, range(n * len(prompts)), make_body, handle, self.concurrency)
        return [[completions[i * n + k] for k in range(n)] for i in range(len(prompts))]

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Always raises UserError: this server's weights cannot be changed."""
        raise UserError(
            "a server with rollout.engine: openai does not accept new weights",
            code="rollout-weights-unsupported",
            where=self.pool.clients[0].url,
            fix="set rollout.engine: vllm or hf",
        )

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Always raises UserError: the API has no request for them."""
        raise UserError(
            "a server with rollout.engine: openai does not score completions",
            code="rollout-scoring-unsupported",
            where=self.pool.clients[0].url,
            fix="set rollout.check_prompts: 0",
        )

    def close(self) -> None:
        """Close connections."""
        self.pool.close()

    def _body(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, *, with_tokens: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        if with_tokens:
            ids = {"prompt": list(prompt), "stop_token_ids": self.end_ids}
            return {**body, **PLAIN, **ids, "logprobs": 1}
        has_prefix = tuple(prompt[: len(self.prefix)]) == self.prefix
        ids = list(prompt[len(self.prefix) :] if has_prefix else prompt)
        stops = [str(self.tokenizer.decode([token])) for token in self.end_ids[:MAX_STOPS]]
        return {**body, "prompt": str(self.tokenizer.decode(ids or list(prompt))), "stop": stops}

    def _completion(self, prompt: Sequence[int], choice: Any, index: int) -> Completion:
        if self.gives_tokens:
            tokens = [int(token) for token in choice["token_ids"]]
            logps = choice["logprobs"]["token_logprobs"]
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            has_ended = bool(tokens) and tokens[-1] in self.end_ids
        else:
            text, logps, has_ended = str(choice["text"]), (), choice["finish_reason"] == "stop"
            tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
            if has_ended:  # only the text of the end token is known: use that of training data
                tokens.append(self.end_ids[0])
        return Completion(
            prompt_id=content_id("prompt", Ids(tuple(prompt))),
            tokens=tuple(tokens),
            logps=tuple(float(logp) for logp in logps),
            text=text,
            stop="eos" if has_ended else "length",
            index=index,
        )
