"""The pipe to TRL's process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers import ROOT, peer_environment

PATIENCE = 10.0  # seconds for the process to end once its input has


class Peer:
    """TRL's process. It runs until the end of the ``with`` block."""

    def __init__(self, python: Path, log: Path) -> None:
        self.log = log
        command = [str(python), "-m", "benchmarks.step.trl_worker"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=peer_environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the reply. Raises RuntimeError with the process's output if it
        fails.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, so the reply is empty
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(PATIENCE)
            raise RuntimeError(
                f"TRL's side ended with status {status} at {do!r}:\n{self.log.read_text()[-4000:]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"TRL's side failed at {do!r}:\n{answer['error']}")
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
