"""Score completions from synchronous code."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence

from valence.rewards.calls import BATCH_SIZE, call_reward, gather_all
from valence.rewards.threads import Background
from valence.types import Completion, Reward, Score
from valence.user_code.attempt import restored_working_directory

POLL_SECONDS = 0.05
"""Interval at which progress and stop are called."""

_loops: dict[int, Background] = {}


class Stopped(Exception):
    """Scoring was stopped. ``scores``: None for completions that were not scored."""

    def __init__(self, scores: list[Score | None]) -> None:
        super().__init__(
            f"stopped with {sum(score is not None for score in scores)} of {len(scores)} scores"
        )
        self.scores = scores


def score_all(
    reward: Reward,
    completions: Sequence[Completion],
    *,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Score]:
    """One score for each completion, in order; a failed score has no value but an error.

    progress: called repeatedly in this thread with the number of completions scored since its last
    call. stop: called repeatedly; if it returns True, running calls are cancelled and Stopped is
    raised with the scores so far. Asynchronous code runs in a thread of the library, so that this
    function may be called with or without an event loop. Signals that raise (Ctrl-C) interrupt it
    at once.
    """
    results: list[Score | None] = [None] * len(completions)
    size: int = getattr(reward, "batch_size", BATCH_SIZE)

    async def score_batch(start: int) -> None:
        batch = completions[start : start + size]
        results[start : start + size] = await call_reward(reward, batch)

    async def score_batches() -> None:
        await gather_all(score_batch(start) for start in range(0, len(completions), size))

    num_reported = 0

    def poll() -> None:
        nonlocal num_reported
        num_scored = sum(score is not None for score in results)
        if progress is not None and num_scored > num_reported:
            num_new, num_reported = num_scored - num_reported, num_scored
            progress(num_new)
        if stop is not None and num_scored < len(results) and stop():
            raise Stopped(list(results))

    with restored_working_directory():
        _wait(_background().submit(score_batches()), poll)
    poll()
    return [score for score in results if score is not None]


def close(reward: Reward) -> None:
    """Close the reward's connections and processes."""
    _wait(_background().submit(reward.close()), lambda: None)


def _background() -> Background:
    """The event loop of this process; a forked process does not inherit its parent's threads."""
    if os.getpid() not in _loops:
        _loops[os.getpid()] = Background("valence rewards")
    return _loops[os.getpid()]


def _wait(work: concurrent.futures.Future[None], poll: Callable[[], None]) -> None:
    """Block until the work is done. Raises its exception."""
    try:
        while not concurrent.futures.wait([work], POLL_SECONDS).done:
            poll()
    finally:
        work.cancel()
    work.result()
