"""For programs that start `python -m MODULE` themselves, as torchrun does: a copy of a process that has loaded torch, in place of
a new one that spends seconds on that.

A client of a few lines stands for the interpreter. It hands over words, folder, environment and streams, passes signals on, and
ends as the copy does. Copies know it as their interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.crash.forked import as_if_new, status_of
from tests.programs import Program

PASSED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
PRELOADED = ("accelerate.commands.accelerate_cli", "torch.distributed.launcher.api")
"""What copies need besides that which every program of a test is forked with."""
LOOKS_EVERY = 0.02
"""Seconds between two looks whether a copy has ended."""
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
    """What makes copies, until ``end``. python: the client, to be called as an interpreter with `-m MODULE WORD...`."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()  # one with a short name, which that of a socket has to have
        folder = Path(self._folder.name)
        self.python, at = folder / "python", folder / "socket"
        self.python.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -ISu \"$0\" \"$@\"\n'''\n{CLIENT}")
        self.python.chmod(0o755)
        self._server = Program(said=folder / "said", main=partial(_serve, str(at)))
        self._server.wait_until(at.exists)

    def end(self) -> None:
        """Copies end with their clients, which are not ended here."""
        self._server.kill()
        self._folder.cleanup()


def _serve(at: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{at}.new")
        listening.listen(64)
        os.rename(f"{at}.new", at)  # it answers from the moment that it is seen
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
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
    said = b""
    while len(said) < int.from_bytes(size, "little"):
        said += connection.recv(1 << 16)
    python, words, folder, environment = json.loads(said)
    if not (copy := os.fork()):
        for stream, given in enumerate(streams):
            os.dup2(given, stream)
        as_if_new(environment, ())
        os._exit(status_of(partial(_run, python, words, folder)))
    for stream in (0, 1, 2, *streams):  # of which the copy's is the last
        os.close(stream)
    while True:
        if select.select([connection], [], [], LOOKS_EVERY)[0]:
            number = connection.recv(1)
            os.kill(copy, number[0] if number else signal.SIGKILL)  # a client that is gone was killed
            if not number:
                os.waitpid(copy, 0)
                return 0
        ended, status = os.waitpid(copy, os.WNOHANG)
        if ended:
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            return 0


def _run(python: str, words: list[str], folder: str) -> None:
    """`python -u -m MODULE WORD...`, as far as copies are asked for it."""
    sys.executable = python
    os.chdir(folder)
    flags = words[: words.index("-m")]
    assert set(flags) <= {"-u"}, flags
    module, *sys.argv[1:] = words[len(flags) + 1 :]
    sys.argv[:1] = [module]
    sys.path.insert(0, folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
