"""Processes that lock a folder, and the leftovers of one that died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from valence import storage
from valence.storage import LOCK_FILE

QUICK = {"beat": 0.05, "watch": 0.4, "patience": 0.2}
TAKE = """
import sys
from pathlib import Path
from valence.storage import Lock
from valence.errors import UserError
lock = Lock(Path(sys.argv[1]), beat=0.05, watch=0.4, patience=0.2)
print("ready", flush=True)
sys.stdin.readline()
try:
    print("taken:", lock.take(), flush=True)
except UserError as error:
    print(f"refused: {error.code}: {error.message}", flush=True)
sys.stdin.readline()
"""


class Process:
    """A process that acquires the lock of a folder on command, and ends on command (releasing the
    lock) or when it is killed.
    """

    def __init__(self, folder: Path, code: str = TAKE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = self.process.pid
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self) -> str:
        self.go()
        return self.line()

    def end(self) -> None:
        self.go()
        assert self.process.wait(10) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def started() -> Iterator[Any]:
    results: list[Process] = []

    def start(folder: Path, code: str = TAKE) -> Process:
        results.append(Process(folder, code))
        return results[-1]

    yield start
    for one in results:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    storage.release_all()


def refused_by(printed: str, pid: int) -> bool:
    """Whether a process could not take the lock because a process of this host, with this id, holds
    it.
    """
    return (
        printed.startswith("refused: run-locked: ")
        and f"pid {pid} on {socket.gethostname()}" in printed
    )


def wait_until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < ends
        time.sleep(0.01)


def named(folder: Path, **other: Any) -> None:
    """A lock file as a process that was started a while ago has left it."""
    content = {
        "host": socket.gethostname(),
        "pid": 2**22 + 1,
        "pid_started": 1,
        "started": "2025-01-01T00:00:00+00:00",
    }
    (folder / LOCK_FILE).write_text(json.dumps({**content, **other}) + "\n")
    os.utime(folder / LOCK_FILE, (0, 0))
