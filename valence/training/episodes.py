"""Completions of several turns: the policy calls tools, and their results follow its turns.

Token in, token out: what was sampled is never decoded and encoded again. Only what follows a turn,
the results of tools as the chat template prints them, is tokenized and added to the tokens so far.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from valence.data.encode import Encoder
from valence.data.tool_calls import CallFormat, ParsedTurn, call_format_of
from valence.data.vocab import RowError
from valence.errors import UserError
from valence.rollouts.continuous import ContinuousBatch, KeysValues, RunningCompletion
from valence.rollouts.hf import HFGenerator, uniforms
from valence.rollouts.protocol import Sampling, completion_seed
from valence.rollouts.tools import RewardMethod, ToolError, ToolResult, Tools, ToolSession
from valence.types import Chat, Completion, Episode, Ids, Message, Prompt, content_id

PATIENCE = 1.0
"""Seconds for which all episodes wait for the tools of some, if the tools can be replayed: the
rounding of log-probabilities depends on which turns are sampled together, which then does not
depend on time. A slower tool, or one that cannot be replayed, delays its own episode only.
"""

T = TypeVar("T")
End = Literal["answer", "turns", "length"]


@dataclass(frozen=True)
class ToolUse:
    """How the policy uses tools.

    encoder: of the prompts, with the schemas of the tools. max_turns: of the policy in an episode.
    """

    encoder: Encoder
    tools: Tools
    max_turns: int
    calls: CallFormat

    @classmethod
    def of(cls, encoder: Encoder, tools: Tools, max_turns: int) -> ToolUse:
        """Raises UserError if the chat template prints no tools, or no calls that are known."""
        template = encoder.template
        calls = call_format_of(template.source(tools.schemas)) if template.exists else None
        if calls is None or not template.reads_tools(tools.schemas):
            model = encoder.tokenizer.name_or_path or "the tokenizer"
            raise UserError(
                f"the chat template of {model} prints no tools, so the model does not know them"
                if template.exists
                else f"{model} has no chat template, which tools need",
                code="tools-need-template",
                where="data.chat_template",
                fix="use a model whose chat template has tools, or set data.chat_template: chatml "
                "and train the model on demonstrations of calls first",
            )
        return cls(encoder, tools, max_turns, calls)


def count_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def parse_turn(
    encoder: Encoder,
    calls: CallFormat,
    tokens: Sequence[int],
    schemas: Sequence[Mapping[str, Any]],
    *,
    num_earlier_calls: int,
) -> ParsedTurn:
    """The text and the calls of a sampled turn. schemas: of the tools."""
    body = list(tokens[:-1] if tokens[-1] in encoder.end_ids else tokens)
    written = str(encoder.tokenizer.decode(body, skip_special_tokens=False))
    return calls.parse(written, schemas, num_earlier_calls=num_earlier_calls)


class EpisodeRun:
    """One completion while its turns are sampled.

    chat, row_ids: the prompt of its row. info: the other columns of the row. position, index: of
    the prompt, and of the completion among those of the prompt. seed: of the random numbers of its
    tools. tokens, mask, logps: of everything after the prompt. limit: most tokens of these.
    is_late: the other episodes have not waited for its tools, see ``PATIENCE``.
    """

    def __init__(
        self,
        use: ToolUse,
        chat: Chat,
        row_ids: tuple[int, ...],
        info: Mapping[str, Any],
        *,
        position: int,
        index: int,
        seed: int,
        limit: int,
    ) -> None:
        self.use, self.chat, self.info = use, chat, info
        self.reset_text = ""
        self.position, self.index, self.seed, self.limit = position, index, seed, limit
        self.row_ids = self.prompt_ids = row_ids
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.logps: list[float] = []
        self.messages: list[Message] = []
        self.calls: list[dict[str, Any]] = []
        self.versions: list[int] = []
        self.num_turns, self.text = 0, ""
        self.end: End = "answer"
        self.error, self.reward, self.is_late = "", None, False
        self.turn_rewards: list[float] = []
        self._session: ToolSession | None = None

    @property
    def context(self) -> list[int]:
        """The tokens before the next turn."""
        return [*self.prompt_ids, *self.tokens]

    @property
    def num_left(self) -> int:
        """How many tokens may follow."""
        return self.limit - len(self.tokens)

    def next_turn(self, sampling: Sampling, saved: KeysValues | None) -> RunningCompletion:
        """The turn that is sampled next. saved: keys and values of what precedes it."""
        draws = uniforms(sampling, self.position, self.index)[len(self.tokens) :]
        return RunningCompletion(tuple(self.context), sampling, draws, saved)

    async def start(self) -> bool:
        """Reset the environment, if there is one. Returns whether a turn is to be sampled."""
        if self.use.tools.environment is None:
            return True
        try:
            session = await self._opened()
            text = await session.reset(self._row())
            if text:
                self._append_to_prompt(self.use.encoder.without_special(text))
        except ToolError as error:
            self.error = f"reset of the environment failed: {error}"
            await self.close()
            return False
        return True

    def _row(self) -> dict[str, Any]:
        return {"prompt": [dict(message) for message in self.chat.messages], **self.info}

    def _append_to_prompt(self, text: str) -> None:
        """Append a text of the environment to the last user turn.

        Raises ToolError if the prompt becomes longer than those of rows may be.
        """
        self.reset_text, self.chat = text, self.chat.with_user_text(text)
        self.prompt_ids = self.use.encoder.encode_prompt(self.chat)
        room = self.use.encoder.max_length
        if len(self.prompt_ids) > room:
            raise ToolError(
                f"its text of {len(text)} characters makes the prompt {len(self.prompt_ids)} "
                f"tokens long, and data.max_length leaves {room}"
            )

    async def take_turn(
        self, tokens: Sequence[int], logps: Sequence[float], versions: Sequence[int] = ()
    ) -> bool:
        """Add a turn that was sampled, and make its calls. Returns whether another turn follows."""
        self._add(tokens, logps)
        self.versions += versions
        self.num_turns += 1
        self.turn_rewards.append(0.0)
        encoder = self.use.encoder
        self.text = str(encoder.tokenizer.decode(list(tokens), skip_special_tokens=True))
        turn = parse_turn(
            encoder,
            self.use.calls,
            tokens,
            self.use.tools.schemas,
            num_earlier_calls=count_calls(self.chat.messages) + len(self.calls),
        )
        if tokens[-1] not in encoder.end_ids:
            self.messages.append({"role": "assistant", "content": self.text})
            return await self._finish("length")
        self.messages.append(turn.message)
        if not turn.calls and not turn.error:
            return await self._finish("answer")
        if self.num_turns == self.use.max_turns:
            return await self._finish("turns")
        results = [await self._call(call) for call in turn.calls]
        if turn.calls and self.use.tools.has_turn_reward:
            self.turn_rewards[-1] += await self._ask_reward("get_turn_reward")
        try:
            if turn.error:
                results = [self._answer_of(turn.error)]
            self.messages += results
            suffix = encoder.encode_tool_suffix(self.chat, self.messages, len(results))
        except RowError as error:
            if turn.error:  # the template has no place for the answer to a malformed call
                return await self._finish("answer")
            raise UserError(
                f"the chat template cannot continue a conversation with tools: {error.reason}",
                code=error.code,
                where="rollout.tools",
                fix=error.fix,
            ) from error
        if len(suffix) >= self.num_left:
            del self.messages[-len(results) :]
            return await self._finish("length")
        self.tokens += suffix
        self.mask += [False] * len(suffix)
        self.logps += [0.0] * len(suffix)
        self.versions += self.versions[-1:] * len(suffix)
        return True

    def _answer_of(self, problem: str) -> Message:
        """The turn that answers a malformed call. Raises RowError."""
        self._record("", {}, ToolResult(problem, "malformed"))
        conversation, encoder = [*self.chat.messages, *self.messages], self.use.encoder
        plain = encoder.without_special(problem)  # it quotes the model
        return encoder.template.answer_of_error(conversation, plain, self.chat.tools)

    def _add(self, tokens: Sequence[int], logps: Sequence[float]) -> None:
        self.tokens += tokens
        self.mask += [True] * len(tokens)
        self.logps += logps

    async def _call(self, call: Any) -> Message:
        session = await self._opened()
        result = await session.call(call.name, call.arguments)
        self._record(call.name, call.arguments, result)
        return {
            "role": "tool",
            "name": call.name,
            "tool_call_id": call.id,
            # a result cannot end its turn and begin one of the model
            "content": self.use.encoder.without_special(result.text),
        }

    def _record(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> None:
        self.calls.append(
            {
                "turn": self.num_turns,
                "name": name,
                "arguments": dict(arguments),
                "error": result.error,
                "detail": result.detail,
                "is_cut": result.is_cut,
                "seconds": round(result.seconds, 3),
            }
        )

    async def _opened(self) -> ToolSession:
        if self._session is None:
            self._session = await self.use.tools.open(self.seed)
        return self._session

    async def _finish(self, end: End) -> bool:
        self.end = end
        tools = self.use.tools
        if tools.has_reward:
            self.turn_rewards[-1] += await self._ask_reward("get_reward")
        if (tools.has_reward or tools.has_turn_reward) and not self.error:
            self.reward = sum(self.turn_rewards)
        await self.close()
        return False

    async def _ask_reward(self, method: RewardMethod) -> float:
        """A reward of the environment. If it fails, the episode has no score."""
        try:
            return await (await self._opened()).reward(method)
        except ToolError as error:
            self.error = self.error or f"{method} of the environment failed: {error}"
            return 0.0

    async def close(self) -> None:
        """End the environment and the process of the tools."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def completion(self, version: int) -> Completion:
        """The completion, when no turn follows."""
        versions = tuple(self.versions)
        return Completion(
            prompt_id=content_id("prompt", Ids(self.row_ids)),
            tokens=tuple(self.tokens),
            logps=tuple(self.logps),
            text=self.text,
            stop="length" if self.end == "length" else "eos",
            version=min(versions, default=version),
            versions=versions if len(set(versions)) > 1 else (),
            index=self.index,
            mask=tuple(self.mask),
            episode=Episode(
                messages=tuple(json.loads(json.dumps(self.messages, default=str))),
                calls=tuple(self.calls),
                end=self.end,
                prompt_ids=() if self.prompt_ids == self.row_ids else self.prompt_ids,
                reward=self.reward,
                error=self.error,
                reset_text=self.reset_text,
                turn_rewards=tuple(self.turn_rewards) if self.use.tools.has_turn_reward else (),
            ),
        )


