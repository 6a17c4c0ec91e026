"""Rewards added up: weights, clips, gates, parts and names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rewards.kit import answers, entry, scores
from valence.config.schema import RewardSettings
from valence.rewards import reward_of
from valence.rewards.combine import Combined, RewardPart
from valence.types import Completion, Score


@dataclass
class Fixed:
    name: str
    fixed_scores: Sequence[Score]
    deterministic: bool = True
    batch_size: int = 100

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        return list(self.fixed_scores)

    async def close(self) -> None: ...


def fixed(name: str, *values: float | None) -> Fixed:
    return Fixed(
        name, [Score(value, error="" if value is not None else "broken") for value in values]
    )


def test_the_sum_is_weighted_and_its_parts_are_kept() -> None:
    both = Combined(
        (RewardPart(fixed("a", 1.0, -2.0), 0.5), RewardPart(fixed("b", 3.0, 4.0), -2.0))
    )
    result = scores(both, answers(2))
    assert [score.value for score in result] == [0.5 - 6.0, -1.0 - 8.0]
    assert [dict(score.parts) for score in result] == [{"a": 1.0, "b": 3.0}, {"a": -2.0, "b": 4.0}]
    assert both.name == "a+b"


def test_texts_of_all_rewards_in_the_sum_are_joined() -> None:
    def says(name: str, *texts: str, gate: float | None = None) -> RewardPart:
        results = [Score(float(i), feedback=text) for i, text in enumerate(texts)]
        return RewardPart(Fixed(name, results), gate=gate)

    parts = says("a", "one", "", "same"), says("b", "two", "", "same")
    texts = [score.feedback for score in scores(Combined(parts), answers(3))]
    assert texts == ["one\n\ntwo", "", "same"]
    gated = Combined((says("a", "one", "three"), says("b", "two", "four", gate=0.5)))
    assert [score.feedback for score in scores(gated, answers(2))] == ["two", "three\n\nfour"]


def test_rewards_of_turns_are_weighted_like_those_of_completions() -> None:
    parts = (
        RewardPart(Fixed("a", [Score(3.0, turn_rewards=(1.0, 2.0)), Score(1.0)]), 0.5),
        RewardPart(Fixed("b", [Score(4.0, turn_rewards=(0.0, 4.0)), Score(2.0)]), -2.0),
        RewardPart(fixed("c", 5.0, 5.0)),
    )
    first, second = scores(Combined(parts), answers(2))
    assert (first.value, first.turn_rewards) == (1.5 - 8.0 + 5.0, (0.5, 1.0 - 8.0))
    assert (second.value, second.turn_rewards) == (0.5 - 4.0 + 5.0, ())


def test_a_clip_acts_before_the_weight_and_shows_in_the_parts() -> None:
    result = scores(
        Combined((RewardPart(fixed("a", 9.0, -9.0, 0.25), 2.0, clip=(-1.0, 0.5)),)), answers(3)
    )
    assert [score.value for score in result] == [1.0, -2.0, 0.5]
    assert [score.parts["a"] for score in result] == [0.5, -1.0, 0.25]


def test_below_a_gate_only_the_gate_counts() -> None:
    """Two gates: where both are shut, both count, and nothing else."""
    combined = Combined(
        (
            RewardPart(fixed("form", 1.0, 0.0, 1.0, 0.0), 0.5, gate=1.0),
            RewardPart(fixed("safe", 0.5, 0.5, -3.0, -3.0), 2.0, gate=0.0),
            RewardPart(fixed("good", 8.0, 8.0, 8.0, 8.0)),
        )
    )
    result = scores(combined, answers(4))
    assert [score.value for score in result] == [0.5 + 1.0 + 8.0, 0.0, -6.0, -6.0]
    assert [score.parts["good"] for score in result] == [8.0] * 4
    at_the_gate = Combined(
        (RewardPart(fixed("a", 1.0), gate=1.0, clip=(0.0, 1.0)), RewardPart(fixed("b", 5.0)))
    )
    assert scores(at_the_gate, answers(1))[0].value == 6.0


def test_one_that_failed_fails_the_whole_and_is_named() -> None:
    combined = Combined(
        (RewardPart(fixed("a", 1.0, None, None)), RewardPart(fixed("b", 2.0, 3.0, None), 0.0))
    )
    result = scores(combined, answers(3))
    assert [score.value for score in result] == [1.0, None, None]
    assert [score.error for score in result] == ["", "a: broken", "a: broken; b: broken"]
    assert result[1].parts == {"b": 3.0}


@pytest.mark.parametrize("weights", [(1e308, 1e308), (1e308, -1e308)])
def test_a_sum_that_is_not_finite_is_an_error(weights: tuple[float, float]) -> None:
    combined = Combined(
        tuple(
            RewardPart(fixed(name, 10.0), weight)
            for name, weight in zip("ab", weights, strict=True)
        )
    )
    score = scores(combined, answers(1))[0]
    assert score.value is None
    assert score.error


def test_it_is_the_formula_for_any_numbers() -> None:
    draw = random.Random(1)
    for _ in range(50):
        numbers = [[draw.gauss(0, 2) for _ in range(5)] for _ in range(3)]
        weights, gate = [draw.gauss(0, 1) for _ in range(3)], draw.gauss(0, 1)
        parts = tuple(
            RewardPart(
                fixed(f"r{k}", *numbers[k]), weights[k], (-1.5, 1.5), gate if k == 1 else None
            )
            for k in range(3)
        )
        for i, score in enumerate(scores(Combined(parts), answers(5))):
            clipped = [sorted((-1.5, numbers[k][i], 1.5))[1] for k in range(3)]
            actual = weights[1] * clipped[1]
            full = (
                actual
                if clipped[1] < gate
                else sum(w * c for w, c in zip(weights, clipped, strict=True))
            )
            assert score.value == pytest.approx(full, abs=1e-12)


def test_a_reward_that_gives_too_few_scores_is_a_defect() -> None:
    with pytest.raises(ValueError, match=r"\ba\b.*\b1\b.*\b2\b"):
        scores(Combined((RewardPart(fixed("a", 1.0)),)), answers(2))


@pytest.mark.parametrize(("entries", "code", "where", "fix"), [
    ([entry("length"), entry("length")], "reward-name-duplicate", "reward.1.name", "name"),
    ([entry("length", name="a/b")], "reward-name-invalid", "reward.0.name", ""),
    ([entry("length", name="mean")], "reward-name-invalid", "reward.0.name", ""),
    ([entry("length", clip=(1.0, 0.0))], "reward-setting-value", "reward.0.clip", ""),
    ([entry("lenght")], "reward-not-found", "reward.0.reward", "length?"),
    ([entry("localhost:5000")], "reward-not-found", "reward.0.reward", "http://localhost:5000"),
    ([entry("a/model")], "reward-model-unsupported", "reward.0.reward", ""),
])  # fmt: skip
def test_what_cannot_be_put_together_is_a_mistake(
    entries: list[RewardSettings],
    code: str,
    where: str,
    fix: str,
) -> None:
    with raises_error(code, where=where, fix=fix):
        reward_of(entries)


def test_names_are_short() -> None:
    def backend(target: str, settings: Any, where: str) -> Any:
        class Backend:
            identity = None

        return Backend()

    entries = [
        entry("length"),
        entry("http://10.0.0.1:80/get_reward,http://b/x"),
        entry("org/judge-1b"),
        entry("x/y/", name="z"),
    ]
    result = reward_of(entries, model=backend)
    assert [part.reward.name for part in result.parts] == ["length", "10.0.0.1-80", "judge-1b", "z"]
    assert [part.reward.deterministic for part in result.parts] == [True, False, True, True]
    assert result.deterministic is False
