"""Whether two formulas are equal, asked of a process of its own: an answer may hold one that no
computer gets done with, and nothing else stops that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PROCESS = Path(__file__).with_name("maths_process.py")


class Maths:
    """One process that compares, started when it is first asked and again when it had to end.

    ``seconds``: of the processor for one comparison, after which the kernel ends it.
    """

    def __init__(self, seconds: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("No module named 'math_verify'")
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """``score``: 1.0 or 0.0; or else ``error``."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            line = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if line.endswith("\n"):
                return json.loads(line)
            self._end()
            return {"error": f"the comparison took more than {self.seconds:g} s or too much memory"}

    def close(self) -> None:
        if self._lock.acquire(timeout=self.seconds):
            self._end()
            self._lock.release()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESS), str(self.seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