def episodes_of(
    use: ToolUse, prompts: Sequence[Prompt], n: int, sampling: Sampling, positions: Sequence[int]
) -> list[EpisodeRun]:
    """n episodes of each prompt. positions: of the prompts, which random numbers depend on.

    Raises UserError for a prompt that is no chat, with its row.
    """
    episodes: list[EpisodeRun] = []
    for prompt, position in zip(prompts, positions, strict=True):
        try:
            chat = use.encoder.chat_of(prompt.prompt)
            ids = use.encoder.encode_prompt(prompt.prompt)
        except UserError as error:
            raise UserError(
                error.message, code=error.code, where=str(prompt.origin), fix=error.fix
            ) from error
        episodes += [
            EpisodeRun(
                use,
                chat,
                ids,
                prompt.info,
                position=position,
                index=k,
                seed=completion_seed(sampling.seed, position) + k,
                limit=sampling.max_new_tokens,
            )
            for k in range(n)
        ]
    return episodes


def completions_of(episodes: Sequence[EpisodeRun], n: int, version: int) -> list[list[Completion]]:
    """The completions of episodes that have ended, n of each prompt."""
    completions = [episode.completion(version) for episode in episodes]
    return [completions[i : i + n] for i in range(0, len(completions), n)]


class BackgroundLoop:
    """An event loop in a thread, for the tools of episodes while others are sampled."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="valence-tools", daemon=True
        )
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, episodes: Sequence[EpisodeRun]) -> None:
        """Cancel what is in progress, and end these episodes."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(e.close() for e in episodes), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def sample_episodes(
    generator: HFGenerator,
    episodes: Sequence[EpisodeRun],
    sampling: Sampling,
    *,
    progress: Callable[[int], None],
    on_end: Callable[[EpisodeRun], None],
) -> None:
    """Sample episodes in this process, at most ``generator.batch_size`` at once.

    Their turns are sampled together. While some are sampled, the tools of turns that have ended
    are called. An episode whose tools have answered joins those that are being sampled. If the
    tools can be replayed, it joins only when no turn is being sampled, see ``PATIENCE``.

    progress: called before each token, with the number of episodes that have ended since its last
    call. on_end: called when an episode has ended. Raises FloatingPointError if logits are not
    finite.
    """
    tools = episodes[0].use.tools
    patience = 0.0 if tools.not_replayable else PATIENCE
    batch, waiting = ContinuousBatch(generator), deque(range(len(episodes)))
    running: dict[RunningCompletion, int] = {}
    saved: dict[int, KeysValues | None] = {}
    pending: dict[Future[bool], int] = {}
    ready: list[int] = []
    num_live = 0
    background = BackgroundLoop()
    try:
        # so that no episode has to wait for the imports of the tools
        background.submit(tools.prepare()).result()
        while waiting or num_live:
            while waiting and num_live < generator.batch_size:
                number = waiting.popleft()
                pending[background.submit(episodes[number].start())] = number
                num_live += 1
            num_ended = 0
            if not (patience and batch.rows):
                is_idle = not batch.rows and not ready
                for future in _answered(pending, episodes, patience, is_idle, progress):
                    number = pending.pop(future)
                    if future.result():
                        ready.append(number)
                    else:
                        saved.pop(number, None)
                        on_end(episodes[number])
                        num_ended += 1
            progress(num_ended)
            num_live -= num_ended
            if patience and num_ended and waiting:  # the next ones join the same turns
                continue
            if ready and batch.can_add:
                rows = {
                    episodes[number].next_turn(sampling, saved.pop(number, None)): number
                    for number in sorted(ready)
                }
                batch.add(list(rows))
                running.update(rows)
                ready = []
            if not batch.rows:
                continue
            for row in batch.draw():
                if row.error is not None:
                    raise row.error
                number = running.pop(row)
                if len(row.tokens) < len(row.draws):
                    saved[number] = batch.save(row)
                work = episodes[number].take_turn(row.tokens, row.logps)
                pending[background.submit(work)] = number
            batch.advance()
    finally:
        background.close(episodes)


def _answered(
    pending: Mapping[Future[bool], int],
    episodes: Sequence[EpisodeRun],
    patience: float,
    is_idle: bool,
    progress: Callable[[int], None],
) -> list[Future[bool]]:
    """The futures that are done: all of them, if that takes no longer than ``patience`` seconds.
    The episodes of the others are late.

    is_idle: nothing can be sampled, so at least one has to be done.
    """
    end = time.monotonic() + patience
    while True:
        is_late = time.monotonic() >= end
        done, rest = wait(
            pending,
            timeout=0.1 if is_idle or not is_late else 0.0,
            return_when=FIRST_COMPLETED if is_late else ALL_COMPLETED,
        )
        if not rest or (is_late and (done or not is_idle)):
            for future in rest:
                episodes[pending[future]].is_late = patience > 0
            return sorted(done, key=lambda future: pending[future])
        progress(0)
