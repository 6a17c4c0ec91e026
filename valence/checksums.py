"""Checksums of the files that a run writes and reads back: a key of a JSON object, or the last line
of a text file.

They detect damage, not attacks. A file without a checksum is accepted, because a user may have
edited it on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from zlib import crc32

KEY = "crc"
"""Key in a JSON object: the CRC-32 of its other entries, independent of formatting."""
LAST_LINE = re.compile(r"# crc of the lines above: ([0-9a-f]{8})\n?\Z")


class ChecksumError(ValueError):
    """Content that has changed since it was written."""


def checksum(value: Any) -> int:
    """The CRC-32 of a value as JSON, with ``default=str`` for values that JSON does not support."""
    plain = json.loads(json.dumps(value, default=str))
    return crc32(json.dumps(plain, sort_keys=True).encode())


def add_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum as the last key."""
    entries = {name: item for name, item in value.items() if name != KEY}
    return {**entries, KEY: checksum(entries)}


def verify(value: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """The object without its checksum.

    Raises ChecksumError if it is wrong, or missing and ``required``.
    """
    entries = {name: item for name, item in value.items() if name != KEY}
    if KEY in value and value[KEY] != checksum(entries):
        raise ChecksumError("wrong checksum: it has changed since it was written")
    if required and KEY not in value:
        raise ChecksumError("it has no checksum")
    return entries


def add_checksum_line(text: str) -> str:
    """Add a comment as the last line with the checksum of the lines above."""
    return f"{text}# crc of the lines above: {crc32(text.encode()):08x}\n"


def verify_text(text: str) -> None:
    """Raise ChecksumError if the last line has a checksum that does not match the lines above."""
    match = LAST_LINE.search(text)
    if match and int(match[1], 16) != crc32(text[: match.start()].encode()):
        raise ChecksumError(
            "the checksum in the last line does not match: the file has changed since it was "
            "written"
        )
