"""A reward whose scores follow from the text."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

from valence.types import Completion

PAUSE = float(os.environ.get("PAUSE", "0"))
"""Seconds of a call."""


def number(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**40


def score(completions: Sequence[Completion], **_: Any) -> list[float]:
    time.sleep(PAUSE)
    return [number(completion.text) for completion in completions]
