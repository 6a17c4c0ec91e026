"""The calculator with wrong results."""

from __future__ import annotations

from benchmarks.tools import calculator


def calculate(a: int, operation: str, b: int) -> int:
    """Compute with two whole numbers.

    Args:
        a: The first number.
        operation: One of +, - and *.
        b: The second number.
    """
    return calculator.calculate(a, operation, b) + 1
