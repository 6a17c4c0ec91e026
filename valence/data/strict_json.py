"""JSON as its standard has it, read from any place in a text.

Python's own reader lets more pass.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


class StrictDecoder(json.JSONDecoder):
    """``fault``: what Python let pass in the last value (a name twice in an object, NaN, half
    characters), or None.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object, parse_constant=self._constant)
        self.fault: str | None = None

    def value_at(self, text: str, start: int) -> tuple[Any, int]:
        """The value that starts at ``start``, and where it ends.

        Raises ValueError, with what is wrong.
        """
        self.fault = None
        try:
            value, end = self.raw_decode(text, start)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if "\\ud" in text[start:end].lower():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                self.fault = "a \\ud... escape is half a character"
        return value, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            self.fault = (
                f"the name {next(n for n, count in counts.items() if count > 1)!r} "
                f"appears twice in one object"
            )
        return value

    def _constant(self, name: str) -> float:
        self.fault = f"{name} is not a JSON value"
        return float(name)
