"""`valence` in processes of its own, forked from one that has loaded what it needs and run nothing: the same commands, without
the seconds that Python takes to import torch and transformers. That it starts from nothing too is tested where that matters."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.crash.forked import popen_forks
from benchmarks.crash.process import PRELOADED
from valence import cli

PRELOADED_HERE = [*PRELOADED, "tests.programs", "torch.distributed.fsdp", "valence.dist.processes", "tests.forests"]


def fork_server() -> Any:
    """A context whose processes are forked from one server. There is one server in a process: what is loaded is chosen once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_HERE)
    forkserver.ensure_running()
    return context


class Program:
    """`valence` with these words, in the current folder. said: a file for what it prints; environment: variables of its own;
    main: what is called in place of `valence`, of a module."""

    def __init__(
        self, *words: str, said: str | Path = os.devnull, main: Callable[[], None] = cli.main, **environment: str
    ) -> None:
        out = os.fspath(Path(said).absolute())
        self.process = fork_server().Process(
            target=_main, args=(main, words, os.getcwd(), {**os.environ, **environment}, out), daemon=False
        )
        self.process.start()
        self.pid: int = self.process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.process.exitcode

    def wait(self, seconds: float = 120.0) -> int:
        self.process.join(seconds)
        if (status := self.process.exitcode) is None:
            self.kill()
            raise TimeoutError(f"it still runs after {seconds:g} s")
        return status

    def wait_until(self, reached: Any, seconds: float = 200.0) -> None:
        """Until reached() holds, or it has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.poll() is None and not reached():
            time.sleep(0.005)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> int:
        """SIGKILL, and the exit status."""
        self.send_signal(signal.SIGKILL)
        self.process.join()
        return self.process.exitcode


def _main(main: Callable[[], None], words: tuple[str, ...], folder: str, environment: dict[str, str], said: str) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.close(out)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["valence", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "--nproc" in words:
        with popen_forks(main):
            main()
    else:
        main()
