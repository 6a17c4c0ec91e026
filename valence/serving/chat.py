"""Answer chat messages with a policy, token by token, for a service that many people use."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from valence.errors import UserError
from valence.rollouts import Sampling
from valence.trainer.sampling import PolicySampler, sampling_failed
from valence.trainer.trainer import Trainer
from valence.types import Chat, Completion, Message

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to."""


@dataclass(frozen=True)
class Answer:
    """A completion that the service has sampled, with everything that feedback on it needs."""

    id: str
    model: str
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    sampling: Sampling

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.completion.text}


class _CancelledError(Exception):
    """Nobody waits for the answer any more."""


class TextStream:
    """Turns tokens into pieces of text; a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._tokens, self._text = tokenizer, list[int](), ""

    def push(self, token: int) -> str:
        """Return the text that this token adds."""
        self._tokens.append(token)
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if text.endswith(INCOMPLETE) or not text.startswith(self._text):
            return ""
        piece, self._text = text[len(self._text) :], text
        return piece


class ChatModel:
    """Answers with the policy of a run, one request at a time.

    name: shown to clients. num_waiting: requests that wait for their turn.
    """

    def __init__(self, trainer: Trainer, name: str, *, max_context: int | None = None) -> None:
        """max_context: most tokens of a prompt and its completion. Raises UserError for a reward
        model, or a model without a chat template.
        """
        if trainer.prepared.method.is_reward_model:
            raise UserError(
                "reward models cannot generate text",
                code="reward-model-cannot-generate",
                where=name,
                fix="name a language model",
            )
        self.encoder = trainer.prepared.encoder
        if not self.encoder.template.exists:
            raise UserError(
                "the model has no chat template",
                code="chat-template-missing",
                where=name,
                fix="name a chat model, or set data.chat_template: chatml",
            )
        self.name, self.trainer = name, trainer
        self.max_context = max_context or position_limit_of(trainer)
        self.num_waiting = 0
        self._sampler = PolicySampler(
            trainer.policy, self.encoder, version=lambda: trainer.step, batch_size=1
        )
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "valence-chat")

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt.

        Raises UserError when the chat template cannot render it, or it leaves no room for a
        completion.
        """
        ids = self.encoder.encode_prompt(Chat(tuple(messages), tuple(tools)))
        if self.max_context is not None and len(ids) >= self.max_context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, and the model reads {self.max_context}",
                code="prompt-too-long",
                where="messages",
                fix="start a new conversation",
            )
        return ids

    async def stream(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        id: str | None = None,
    ) -> AsyncIterator[str | Answer]:
        """Yield the pieces of the answer's text, then the answer. id: of the answer.

        Sampling ends when the caller leaves the iterator. Raises UserError when the messages
        cannot be answered.
        """
        prompt_ids = self.encode(messages, tools)
        if self.max_context is not None:
            room = self.max_context - len(prompt_ids)
            sampling = Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_new_tokens=min(sampling.max_new_tokens, room),
                seed=sampling.seed,
            )
        self.num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self.num_waiting -= 1
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        cancelled = threading.Event()
        text = TextStream(self.encoder.tokenizer)

        def on_tokens(_: list[int], tokens: list[int]) -> None:
            if cancelled.is_set():
                raise _CancelledError
            if piece := text.push(tokens[0]):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def sample() -> Completion:
            try:
                with torch.inference_mode():
                    return self._sampler.generate([prompt_ids], 1, sampling, on_tokens=on_tokens)[
                        0
                    ][0]
            except FloatingPointError as error:
                raise sampling_failed(error, self.trainer.step) from error
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        task = loop.run_in_executor(self._thread, sample)
        sent = ""
        try:
            while (piece := await pieces.get()) is not None:
                sent += piece
                yield piece
            completion = await task
            if completion.text.startswith(sent) and completion.text != sent:
                yield completion.text[len(sent) :]  # what was held back
            yield Answer(
                id=id or secrets.token_hex(8),
                model=self.name,
                prompt=tuple(messages),
                prompt_ids=prompt_ids,
                completion=completion,
                sampling=sampling,
            )
        finally:
            cancelled.set()
            await asyncio.shield(asyncio.wait([task]))
            self._lock.release()

    async def answer(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Answer:
        """Return the whole answer."""
        async for part in self.stream(messages, sampling, tools):
            if isinstance(part, Answer):
                return part
        raise AssertionError("a stream ends with its answer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def position_limit_of(trainer: Trainer) -> int | None:
    """Most tokens that the model has positions for; None when it does not say."""
    from valence.models.build import position_limit

    limit = position_limit(trainer.policy.causal)
    return None if limit is None else limit[0]
