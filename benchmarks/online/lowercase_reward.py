"""A reward that a tiny random model can learn to raise."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from valence.types import Completion


def share_of_lowercase(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Share of the characters of each completion that are lowercase letters."""
    return [
        sum(letter in ascii_lowercase for letter in completion.text) / max(1, len(completion.text))
        for completion in completions
    ]
