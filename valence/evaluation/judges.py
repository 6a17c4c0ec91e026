"""Judges of pairs of answers: which of two models answered a prompt better?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from valence.rewards.build import backend_identities
from valence.rewards.combine import Combined
from valence.rewards.run import close, score_all
from valence.types import Completion, Score


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of both models to a prompt.

    id: of the content of prompt and answers. prompt: as text. tags: groups of prompts that it
    belongs to. origin: place of the prompt, for messages.
    """

    id: str
    prompt: str
    baseline: Completion
    candidate: Completion
    tags: tuple[str, ...]
    origin: str

    @property
    def length_difference(self) -> int:
        """Characters of the candidate's answer minus those of the baseline's."""
        return len(self.candidate.text) - len(self.baseline.text)


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """A judge's opinion of a pair.

    preference: 1 if the candidate's answer is better, 0 if the baseline's is, 0.5 for a tie; None
    if the judge failed, and then ``error`` says why. margin: by how much the candidate's is better.
    parts: further numbers of the judge, by name.
    """

    preference: float | None
    margin: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        if self.preference is None:
            return {"preference": None, "error": self.error}
        parts = {"parts": dict(self.parts)} if self.parts else {}
        return {"preference": self.preference, "margin": self.margin, **parts}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PairVerdict | None:
        """The verdict of which ``to_dict`` gave this; None if none did."""
        preference, error = value.get("preference"), value.get("error")
        if preference is None:
            return cls(None, error=error) if isinstance(error, str) and error else None
        margin, parts = value.get("margin", 0.0), value.get("parts", {})
        numbers = [preference, margin, *(parts.values() if isinstance(parts, dict) else [None])]
        if any(type(number) not in (int, float) for number in numbers):
            return None
        return cls(preference, margin, parts) if 0 <= preference <= 1 else None


class PairJudge(Protocol):
    """Compares pairs of answers.

    ``identity``: everything besides the pairs that its verdicts depend on, as JSON. ``window``:
    pairs that are judged and written together.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> Any: ...
    @property
    def window(self) -> int: ...
    def judge(
        self, pairs: Sequence[AnswerPair], progress: Callable[[int], None]
    ) -> list[PairVerdict]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RewardJudge:
    """Prefers the answer with the larger reward; equal rewards are a tie."""

    reward: Combined
    window: int = 32

    @property
    def name(self) -> str:
        return "+".join(part.reward.name for part in self.reward.parts)

    @property
    def identity(self) -> Any:
        return backend_identities(self.reward)

    def judge(
        self, pairs: Sequence[AnswerPair], progress: Callable[[int], None]
    ) -> list[PairVerdict]:
        completions = [answer for pair in pairs for answer in (pair.baseline, pair.candidate)]
        num_scored = 0

        def advance(num_new: int) -> None:
            nonlocal num_scored
            num_pairs, num_scored = num_scored // 2, num_scored + num_new
            progress(num_scored // 2 - num_pairs)

        scores = score_all(self.reward, completions, progress=advance)
        return [
            _compare_scores(baseline, candidate)
            for baseline, candidate in zip(scores[::2], scores[1::2], strict=True)
        ]

    def close(self) -> None:
        close(self.reward)


def _compare_scores(baseline: Score, candidate: Score) -> PairVerdict:
    errors = {"baseline": baseline, "candidate": candidate}
    failed = [f"{side}: {score.error}" for side, score in errors.items() if score.value is None]
    if baseline.value is None or candidate.value is None:
        return PairVerdict(None, error="; ".join(failed))
    margin = candidate.value - baseline.value
    if not math.isfinite(margin):
        return PairVerdict(None, error=f"the difference of the rewards is {margin}")
    preference = 0.5 if margin == 0 else float(margin > 0)
    parts = {"baseline": baseline.value, "candidate": candidate.value}
    return PairVerdict(preference, margin, parts)
