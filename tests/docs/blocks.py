"""The code blocks of a page: run in order, and compared with the output shown below each.

``python -m tests.docs.blocks PAGE...`` runs pages and writes what they print into them.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"([-+]?\d+\.\d+(?:e[-+]?\d+)?)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where that text starts (character, and line from
    1) and ends.
    """

    language: str
    text: str
    start: int
    end: int
    line: int


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order."""
    results = [
        Block(m[1], m[2], m.start(2), m.end(2), page.count("\n", 0, m.start(2)) + 1)
        for m in FENCED.finditer(page)
    ]
    return [b for b in results if language in (None, b.language)]


def executed(page: str, name: str) -> Iterator[tuple[Block, str, Block | None]]:
    """Runs the python blocks in one namespace.

    Yields each with what it printed, and the text block right below it.
    """
    namespace: dict[str, Any] = {"__name__": "page"}
    every = blocks(page)
    for i, block in enumerate(every):
        if block.language != "python":
            continue
        out = io.StringIO()
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.text, name, "exec")
        with redirect_stdout(out):
            exec(code, namespace)
        below = every[i + 1] if i + 1 < len(every) else None
        shown = (
            below
            if below
            and below.language == "text"
            and not page[block.end + 3 : below.start - 8].strip()
            else None
        )
        yield block, out.getvalue(), shown


def same_output(result: str, shown: str) -> bool:
    """Equal, but for the last digits of numbers, which another machine may round otherwise."""
    ours, theirs = NUMBER.split(result.strip()), NUMBER.split(shown.strip())
    if len(ours) != len(theirs) or ours[::2] != theirs[::2]:
        return False
    return all(
        abs(float(a) - float(b)) <= 2e-4 * max(1.0, abs(float(b)))
        for a, b in zip(ours[1::2], theirs[1::2], strict=True)
    )


def refreshed(page: str, name: str) -> str:
    """The page with the output of every block as it is now."""
    for _, result, shown in reversed(list(executed(page, name))):
        if shown is not None and not same_output(result, shown.text):
            page = page[: shown.start] + result + page[shown.end :]
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refreshed(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8")
