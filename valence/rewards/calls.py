"""Calls of one reward: in batches, with limited concurrency and retries. Every completion has a
score or an error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from valence.network import backoff, draw_jitter
from valence.types import Completion, Reward, Score
from valence.user_code.attempt import describe

T = TypeVar("T")
BATCH_SIZE = 64
"""Default number of completions per call."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try, doubled for each further one, and their maximum."""
MAX_RETRY_AFTER = 120.0
"""Longest pause that a server may request, in seconds."""
MAX_TIMEOUTS = 2
"""A call that timed out is repeated only until this multiple of its time limit has passed, however
many retries are left.
"""


class RewardError(Exception):
    """A call returned no scores.

    ``passes``: a later call may succeed, not before ``after`` seconds. ``late``: the call exceeded
    its time limit. ``late`` without ``passes``: it is still running, and cannot be stopped.
    """

    def __init__(
        self, reason: str, *, passes: bool = False, after: float = 0.0, late: bool = False
    ) -> None:
        super().__init__(reason)
        self.passes, self.after, self.late = passes, after, late


@dataclass(frozen=True, slots=True)
class FailedCall(Score):
    """The score of a completion after its whole call failed.

    ``error`` may be about another completion of the same call. ``late``: the call exceeded its time
    limit.
    """

    late: bool = False


class CallBackend(Protocol):
    """The implementation of a reward.

    ``identity``: everything besides the completions that its scores depend on, as JSON; None:
    unknown.
    """

    @property
    def identity(self) -> Mapping[str, Any] | None: ...
    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        """One call: the scores of one or more completions, in order. Raises RewardError."""
        ...

    async def close(self) -> None: ...


@dataclass
class Calls:
    """A reward that calls a backend.

    patience: seconds from the first call of a batch within which it is repeated after a time-out.
    ``sleep`` and ``draw``: pause, and random numbers for the length of pauses.
    """

    name: str
    backend: CallBackend
    deterministic: bool
    batch_size: int = BATCH_SIZE
    concurrency: int = 8
    retries: int = 3
    patience: float = math.inf
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Any] = asyncio.sleep
    draw: Callable[[], float] = draw_jitter
    _slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = field(
        default=None, repr=False
    )

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        batches = [
            completions[i : i + self.batch_size]
            for i in range(0, len(completions), self.batch_size)
        ]
        results = await gather_all(self._call(batch) for batch in batches)
        return [score for scores in results for score in scores]

    async def close(self) -> None:
        await self.backend.close()

    async def _call(self, batch: Sequence[Completion]) -> list[Score]:
        async with self._slot():
            start, retries = self.clock(), 0
            while True:
                try:
                    scores = await self.backend.attempt(batch)
                except RewardError as error:
                    is_over = error.late and self.clock() - start >= self.patience
                    has_tries = retries < self.retries and error.after <= MAX_RETRY_AFTER
                    if not error.passes or is_over or not has_tries:
                        tries = f" ({retries + 1} tries)" if retries else ""
                        failed = FailedCall(None, error=f"{error}{tries}", late=error.late)
                        return [failed] * len(batch)
                    pause = backoff(retries, FIRST_PAUSE, LONGEST_PAUSE, self.draw)
                    await self.sleep(error.after + pause)
                    retries += 1
                else:
                    pairs = zip(scores, batch, strict=True)
                    return [checked(score, completion) for score, completion in pairs]

    def _slot(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop; a program may use several in turn."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.concurrency))
        return self._slots[1]


async def call_reward(reward: Reward, completions: Sequence[Completion]) -> list[Score]:
    """The scores of any reward. Raises ValueError if their number is wrong."""
    scores = await reward(completions)
    if len(scores) != len(completions):
        raise ValueError(
            f"{reward.name} returned {len(scores)} scores for {len(completions)} completions"
        )
    return scores


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. If one raises, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def checked(score: Score, completion: Completion | None = None) -> Score:
    """Return the score, or a failed one if its value, one of its parts or of its turns is not a
    finite number, or if its feedback is not text. completion: if known, its turns are counted.
    """
    if score.value is None:
        return score if score.error else Score(None, score.parts, "the reward returned no score")
    if not isinstance(score.feedback, str):
        return Score(None, error=f"the feedback is {describe(score.feedback)}, not text")
    turns = {f"the reward of turn {i}": value for i, value in enumerate(score.turn_rewards, 1)}
    parts = {f"the part {name}": value for name, value in score.parts.items()}
    for subject, value in {"the score": score.value, **parts, **turns}.items():
        if not _is_finite(value):
            return Score(None, error=f"{subject} is {describe(value)}, not a finite number")
    count = len(score.turn_rewards)
    if count and completion is not None and count != completion.num_turns:
        problem = f"{count} rewards of turns for a completion of {completion.num_turns} turns"
        return Score(None, error=problem)
    # a command's output may have characters that no tokenizer accepts
    return replace(score, feedback=score.feedback.encode("utf-8", "replace").decode().strip())


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
