"""Rewards for tests."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from valence.types import Completion

scored_texts: list[str] = []
"""Texts that ``broken`` was called with."""


def vowels(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The share of vowels in the text."""
    return [
        sum(letter in "aeiou" for letter in completion.text) / max(1, len(completion.text))
        for completion in completions
    ]


def constant(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The same reward for every completion."""
    return [1.0] * len(completions)


def by_index(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Larger for completions that were sampled later."""
    return [completion.index / 3 for completion in completions]


solved: list[int] = []
"""Calls of ``solved_after``."""


def solved_after(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Rewards differ in the first two calls, and every completion is right from then on."""
    solved.append(len(completions))
    return different(completions) if len(solved) <= 2 else [1.0] * len(completions)


def different(completions: Sequence[Completion]) -> list[float]:
    """Rewards that are never equal in a group."""
    return [completion.index / 10 for completion in completions]


period = 3
calls_of_now_and_then: list[int] = []


def now_and_then(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Rewards differ in one of this many calls."""
    calls_of_now_and_then.append(len(completions))
    differs = len(calls_of_now_and_then) % period == 1
    return different(completions) if differs else [0.0] * len(completions)


def patchy(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Fails on the first answer to each prompt."""
    return [
        math.nan if item.index == 0 else score
        for item, score in zip(completions, vowels(completions), strict=True)
    ]


def broken(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Fails for every completion."""
    raise RuntimeError("no judge today")


def tied_for_even(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Equal rewards where ``wanted`` of the prompt is even."""
    return [completion.index * float(completion.info["wanted"]) for completion in completions]


def of_tools(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Number of tools of the prompt."""
    return [float(len(completion.tools)) for completion in completions]


def of_info(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1 for the completion whose index the prompt's info contains, otherwise 0."""
    return [float(completion.info["wanted"] == completion.index) for completion in completions]


def wanted(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Records the info of each prompt."""
    scored_texts.extend(str(completion.info["wanted"]) for completion in completions)
    return vowels(completions)


calls: list[int] = []
"""Answers of each call of ``hanging``."""


def hanging(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Never returns from its second call, in which it writes the file that MARK names."""
    calls.append(len(completions))
    if len(calls) == 2:
        Path(os.environ["MARK"]).touch()
        threading.Event().wait(600)
    return vowels(completions)


def explained(completions: Sequence[Completion], **_: Any) -> list[tuple[float, str]]:
    """The share of vowels, and in words which of them are there; nothing about every third one."""
    scores = vowels(completions)
    texts = ["".join(sorted({*c.text} & {*"aeiou"})) or "no vowels" for c in completions]
    return [
        (score, "" if completion.index % 3 == 2 else f"found: {text}")
        for score, text, completion in zip(scores, texts, completions, strict=True)
    ]


def names_b(completions: Sequence[Completion], **_: Any) -> list[tuple[float, str]]:
    """No number that differs; the text names the letter that is wanted."""
    return [(0.0, "hint b")] * len(completions)
