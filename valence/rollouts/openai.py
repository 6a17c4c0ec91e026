"""Sampling from any server with the completions wire of OpenAI.

Its weights are its own: they are never updated.

Where the server takes token ids and gives them back (``return_token_ids``, as vLLM does), answers
carry them. Elsewhere prompts travel as text, and answers have text alone: enough for methods that
train on what was answered, not for a policy gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valence.errors import UserError
from valence.rollouts.asking import Asking, seed_of, unsaid
from valence.rollouts.protocol import Named, Pair, Sampling, check_request, unheard
from valence.rollouts.wire import Lost, Refused, Wire
from valence.types import Completion, Ids, content_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUTE = "/v1/completions"
KEY = "OPENAI_API_KEY"

TRIES = 8
"""Times in a row that a server may say that it has too much to do."""

STOPS = 4
"""Strings that may end an answer, at most, by the wire."""

PLAIN: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""What a server that speaks tokens is told beside the wire's own settings, so that its defaults
change nothing.
"""


class OpenAIGenerator:
    """A completions endpoint.

    ``model``: its name there; default: the only one there. end_ids: tokens that end an answer, the
    most important first. prefix: tokens that the server, like the tokenizer, puts before every text
    by itself. See ``VLLMGenerator`` for the rest.
    """

    version, dtype = 0, ""

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        model: str | None = None,
        prefix: Sequence[int] = (),
        timeout: float = 600.0,
        concurrency: int = 64,
        say: Callable[[str], None] = unsaid,
    ) -> None:
        self.wire = Wire(url, timeout, os.environ.get(KEY), health="/v1/models")
        self.asking = Asking(self.wire, ROUTE, tries=TRIES, say=say)
        self.tokenizer, self.end_ids, self.concurrency = (
            tokenizer,
            list(dict.fromkeys(end_ids)),
            concurrency,
        )
        self._named, self.prefix = model, tuple(prefix)

    @cached_property
    def model(self) -> str:
        """The model's name. Raises UserError when the server has several and none was named."""
        if self._named is not None:
            return self._named
        names = [
            str(each["id"])
            for each in self.asking.persist(lambda: self.wire.get("/v1/models"))["data"]
        ]
        if len(names) != 1:
            what = f"the server has {len(names)} models: {', '.join(names[:8])}"
            raise UserError(
                what,
                code="rollout-model-ambiguous",
                where=self.wire.url,
                fix="point rollout.url at a server with one model",
            )
        return names[0]

    @cached_property
    def gives_tokens(self) -> bool:
        """Whether token ids and log-probabilities come back.

        Asks the server, once, for one token.
        """
        body = self._body([self.end_ids[0]], Sampling(max_new_tokens=1), 0, tokens=True)
        try:
            choice = self.asking.persist(lambda: self.wire.post(ROUTE, body))["choices"][0]
        except Refused as error:
            if error.status in (401, 403, 404):
                raise
            return False
        return (
            bool(choice.get("token_ids"))
            and len((choice.get("logprobs") or {}).get("token_logprobs") or ()) == 1
        )

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = unheard,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        Without token ids (``gives_tokens``) prompts and answers make a round trip through text, and
        there are no log-probabilities.
        """
        check_request(prompts, n)
        answers: dict[int, Completion] = {}

        def body(at: int) -> dict[str, Any]:
            seed = seed_of(sampling.seed, at // n) + at % n
            return self._body(prompts[at // n], sampling, seed, tokens=self.gives_tokens)

        def take(at: int, answer: Any) -> None:
            answers[at] = self._completion(prompts[at // n], answer["choices"][0], at % n)
            progress(1)

        # One request per answer: not every server heeds n.
        self.asking.all(
            range(n * len(prompts)),
            lambda left: {at: body(at) for at in left},
            take,
            self.concurrency,
        )
        return [[answers[i * n + k] for k in range(n)] for i in range(len(prompts))]

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Always raises UserError: this server's weights are its own."""
        raise UserError(
            "it takes no new weights",
            code="rollout-weights-unsupported",
            where=self.wire.url,
            fix="use rollout.engine: vllm, or hf",
        )

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Always raises UserError: the wire has no way to ask for them."""
        raise UserError(
            "it scores no answers",
            code="rollout-scoring-unsupported",
            where=self.wire.url,
            fix="set rollout.check_prompts: 0",
        )

    def close(self) -> None:
        """Gives back connections."""
        self.wire.close()

    def _body(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, *, tokens: bool
    ) -> dict[str, Any]:
        own = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }
        if tokens:
            return {
                **own,
                **PLAIN,
                "prompt": list(prompt),
                "stop_token_ids": self.end_ids,
                "logprobs": 1,
            }
        stops = [str(self.tokenizer.decode([token])) for token in self.end_ids[:STOPS]]
        own_part = (
            prompt[len(self.prefix) :]
            if tuple(prompt[: len(self.prefix)]) == self.prefix
            else prompt
        )
        return {
            **own,
            "prompt": str(self.tokenizer.decode(list(own_part or prompt))),
            "stop": stops,
        }

    def _completion(self, prompt: Sequence[int], choice: Any, index: int) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Lost(f"{self.wire.url}: an answer ended with {reason!r}")
        ended = reason == "stop"
        if self.gives_tokens:
            tokens, logps = (
                [int(token) for token in choice["token_ids"]],
                choice["logprobs"]["token_logprobs"],
            )
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            ended = bool(tokens) and tokens[-1] in self.end_ids
        else:
            text, logps = str(choice["text"]), ()
            tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
            if ended:  # by a token of which only the text is known: take that of training data
                tokens.append(self.end_ids[0])
        return Completion(
            prompt_id=content_id("prompt", Ids(tuple(prompt))),
            tokens=tuple(tokens),
            logps=tuple(float(logp) for logp in logps),
            text=text,
            stop="eos" if ended else "length",
            index=index,
        )
