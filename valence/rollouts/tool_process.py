"""The process that runs tools, and their environments, for the samples of a rollout.

The run starts one server process. It imports the modules of the tools once and forks a child for
each connection that the run passes to it. A child serves one sample: it reads a line of JSON for
each request and replies with a line of JSON. Neither side executes what the other one sends.

- The server kills the process group of a child as soon as the run closes its connection.
- The server kills all children, and ends, when the run ends.
- The kernel ends the process group of a child when the server ends.

This file imports little, since a run waits for it: the server runs it by its path, without the
package that contains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import math
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, cast

from valence.errors import UserError
from valence.user_code.attempt import Raised, attempt, describe, describe_error
from valence.user_code.load import frames_of, load_object, place_of, unwrap

POLL_MILLISECONDS = 1000
"""Interval at which the server checks that the run still exists."""
Message = Mapping[str, Any]


class ToolWorker:
    """Calls the tools of one sample.

    functions: by name. factory: creates the environment, at the first request that needs it.
    max_output: characters of a result, after which it is cut. Blocking code runs in the thread that
    calls ``handle``, and asynchronous code in an event loop that runs until ``stop``.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        factory: Callable[[], Any] | None,
        max_output: int,
    ) -> None:
        self.functions, self.factory, self.max_output = functions, factory, max_output
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle(self, message: Message) -> dict[str, Any]:
        """The reply to a message: ``text`` or ``value``, or else ``error`` and its ``detail``."""
        kind = message["kind"]
        handlers: dict[str, Callable[[], dict[str, Any]]] = {
            "call": lambda: self._call(message["name"], message["arguments"]),
            "reset": lambda: self._reset(message["row"]),
            "reward": lambda: self._reward(message["name"]),
            "close": self._close,
        }
        reply = attempt(handlers[kind])
        if not isinstance(reply, Raised):
            return reply
        if kind == "close":
            traceback.print_exception(reply.error)
        text, is_cut = self._cut(describe_error(reply.error))
        detail = printable(self._place(reply.error, message.get("name", kind)))
        return {"error": text, "is_cut": is_cut, "detail": detail}

    def stop(self) -> None:
        """Cancel asynchronous calls and end their event loop."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            loop.stop()

        asyncio.run_coroutine_threadsafe(end(), loop)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        function = self.functions.get(name) or getattr(self._instance(), name)
        text, is_cut = self._cut(as_text(self._run(partial(function, **arguments))))
        return {"text": text, "is_cut": is_cut}

    def _cut(self, text: str) -> tuple[str, bool]:
        """The start of a text, and whether that is not all."""
        is_cut = len(text) > self.max_output
        if is_cut:
            more = len(text) - self.max_output
            text = f"{text[: self.max_output]}\n[cut: {more} more characters]"
        return printable(text), is_cut

    def _reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text = self._run(partial(self._instance().reset, **row))
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned {describe(text)} instead of text or None")
        return {"text": None if text is None else printable(text)}

    def _reward(self, name: str) -> dict[str, Any]:
        value = self._run(getattr(self._instance(), name))
        if callable(getattr(value, "item", None)):  # numpy or torch
            value = value.item()
        if not isinstance(value, Real):
            raise TypeError(f"{name} returned {describe(value)} instead of a number")
        if not math.isfinite(value):
            raise ValueError(f"{name} returned {describe(value)}, which is not finite")
        return {"value": float(value)}

    def _close(self) -> dict[str, Any]:
        close = getattr(self._environment, "close", None)
        if callable(close):
            self._run(close)
        return {}

    def _instance(self) -> Any:
        if self._environment is None:
            assert self.factory is not None
            self._environment = self.factory()
        return self._environment

    def _run(self, call: Callable[[], Any]) -> Any:
        """The result of a call, awaited in the event loop of this sample if it is asynchronous."""
        result = call()
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run = partial(_run_forever, self._loop)
            threading.Thread(target=run, name="asynchronous tools", daemon=True).start()
        result = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()
        if isinstance(result, Raised):
            raise result.error
        return result

    def _place(self, error: BaseException, name: str) -> str:
        """File and line where the code of a tool raised an error; of its file if possible."""
        libraries = (asyncio.__file__.removesuffix("__init__.py"), threading.__file__)
        frames = frames_of(error, (attempt.__code__.co_filename, __file__, *libraries))
        frames = [frame for frame in frames if "concurrent/futures" not in frame.filename]
        owner = self.functions.get(name) or getattr(self._environment or self.factory, name, None)
        code: Any = getattr(unwrap(owner), "__code__", None) if callable(owner) else None
        inside = [f for f in frames if code is not None and f.filename == code.co_filename]
        return place_of(inside or frames)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


async def _awaited(result: Awaitable[Any]) -> Any:
    """The result, or its exception: SystemExit would end the event loop."""
    try:
        return await result
    except (KeyboardInterrupt, SystemExit) as error:
        return Raised(error)


def as_text(result: Any) -> str:
    """The result of a tool as a model reads it: text, or else JSON, or else ``str``."""
    if isinstance(result, str):
        return result
    text = attempt(lambda: json.dumps(result, ensure_ascii=False))
    return str(result) if isinstance(text, Raised) else text


def printable(text: str) -> str:
    """Replace halves of surrogate pairs, which no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def seed_generators(seed: int | None) -> None:
    """Seed the random numbers of Python, and of numpy and torch where they are loaded.

    A fork copies the state of their generators: without a seed, a random one.
    """
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@dataclass(frozen=True, slots=True)
class _Child:
    connection: socket.socket
    lifeline: int
    """The end of a pipe that only the server has."""


