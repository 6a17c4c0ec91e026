"""Tools and environments of the tests. Their processes import nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def scale(number: int, factor: int = 2) -> int:
    """Multiply a number.

    Args:
        number: The number.
        factor: What to multiply it by.
    """
    if number % 7 == 0:
        raise ValueError("no multiples of seven")
    return number * factor


async def wait(number: int) -> str:
    """Wait a little.

    Args:
        number: Hundredths of a second.
    """
    time.sleep(number / 100)
    return "waited"


class Shop:
    """Counts what was bought. Its prompts differ between rows."""

    def __init__(self) -> None:
        self.count, self.wanted = 0, 0

    def reset(self, wanted: int, **_: Any) -> str | None:
        """Called for each sample."""
        self.count, self.wanted = 0, wanted
        return f" Buy {wanted}." if wanted else None

    def scale(self, number: int) -> str:
        """Buy some.

        Args:
            number: How many.
        """
        self.count += number
        return f"{self.count} in all"

    def get_reward(self) -> float:
        return self.count + self.wanted / 10


class Counter:
    """Rewards each turn with what it has counted, and the last one with 0.5."""

    def reset(self, fails: bool = False, **_: Any) -> None:
        """Called for each sample."""
        self.count, self.fails = 0, fails

    def scale(self, number: int) -> str:
        """Count.

        Args:
            number: How far.
        """
        self.count += number
        return "counted"

    def get_turn_reward(self) -> float:
        count, self.count = self.count, 0
        if self.fails:
            raise ValueError("no reward")
        return count

    def get_reward(self) -> float:
        return 0.5


class Last:
    """A sample whose row says so gets no result before all others have ended."""

    replayable = False

    def reset(self, folder: str, num_others: int, is_last: bool = False, **_: Any) -> None:
        """Called for each sample."""
        self.ended, self.num_others, self.is_last = Path(folder), num_others, is_last

    def scale(self, number: int) -> int:
        """Multiply.

        Args:
            number: The number.
        """
        while self.is_last and len(list(self.ended.iterdir())) < self.num_others:
            time.sleep(0.01)
        return 2 * number

    def close(self) -> None:
        (self.ended / str(os.getpid())).touch()


class Late(Last):
    """The same, and its calls can be repeated."""

    replayable = True
