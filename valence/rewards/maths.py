"""Compare formulas in a separate process: a completion may have a formula whose comparison does not
end, and only ending the process stops it.
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


class FormulaComparer:
    """A process that compares formulas. It starts at the first comparison, and again when it ended.

    seconds: processor time limit of one comparison, after which the kernel ends the process.
    """

    def __init__(self, seconds: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("No module named 'math_verify'")
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def compare(self, expected: list[str], text: str) -> dict[str, Any]:
        """``score``: 1.0 if the last formula of the text equals an expected one, else 0.0; or
        ``error``.
        """
        question = {"expected": expected, "text": text}
        with self._lock:
            process = self._running_process()
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
            return {"error": f"the comparison took over {self.seconds:g} s or used too much memory"}

    def close(self) -> None:
        if self._lock.acquire(timeout=self.seconds):
            self._end()
            self._lock.release()

    def _running_process(self) -> subprocess.Popen[str]:
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
