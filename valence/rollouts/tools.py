"""Tools that a model calls while it answers: functions, and the methods of an environment.

Each sample of a rollout has a ``ToolSession``. Its tools run in a process that only this sample
uses, and that is killed after the time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from valence.errors import UserError
from valence.rollouts.tool_process import Message, ToolWorker
from valence.user_code.attempt import (
    Raised,
    attempt,
    describe_error,
    restored_working_directory,
    separate_working_directory,
)
from valence.user_code.load import (
    REGISTERED,
    definition_place,
    describe_raised,
    load_function,
    load_object,
    truncate,
)
from valence.user_code.sources import code_digest, function_sources, unwrap

PROCESS = Path(__file__).with_name("tool_process.py")
START = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"
START_SECONDS = 120.0
"""Time limit for importing the modules of the tools."""
END_SECONDS = 5.0
"""Time within which the server process ends."""
GRACE_SECONDS = 0.05
"""Time for a reply that came while the event loop was blocked until after the time limit."""
MAX_REPLY_BYTES = 2**26
MAX_ABANDONED = 8
"""Maximum number of threads whose tools have not returned within the time limit."""
RESERVED = ("reset", "get_reward", "get_turn_reward", "close")
"""Public methods of an environment that are no tools."""

RewardMethod = Literal["get_reward", "get_turn_reward"]
ToolFailure = Literal["", "exception", "timeout", "unknown_tool", "arguments", "lost", "malformed"]


class ToolError(Exception):
    """An environment failed, so the sample has no score: a missing score is not zero.

    kind: ``exception``, ``timeout``, or ``lost`` if its process has ended. detail: file and line
    in the code of the environment.
    """

    def __init__(self, message: str, kind: ToolFailure = "exception", detail: str = "") -> None:
        super().__init__(message)
        self.kind: ToolFailure = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call."""

    text: str
    """What the model reads; it begins with ``Error:`` if the call failed."""
    error: ToolFailure = ""
    """Why the call failed. ``lost``: the process of the tool ended, now or in an earlier call."""
    is_cut: bool = False
    """Whether the text was longer than the limit."""
    seconds: float = 0.0
    detail: str = ""
    """File and line where the code of the tool raised an exception."""


@dataclass(frozen=True, slots=True)
class _Tool:
    """A function, or a method of the environment.

    is_local: whether it runs in a thread of this process. parameters: without ``self``.
    """

    name: str
    target: str
    function: Callable[..., Any]
    is_local: bool
    schema: dict[str, Any]
    parameters: tuple[inspect.Parameter, ...]

    def argument_problem(self, arguments: object) -> str | None:
        """What is wrong with the names of the arguments of a call."""
        usage = f"call it as {self.name}({', '.join(map(_usage, self.parameters))})"
        if not isinstance(arguments, Mapping):
            return f"the arguments of {self.name} are no object with names and values; {usage}"
        columns = cast(Mapping[str, Any], arguments)
        unknown, missing = _unmatched(self.parameters, columns)
        problems = [f"{self.name} has no argument {truncate(name)!r}" for name in unknown]
        problems += [f"the argument {name!r} of {self.name} is missing" for name in missing]
        return "; ".join([*problems, usage]) if problems else None


