"""What the logs of two runs of the same have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_THE_MACHINE = ("seconds", "tokens/s", "memory")
"""How the names of numbers begin that differ each time the same is computed."""


def repeatable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the log without its times and memory."""
    return {name: value for name, value in record.items() if not name.startswith(OF_THE_MACHINE)}
