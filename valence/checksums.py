"""Checksums of the files that a run writes and reads back: a key of a JSON object, or the last line
of a text.

They are against damage, not against an attacker. A file without a checksum is accepted, since
somebody may have edited it on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from zlib import crc32

KEY = "crc"
"""In a JSON object: the CRC-32 of all the rest of it, whatever its layout."""
LAST_LINE = re.compile(r"# crc of the lines above: ([0-9a-f]{8})\n?\Z")


class ChecksumError(ValueError):
    """Content that is not as it was written."""


def checksum(value: Any) -> int:
    """The CRC-32 of a value that JSON can hold; what else there is counts as text, as
    ``json.dumps`` with ``default=str``.
    """
    plain = json.loads(json.dumps(value, default=str))
    return crc32(json.dumps(plain, sort_keys=True).encode())


def add_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum as the last key."""
    rest = {name: item for name, item in value.items() if name != KEY}
    return {**rest, KEY: checksum(rest)}


def verify(value: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """The object without its checksum.

    Raises ChecksumError when that is wrong, or missing and ``required``.
    """
    rest = {name: item for name, item in value.items() if name != KEY}
    if KEY in value and value[KEY] != checksum(rest):
        raise ChecksumError("its checksum is wrong: it has changed since it was written")
    if required and KEY not in value:
        raise ChecksumError("it has no checksum")
    return rest


def add_checksum_line(text: str) -> str:
    """The text with a comment as its last line that holds the checksum of the lines above."""
    return f"{text}# crc of the lines above: {crc32(text.encode()):08x}\n"


def verify_text(text: str) -> None:
    """Raises ChecksumError when the last line holds a checksum that is not that of the lines
    above.
    """
    match = LAST_LINE.search(text)
    if match and int(match[1], 16) != crc32(text[: match.start()].encode()):
        raise ChecksumError(
            "the checksum in its last line is wrong: it has changed since it was written"
        )
