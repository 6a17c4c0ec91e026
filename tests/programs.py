"""Python programs in processes forked from one that has already imported torch.

Importing torch and transformers takes seconds. Programs that start from nothing have other tests.

- ``Program`` runs ``valence``, or a function, in such a process.
- ``Copies`` makes an interpreter for programs that start ``python -m MODULE`` themselves, as
  torchrun does. It is a client of a few lines: it sends its words, folder, environment and streams
  to a server that forks a copy, passes signals on, and ends as the copy does.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.crash.forked import popen_forks, reset_process, status_of
from benchmarks.crash.process import PRELOADED
from valence import cli

PRELOADED_HERE = [
    *PRELOADED,
    "tests.programs",
    "torch.distributed.fsdp",
    "valence.distributed.process_group",
    "tests.prefix_trees",
    "peft.utils.transformers_weight_conversion",
    "valence.reports.form",
    "tests.warm_caches",
]


def fork_server() -> Any:
    """A context whose processes are forked from one server.

    There is one server in a process: what is loaded is chosen once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_HERE)
    forkserver.ensure_running()
    return context


class Program:
    """`valence` with these words, in the current folder. output: a file for what it prints;
    environment: additional variables;
    main: what is called in place of `valence`, of a module.
    """

    def __init__(
        self,
        *words: str,
        output: str | Path = os.devnull,
        main: Callable[[], None] = cli.main,
        **environment: str,
    ) -> None:
        out = os.fspath(Path(output).absolute())
        self.process = fork_server().Process(
            target=_main,
            args=(main, words, os.getcwd(), {**os.environ, **environment}, out),
            daemon=False,
        )
        self.process.start()
        self.pid: int = self.process.pid

    def poll(self) -> int | None:
        """Exit status, or minus the number of the signal; None while the program runs."""
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
        """Kill the program with SIGKILL and return its exit status."""
        self.send_signal(signal.SIGKILL)
        self.process.join()
        return self.process.exitcode


def _main(
    main: Callable[[], None],
    words: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    output: str,
) -> None:
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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


PASSED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
PRELOADED_IN_COPIES = ("accelerate.commands.accelerate_cli", "torch.distributed.launcher.api")
"""Imported by copies in addition to PRELOADED_HERE."""
LOOKS_EVERY = 0.02
"""Seconds between two checks whether a copy has ended."""
CLIENT = f"""
import json, os, signal, socket, sys
numbers = [getattr(signal, name) for name in {PASSED}]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
said = json.dumps([os.path.abspath(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(said).to_bytes(8, "little")], [0, 1, 2])
server.sendall(said)
for number in numbers:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
status = int.from_bytes(server.recv(4) or b"F", "little", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Copies:
    """Forks copies until ``end``.

    python: the client, to be called as an interpreter with `-m MODULE WORD...`, `-P FILE WORD...` or
    `-c CODE`. interpreter: the Python of another environment, whose processes are forked instead,
    after it has imported modules.
    """

    def __init__(
        self,
        interpreter: str | Path | None = None,
        modules: Sequence[str] = PRELOADED_IN_COPIES,
        **environment: str,
    ) -> None:
        self._folder = TemporaryDirectory()  # its name is short, as that of a socket must be
        folder = Path(self._folder.name)
        self.python, at = folder / "python", folder / "socket"
        self.python.write_text(
            f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -ISu \"$0\" \"$@\"\n'''\n{CLIENT}"
        )
        self.python.chmod(0o755)
        words = (str(at), *modules)
        if interpreter is None:
            main = partial(serve, *words)
            self._server = Program(output=folder / "said", main=main, **environment)
        else:
            code = "import sys; from tests.programs import serve; serve(*sys.argv[1:])"
            self._server = subprocess.Popen(
                [interpreter, "-c", code, *words], env=os.environ | environment
            )
        until = time.monotonic() + 200
        while not at.exists() and self._server.poll() is None and time.monotonic() < until:
            time.sleep(0.005)

    def end(self) -> None:
        """Copies end with their clients, which are not ended here."""
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


def serve(at: str, *modules: str) -> None:
    """Fork a copy of this process, which imports modules, for each client of the socket ``at``."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{at}.new")
        listening.listen(64)
        os.rename(f"{at}.new", at)  # it answers from the moment that it is seen
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watching processes are not joined
        while True:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(_watch(connection))
            connection.close()


def _watch(connection: socket.socket) -> int:
    """Starts a copy, and tells its client how it ended."""
    size, streams, *_ = socket.recv_fds(connection, 8, 3)
    message = b""
    while len(message) < int.from_bytes(size, "little"):
        message += connection.recv(1 << 16)
    python, words, folder, environment = json.loads(message)
    if not (copy := os.fork()):
        for stream, value in enumerate(streams):
            os.dup2(value, stream)
        reset_process(environment, ())
        os._exit(status_of(partial(_run_words, python, words, folder)))
    for stream in (0, 1, 2, *streams):  # of which the copy's is the last
        os.close(stream)
    while True:
        if select.select([connection], [], [], LOOKS_EVERY)[0]:
            number = connection.recv(1)
            # a client that is gone was killed
            os.kill(copy, number[0] if number else signal.SIGKILL)
            if not number:
                os.waitpid(copy, 0)
                return 0
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended:
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            return 0


def _run_words(python: str, words: list[str], folder: str) -> None:
    """`python -u -m MODULE WORD...`, `python -P FILE WORD...` or `python -c CODE`, as far as copies
    are asked for it.
    """
    sys.executable = python
    os.chdir(folder)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    flag = words.pop(0) if words[0] in ("-u", "-P") else ""
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
        return
    if words[0] != "-m":
        assert flag == "-P", words
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = words[1:]
    sys.path.insert(0, folder)
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
