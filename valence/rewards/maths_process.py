"""The process that compares formulas: a JSON line in, a JSON line out.

It imports nothing from the package.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

MAX_MEMORY = 4 * 2**30
"""Memory limit in bytes."""


def compare(expected: list[str], text: str) -> dict[str, Any]:
    """Whether the text's last formula equals an expected one.

    It is an error if no expected text is a formula, but not if the text has none.
    """
    from math_verify import parse, verify

    answer = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    is_readable = False
    for formula in expected:
        for form in (formula, f"${formula}$"):  # with or without the delimiters of LaTeX
            gold = parse(form, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
            is_readable = is_readable or bool(gold)
            if gold and verify(gold, answer, timeout_seconds=None):
                return {"score": 1.0}
    return {"score": 0.0} if is_readable else {"error": "no formula found"}


def main() -> None:
    seconds = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is not a reply
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even inside C code
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    import math_verify  # noqa: F401  # pyright: ignore[reportUnusedImport]  # takes a second

    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = compare(**json.loads(line))
        except MemoryError:
            reply = {"error": "the comparison used too much memory"}
        except (
            ValueError,
            TypeError,
            ArithmeticError,
            LookupError,
            AttributeError,
            NotImplementedError,
            RecursionError,
        ) as error:
            reply = {"error": f"the comparison failed: {type(error).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