def _usage(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    has_default = parameter.default is not parameter.empty
    return f"{parameter.name}={parameter.default!r}" if has_default else parameter.name


def _unmatched(
    parameters: Sequence[inspect.Parameter], names: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Names that no parameter takes, and parameters without default that have no value."""
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else [name for name in names if name not in named]
    missing = [n for n, p in named.items() if p.default is p.empty and n not in names]
    return unknown, missing


class Tools:
    """The tools of a run.

    functions: import paths of functions (``module:name``). environment: import path of a class, or
    of a function without arguments that creates an instance. timeout: seconds of a call and of
    each other method, after which the process of the sample is killed. max_output:
    characters of a result; longer ones are cut. max_processes: processes at a time; further
    sessions wait until another one is closed. where: the section of the recipe, for messages.

    Objects that no import finds (``python:name``), such as functions of a notebook, run in threads
    of this process, which cannot be killed.

    Raises UserError for a tool or an environment that does not exist or has no schema.
    """

    def __init__(
        self,
        functions: Sequence[str] = (),
        environment: str | None = None,
        *,
        timeout: float = 30.0,
        max_output: int = 10_000,
        max_processes: int = 256,
        where: str = "rollout",
    ) -> None:
        if sys.platform == "win32":
            raise UserError(
                "tools do not run on Windows, which cannot fork their processes",
                code="tools-platform",
                where=where,
                fix="use Linux, macOS or the Windows Subsystem for Linux",
            )
        self.timeout, self.max_output, self.where = timeout, max_output, where
        self._tools: dict[str, _Tool] = {}
        for target in functions:
            self._add(_function_tool(target, f"{where}.tools"))
        self._environment = None if environment is None else Environment(environment, where)
        for tool in self._environment.tools if self._environment else ():
            self._add(tool)
        self._identity = self._read_identity()  # while the files are those that were imported
        self._folder = os.getcwd()
        self._server: _ServerProcess | None = None
        self._server_lock = threading.Lock()
        self._abandoned: list[threading.Thread] = []
        self._max_processes = max_processes
        self._slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    def _add(self, tool: _Tool) -> None:
        other = self._tools.setdefault(tool.name, tool)
        if other is not tool:
            raise UserError(
                f"two tools have the name {tool.name!r}: {other.target} and {tool.target}",
                code="tool-duplicate",
                where=f"{self.where}: {tool.target}",
                fix="rename one of them, or remove it",
            )

    @property
    def names(self) -> list[str]:
        return [*self._tools]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas, as chat templates read them: first of functions, then of the environment
        in alphabetical order.
        """
        return [tool.schema for tool in self._tools.values()]

    @property
    def has_environment(self) -> bool:
        return self._environment is not None

    @property
    def has_reward(self) -> bool:
        """Whether the environment has a method ``get_reward``."""
        return self._environment is not None and self._environment.has_reward

    @property
    def has_turn_reward(self) -> bool:
        """Whether the environment has a method ``get_turn_reward``."""
        return self._environment is not None and self._environment.has_turn_reward

    @property
    def not_replayable(self) -> list[str]:
        """Functions and environments whose calls cannot be repeated with the same results: they say
        so with the attribute ``replayable = False``."""
        functions = [
            tool.target
            for tool in self._tools.values()
            if not getattr(tool.function, "replayable", True)
        ]
        if self._environment is not None and not self._environment.is_replayable:
            functions.append(self._environment.target)
        return functions

    @property
    def identity(self) -> Mapping[str, Any]:
        """Digests of the files of the tools and of what they import outside of installed libraries.

        Does not include data files or the network.
        """
        return self._identity

    def _read_identity(self) -> Mapping[str, Any]:
        functions = [t for t in self._tools.values() if not self._is_of_environment(t)]
        identity: dict[str, Any] = {"tools": [_sources(t.function, t.target) for t in functions]}
        if self._environment is not None:
            source = _sources(self._environment.factory, self._environment.target)
            identity["environment"] = source
        return identity

    def _is_of_environment(self, tool: _Tool) -> bool:
        return self._environment is not None and tool in self._environment.tools

    def start(self) -> None:
        """Start the server process, which imports the tools, without waiting for it.

        ``open`` starts it otherwise.
        """
        if not self._has_processes:
            return
        with self._server_lock:
            if self._server is None or not self._server.is_running:
                self._server = _ServerProcess(self._server_settings(), self._folder)

    async def prepare(self) -> None:
        """Wait until the server process has imported the tools, if they need one.

        Raises UserError if that fails.
        """
        if self._has_processes:
            await self._running_server()

    async def open(self, seed: int | None = None) -> ToolSession:
        """A session for one sample. Its process starts at the first call that needs it.

        seed: of the random numbers in its process. At most ``max_processes`` sessions have a
        process, so callers must not wait for more than these together before they close some.

        Raises UserError if the server process cannot import the tools.
        """
        await self.prepare()
        return ToolSession(self, seed)

    def close(self) -> None:
        """End all processes. Another call of ``open`` starts them again."""
        with self._server_lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    # For sessions

    def tool(self, name: str) -> _Tool | None:
        return self._tools.get(name)

    @property
    def environment(self) -> Environment | None:
        return self._environment

    @property
    def slots(self) -> asyncio.Semaphore:
        """Limits the processes of sessions in the current event loop."""
        loop = asyncio.get_running_loop()
        return self._slots.setdefault(loop, asyncio.Semaphore(self._max_processes))

    async def start_process(self) -> ProcessClient:
        """Raises ToolError if there cannot be another process."""
        server = await self._running_server()
        try:
            return await ProcessClient.connect(server)
        except OSError as error:  # it has just ended, or too many files are open
            raise ToolError(f"no process for the tool: {describe_error(error)}", "lost") from error

    def start_thread(self) -> ThreadClient:
        """Raises ToolError if too many threads have not returned."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise ToolError(
                f"not called, because {len(self._abandoned)} earlier calls have not returned",
                "timeout",
            )
        functions = {
            t.name: t.function
            for t in self._tools.values()
            if t.is_local and not self._is_of_environment(t)
        }
        environment = self._environment
        factory = environment.factory if environment and environment.is_local else None
        return ThreadClient(ToolWorker(functions, factory, self.max_output), self._abandoned)

    @property
    def _has_processes(self) -> bool:
        return any(not tool.is_local for tool in self._tools.values()) or (
            self._environment is not None and not self._environment.is_local
        )

    async def _running_server(self) -> _ServerProcess:
        server = self._server
        if server is None or not server.is_ready or not server.is_running:
            self.start()
            server = self._server
            assert server is not None
            await asyncio.to_thread(server.wait)
        return server

    def _server_settings(self) -> dict[str, Any]:
        environment = self._environment
        return {
            "functions": {
                t.name: t.target
                for t in self._tools.values()
                if not t.is_local and not self._is_of_environment(t)
            },
            "environment": environment.target if environment and not environment.is_local else None,
            "max_output": self.max_output,
            "where": self.where,
        }


class ToolSession:
    """The tools of one sample. Its calls run one after the other. Not for use in two event loops.

    After a timeout, or when its process has ended, a session of functions gets another process at
    the next call. A session with an environment has lost its state: further calls give the error
    ``lost``, and ``reward`` raises ToolError.
    """

    def __init__(self, tools: Tools, seed: int | None) -> None:
        self._tools, self._seed = tools, seed
        self._clients: dict[bool, ProcessClient | ThreadClient] = {}
        self._lock = asyncio.Lock()
        self._lost = ""
        self._is_closed = False

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Reset the environment with the columns of a row that its ``reset`` takes. Returns its
        text, which belongs to the end of the last message of the user; None without environment.

        Raises ToolError if that fails: the sample cannot be continued.
        """
        environment = self._tools.environment
        if environment is None:
            return None
        message = {"kind": "reset", "row": environment.reset_columns(row)}
        return (await self._ask_environment(message, "reset"))["text"]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Never raises for what the tool does, or for a call that is wrong: the text
        of the result says what happened.
        """
        tool = self._tools.tool(str(name))
        if tool is None:
            names = ", ".join(self._tools.names) or "none"
            text = f"Error: there is no tool {truncate(str(name))!r}; the tools are: {names}"
            return ToolResult(text, "unknown_tool")
        problem = tool.argument_problem(arguments)
        if problem is None:
            message = {"kind": "call", "name": name, "arguments": dict(arguments)}
            encoded = attempt(partial(json.dumps, message))
            problem = describe_error(encoded.error) if isinstance(encoded, Raised) else None
        else:
            message = {}
        if problem is not None:
            return ToolResult(f"Error: {problem}", "arguments")
        start = time.perf_counter()
        try:
            reply = await self._ask(tool.is_local, message)
        except ToolError as error:
            return ToolResult(f"Error: {error}", error.kind, seconds=time.perf_counter() - start)
        seconds = time.perf_counter() - start
        if "error" in reply:
            text = f"Error: {reply['error']}"
            return ToolResult(text, "exception", reply["is_cut"], seconds, reply["detail"])
        return ToolResult(reply["text"], "", reply["is_cut"], seconds)

    async def reward(self, method: RewardMethod = "get_reward") -> float:
        """What a method of the environment returns.

        Raises ToolError if it fails, does not return a finite number, or the state is lost: then
        the sample has no score.
        """
        return (await self._ask_environment({"kind": "reward", "name": method}, method))["value"]

    async def close(self) -> None:
        """Call the environment's ``close``, if it has one, and end the process of the session.

        An error in ``close`` is printed to the standard error and changes nothing.
        """
        if self._is_closed:
            return
        environment = self._tools.environment
        try:
            if environment and environment.has_close and environment.is_local in self._clients:
                with contextlib.suppress(ToolError):
                    await self._ask(environment.is_local, {"kind": "close"})
        finally:
            self._is_closed = True
            for is_local in list(self._clients):
                self._end(is_local)

    async def _ask_environment(self, message: Message, method: str) -> dict[str, Any]:
        environment = self._tools.environment
        assert environment is not None
        try:
            reply = await self._ask(environment.is_local, message)
        except ToolError as error:
            raise ToolError(f"{environment.target}.{method}: {error}", error.kind) from None
        if "error" in reply:
            place = f" ({reply['detail']})" if reply["detail"] else ""
            raise ToolError(
                f"{environment.target}.{method} raised {truncate(reply['error'])}{place}",
                detail=reply["detail"],
            )
        return reply

    async def _ask(self, is_local: bool, message: Message) -> dict[str, Any]:
        """The reply of a process or thread. Raises ToolError if there is none."""
        async with self._lock:
            if self._is_closed:
                raise RuntimeError("the session of the tools is closed")
            if self._lost:
                raise ToolError(f"the state of the environment is lost: {self._lost}", "lost")
            client = self._clients.get(is_local)
            if client is None:
                client = await self._start(is_local)
                message = {**message, "seed": self._seed}
            reply = None
            problem = "the call was cancelled"
            try:
                reply = await client.ask(json.dumps(message).encode() + b"\n", self._tools.timeout)
                return reply
            except TimeoutError:
                problem = f"no result within {self._tools.timeout:g} s"
                raise ToolError(problem, "timeout") from None
            except (OSError, EOFError, ValueError):
                problem = "the process of the tool ended before the call returned"
                raise ToolError(problem, "lost") from None
            finally:
                if reply is None:
                    self._end(is_local)
                    environment = self._tools.environment
                    if environment is not None and environment.is_local == is_local:
                        self._lost = problem

    async def _start(self, is_local: bool) -> ProcessClient | ThreadClient:
        if is_local:
            client = self._clients[is_local] = self._tools.start_thread()
            return client
        slots = self._tools.slots
        await slots.acquire()
        try:
            client = self._clients[is_local] = await self._tools.start_process()
        finally:
            if is_local not in self._clients:
                slots.release()
        return client

    def _end(self, is_local: bool) -> None:
        client = self._clients.pop(is_local, None)
        if client is not None:
            client.end()
            if not is_local:
                self._tools.slots.release()


# Tools and environments


class Environment:
    """An environment: its tools, and what else its class has.

    Raises UserError if it does not exist, needs arguments, or has no ``reset``.
    """

    def __init__(self, target: str, where: str) -> None:
        self.target, place = target, f"{where}.environment"
        self.factory: Any = load_object(target, place, "environment")
        self.is_local = _is_local(target)
        if not callable(self.factory):
            raise UserError(
                f"{target} is of type {type(self.factory).__name__}, not a class",
                code="environment-not-callable",
                where=f"{place}: {target}",
                fix="use a class, or a function that returns an instance of one",
            )
        self._check_arguments(place)
        cls = self._class(place)
        reset = inspect.getattr_static(cls, "reset", None)
        if not inspect.isfunction(reset):
            raise UserError(
                f"the environment {cls.__name__} has no method reset",
                code="environment-reset-missing",
                where=f"{place}: {target}",
                fix="define `def reset(self, **row)`, which is called at the start of each sample",
            )
        self._reset_parameters = _parameters(reset, is_method=True)
        self.has_reward = callable(getattr(cls, "get_reward", None))
        self.has_turn_reward = callable(getattr(cls, "get_turn_reward", None))
        self.has_close = callable(getattr(cls, "close", None))
        self.is_replayable = bool(getattr(cls, "replayable", True))
        self.tools = [
            _make_tool(
                function,
                f"{target}.{name}",
                self.is_local,
                place,
                is_method=not isinstance(inspect.getattr_static(cls, name), staticmethod),
            )
            for name, function in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in RESERVED
        ]

    def reset_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that ``reset`` takes. Raises ToolError if one is missing or not JSON."""
        unknown, missing = _unmatched(self._reset_parameters, row)
        if missing:
            raise ToolError(
                f"{self.target}.reset reads the column {missing[0]!r}, which the row does not have "
                f"(columns: {', '.join(row) or 'none'})"
            )
        columns = {name: value for name, value in row.items() if name not in unknown}
        for name, value in columns.items():
            if isinstance(encoded := attempt(partial(json.dumps, value)), Raised):
                raise ToolError(
                    f"{self.target}.reset cannot receive the column {name!r} "
                    f"({truncate(describe_error(encoded.error))}); use only text, numbers, lists "
                    "and dictionaries"
                )
        return columns

    def _check_arguments(self, place: str) -> None:
        signature = attempt(partial(inspect.signature, self.factory))
        if isinstance(signature, Raised):  # written in C
            return
        _, missing = _unmatched([*signature.parameters.values()], {})
        if missing:
            raise UserError(
                f"the environment {self.target} needs the argument {missing[0]!r}",
                code="environment-arguments",
                where=f"{place}: {self.target}",
                fix="name a function without arguments that creates the environment, or give the "
                "argument a default",
            )

    def _class(self, place: str) -> type:
        """The class of the instances; creates one only if nothing else names its class."""
        inner = self.factory
        while isinstance(inner, partial):
            inner = cast(Any, inner).func
        if inspect.isclass(inner):
            return inner
        hints = attempt(partial(inspect.signature, inner, eval_str=True))
        result = inspect.Signature.empty if isinstance(hints, Raised) else hints.return_annotation
        if inspect.isclass(result) and result is not inspect.Signature.empty:
            return result
        with restored_working_directory():
            instance = attempt(self.factory)
        if isinstance(instance, Raised):
            raise UserError(
                f"{self.target} {truncate(describe_raised(instance.error, __file__))}",
                code="environment-failed",
                where=f"{place}: {self.target}",
                fix="fix the function, or annotate it with the class that it returns",
            ) from instance.error
        close = getattr(instance, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            attempt(close)
        return type(instance)


def _is_local(target: str) -> bool:
    return target.partition(":")[0] == REGISTERED


def _function_tool(target: str, where: str) -> _Tool:
    function = load_function(target, where, "tool")
    return _make_tool(function, target, _is_local(target), where)


def _make_tool(
    function: Callable[..., Any],
    target: str,
    is_local: bool,
    where: str,
    *,
    is_method: bool = False,
) -> _Tool:
    """Raises UserError if a function has no JSON schema."""
    from transformers.utils.chat_template_utils import get_json_schema  # loads torch

    place = definition_place(function) or target
    name = getattr(function, "__name__", None)
    schema = attempt(partial(get_json_schema, function))
    if isinstance(schema, Raised) or name is None:
        problem = truncate(describe_error(schema.error)) if isinstance(schema, Raised) else place
        raise UserError(
            f"the tool {target} ({place}) has no JSON schema: {problem}",
            code="tool-schema",
            where=f"{where}: {target}",
            fix="define it with `def` or `async def`, give each parameter a type hint, and "
            "describe each one under `Args:` in a Google-style docstring",
        )
    parameters = _parameters(function, is_method)
    unnamed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if unnamed:
        raise UserError(
            f"the parameter {unnamed[0].name!r} of the tool {target} ({place}) cannot be passed by "
            "name",
            code="tool-schema",
            where=f"{where}: {target}",
            fix="define it as an ordinary parameter: models pass arguments by name",
        )
    return _Tool(name, target, function, is_local, schema, parameters)


def _parameters(function: Callable[..., Any], is_method: bool) -> tuple[inspect.Parameter, ...]:
    parameters = tuple(inspect.signature(function).parameters.values())
    return parameters[1:] if is_method else parameters


def _sources(function: Any, target: str) -> dict[str, Any]:
    """The import path of a function or class, with the digests of its file and of those that it
    imports.
    """
    members: list[Any] = [function]
    if inspect.isclass(function):
        members = [member for _, member in inspect.getmembers(function, inspect.isfunction)]
    sources = None if _is_local(target) else function_sources(unwrap(function), target)
    return {"function": target, **(sources or {"source": code_digest(members)})}


# Processes and threads


@dataclass(eq=False)
class _ServerProcess:
    """The process that forks one for each session. Starts at once."""

    settings: Mapping[str, Any]
    folder: str
    is_ready: bool = False
    _error: UserError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._control, other = socket.socketpair()
        code = START.format(path=sys.path, file=str(PROCESS))
        arguments = [str(other.fileno()), json.dumps(self.settings)]
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what tools print must not mix with the output of the run
                pass_fds=(other.fileno(),),
                start_new_session=True,
                cwd=self.folder,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> None:
        """Block until the modules of the tools are imported. Raises UserError if that fails."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.is_ready:
                return
            self._control.settimeout(START_SECONDS)
            try:
                with self._control.makefile("rb") as replies:
                    line = replies.readline()
            except TimeoutError:
                line = b""
            facts = json.loads(line) if line else {}
            if line and "error" not in facts:
                self.is_ready = True
                return
            self._error = UserError(**facts["error"]) if line else self._not_started()
        self.close()
        raise self._error

    def _not_started(self) -> UserError:
        return UserError(
            "the process that runs the tools ended, or did not start within "
            f"{START_SECONDS:g} s, while it imported their modules",
            code="tools-process-failed",
            where=self.settings["where"],
            fix="read its output above, and import the modules of the tools in another process",
        )

    def connect(self) -> socket.socket:
        """A connection to a new process. Raises OSError if the server has ended."""
        connection, other = socket.socketpair()
        with other:
            try:
                socket.send_fds(self._control, [b"."], [other.fileno()])
            except OSError:
                connection.close()
                raise
        return connection

    def close(self) -> None:
        """End the server and its children."""
        with contextlib.suppress(OSError):
            # also if a process that this one has forked holds a copy of the socket
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(eq=False)
class ProcessClient:
    """The connection of a session to its process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, server: _ServerProcess) -> ProcessClient:
        connection = server.connect()
        return cls(*await asyncio.open_connection(sock=connection, limit=MAX_REPLY_BYTES))

    async def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The reply to a message. Raises TimeoutError, and EOFError when the process has ended."""
        self.writer.write(line)
        try:
            async with asyncio.timeout(seconds):
                await self.writer.drain()
                reply = await self.reader.readline()
        except TimeoutError:
            async with asyncio.timeout(GRACE_SECONDS):
                reply = await self.reader.readline()
        if not reply.endswith(b"\n"):
            raise EOFError
        return json.loads(reply)

    def end(self) -> None:
        """Close the connection; the server kills the process."""
        with contextlib.suppress(OSError):
            # also if a process that this one has forked holds a copy of the socket
            self.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.writer.transport.abort()


class ThreadClient:
    """A thread that runs tools which no import finds. abandoned: receives it if it does not end."""

    def __init__(self, worker: ToolWorker, abandoned: list[threading.Thread]) -> None:
        self._worker, self._abandoned = worker, abandoned
        self._loop = asyncio.get_running_loop()
        self._messages = queue.SimpleQueue[tuple[bytes, asyncio.Future[bytes]] | None]()
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="valence tools", daemon=True)
        self._thread.start()

    async def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The reply to a message. Raises TimeoutError."""
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._is_busy = True
        self._messages.put((line, reply))
        await asyncio.wait({reply}, timeout=seconds)
        if not reply.done():
            raise TimeoutError
        self._is_busy = False
        return json.loads(reply.result())

    def end(self) -> None:
        """End the thread, or abandon it if a call has not returned."""
        self._messages.put(None)
        self._worker.stop()
        if self._is_busy:
            self._abandoned.append(self._thread)

    def _run(self) -> None:
        separate_working_directory()
        while (request := self._messages.get()) is not None:
            line, reply = request
            # decoded here: a tool must not change objects of the run
            message = json.loads(line)
            with restored_working_directory():
                result = json.dumps(self._worker.handle(message)).encode()
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(_deliver, reply, result)


def _deliver(reply: asyncio.Future[bytes], result: bytes) -> None:
    if not reply.done():
        reply.set_result(result)
