"""A reward that takes as long as a judge over the network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from valence.types import Completion


async def remainder(completions: Sequence[Completion], **_: Any) -> list[float]:
    """The sum of the token ids modulo 17, after ``VALENCE_REWARD_SECONDS`` per call."""
    await asyncio.sleep(float(os.environ.get("VALENCE_REWARD_SECONDS", "0")))
    return [sum(completion.tokens) % 17 / 17 for completion in completions]
