"""Rewards that worker processes import: they score, fail, hang, crash and print.

Light, so that workers start soon.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reward_server.hash_reward import hash_score
from valence.types import Completion

EIGHT = asyncio.Barrier(8)
"""Answers "pid" have no score before eight calls with one run together."""


def of_tokens(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Needs what no server has."""
    return [float(len(ids)) for _, ids in zip(prompts, completion_ids, strict=True)]


def counted(completions: Sequence[Completion], file: str) -> list[float]:
    """Writes the texts that it judges to a file, one a line."""
    with Path(file).open("a", encoding="utf-8") as lines:
        lines.writelines(f"{c.text}\n" for c in completions)
    return [1.0] * len(completions)


def dislikes_bad(completions: Sequence[Completion], file: str = os.devnull) -> list[float]:
    """Raises an error that quotes each answer of the call when one of them is bad."""
    counted(completions, file)
    texts = [c.text for c in completions]
    if any("bad" in text for text in texts):
        raise ValueError(f"cannot score {texts}")
    return [hash_score(text) for text in texts]


def obeys(completions: Sequence[Completion], **_: Any) -> list[float]:
    """Does what each answer asks for.

    Its score is ``hash_score``; that of "pid" is the process's id.
    """
    for text in (c.text for c in completions):
        _obey(text)
    return [float(os.getpid()) if c.text == "pid" else hash_score(c.text) for c in completions]


def _obey(text: str) -> None:
    if text == "hang":
        threading.Event().wait()
    elif text == "hang holding the interpreter":
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif text == "crash":
        os.kill(os.getpid(), 9)
    elif text == "exit":
        os._exit(0)
    elif text == "leave":
        sys.exit(3)
    elif text == "print":
        print("this is printed")
        print("\x1b[31mand this\n" + "x" * 5000, file=sys.stderr)
        subprocess.run(["echo", "by another program"], check=True)
    elif text == "huge":
        raise ValueError("x" * 1_000_000)
    elif text.startswith("child "):
        with subprocess.Popen(["sleep", "1000"]) as child:
            Path(text.removeprefix("child ")).write_text(str(child.pid), encoding="utf-8")
    elif text.startswith("touch "):
        Path(text.removeprefix("touch ")).touch()
    elif text.startswith("wait "):
        time.sleep(float(text.removeprefix("wait ")))


async def obeys_later(completions: Sequence[Completion]) -> list[float]:
    for text in (c.text for c in completions):
        if text == "block":
            threading.Event().wait()
        if text == "wait":
            await asyncio.Event().wait()
        if text == "pid":
            await EIGHT.wait()
        _obey(text)
    return [float(os.getpid()) if c.text == "pid" else hash_score(c.text) for c in completions]