class _Server:
    """Forks a child for each connection that the run sends, and ends children."""

    def __init__(self, control: socket.socket, worker: ToolWorker) -> None:
        self.control, self.worker = control, worker
        self.children: dict[int, _Child] = {}
        self.run_pid = os.getppid()
        self.wakeup_reader, self.wakeup_writer = socket.socketpair()
        for end in (self.wakeup_reader, self.wakeup_writer):
            end.setblocking(False)
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(self.wakeup_reader, select.POLLIN)

    def serve(self) -> None:
        """Returns when the run has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_writer.fileno(), warn_on_full_buffer=False)
        while os.getppid() == self.run_pid:
            fds = {fd for fd, _ in self.poll.poll(POLL_MILLISECONDS)}
            # in this order: numbers of closed connections are used again
            closed = {
                p: fd for p, c in self.children.items() if (fd := c.connection.fileno()) in fds
            }
            kill_groups(list(closed))
            for fd in closed.values():
                self.poll.unregister(fd)
            if self.wakeup_reader.fileno() in fds:
                with contextlib.suppress(BlockingIOError):
                    self.wakeup_reader.recv(4096)
                self._reap()
            if self.control.fileno() in fds and not self._accept():
                return

    def _accept(self) -> bool:
        """Fork a child for a connection. False if the run has ended."""
        message, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
            connection = socket.socket(fileno=fd)
            if isinstance(result := attempt(lambda c=connection: self._fork(c)), Raised):
                traceback.print_exception(result.error)  # such as the limit on processes
                connection.close()
        return bool(message)

    def _fork(self, connection: socket.socket) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            result = attempt(lambda: self._serve_sample(connection, reader))
            if isinstance(result, Raised) and not isinstance(result.error, OSError):
                traceback.print_exception(result.error)
            _flush()
            os._exit(0)
        os.close(reader)
        with contextlib.suppress(OSError):  # the child has done it, or has ended
            os.setpgid(pid, pid)
        self.children[pid] = _Child(connection, writer)
        self.poll.register(connection, 0)  # reports only that the other end is closed

    def _serve_sample(self, connection: socket.socket, lifeline: int) -> None:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in self.children.values():
            other.connection.close()
            os.close(other.lifeline)
        for end in (self.control, self.wakeup_reader, self.wakeup_writer):
            end.close()
        end_with_server(lifeline)
        prefer_as_victim()
        with connection.makefile("rb") as messages:
            for line in messages:
                message = json.loads(line)
                if "seed" in message:
                    seed_generators(message["seed"])
                reply = self.worker.handle(message)
                _flush()
                connection.sendall(json.dumps(reply).encode() + b"\n")

    def _reap(self) -> None:
        for pid in list(self.children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            kill_groups([pid])  # processes that a tool has started
            child = self.children.pop(pid)
            with contextlib.suppress(KeyError):
                self.poll.unregister(child.connection)
            with contextlib.suppress(OSError):  # another process may have copied it
                child.connection.shutdown(socket.SHUT_RDWR)
            child.connection.close()
            os.close(child.lifeline)


def kill_groups(pids: list[int]) -> None:
    """Kill processes, and all that they have started in their process groups."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def end_with_server(lifeline: int) -> None:
    """Let the kernel end this process group when the server ends, even while a tool blocks the
    interpreter.
    """
    import fcntl  # not on Windows, where `Tools` reports that

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it has ended already
        os._exit(1)


def prefer_as_victim() -> None:
    """Let Linux end this process before others when memory runs out."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
    ):
        file.write("1000")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        attempt(stream.flush)


def _load(settings: Message) -> ToolWorker:
    where = settings["where"]
    functions = {
        name: load_object(path, f"{where}.tools", "tool")
        for name, path in settings["functions"].items()
    }
    path = settings["environment"]
    factory = load_object(path, f"{where}.environment", "environment") if path else None
    return ToolWorker(functions, factory, settings["max_output"])


def main() -> None:
    """The server. Arguments: the number of its socket, and its settings as JSON."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    cast(Any, sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")
    settings = json.loads(sys.argv[2])
    del sys.argv[1:]  # modules of users may read it
    try:
        worker = _load(settings)
    except UserError as error:
        control.sendall(json.dumps({"error": error.facts}).encode() + b"\n")
        return
    gc.freeze()  # a collection in a child would copy the memory that it shares with the server
    server = _Server(control, worker)
    control.sendall(b"{}\n")
    try:
        server.serve()
    finally:
        kill_groups(list(server.children))
        _flush()
        os._exit(0)


if __name__ == "__main__":
    main()
