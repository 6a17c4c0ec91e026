"""One reward as it is called: in batches, so many at a time, again after failures that may pass;
every answer has its score or an error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from valence.network import backoff, draw_jitter
from valence.rewards.threads import Raised, attempt
from valence.types import Completion, Score

T = TypeVar("T")
BATCH = 64
"""Answers of one call, unless something else is said."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try, doubled for each further one, and where that ends."""
MOST_PATIENCE = 120.0
"""Seconds that a server may ask to wait for."""
TIME_OUTS = 2
"""A batch whose call ran out of time is called again only while less than so many times the time of
one call has passed: what hangs holds a batch up this long, however many retries it has.
"""


class RewardError(Exception):
    """A call returned no scores.

    ``passes``: a later call may succeed, not before ``after`` seconds. ``late``: the call exceeded
    its time limit. ``late`` without ``passes``: it is still running, and nothing can stop it.
    """

    def __init__(
        self, why: str, *, passes: bool = False, after: float = 0.0, late: bool = False
    ) -> None:
        super().__init__(why)
        self.passes, self.after, self.late = passes, after, late


@dataclass(frozen=True, slots=True)
class FailedCall(Score):
    """The score of a completion whose call failed as a whole.

    ``error`` may be about another completion of the same call. ``late``: the call exceeded its time
    limit.
    """

    late: bool = False


class CallBackend(Protocol):
    """What is called.

    ``identity``: everything that its scores depend on besides the completions, as JSON; None:
    unknown.
    """

    @property
    def identity(self) -> Mapping[str, Any] | None: ...
    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        """One call for at least one completion: a score each, in order. Raises Failed."""
        ...

    async def close(self) -> None: ...


@dataclass
class Calls:
    """A reward made of calls of a backend. patience: seconds from a batch's first call in which it
    is made again after a time-out. ``sleep`` and ``draw``: how pauses are made; the latter has a
    state of its own, since the program's random numbers belong to the run.
    """

    name: str
    backend: CallBackend
    deterministic: bool
    batch_size: int = BATCH
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
        found = await together(self._batch(batch) for batch in batches)
        return [score for scores in found for score in scores]

    async def close(self) -> None:
        await self.backend.close()

    async def _batch(self, batch: Sequence[Completion]) -> list[Score]:
        async with self._slot():
            began = self.clock()
            for tries in range(self.retries + 1):
                try:
                    scores = await self.backend.attempt(batch)
                except RewardError as error:
                    over = error.late and self.clock() - began >= self.patience
                    if (
                        error.passes
                        and not over
                        and tries < self.retries
                        and error.after <= MOST_PATIENCE
                    ):
                        pause = backoff(tries, FIRST_PAUSE, LONGEST_PAUSE, self.draw)
                        await self.sleep(error.after + pause)
                        continue
                    tried = f" ({tries + 1} tries)" if tries else ""
                    return [FailedCall(None, error=f"{error}{tried}", late=error.late)] * len(batch)
                assert len(scores) == len(batch)
                return [checked(score) for score in scores]
        raise AssertionError

    def _slot(self) -> asyncio.Semaphore:
        """Of the event loop that runs: a program may use several, one after the other."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.concurrency))
        return self._slots[1]


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one raises, that is raised, and the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def checked(score: Score) -> Score:
    """Return the score, or a failed one if its value or one of its parts is not a finite number."""
    if score.value is None:
        return score if score.error else Score(None, score.parts, "it gave no score")
    for name, value in {"": score.value, **score.parts}.items():
        if not _is_finite(value):
            subject = f"its part {name}" if name else "the score"
            return Score(None, error=f"{subject} is {describe(value)}, no finite number")
    return score


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def describe(value: object) -> str:
    """``repr(value)``, or the type's name if that raises.

    Objects of reward functions may raise anything.
    """
    return _text_or_type(repr, value)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, whatever its ``__str__`` does."""
    name = type(error).__name__
    message = _text_or_type(str, error)
    return f"{name}: {message}" if message else name


def _text_or_type(convert: Callable[[Any], str], value: object) -> str:
    # even SystemExit: formatting an error must not raise
    text = attempt(lambda: str(convert(value)))
    return f"<{type(value).__name__} that cannot be shown>" if isinstance(text, Raised) else text
