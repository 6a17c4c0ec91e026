"""The calculator that the policy learns to call, one that is wrong, and the reward."""

from __future__ import annotations

import re
from collections.abc import Sequence

from valence.types import Completion


def calculate(a: int, operation: str, b: int) -> int:
    """Compute with two whole numbers.

    Args:
        a: The first number.
        operation: One of +, - and *.
        b: The second number.
    """
    results = {"+": a + b, "-": a - b, "*": a * b}
    if operation not in results:
        raise ValueError(f"unknown operation {operation!r}: use +, - or *")
    return results[operation]


def is_solved(text: str, answer: str, errors: Sequence[str]) -> bool:
    """Whether a text has the right number, after calls of which at least one succeeded."""
    numbers = [number.replace(",", "") for number in re.findall(r"-?\d[\d,]*", text)]
    return "" in errors and answer in numbers


def solved(completions: Sequence[Completion]) -> list[float]:
    """1 for the right answer after a valid call, 0.2 for a valid call alone, else 0."""
    rewards: list[float] = []
    for completion in completions:
        assert completion.episode is not None
        errors = [str(call["error"]) for call in completion.episode.calls]
        is_right = is_solved(completion.text, completion.info["answer"], errors)
        rewards.append(1.0 if is_right else 0.2 * ("" in errors))
    return rewards
