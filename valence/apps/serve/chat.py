"""Answer chat messages with a policy, token by token, for a service with many users."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from valence.apps.serve.prompts import prompt_id
from valence.data.tool_calls import CallFormat, call_format_of
from valence.errors import UserError
from valence.rollouts import Sampling
from valence.rollouts.continuous import ContinuousBatch, RunningCompletion
from valence.rollouts.hf import uniforms
from valence.training.episodes import BackgroundLoop, EpisodeRun, count_calls, parse_turn
from valence.training.sampling import PolicySampler, sampling_failed
from valence.training.trainer import Trainer
from valence.types import Chat, Completion, Demonstration, Message, Origin, TokenizedExample

T = TypeVar("T")

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoded text of the first bytes of a character."""

MAX_BATCH = 8
"""Completions of a model that are sampled at once, by default."""


@dataclass(frozen=True)
class ChatPrompt:
    """Chat messages and tools, and their tokens for a model.

    key: identifies the request. calls_tools: the service makes the calls of the answer. info: the
    other columns of the prompt's row, which an environment may read.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    ids: tuple[int, ...]
    key: str
    calls_tools: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class FinishedTurn:
    """A turn of an answer without the text of its calls, and the results of these calls."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Answer:
    """A completion that the service has sampled, with all data that feedback on it needs.

    key: identifies the request, to which an environment may have added. vocabulary: digest of the
    tokenizer. turns: of a completion that is more than text. info: columns for the rows of votes
    on it, such as the side of an A/B test.
    """

    id: str
    model: str
    key: str
    vocabulary: str
    prompt: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    sampling: Sampling
    turns: tuple[Message, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The completion as chat turns, of which the last one is the assistant's."""
        return self.turns or ({"role": "assistant", "content": self.completion.text},)

    @property
    def has_client_calls(self) -> bool:
        """Whether it ends with calls that the client is to make."""
        return len(self.turns) == 1 and "tool_calls" in self.turns[0] and not self.completion.mask


def new_id() -> str:
    """An id for an answer that cannot be guessed."""
    return secrets.token_hex(8)


class TextStream:
    """Decodes tokens into pieces of text.

    A character is returned when all its bytes are known, and text that may be the start of a stop
    string once it is clear that it is not. is_stopped: a stop string was reached; ``text`` ends
    before it. holds: strings, also special tokens, from which on no text is returned.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), holds: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._tokens, self._stops = tokenizer, list[int](), tuple(stops)
        self._holds = tuple(holds)
        self.text = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Return the text that this token adds."""
        self._tokens.append(token)
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        self.is_stopped = bool(ends)
        if ends:
            text = text[: min(ends)]
        else:
            text = text[: len(text) - self._num_held_back(text)]
        is_incomplete = text.endswith(INCOMPLETE) and not ends
        if is_incomplete or self._is_held() or not text.startswith(self.text):
            return ""
        piece, self.text = text[len(self.text) :], text
        return piece

    def _is_held(self) -> bool:
        if not self._holds:
            return False
        written = str(self._tokenizer.decode(self._tokens, skip_special_tokens=False))
        return any(start in written for start in self._holds)

    def _num_held_back(self, text: str) -> int:
        """Characters at the end of the text that a stop string may start with."""
        ends = (*self._stops, *self._holds)
        starts = (end[:size] for end in ends for size in range(1, len(end)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)


@dataclass(eq=False)
class _Request:
    """A completion that a client waits for.

    put: sends a piece of text to the client; None: the result is there. is_cancelled: the client
    has left.
    """

    row: RunningCompletion
    text: TextStream
    put: Callable[[str | None], None]
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    result: Completion | BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.result = error
        self.put(None)


class ChatModel:
    """Answers with the policy of a run, several requests at a time, in the order of arrival.

    name: shown to clients. num_requests: running and waiting requests.
    """

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        *,
        max_context: int | None = None,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """max_context: maximum tokens of a prompt and its completion. max_batch: completions that
        are sampled at once. Raises UserError for a reward model, a model without a chat template,
        or tools that cannot be imported.
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
        self.max_batch = max_batch
        self.num_requests = 0
        self.tool_use = trainer.prepared.tool_use
        self._background = None if self.tool_use is None else BackgroundLoop()
        self._episodes = set[EpisodeRun]()
        self._sampler = PolicySampler(trainer.policy, self.encoder, version=lambda: trainer.step)
        self._encoding = threading.Lock()
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "valence-chat")
        self._lock = threading.Lock()
        self._waiting = deque[_Request]()
        self._active = list[_Request]()
        self._completed = list[_Request]()
        self._is_sampling = False
        if self.tool_use is not None and self._background is not None:
            with ExitStack() as failing:
                failing.callback(self.close)
                self._background.submit(self.tool_use.tools.prepare()).result()
                failing.pop_all()

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        client_calls: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return a prompt with its tokens. Safe to call from any thread.

        client_calls: the client makes the calls of the answer, instead of the service. info: the
        other columns of the prompt's row.

        Raises UserError when the chat template cannot render it or does not print tools, or when
        there is no room for a completion.
        """
        chat = Chat(tuple(messages), tuple(tools))
        with self._encoding:
            if tools and not self.encoder.template.reads_tools(tools):
                raise UserError(
                    "the model's chat template does not support tools",
                    code="tools-unsupported",
                    where="tools",
                    fix="remove the tools, or serve a model whose template prints them",
                )
            prompt = self.encoder.chat_of(chat)  # with the tools of the run
            ids = self.encoder.encode_prompt(prompt)
        self._room(ids)
        return ChatPrompt(
            prompt.messages,
            prompt.tools,
            ids,
            key=prompt_id(chat.messages, chat.tools),
            calls_tools=self.tool_use is not None and not client_calls,
            info=info or {},
        )

    def _room(self, prompt: Sequence[int]) -> float:
        """How many tokens may follow a prompt. Raises UserError if there is no room."""
        if self.max_context is None:
            return float("inf")
        if len(prompt) >= self.max_context:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, which leaves no room for an answer: "
                f"the model's maximum is {self.max_context} tokens",
                code="prompt-too-long",
                where="messages",
                fix="start a new conversation",
            )
        return self.max_context - len(prompt)

    def encode_correction(self, answer: Answer, correction: str) -> tuple[int, ...]:
        """Return the tokens of a correction behind the prompt of an answer; none when the answer
        was sampled with another tokenizer, or has several turns, of which it corrects the last.

        Raises UserError when the correction cannot be trained on.
        """
        if answer.vocabulary != self.encoder.vocab.digest:
            return ()
        demonstration = Demonstration(
            prompt=Chat((*answer.prompt, *answer.messages[:-1]), answer.tools),
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
                fix="shorten the correction, or restart the server with a larger data.max_length"
                if encoded.kind == "too_long"
                else encoded.fix,
            )
        return tuple(encoded.answers[0].ids) if len(answer.messages) == 1 else ()

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token alone; a part of a character is a replacement character."""
        return [str(self.encoder.tokenizer.decode([token])) for token in tokens]

    async def stream(
        self, prompt: ChatPrompt, sampling: Sampling, *, id: str = "", stops: Sequence[str] = ()
    ) -> AsyncGenerator[str | FinishedTurn | Answer, None]:
        """Yield the pieces of the answer's text, each turn with calls after its pieces, then the
        answer. id: of the answer. stops: strings before which the text ends.

        If the service makes the calls, every turn is yielded. Sampling ends at the next token when
        the caller closes the generator, or is cancelled. Raises UserError when the prompt cannot
        be answered.
        """
        room = int(min(sampling.max_new_tokens, self._room(prompt.ids)))
        sampling = replace(sampling, max_new_tokens=room)
        answer = self._call_tools if prompt.calls_tools else self._answer_once
        self.num_requests += 1
        try:
            async with aclosing(answer(prompt, sampling, stops)) as parts:
                async for part in parts:
                    yield replace(part, id=id or new_id()) if isinstance(part, Answer) else part
        finally:
            # nothing is awaited here: a request that is cancelled may be cancelled again
            self.num_requests -= 1

    async def _answer_once(
        self, prompt: ChatPrompt, sampling: Sampling, stops: Sequence[str]
    ) -> AsyncGenerator[str | FinishedTurn | Answer, None]:
        """Answer with one turn, whose calls the client makes. Their text is not yielded."""
        calls = None
        if prompt.tools:
            calls = call_format_of(self.encoder.template.source(prompt.tools))
        holds = () if calls is None else calls.starts
        sent = ""
        async with aclosing(self._sample_turn(prompt.ids, sampling, stops, holds)) as parts:
            async for part in parts:
                if isinstance(part, str):
                    sent += part
                    yield part
                    continue
                turns = () if calls is None else self._turn_with_calls(prompt, part, calls)
                if turns:
                    yield FinishedTurn(turns)
                elif part.text.startswith(sent) and part.text != sent:
                    yield part.text[len(sent) :]  # it was no call, or an incomplete character
                yield self._answer(prompt, part, sampling, turns)

    def _turn_with_calls(
        self, prompt: ChatPrompt, completion: Completion, calls: CallFormat
    ) -> tuple[Message, ...]:
        """A completion as a turn with calls; none if it has no calls that can be read."""
        if completion.stop != "eos":
            return ()
        turn = parse_turn(
            self.encoder,
            calls,
            completion.tokens,
            prompt.tools,
            num_earlier_calls=count_calls(prompt.messages),
        )
        return (turn.message,) if turn.calls else ()

    async def _call_tools(
        self, prompt: ChatPrompt, sampling: Sampling, _: Sequence[str]
    ) -> AsyncGenerator[str | FinishedTurn | Answer, None]:
        """Answer with as many turns as the model calls tools."""
        assert self.tool_use is not None
        chat = Chat(prompt.messages, prompt.tools)
        run = EpisodeRun(
            self.tool_use,
            chat,
            prompt.ids,
            prompt.info,
            position=0,
            index=0,
            limit=sampling.max_new_tokens,
            seed=sampling.seed,
        )
        self._episodes.add(run)
        try:
            goes_on = await self._in_background(run.start())
            if not goes_on:
                raise UserError(
                    run.error,
                    code="environment-failed",
                    where="rollout.environment",
                    fix="fix it, or take the prompts from a file with the columns that it needs",
                )
            run.limit = int(min(run.limit, self._room(run.prompt_ids)))
            version = 0
            while goes_on:
                turn_sampling = replace(
                    sampling,
                    max_new_tokens=run.num_left,
                    seed=(sampling.seed + (run.num_turns << 32)) % 2**63,
                )
                num_messages = len(run.messages)
                context, sent = tuple(run.context), ""
                async with aclosing(self._sample_turn(context, turn_sampling, ())) as parts:
                    async for part in parts:
                        if isinstance(part, str):
                            sent += part
                            yield part
                            continue
                        version = part.version
                        if part.text.startswith(sent) and part.text != sent:
                            yield part.text[len(sent) :]  # an incomplete character
                        work = run.take_turn(part.tokens, part.logps)
                        goes_on = await self._in_background(work)
                yield FinishedTurn(tuple(run.messages[num_messages:]))
            completion = run.completion(version)
            assert completion.episode is not None
            prompt = replace(prompt, messages=run.chat.messages, ids=run.prompt_ids)
            yield self._answer(prompt, completion, sampling, completion.episode.messages)
        finally:
            with self._lock:
                self._episodes.discard(run)
                if not self._closed.is_set() and self._background is not None:
                    self._background.submit(run.close())

    async def _in_background(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work of tools, which runs in another thread. Raises UserError if the service
        ends.
        """
        with self._lock:
            if self._closed.is_set() or self._background is None:
                work.close()
                raise _stopped()
            future = self._background.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise _stopped() from None
            raise

    def _answer(
        self,
        prompt: ChatPrompt,
        completion: Completion,
        sampling: Sampling,
        turns: tuple[Message, ...],
    ) -> Answer:
        return Answer(
            id="",
            model=self.name,
            key=prompt.key,
            vocabulary=self.encoder.vocab.digest,
            prompt=prompt.messages,
            tools=prompt.tools,
            prompt_ids=prompt.ids,
            completion=completion,
            sampling=sampling,
            turns=turns,
        )

    async def _sample_turn(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        stops: Sequence[str],
        holds: Sequence[str] = (),
    ) -> AsyncGenerator[str | Completion, None]:
        """Yield the pieces of a turn's text, then the turn. holds: see ``TextStream``."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def put(piece: str | None) -> None:
            if not request.is_cancelled.is_set():  # otherwise the loop may be closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        text = TextStream(self.encoder.tokenizer, stops, holds)
        row = RunningCompletion(prompt, sampling, uniforms(sampling, 0, 0))
        request = _Request(row, text, put)
        self._submit(request)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            completion = request.result
            if not isinstance(completion, Completion):
                raise completion or AssertionError("a request ends with a result")
            yield completion
        finally:
            # nothing is awaited here: a request that is cancelled may be cancelled again
            request.is_cancelled.set()

    def _submit(self, request: _Request) -> None:
        with self._lock:
            if self._closed.is_set():
                raise _stopped()
            self._waiting.append(request)
            self._start()

    def _start(self) -> None:
        """Start to sample, unless this happens already. Needs the lock."""
        if self._waiting and not self._is_sampling:
            self._is_sampling = True
            run = self._thread.submit(self._sampler.sample_continuously, self._sample)
            run.add_done_callback(self._after_sampling)

    def _after_sampling(self, run: Future[None]) -> None:
        """End the last requests. After an error, end all that it stopped, and start again for those
        that wait.
        """
        self._end_completed()
        if (error := run.exception()) is None:
            return
        if isinstance(error, FloatingPointError):
            error = sampling_failed(error, self.trainer.step)
        with self._lock:
            stopped, self._active = self._active, []
            if self._closed.is_set():
                stopped += self._waiting
                self._waiting.clear()
            self._is_sampling = False
            self._start()
        for request in stopped:
            request.fail(error)

    def _sample(self, batch: ContinuousBatch) -> None:
        """Sample until no request is left. Runs in the model's thread."""
        with torch.inference_mode():
            while self._admit(batch):
                batch.draw()
                for request in self._active:
                    self._send(request, batch)
                self._active = [request for request in self._active if request.result is None]
                batch.advance()
                if batch.rows:  # otherwise the model must be left as it was before
                    self._end_completed()

    def _admit(self, batch: ContinuousBatch) -> bool:
        """Start waiting requests while there is room. Returns whether any request is left."""
        if self._closed.is_set():
            raise _stopped()
        while requests := self._next_requests(batch):
            try:
                batch.add([request.row for request in requests])
            except (UserError, RuntimeError) as error:  # such as a prompt without enough memory
                for request in requests:
                    request.fail(error)
            else:
                self._active += requests
        with self._lock:
            self._is_sampling = bool(self._active or self._waiting)
            return self._is_sampling

    def _next_requests(self, batch: ContinuousBatch) -> list[_Request]:
        """The next waiting requests that have one prompt and fit into the batch."""
        requests = list[_Request]()
        with self._lock:
            while self._waiting and batch.can_add:
                request = self._waiting[0]
                if not request.is_cancelled.is_set():
                    is_full = len(batch.rows) + len(requests) >= self.max_batch
                    if is_full or (requests and request.row.prompt is not requests[0].row.prompt):
                        break
                    requests.append(request)
                self._waiting.popleft()
        return requests

    def _send(self, request: _Request, batch: ContinuousBatch) -> None:
        """Send the text of a new token to the client, and the completion after the last one."""
        row, text = request.row, request.text
        if request.is_cancelled.is_set():
            row.is_finished = True
            request.result = _stopped()
            return
        if row.error is not None:
            request.result = sampling_failed(row.error, self.trainer.step)
            self._completed.append(request)
            return
        if piece := text.push(row.tokens[-1]):
            request.put(piece)
        row.is_finished |= text.is_stopped
        if row.is_finished:
            completion = batch.complete(row)
            if text.is_stopped:
                completion = replace(completion, text=text.text, stop="stop")
            request.result = completion
            self._completed.append(request)

    def _end_completed(self) -> None:
        while self._completed:
            self._completed.pop(0).put(None)

    async def answer(
        self, prompt: ChatPrompt, sampling: Sampling, *, stops: Sequence[str] = ()
    ) -> Answer:
        """Return the complete answer."""
        async with aclosing(self.stream(prompt, sampling, stops=stops)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    return part
        raise AssertionError("a stream ends with its answer")

    def close(self) -> None:
        """Stop sampling at the next token, and end the tools. Calling it again has no effect."""
        with self._lock:
            is_closed = self._closed.is_set()
            self._closed.set()
        self._thread.shutdown(wait=False)
        if not is_closed and self.tool_use is not None and self._background is not None:
            self._background.close(list(self._episodes))
            self.tool_use.tools.close()


def _stopped() -> UserError:
    return UserError("the server is shutting down", code="server-stopped", fix="retry later")


def position_limit_of(trainer: Trainer) -> int | None:
    """Maximum number of positions of the model; None if it is unknown."""
    from valence.models.build import position_limit

    limit = position_limit(trainer.policy.causal)
    return None if limit is None else limit[0]
