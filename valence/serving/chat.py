"""Answer chat messages with a policy, token by token, for a service with many users."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import torch

from valence.errors import UserError
from valence.rollouts import Sampling
from valence.rollouts.hf import OnTokens
from valence.trainer.sampling import PolicySampler, sampling_failed
from valence.trainer.trainer import Trainer
from valence.types import Chat, Completion, Demonstration, Message, Origin, TokenizedExample

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoded text of the first bytes of a character."""


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages and tools, and their tokens for a model."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """A completion that the service has sampled, with all data that feedback on it needs.

    vocabulary: digest of the tokenizer.
    """

    id: str
    model: str
    vocabulary: str
    prompt: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    sampling: Sampling

    @property
    def message(self) -> Message:
        return {"role": "assistant", "content": self.completion.text}


def new_id() -> str:
    """An id for an answer that cannot be guessed."""
    return secrets.token_hex(8)


class _CancelledError(Exception):
    """The client no longer waits for the answer."""


class TextStream:
    """Decodes tokens into pieces of text; a character is returned when all its bytes are known."""

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

    name: shown to clients. num_requests: running and waiting requests.
    """

    def __init__(self, trainer: Trainer, name: str, *, max_context: int | None = None) -> None:
        """max_context: maximum tokens of a prompt and its completion. Raises UserError for a reward
        model, or a model without a chat template.
        """
        if trainer.prepared.method.is_reward_model:
            raise UserError(
                "reward models cannot generate text",
                code="reward-model-cannot-generate",
                where=name,
                fix="use a language model",
            )
        self.encoder = trainer.prepared.encoder
        if not self.encoder.template.exists:
            raise UserError(
                "the model has no chat template",
                code="chat-template-missing",
                where=name,
                fix="use a chat model, or add data.chat_template=chatml",
            )
        self.name, self.trainer = name, trainer
        self.max_context = max_context or position_limit_of(trainer)
        self.num_requests = 0
        self._sampler = PolicySampler(
            trainer.policy, self.encoder, version=lambda: trainer.step, batch_size=1
        )
        self._encoding = threading.Lock()
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "valence-chat")

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatPrompt:
        """Return a prompt with its tokens. Safe to call from any thread.

        Raises UserError when the chat template cannot render it, or it leaves no room for a
        completion.
        """
        with self._encoding:
            ids = self.encoder.encode_prompt(Chat(tuple(messages), tuple(tools)))
        if self.max_context is not None and len(ids) >= self.max_context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, but the maximum of the model is "
                f"{self.max_context}",
                code="prompt-too-long",
                where="messages",
                fix="start a new conversation",
            )
        return ChatPrompt(tuple(messages), tuple(tools), ids)

    def encode_correction(self, answer: Answer, correction: str) -> tuple[int, ...]:
        """Return the tokens of a correction behind the prompt of an answer; none when the answer
        was sampled with another tokenizer.

        Raises UserError when the correction cannot be trained on.
        """
        if answer.vocabulary != self.encoder.vocab.digest:
            return ()
        demonstration = Demonstration(
            prompt=Chat(answer.prompt, answer.tools),
            completion=Chat(({"role": "assistant", "content": correction},)),
            origin=Origin("correction", 0),
        )
        with self._encoding:
            encoded = self.encoder.encode(demonstration)
        if not isinstance(encoded, TokenizedExample):
            raise UserError(
                f"the correction cannot be used: {encoded.reason}",
                code=encoded.code,
                where="correction",
                fix=encoded.fix,
            )
        return tuple(encoded.answers[0].ids)

    async def stream(
        self, prompt: ChatPrompt, sampling: Sampling, *, id: str = ""
    ) -> AsyncGenerator[str | Answer, None]:
        """Yield the pieces of the answer's text, then the answer. id: of the answer.

        Sampling ends at the next token when the caller closes the generator, or is cancelled.
        Raises UserError when the prompt cannot be answered.
        """
        if self._closed.is_set():
            raise _stopped()
        if self.max_context is not None:
            room = self.max_context - len(prompt.ids)
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        cancelled = threading.Event()
        text = TextStream(self.encoder.tokenizer)

        def put(piece: str | None) -> None:
            if not cancelled.is_set():  # otherwise the loop may be closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def on_tokens(_: list[int], tokens: list[int]) -> None:
            if cancelled.is_set():
                raise _CancelledError
            if piece := text.push(tokens[0]):
                put(piece)

        def sample() -> Completion:
            try:
                return self._sample(prompt.ids, sampling, on_tokens)
            finally:
                put(None)

        self.num_requests += 1
        task = loop.run_in_executor(self._thread, sample)
        sent = ""
        try:
            while (piece := await pieces.get()) is not None:
                sent += piece
                yield piece
            completion = await task
            if completion.text.startswith(sent) and completion.text != sent:
                yield completion.text[len(sent) :]  # an incomplete character
            yield Answer(
                id=id or new_id(),
                model=self.name,
                vocabulary=self.encoder.vocab.digest,
                prompt=prompt.messages,
                tools=prompt.tools,
                prompt_ids=prompt.ids,
                completion=completion,
                sampling=sampling,
            )
        finally:
            # nothing is awaited here: a request that is cancelled may be cancelled again
            cancelled.set()
            task.cancel()
            self.num_requests -= 1

    def _sample(
        self, prompt: tuple[int, ...], sampling: Sampling, on_tokens: OnTokens
    ) -> Completion:
        def unless_closed(numbers: list[int], tokens: list[int]) -> None:
            if self._closed.is_set():
                raise _stopped()
            on_tokens(numbers, tokens)

        if self._closed.is_set():
            raise _stopped()
        try:
            with torch.inference_mode():
                batch = self._sampler.generate([prompt], 1, sampling, on_tokens=unless_closed)
        except FloatingPointError as error:
            raise sampling_failed(error, self.trainer.step) from error
        return batch[0][0]

    async def answer(self, prompt: ChatPrompt, sampling: Sampling) -> Answer:
        """Return the complete answer."""
        async with aclosing(self.stream(prompt, sampling)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    return part
        raise AssertionError("a stream ends with its answer")

    def close(self) -> None:
        """Stop sampling at the next token."""
        self._closed.set()
        self._thread.shutdown(wait=False)


def _stopped() -> UserError:
    return UserError("the server is shutting down", code="server-stopped", fix="retry later")


def position_limit_of(trainer: Trainer) -> int | None:
    """Maximum number of positions of the model; None if it is unknown."""
    from valence.models.build import position_limit

    limit = position_limit(trainer.policy.causal)
    return None if limit is None else limit[0]
