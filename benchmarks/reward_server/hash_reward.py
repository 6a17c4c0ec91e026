"""A reward whose expected scores clients can compute: a hash of the completion."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

from valence.types import Completion

PAUSE = float(os.environ.get("PAUSE", "0"))
"""Seconds that each call takes."""


def hash_score(text: str) -> float:
    """Score of a text: its SHA-256, scaled to [0, 256)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**40


def score(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The reward function that the benchmark serves."""
    time.sleep(PAUSE)
    return [hash_score(completion.text) for completion in completions]
