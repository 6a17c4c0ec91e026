"""JSON as its standard has it, read from any place in a text.

Python's own reader lets more pass.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any


class JSONError(ValueError):
    """JSON text that is valid syntax and still cannot be used. fix: how to fix it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class StrictDecoder(json.JSONDecoder):
    """``fault``: what Python let pass in the last value (a name twice in an object, NaN, half
    characters), or None.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object, parse_constant=self._constant)
        self.fault: JSONError | None = None

    def value_at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that starts at ``start``, and where it ends.

        Raises JSONDecodeError for invalid syntax, and JSONError beyond the limits of Python.
        """
        self.fault = None
        try:
            value, end = self.raw_decode(text, start)
        except RecursionError as error:
            raise JSONError(
                "lists and objects are nested too deeply", "nest them less deeply"
            ) from error
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # of int()
            raise JSONError(
                f"a number has more than {sys.get_int_max_str_digits():,} digits",
                "shorten the number, or write it in double quotes",
            ) from error
        if "\\ud" in text[start:end].lower():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                self.fault = JSONError(
                    "a \\ud... escape is only half of a character",
                    "write the character itself, or both \\u escapes of its surrogate pair",
                )
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            name = next(n for n, count in counts.items() if count > 1)
            self.fault = JSONError(
                f"the name {name!r} appears twice in one object", "remove or rename one of the two"
            )
        return value

    def _constant(self, name: str) -> float:
        self.fault = JSONError(
            f"{name} is not a JSON value", "write a number, or null for a missing one"
        )
        return float(name)
