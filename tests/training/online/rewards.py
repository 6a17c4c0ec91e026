"""Rewards for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from valence.types import Completion

asked: list[str] = []
"""Texts that ``broken`` was asked about."""


def vowels(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The share of vowels in the text."""
    return [sum(letter in "aeiou" for letter in each.text) / max(1, len(each.text)) for each in completions]


def constant(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Nothing to learn from."""
    return [1.0] * len(completions)


def patchy(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Fails on the first answer to each prompt."""
    return [math.nan if each.index == 0 else score for each, score in zip(completions, vowels(completions), strict=True)]


def broken(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Fails on all."""
    raise RuntimeError("no judge today")


def of_info(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 where what comes with the prompt says so."""
    return [float(each.info["wanted"] == each.index) for each in completions]
