"""Several rewards as one: a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from valence.rewards.calls import BATCH_SIZE, FailedCall, call_reward, gather_all
from valence.types import Completion, Reward, Score


@dataclass(frozen=True)
class RewardPart:
    """One reward in the sum.

    ``clip``: minimum and maximum of its score; ``gate``: minimum score without which the other
    rewards do not count.
    """

    reward: Reward
    weight: float = 1.0
    clip: tuple[float, float] | None = None
    gate: float | None = None

    def clipped(self, value: float) -> float:
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


@dataclass(frozen=True)
class Combined:
    """sum_k weight_k * clip_k(r_k); if some rewards are below their gate, the sum of these alone.

    If one fails, the sum fails: the rest of a sum is a different reward. The parts of a score are
    the rewards after clipping and before weighting, and (``name/part``) their own parts. The
    feedback is that of all rewards in the sum, and the rewards of turns are their weighted sums.
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
        """Completions of a full call of every part."""
        return max(getattr(part.reward, "batch_size", BATCH_SIZE) for part in self.parts)

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        if not completions:
            return []
        columns = await gather_all(call_reward(part.reward, completions) for part in self.parts)
        return [self._sum(row) for row in zip(*columns, strict=True)]

    async def close(self) -> None:
        for part in self.parts:
            await part.reward.close()

    def _sum(self, scores: Sequence[Score]) -> Score:
        numbers: dict[str, float] = {}
        errors: list[str] = []
        values: list[tuple[RewardPart, float, Score]] = []
        for part, score in zip(self.parts, scores, strict=True):
            name = part.reward.name
            numbers |= {f"{name}/{part_name}": value for part_name, value in score.parts.items()}
            if score.value is None:
                errors.append(f"{name}: {score.error}")
                continue
            numbers[name] = part.clipped(score.value)
            values.append((part, numbers[name], score))
        failed_calls = [score for score in scores if isinstance(score, FailedCall)]
        if failed_calls:
            return FailedCall(
                None, numbers, "; ".join(errors), late=any(score.late for score in failed_calls)
            )
        if errors:
            return Score(None, numbers, "; ".join(errors))
        below_gate = [
            entry for entry in values if entry[0].gate is not None and entry[1] < entry[0].gate
        ]
        counted = below_gate or values
        total = sum(part.weight * value for part, value, _ in counted)
        if not math.isfinite(total):
            return Score(None, numbers, f"the weighted sum is {total}, not a finite number")
        texts = dict.fromkeys(score.feedback for _, _, score in counted if score.feedback)
        turns = [[part.weight * x for x in score.turn_rewards] for part, _, score in counted]
        of_turns = [sum(column) for column in zip(*filter(None, turns), strict=True)]
        return Score(total, numbers, feedback="\n\n".join(texts), turn_rewards=tuple(of_turns))
