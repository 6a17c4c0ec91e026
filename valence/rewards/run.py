"""Scoring from a program that is not asynchronous itself: a loop, a command."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence

from valence.rewards.calls import BATCH, together
from valence.rewards.threads import Background, restored_working_directory
from valence.types import Completion, Reward, Score

POLL = 0.05
"""Seconds between two looks at what has come and whether to stop."""

_loops: dict[int, Background] = {}


class Stopped(Exception):
    """Scoring was stopped. ``scores``: those that had come until then, None for the others."""

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
    """One score for each completion, in their order; a failed one has no value and says why.

    progress: called now and then, from this thread, with the number of answers scored since its
    last call. stop: asked now and then; when it says yes, what is under way is given up and Stopped
    is raised with the scores that have come. Everything asynchronous runs in a thread of the
    library's own, so this may be called whatever event loops the program has; signals that raise
    (Ctrl-C) come through at once.
    """
    found: list[Score | None] = [None] * len(completions)
    size: int = getattr(reward, "batch_size", BATCH)

    async def part(start: int) -> None:
        scores = await reward(completions[start : start + size])
        if len(scores) != len(completions[start : start + size]):
            raise ValueError(
                f"{reward.name} gave {len(scores)} scores for "
                f"{len(completions[start : start + size])} answers"
            )
        found[start : start + size] = scores

    async def every() -> None:
        await together(part(start) for start in range(0, len(completions), size))

    told = 0

    def look() -> None:
        nonlocal told
        came = sum(score is not None for score in found)
        if progress is not None and came > told:
            told, news = came, came - told
            progress(news)
        if stop is not None and came < len(found) and stop():
            raise Stopped(list(found))

    with restored_working_directory():
        _wait(_driver().submit(every()), look)
    look()
    return [score for score in found if score is not None]


def close(reward: Reward) -> None:
    """Gives back the reward's connections and processes."""
    _wait(_driver().submit(reward.close()), lambda: None)


def _driver() -> Background:
    """The loop of this process: a forked one has none of its parent's threads."""
    if os.getpid() not in _loops:
        _loops[os.getpid()] = Background("valence rewards")
    return _loops[os.getpid()]


def _wait(work: concurrent.futures.Future[None], look: Callable[[], None]) -> None:
    """Until the work is done. Raises what it raised."""
    try:
        while not concurrent.futures.wait([work], POLL).done:
            look()
    finally:
        work.cancel()
    work.result()
