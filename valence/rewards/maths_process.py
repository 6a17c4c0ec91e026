"""The process that compares formulas: a JSON line in, a JSON line out.

It imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 4 * 2**30
"""Bytes that it may use."""


def compared(right: list[str], text: str) -> dict[str, Any]:
    """Whether the text's last formula equals one of those that are right.

    What the row says must be one; what the text says need not.
    """
    from math_verify import parse, verify

    said = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    readable = False
    for each in right:
        for form in (each, f"${each}$"):  # with or without the signs around LaTeX
            gold = parse(form, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
            readable = readable or bool(gold)
            if gold and verify(gold, said, timeout_seconds=None):
                return {"score": 1.0}
    return {"score": 0.0} if readable else {"error": "no formula can be read"}


def main() -> None:
    seconds = float(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process whatever it is in
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    import math_verify  # noqa: F401  # pyright: ignore[reportUnusedImport]  # takes a second

    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            said = compared(**json.loads(line))
        except MemoryError:
            said = {"error": "the comparison took too much memory"}
        except (
            ValueError,
            TypeError,
            ArithmeticError,
            LookupError,
            AttributeError,
            NotImplementedError,
            RecursionError,
        ) as error:
            said = {"error": f"the comparison failed: {type(error).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
