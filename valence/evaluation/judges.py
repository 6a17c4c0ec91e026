"""Judges of pairs of answers: which of two models answered a prompt better?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from valence.rewards.build import (
    ModelReward,
    backend_identities,
    calls_functions,
    pair_calls,
    reward_of,
)
from valence.rewards.calls import Calls
from valence.rewards.combine import Combined
from valence.rewards.judge import PairComparer, ShownPair
from valence.rewards.run import close, score_all
from valence.types import Completion, Score
from valence.user_code.sources import loaded_sources

if TYPE_CHECKING:
    from valence.config.schema import RewardSettings


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of both models to a prompt.

    id: of the content of prompt and answers. prompt_key: of the content of the prompt. prompt: as
    text. tags: groups of prompts that it belongs to. origin: place of the prompt, for messages.
    """

    id: str
    prompt: str
    baseline: Completion
    candidate: Completion
    tags: tuple[str, ...]
    origin: str
    prompt_key: str = ""

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
        """Read the result of ``to_dict``. Returns None for anything else."""
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

    ``identity``: everything besides the pairs that its verdicts depend on, as JSON; None: unknown.
    ``sources``: files that it has loaded so far and that ``identity`` may not include, as
    ``loaded_sources`` returns them. ``window``: pairs that are judged and written together.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> Any: ...
    @property
    def sources(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def window(self) -> int: ...
    @property
    def cost(self) -> float | None:
        """US dollars spent on the verdicts; None if unknown."""
        ...

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
        backends = backend_identities(self.reward)
        if None in backends:
            return None
        parts = [(part.weight, part.clip, part.gate) for part in self.reward.parts]
        is_plain = all(part == (1.0, None, None) for part in parts)
        return backends if is_plain else [*backends, {"weight, clip and gate": parts}]

    @property
    def sources(self) -> Mapping[str, Mapping[str, str]]:
        return loaded_sources() if calls_functions(self.reward) else {}

    def judge(
        self, pairs: Sequence[AnswerPair], progress: Callable[[int], None]
    ) -> list[PairVerdict]:
        completions = [answer for pair in pairs for answer in (pair.baseline, pair.candidate)]
        scores = score_all(self.reward, completions, progress=half_of(progress))
        return [
            _compare_scores(baseline, candidate)
            for baseline, candidate in zip(scores[::2], scores[1::2], strict=True)
        ]

    @property
    def cost(self) -> float | None:
        return None

    def close(self) -> None:
        close(self.reward)


@dataclass
class LanguageModelJudge:
    """Asks a language model which answer is better, with the candidate's answer first and last.

    The preference is the mean of both orders: an opinion that changes with the order is a tie.
    Parts: the preferences of both orders, and the mean margin of each criterion, from -1 to 1.
    """

    calls: Calls
    window: int = 16

    @property
    def name(self) -> str:
        return self.calls.name

    @property
    def identity(self) -> Any:
        return self.calls.backend.identity

    @property
    def sources(self) -> Mapping[str, Mapping[str, str]]:
        return {}

    def judge(
        self, pairs: Sequence[AnswerPair], progress: Callable[[int], None]
    ) -> list[PairVerdict]:
        shown: list[Any] = []
        for pair in pairs:
            baseline, candidate = pair.baseline.text, pair.candidate.text
            prompt = pair.baseline.prompt
            shown.append(ShownPair(prompt, candidate, baseline))
            shown.append(ShownPair(prompt, baseline, candidate))
        scores = score_all(self.calls, shown, progress=half_of(progress))
        return [
            _combine_orders(first, last)
            for first, last in zip(scores[::2], scores[1::2], strict=True)
        ]

    @property
    def cost(self) -> float | None:
        return (
            self.calls.backend.model.cost if isinstance(self.calls.backend, PairComparer) else None
        )

    def close(self) -> None:
        close(self.calls)


FIRST, LAST = "candidate shown first", "candidate shown last"


def _combine_orders(first: Score, last: Score) -> PairVerdict:
    """The verdict of the scores with the candidate's answer first, and last."""
    failed = [f"{name}: {score.error}" for name, score in ((FIRST, first), (LAST, last))
              if score.value is None]  # fmt: skip
    if first.value is None or last.value is None:
        return PairVerdict(None, error="; ".join(failed))
    preferences = [_preference(first.value), 1 - _preference(last.value)]
    criteria = {name: (first.parts[name] - last.parts[name]) / 2 for name in first.parts}
    parts = {FIRST: preferences[0], LAST: preferences[1], **criteria}
    return PairVerdict(sum(preferences) / 2, (first.value - last.value) / 2, parts)


def _preference(margin: float) -> float:
    return 0.5 if margin == 0 else float(margin > 0)


def half_of(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Progress in pairs, of which each has two scores."""
    num_scored = 0

    def advance(num_new: int) -> None:
        nonlocal num_scored
        num_pairs, num_scored = num_scored // 2, num_scored + num_new
        progress(num_scored // 2 - num_pairs)

    return advance


def build_judge(specs: Sequence[RewardSettings], model: ModelReward, folder: Path) -> PairJudge:
    """The judge of the entries of a reward section: of one LLM judge, which compares answers side
    by side, or of rewards that score each answer. folder: for the replies of LLM judges.
    """
    if len(specs) == 1 and specs[0].judge is not None:
        return LanguageModelJudge(pair_calls(specs[0], folder))
    return RewardJudge(reward_of(specs, model=model))


def _compare_scores(baseline: Score, candidate: Score) -> PairVerdict:
    errors = {"baseline": baseline, "candidate": candidate}
    failed = [f"{side}: {score.error}" for side, score in errors.items() if score.value is None]
    if baseline.value is None or candidate.value is None:
        return PairVerdict(None, error="; ".join(failed))
    margin = candidate.value - baseline.value
    if not math.isfinite(margin):
        return PairVerdict(None, error=f"the difference of the rewards is {margin}")
    parts = {"baseline": baseline.value, "candidate": candidate.value}
    return PairVerdict(_preference(margin), margin, parts)
