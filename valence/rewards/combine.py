"""Several rewards as one: a weighted sum whose parts are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from valence.rewards.calls import BATCH, FailedCall, together
from valence.types import Completion, Reward, Score


@dataclass(frozen=True)
class RewardPart:
    """One reward in the sum.

    ``clip``: smallest and largest number that it gives; ``gate``: what it must give for the others
    to count.
    """

    reward: Reward
    weight: float = 1.0
    clip: tuple[float, float] | None = None
    gate: float | None = None

    def of(self, score: Score) -> float:
        """What it gives, clipped. The score has not failed."""
        assert score.value is not None
        return (
            score.value if self.clip is None else min(max(score.value, self.clip[0]), self.clip[1])
        )


@dataclass(frozen=True)
class Combined:
    """sum_k weight_k * clip_k(r_k); where some give less than their gate, the sum of these alone.

    One that failed fails the whole: what is left of a sum is another reward.

    The parts of its scores are what each gives after clipping, before weighting, and below them
    (``name/part``) their own parts.
    """

    parts: tuple[RewardPart, ...]

    @property
    def name(self) -> str:
        return "+".join(part.reward.name for part in self.parts)

    @property
    def deterministic(self) -> bool:
        return all(part.reward.deterministic for part in self.parts)

    @property
    def batch_size(self) -> int:
        """Completions that make a whole call of each part."""
        return max(getattr(part.reward, "batch_size", BATCH) for part in self.parts)

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        if not completions:
            return []
        columns = await together(_called(part.reward, completions) for part in self.parts)
        return [self._sum(row) for row in zip(*columns, strict=True)]

    async def close(self) -> None:
        for part in self.parts:
            await part.reward.close()

    def _sum(self, scores: Sequence[Score]) -> Score:
        numbers: dict[str, float] = {}
        errors: list[str] = []
        given: list[tuple[RewardPart, float]] = []
        for part, score in zip(self.parts, scores, strict=True):
            name = part.reward.name
            numbers |= {f"{name}/{below}": value for below, value in score.parts.items()}
            if score.value is None:
                errors.append(f"{name}: {score.error}")
                continue
            numbers[name] = part.of(score)
            given.append((part, numbers[name]))
        failed_calls = [score for score in scores if isinstance(score, FailedCall)]
        if failed_calls:
            return FailedCall(
                None, numbers, "; ".join(errors), late=any(score.late for score in failed_calls)
            )
        if errors:
            return Score(None, numbers, "; ".join(errors))
        shut = [
            (part, value) for part, value in given if part.gate is not None and value < part.gate
        ]
        total = sum(part.weight * value for part, value in shut or given)
        if not math.isfinite(total):
            return Score(None, numbers, f"the weighted sum is {total}, no finite number")
        return Score(total, numbers)


async def _called(reward: Reward, completions: Sequence[Completion]) -> list[Score]:
    scores = await reward(completions)
    if len(scores) != len(completions):
        raise ValueError(f"{reward.name} gave {len(scores)} scores for {len(completions)} answers")
    return scores
