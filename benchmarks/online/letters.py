"""A rule that a tiny model can learn."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from valence.types import Completion


def share(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The share of small letters in the text."""
    return [
        sum(letter in ascii_lowercase for letter in completion.text) / max(1, len(completion.text))
        for completion in completions
    ]
