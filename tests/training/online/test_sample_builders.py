"""How the completions of a round become examples: pairs and thumbs by their rewards."""

from __future__ import annotations

from typing import Any

import pytest

from valence.methods.sample_builders import RolloutGroup, binary_labels, preference_pairs
from valence.types import Completion, Origin, TokenizedExample


def group(*rewards: float, tokens: tuple[int, ...] | None = None) -> RolloutGroup:
    """A prompt with a completion for each reward, whose first token is its index unless given."""
    prompt = TokenizedExample(
        id="p", origin=Origin("prompts.jsonl", 1), kind="prompt", prompt_ids=(100, 101),
        prompt_mask=(False, False), answers=(),
    )  # fmt: skip
    firsts = tokens or tuple(range(len(rewards)))
    completions = tuple(
        Completion("p", (first, 99), (-1.0, -1.0), "", "eos", index=i)
        for i, first in enumerate(firsts)
    )
    return RolloutGroup(prompt, completions, tuple(rewards))


def firsts(examples: list[TokenizedExample]) -> list[tuple[int, ...]]:
    return [tuple(answer.ids[0] for answer in example.answers) for example in examples]


@pytest.mark.parametrize(("rewards", "settings", "expected"), [
    ((0.1, 0.9, 0.5), {}, [(1, 0)]),
    ((0.5, 0.9, 0.1, 0.9, 0.1), {}, [(1, 2)]),  # of equal rewards the first that was sampled
    ((0.5, 0.5), {}, []),
    ((0.1, 0.9, 0.5), {"pairs": "all"}, [(1, 2), (1, 0), (2, 0)]),
    ((0.1, 0.9, 0.5), {"pairs": "all", "pair_margin": 0.5}, [(1, 0)]),
    ((0.0, 0.5), {"pair_margin": 0.5}, [(1, 0)]), ((0.0, 0.5), {"pair_margin": 0.6}, []),
    ((0.7,), {}, []),
])  # fmt: skip
def test_the_completion_with_the_larger_reward_is_chosen(
    rewards: tuple[float, ...], settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert firsts(preference_pairs([group(*rewards)], **settings)) == expected


def test_equal_completions_are_no_pair() -> None:
    assert preference_pairs([group(0.0, 1.0, tokens=(5, 5))]) == []


def labels(examples: list[TokenizedExample]) -> dict[int, bool | None]:
    return {example.answers[0].ids[0]: example.label for example in examples}


@pytest.mark.parametrize(("rewards", "settings", "expected"), [
    ((0.0, 1.0, 0.5), {}, {0: False, 1: True}),  # 0.5 is the mean, and left out
    ((0.0, 0.2, 1.0), {"thumbs_up": "median"}, {0: False, 2: True}),
    ((0.0, 0.5, 1.0), {"thumbs_up": 0.5}, {0: False, 1: True, 2: True}),
    ((0.3, 0.1, 0.9, 0.7), {"thumbs_quantile": 0.25}, {2: True, 1: False}),
    ((0.5, 0.5), {"thumbs_quantile": 0.5}, {}),
    ((0.5, 0.5), {}, {}),
])  # fmt: skip
def test_completions_above_the_bar_are_thumbs_up(
    rewards: tuple[float, ...], settings: dict[str, Any], expected: dict[int, bool]
) -> None:
    assert labels(binary_labels([group(*rewards)], **settings)) == expected


def test_the_bar_of_a_batch_is_made_of_all_its_groups() -> None:
    low, high = group(0.0, 0.2, tokens=(0, 1)), group(0.8, 1.0, tokens=(2, 3))
    assert labels(binary_labels([low, high], thumbs_up="batch_mean")) == {
        0: False,
        1: False,
        2: True,
        3: True,
    }
    assert labels(binary_labels([low, high])) == {0: False, 1: True, 2: False, 3: True}
