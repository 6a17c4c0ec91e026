"""Tools and environments: their schemas, their processes, and what a sample gets when one fails."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.errors import raises_error
from tests.rewards.kit import skip_if_threads_share_a_folder
from valence.rollouts import tools as tools_module
from valence.rollouts.tools import ToolError, ToolResult, Tools, ToolSession
from valence.user_code.load import target_of

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
FUNCTIONS = '''
import asyncio, json, os, subprocess, sys, threading, time

LOADED_BY = os.getpid()
calls = []

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

async def add_later(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0)
    return a + b

add_later.replayable = False

def options(**values: int) -> dict:
    """Return the arguments.

    Args:
        values: Any values.
    """
    return values

def show(kind: str):
    """Return a value of a kind.

    Args:
        kind: The kind.
    """
    print("printed by a tool", kind)
    return {
        "text": "a\\n\\u00e9\\ud83d", "dict": {"a": [1, None, "\\u00e9"]}, "none": None, "set": {1},
        "long": "x" * 20_000, "nan": float("nan"),
    }[kind]

def fail(failure: str) -> str:
    """Fail.

    Args:
        failure: In which way.
    """
    if failure == "loop":
        while True:
            pass
    elif failure == "sleep":
        time.sleep(600)
    elif failure == "exit":
        os._exit(0)
    elif failure == "abort":
        os.abort()
    elif failure == "SystemExit":
        sys.exit("bye")
    elif failure == "long":
        raise ValueError("x" * 20_000)
    elif failure == "unprintable":
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError
        raise Odd
    return json.loads("{")

async def fail_later(failure: str) -> str:
    """Fail.

    Args:
        failure: In which way.
    """
    if failure == "SystemExit":
        sys.exit("bye")
    await asyncio.sleep(600)

def facts() -> dict:
    """Return facts about the process."""
    calls.append(None)
    return {
        "pid": os.getpid(), "parent": os.getppid(), "loaded_by": LOADED_BY, "calls": len(calls),
        "folder": os.getcwd(), "modules": sorted(sys.modules), "threads": threading.active_count(),
    }

def start_process() -> int:
    """Start a process that lives longer."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

def run_loop() -> int:
    """Run an event loop, as wrappers of asynchronous clients do."""
    return asyncio.run(add_later(1, 2))

def priority() -> int:
    """Return the priority to be ended when memory runs out."""
    return int(open("/proc/self/oom_score_adj").read())

def draw() -> float:
    """Draw a random number."""
    import random
    return random.random()

def wait_for_file(path: str) -> str:
    """Wait until a file exists.

    Args:
        path: The path of the file.
    """
    while not os.path.exists(path):
        time.sleep(0.005)
    return path

def positional(a: int, /) -> int:
    """Return a number.

    Args:
        a: The number.
    """

def undocumented(a: int) -> int:
    return a

def untyped(a) -> int:
    """Return a number.

    Args:
        a: The number.
    """

number = 3
'''
ENVIRONMENTS = '''
import asyncio, os, sys, time

class Counter:
    """As written for TRL."""

    limit = 5

    def __init__(self):
        self.value = None
        self._private = 0

    def reset(self, **kwargs) -> str | None:
        self.value = kwargs["start"]
        self.columns = sorted(kwargs)
        return None if kwargs.get("quiet") else f" Starts at {self.value}."

    def increment(self, step: int) -> str:
        """Increment the counter.

        Args:
            step: The number to add.

        Returns:
            The new value.
        """
        self.value += step
        return f"now {self.value}"

    def break_down(self, failure: str) -> str:
        """Break down.

        Args:
            failure: In which way.
        """
        if failure == "exit":
            os._exit(1)
        if failure == "loop":
            while True:
                pass
        raise RuntimeError("broken")

    @staticmethod
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    def _helper(self): ...

    @property
    def problem(self):
        raise AssertionError("properties are not read")

    def get_reward(self) -> float:
        return self.value / 10

    def close(self) -> None:
        if "log" in self.columns:
            print("closed", self.value)

class Asynchronous:
    async def reset(self, path: str = "") -> str:
        self.loop = asyncio.get_running_loop()
        self.path, self.ticks = path, 0
        self.task = asyncio.create_task(self._tick())
        return " Ready."

    async def _tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)

    async def get_ticks(self) -> int:
        """Get the number of ticks."""
        assert asyncio.get_running_loop() is self.loop
        return self.ticks

    async def get_reward(self) -> float:
        return 0.5

    async def close(self) -> None:
        self.task.cancel()
        open(self.path, "w").close()

class Reward(Counter):
    def get_reward(self):
        return {"nan": float("nan"), "text": "1", "none": None, "true": True}[self.value]

class BadReset(Counter):
    def reset(self, failure, **row):
        if failure == "number":
            return 3
        if failure == "exit":
            os._exit(3)
        raise RuntimeError("no reset")

class NeedsArgument(Counter):
    def __init__(self, size):
        pass

class NoReset:
    pass

class SlowStart(Counter):
    def __init__(self):
        time.sleep(600)

class BadClose(Counter):
    def close(self):
        raise RuntimeError("not closed")

def create() -> Counter:
    return Counter()

def create_without_annotation():
    return Counter()

def create_badly():
    raise RuntimeError("cannot create")
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with tools, in the current folder, whose name no other test uses."""
    monkeypatch.chdir(tmp_path)
    name = f"tools_{os.getpid()}_{time.monotonic_ns()}"
    Path(f"{name}.py").write_text(FUNCTIONS + ENVIRONMENTS)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def make(module: str) -> Iterator[Callable[..., Tools]]:
    """Tools by the names of objects in the module."""
    created: list[Tools] = []

    def create(*names: str, environment: str | None = None, **settings: Any) -> Tools:
        environment = environment and f"{module}:{environment}"
        created.append(Tools([f"{module}:{name}" for name in names], environment, **settings))
        return created[-1]

    yield create
    for tools in created:
        tools.close()


def in_session(tools: Tools, use: Callable[[ToolSession], Awaitable[T]]) -> T:
    async def run() -> T:
        async with await tools.open() as session:
            return await use(session)

    return asyncio.run(run())


def call(tools: Tools, name: str, **arguments: Any) -> ToolResult:
    return in_session(tools, lambda session: session.call(name, arguments))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc").is_dir()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Schemas


def test_schemas_are_those_of_transformers(make: Callable[..., Tools]) -> None:
    tools = make("add", "add_later", environment="Counter")
    assert tools.names == ["add", "add_later", "break_down", "double", "increment"]
    assert tools.schemas[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }
    properties = tools.schemas[-1]["function"]["parameters"]["properties"]
    assert list(properties) == ["step"]
    assert tools.has_environment
    assert tools.has_reward
    assert not make("add").has_environment
    assert not make("add").has_reward


def test_schemas_are_made_without_a_process(make: Callable[..., Tools]) -> None:
    tools = make("add", environment="SlowStart")
    assert tools._server is None


@pytest.mark.parametrize("name", ["undocumented", "untyped", "positional"])
def test_a_function_without_schema_is_an_error(make: Callable[..., Tools], name: str) -> None:
    with raises_error("tool-schema", where="rollout.tools: tools_", fix="") as raised:
        make(name)
    assert name in str(raised.error)
    assert ".py:" in raised.error.message


def test_mistakes_in_the_recipe_are_errors(make: Callable[..., Tools], module: str) -> None:
    with raises_error("tool-not-found", where="rollout.tools", fix="did you mean add"):
        make("adds")
    with raises_error("tool-not-callable"):
        make("number")
    with raises_error("tool-not-callable"):
        make("Counter")
    with raises_error("tool-duplicate", fix="rename"):
        make("add", "add")
    with raises_error("environment-not-found", where="rollout.environment"):
        make(environment="Countr")
    with raises_error("environment-not-callable"):
        make(environment="number")
    with raises_error("environment-arguments") as raised:
        make(environment="NeedsArgument")
    assert "'size'" in raised.error.message
    with raises_error("environment-reset-missing"):
        make(environment="NoReset")
    with raises_error("environment-failed") as raised:
        make(environment="create_badly")
    assert f"cannot create ({module}.py:" in raised.error.message


def test_a_duplicate_of_a_method_is_an_error(
    make: Callable[..., Tools], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("more_tools.py").write_text(
        'def increment(step: int) -> int:\n    """Increment.\n\n    Args:\n        step: A step.\n'
        '    """\n'
    )
    tools = make(environment="Counter")
    assert tools.environment is not None
    with raises_error("tool-duplicate"):
        Tools(["more_tools:increment"], tools.environment.target)


def test_a_module_with_a_syntax_error_is_an_error(make: Callable[..., Tools]) -> None:
    Path("broken_tools.py").write_text("x = 1\ndef f(:\n")
    with raises_error("tool-import-failed", where="rollout.tools: broken_tools:f") as raised:
        Tools(["broken_tools:f"])
    assert "broken_tools.py:2" in raised.error.message
    with raises_error("environment-module-not-found", where="rollout.environment"):
        Tools([], "no_such_tools:Class")


def test_a_module_that_only_the_server_cannot_import_is_an_error(
    make: Callable[..., Tools], module: str
) -> None:
    tools = make("add")
    Path(f"{module}.py").write_text("1 / 0\n")
    with raises_error("tool-import-failed") as raised:
        asyncio.run(tools.open())
    assert f"{module}.py:1: ZeroDivisionError" in raised.error.message
    Path(f"{module}.py").write_text("import os\nos._exit(3)\n")
    with raises_error("tools-process-failed", where="rollout", fix="read its output"):
        asyncio.run(tools.open())
    Path(f"{module}.py").write_text(FUNCTIONS)
    assert call(tools, "add", a=1).text == "2"


def test_windows_is_an_error(make: Callable[..., Tools], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(str(tools_module.PROCESS))  # can be imported
    with raises_error("tools-platform", where="rollout", fix="Linux"):
        make("add")


def test_identity_changes_with_the_sources(make: Callable[..., Tools], module: str) -> None:
    identity = make("add", environment="Counter").identity
    assert json.loads(json.dumps(identity)) == identity
    assert identity["environment"]["function"] == f"{module}:Counter"
    assert make("add", environment="Counter").identity == identity
    del sys.modules[module]
    Path(f"{module}.py").write_text(FUNCTIONS + ENVIRONMENTS + "x = 1\n")
    changed = make("add", environment="Counter").identity
    assert changed["tools"] != identity["tools"]
    assert changed["environment"] != identity["environment"]


# Functions


def test_functions_say_that_they_cannot_be_replayed(
    make: Callable[..., Tools], module: str
) -> None:
    assert make("add", "add_later").not_replayable == [f"{module}:add_later"]
    assert not make("add").not_replayable


def test_functions_are_called_in_a_process(
    make: Callable[..., Tools], capfd: pytest.CaptureFixture[str]
) -> None:
    tools = make("add", "add_later", "options", "show", "facts", "run_loop")

    async def use(session: ToolSession) -> None:
        assert await session.reset({"prompt": "a"}) is None
        assert (await session.call("add", {"a": 2, "b": 3})).text == "5"
        assert (await session.call("add", {"a": 2})).text == "3"
        assert (await session.call("add_later", {"a": 2, "b": 3})).text == "5"
        assert (await session.call("run_loop", {})).text == "3"
        assert (await session.call("options", {"x": 1, "y": 2})).text == '{"x": 1, "y": 2}'
        texts = [await session.call("show", {"kind": kind}) for kind in ("text", "dict", "none")]
        assert [r.text for r in texts] == ["a\né?", '{"a": [1, null, "é"]}', "null"]
        texts = [await session.call("show", {"kind": kind}) for kind in ("set", "nan")]
        assert [r.text for r in texts] == ["{1}", "NaN"]
        facts = json.loads((await session.call("facts", {})).text)
        again = json.loads((await session.call("facts", {})).text)
        assert facts["pid"] == again["pid"] != os.getpid()
        assert again["calls"] == 2
        assert facts["parent"] == facts["loaded_by"]  # imported once, in the server
        assert facts["folder"] == os.getcwd()
        assert not {"torch", "transformers", "numpy", "valence.rollouts"} & {*facts["modules"]}

    in_session(tools, use)
    output = capfd.readouterr()
    assert output.out == ""
    assert "printed by a tool dict" in output.err


def test_long_results_are_cut(make: Callable[..., Tools]) -> None:
    tools = make("show", "fail", max_output=100)
    result = call(tools, "show", kind="long")
    assert result.is_cut
    assert result.error == ""
    assert result.text == "x" * 100 + "\n[cut: 19900 more characters]"
    result = call(tools, "fail", failure="long")
    assert result.is_cut
    assert len(result.text) < 200
    assert not call(tools, "show", kind="set").is_cut


def test_wrong_calls_are_explained(make: Callable[..., Tools]) -> None:
    tools = make("add", environment="Counter")

    async def use(session: ToolSession) -> list[ToolResult]:
        wrong: Any = ["no", "object"]
        return [
            await session.call("ad", {}),
            await session.call("_helper", {}),
            await session.call("get_reward", {}),
            await session.call("add", {}),
            await session.call("add", {"a": 1, "c": 2}),
            await session.call("increment", {"self": 1}),
            await session.call("add", wrong),
        ]

    results = in_session(tools, use)
    unknown, helper, reward, missing, unexpected, method, listed = results
    names = "the tools are: add, break_down, double, increment"
    assert unknown == ToolResult(f"Error: there is no tool 'ad'; {names}", "unknown_tool")
    assert helper.error == reward.error == "unknown_tool"
    assert missing.text == "Error: the argument 'a' of add is missing; call it as add(a, b=1)"
    assert "add has no argument 'c'; call it as" in unexpected.text
    assert "no argument 'self'; the argument 'step' of increment is missing" in method.text
    assert "call it as add(a, b=1)" in listed.text
    assert {r.error for r in results[3:]} == {"arguments"}


def test_exceptions_are_results(make: Callable[..., Tools], module: str) -> None:
    tools = make("fail", "fail_later", "add")
    line = next(n for n, t in enumerate(FUNCTIONS.splitlines(), 1) if "json.loads" in t)
    result = call(tools, "fail", failure="json")
    assert result.error == "exception"
    assert result.text.startswith("Error: JSONDecodeError: ")
    assert "Traceback" not in result.text
    assert result.detail == f"{module}.py:{line}"
    assert call(tools, "fail", failure="SystemExit").text == "Error: SystemExit: bye"
    assert call(tools, "fail_later", failure="SystemExit").text == "Error: SystemExit: bye"
    assert call(tools, "fail", failure="unprintable").text == "Error: Odd: <Odd without text>"
    assert call(tools, "add", a="x").text.startswith("Error: TypeError: ")


@pytest.mark.parametrize(
    ("name", "failure"), [("fail", "loop"), ("fail", "sleep"), ("fail_later", "sleep")]
)
def test_a_timeout_ends_the_process(make: Callable[..., Tools], name: str, failure: str) -> None:
    tools = make("fail", "fail_later", "facts")

    async def use(session: ToolSession) -> None:
        pid = json.loads((await session.call("facts", {})).text)["pid"]
        tools.timeout = 0.3
        result = await session.call(name, {"failure": failure})
        assert (result.error, result.text) == ("timeout", "Error: no result within 0.3 s")
        assert result.seconds >= 0.3
        wait_until(lambda: not is_running(pid))
        tools.timeout = 30
        facts = json.loads((await session.call("facts", {})).text)
        assert (facts["pid"] != pid, facts["calls"]) == (True, 1)

    in_session(tools, use)


@pytest.mark.parametrize("failure", ["exit", "abort"])
def test_a_crash_ends_one_process(make: Callable[..., Tools], failure: str) -> None:
    tools = make("fail", "add")

    async def run() -> None:
        async with await tools.open() as session, await tools.open() as other:
            assert (await other.call("add", {"a": 1})).text == "2"
            result = await session.call("fail", {"failure": failure})
            assert result.error == "lost"
            assert "ended before the call returned" in result.text
            assert (await session.call("add", {"a": 1})).text == "2"
            assert (await other.call("add", {"a": 1})).text == "2"

    asyncio.run(run())


def test_a_reply_that_the_event_loop_reads_late_counts(make: Callable[..., Tools]) -> None:
    tools = make("add")

    async def use(session: ToolSession) -> None:
        await session.call("add", {"a": 1})
        tools.timeout = 0.2
        pending = asyncio.create_task(session.call("add", {"a": 1}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)  # as if a model generated in this thread
        client = session._clients[False]
        assert isinstance(client, tools_module.ProcessClient)
        connection = client.writer.get_extra_info("socket")
        assert select.select([connection.fileno()], [], [], 30)[0]
        assert (await pending).text == "2"

    in_session(tools, use)


def test_a_cancelled_call_does_not_answer_the_next_one(make: Callable[..., Tools]) -> None:
    tools = make("wait_for_file", "add")

    async def use(session: ToolSession) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.call("wait_for_file", {"path": "never"})
        assert (await session.call("add", {"a": 1})).text == "2"

    in_session(tools, use)


def test_processes_that_a_tool_starts_end_with_the_session(make: Callable[..., Tools]) -> None:
    tools = make("start_process")
    pid = int(call(tools, "start_process").text)
    wait_until(lambda: not is_running(pid))


def test_a_slow_tool_does_not_delay_other_sessions(make: Callable[..., Tools]) -> None:
    tools = make("wait_for_file", "add")
    events: list[str] = []

    async def slow() -> None:
        async with await tools.open() as session:
            events.append("slow starts")
            assert (await session.call("wait_for_file", {"path": "ready"})).error == ""
            events.append("slow ends")

    async def quick(number: int) -> None:
        async with await tools.open() as session:
            assert (await session.call("add", {"a": number})).text == str(number + 1)
            events.append("quick")

    async def run() -> None:
        waiting = asyncio.create_task(slow())
        while not events:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(quick(i) for i in range(10)))
        Path("ready").touch()
        await waiting

    asyncio.run(run())
    assert events == ["slow starts", *["quick"] * 10, "slow ends"]


def test_random_numbers_differ_between_sessions_unless_seeded(make: Callable[..., Tools]) -> None:
    tools = make("draw")

    async def draw(seed: int | None) -> str:
        async with await tools.open(seed) as session:
            return (await session.call("draw", {})).text

    async def run() -> list[str]:
        return [await draw(seed) for seed in (None, None, 1, 1, 2)]

    first, second, third, fourth, fifth = asyncio.run(run())
    assert len({first, second, third, fifth}) == 4
    assert third == fourth


def test_the_number_of_processes_is_limited(make: Callable[..., Tools]) -> None:
    tools = make("facts", max_processes=2)

    async def run() -> None:
        first, second, third = [await tools.open() for _ in range(3)]
        for session in (first, second):
            assert (await session.call("facts", {})).error == ""
        pending = asyncio.create_task(third.call("facts", {}))
        await asyncio.sleep(0.1)
        assert not pending.done()
        await first.close()
        assert (await pending).error == ""
        await second.close()
        await third.close()
        with pytest.raises(RuntimeError, match="closed"):
            await first.call("facts", {})

    asyncio.run(run())
    asyncio.run(run())  # in another event loop


# Environments


def test_an_environment_as_written_for_trl(
    make: Callable[..., Tools], capfd: pytest.CaptureFixture[str]
) -> None:
    tools = make("add", environment="Counter")
    row = {"prompt": [{"role": "user", "content": "Count."}], "start": 1, "log": True}

    async def use(session: ToolSession) -> None:
        assert await session.reset(row) == " Starts at 1."
        assert (await session.call("increment", {"step": 2})).text == "now 3"
        assert (await session.call("add", {"a": 2})).text == "3"
        assert (await session.call("double", {"number": 2})).text == "4"
        result = await session.call("break_down", {"failure": "raise"})
        assert (result.error, result.text) == ("exception", "Error: RuntimeError: broken")
        assert (await session.call("increment", {"step": 1})).text == "now 4"
        assert await session.reward() == 0.4
        assert await session.reset({**row, "start": 0, "quiet": True}) is None
        assert await session.reward() == 0.0

    in_session(tools, use)
    assert "closed 0" in capfd.readouterr().err


@pytest.mark.parametrize("environment", ["create", "create_without_annotation"])
def test_an_environment_from_a_function(make: Callable[..., Tools], environment: str) -> None:
    tools = make(environment=environment)
    assert "increment" in tools.names

    async def use(session: ToolSession) -> float | None:
        await session.reset({"start": 5})
        return await session.reward()

    assert in_session(tools, use) == 0.5


def test_asynchronous_environments_keep_their_event_loop(make: Callable[..., Tools]) -> None:
    tools = make(environment="Asynchronous")

    async def use(session: ToolSession) -> None:
        row = {"path": os.path.abspath("closed"), "not a parameter": 1}
        assert await session.reset(row) == " Ready."
        before = int((await session.call("get_ticks", {})).text)
        wait_until(lambda: Path("closed").parent.is_dir())
        await asyncio.sleep(0.1)
        assert int((await session.call("get_ticks", {})).text) > before + 1
        assert await session.reward() == 0.5

    in_session(tools, use)
    assert Path("closed").exists()


def test_states_of_sessions_are_separate(make: Callable[..., Tools]) -> None:
    tools = make(environment="Counter")

    async def sample(number: int) -> float | None:
        async with await tools.open() as session:
            await session.reset({"start": number})
            for _ in range(3):
                await asyncio.sleep(0)
                await session.call("increment", {"step": number})
            return await session.reward()

    async def run() -> list[float | None]:
        return await asyncio.gather(*(sample(i) for i in range(20)))

    assert asyncio.run(run()) == [4 * i / 10 for i in range(20)]


@pytest.mark.parametrize(("failure", "error"), [("exit", "lost"), ("loop", "timeout")])
def test_a_lost_state_has_no_score(make: Callable[..., Tools], failure: str, error: str) -> None:
    tools = make("add", environment="Counter")

    async def use(session: ToolSession) -> None:
        await session.reset({"start": 1})
        tools.timeout = 0.3 if failure == "loop" else 30
        assert (await session.call("break_down", {"failure": failure})).error == error
        result = await session.call("increment", {"step": 1})
        assert result.error == "lost"
        assert "the state of the environment is lost: " in result.text
        assert (await session.call("add", {"a": 1})).error == "lost"
        with pytest.raises(ToolError, match="get_reward: the state") as raised:
            await session.reward()
        assert raised.value.kind == "lost"

    in_session(tools, use)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nan", r"ValueError: get_reward returned nan, which is not finite"),
        ("text", r"TypeError: get_reward returned '1' instead of a number"),
        ("none", r"TypeError: get_reward returned None instead of a number"),
        ("unknown", r"raised KeyError: 'unknown' \(tools_.*\.py:\d+\)"),
    ],
)
def test_a_reward_that_is_no_number_is_an_error(
    make: Callable[..., Tools], value: str, message: str
) -> None:
    tools = make(environment="Reward")

    async def use(session: ToolSession) -> float | None:
        await session.reset({"start": value})
        return await session.reward()

    with pytest.raises(ToolError, match=message):
        in_session(tools, use)


def test_a_failed_reset_is_an_error(make: Callable[..., Tools], module: str) -> None:
    tools = make(environment="BadReset")

    def reset(**row: Any) -> None:
        in_session(tools, lambda session: session.reset(row))

    with pytest.raises(ToolError, match=rf"RuntimeError: no reset \({module}.py:\d+\)"):
        reset(failure="raise")
    with pytest.raises(ToolError, match="returned 3 instead of text or None"):
        reset(failure="number")
    with pytest.raises(ToolError, match="ended before") as raised:
        reset(failure="exit")
    assert raised.value.kind == "lost"
    with pytest.raises(ToolError, match=r"the column 'failure', which the row .*columns: prompt"):
        reset(prompt="a")
    with pytest.raises(ToolError, match="cannot receive the column 'data'"):
        reset(failure="raise", data=b"x")


def test_an_environment_that_does_not_start_in_time(make: Callable[..., Tools]) -> None:
    tools = make(environment="SlowStart", timeout=0.3)
    with pytest.raises(ToolError, match="no result within 0.3 s") as raised:
        in_session(tools, lambda session: session.reset({"start": 1}))
    assert raised.value.kind == "timeout"


def test_an_error_in_close_is_printed(
    make: Callable[..., Tools], capfd: pytest.CaptureFixture[str]
) -> None:
    in_session(make(environment="BadClose"), lambda session: session.reset({"start": 1}))
    assert "RuntimeError: not closed" in capfd.readouterr().err


# Objects from Python


def test_objects_from_python_run_in_threads(make: Callable[..., Tools], module: str) -> None:
    factor = 3
    calls: list[int] = []

    def times(number: int) -> int:
        """Multiply a number.

        Args:
            number: The number.
        """
        calls.append(os.getpid())
        return factor * number

    async def times_later(number: int) -> int:
        """Multiply a number.

        Args:
            number: The number.
        """
        await asyncio.sleep(0)
        return factor * number

    class Box:
        def reset(self, row_value: list[int]) -> str:
            row_value.append(1)
            self.value = row_value
            return f" {row_value}"

        def put(self, number: int) -> list[int]:
            """Put a number.

            Args:
                number: The number.
            """
            self.value.append(number)
            return self.value

        def get_reward(self) -> float:
            return len(self.value)

    targets: list[str] = []
    for value in (times, times_later, Box):
        targets.append(target_of(value, targets))
    assert all(target.startswith("python:") for target in targets)
    tools = Tools([*targets[:2], f"{module}:add"], targets[2])

    async def use(session: ToolSession) -> None:
        row = {"row_value": [5], "other": object()}
        assert await session.reset(row) == " [5, 1]"
        assert row["row_value"] == [5]
        assert (await session.call("times", {"number": 2})).text == "6"
        assert (await session.call("times_later", {"number": 2})).text == "6"
        assert (await session.call("put", {"number": 2})).text == "[5, 1, 2]"
        assert (await session.call("times", {"number": None})).error == "exception"
        assert (await session.call("add", {"a": 1})).text == "2"
        assert await session.reward() == 3.0

    in_session(tools, use)
    assert set(calls) == {os.getpid()}
    tools.close()
    assert len({t["source"] for t in tools.identity["tools"]}) == 3


def test_an_abandoned_thread_does_not_undo_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_if_threads_share_a_folder()
    go_on = threading.Event()

    def hang() -> None:
        """Return late."""
        go_on.wait()
        os.chdir("/usr")

    tools = Tools([target_of(hang)], timeout=0.1)
    try:
        result = in_session(tools, lambda session: session.call("hang", {}))
        assert result.text == "Error: no result within 0.1 s"
        (thread,) = tools._abandoned
        monkeypatch.chdir(tmp_path)
        go_on.set()
        thread.join(30)
        assert os.getcwd() == str(tmp_path)
    finally:
        go_on.set()
        tools.close()


def test_threads_that_do_not_return_are_limited() -> None:
    is_over = False

    def hang() -> None:
        """Do not return."""
        while not is_over:
            time.sleep(0.01)

    async def hang_later() -> None:
        """Do not return."""
        await asyncio.sleep(600)

    tools = Tools([target_of(hang), target_of(hang_later)], timeout=0.1)

    async def use(session: ToolSession) -> None:
        for _ in range(4):  # asynchronous calls can be cancelled
            assert (await session.call("hang_later", {})).text == "Error: no result within 0.1 s"
            wait_until(lambda: not any(thread.is_alive() for thread in tools._abandoned))
        for _ in range(tools_module.MAX_ABANDONED):
            assert (await session.call("hang", {})).text == "Error: no result within 0.1 s"
        result = await session.call("hang", {})
        assert result.error == "timeout"
        assert "not called, because 8 earlier calls have not returned" in result.text

    in_session(tools, use)
    is_over = True


# Processes


RUN = """
import asyncio, json, sys
from valence.rollouts.tools import Tools

async def main():
    tools = Tools([f"{sys.argv[1]}:{name}" for name in ("facts", "fail", "start_process")])
    sessions = [await tools.open() for _ in range(4)]
    facts = [json.loads((await s.call("facts", {})).text) for s in sessions]
    pids = [f["pid"] for f in facts] + [facts[0]["parent"]]
    pids.append(int((await sessions[0].call("start_process", {})).text))
    pairs = zip(sessions[1:], ("loop", "sleep"))
    tasks = [asyncio.create_task(s.call("fail", {"failure": name})) for s, name in pairs]
    await asyncio.sleep(0.2)
    print(json.dumps(pids), flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["run", "server"])
def test_no_process_remains_when_the_run_or_the_server_is_killed(module: str, victim: str) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", RUN, module],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as run:
        assert run.stdout is not None
        pids = json.loads(run.stdout.readline())
        assert len({*pids}) == 6
        assert all(is_running(pid) for pid in pids)
        os.kill(run.pid if victim == "run" else pids[4], signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids))
        run.kill()


def test_another_server_replaces_one_that_was_killed(make: Callable[..., Tools]) -> None:
    tools = make("facts")
    before = json.loads(call(tools, "facts").text)["parent"]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before))
    after = json.loads(call(tools, "facts").text)["parent"]
    assert after != before
    tools.close()
    assert not is_running(after)
    again = json.loads(call(tools, "facts").text)["parent"]
    assert again != after
    tools.close()
    assert not is_running(again)


def test_a_server_that_was_started_before_is_used(make: Callable[..., Tools]) -> None:
    tools = make("facts")
    tools.start()
    server = tools._server
    assert server is not None
    assert json.loads(call(tools, "facts").text)["parent"] == server.process.pid


def test_objects_from_python_start_no_server() -> None:
    def answer() -> bool:
        """Return true."""
        return True

    tools = Tools([target_of(answer)])
    tools.start()
    assert call(tools, "answer").text == "true"
    assert tools._server is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such priority")
def test_linux_ends_tools_first_when_memory_runs_out(make: Callable[..., Tools]) -> None:
    assert call(make("priority"), "priority").text == "1000"


def test_files_of_sessions_are_closed(make: Callable[..., Tools]) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the system does not list open files")
    tools = make("facts")

    def num_files() -> list[int]:
        facts = json.loads(call(tools, "facts").text)
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), facts["parent"])]

    before = num_files()
    for _ in range(10):
        call(tools, "facts")
    # the last process may not have ended, and earlier tests may have left threads that open files
    wait_until(lambda: all(n <= count + 3 for count, n in zip(before, num_files(), strict=True)))


# The examples


def test_the_calculator() -> None:
    names = ("add", "subtract", "multiply")
    tools = Tools([f"examples.tools.calculator:{name}" for name in names])

    async def use(session: ToolSession) -> list[str]:
        return [(await session.call(name, {"a": 6, "b": 7})).text for name in names]

    assert in_session(tools, use) == ["13", "-1", "42"]
    tools.close()


def test_the_file_system() -> None:
    tools = Tools([], "examples.tools.files:FileSystem")
    row = {"prompt": "Copy a to b.", "files": {"a": "1"}, "goal": {"a": "1", "b": "1"}}

    async def use(session: ToolSession) -> None:
        assert await session.reset(row) == "\n\nThere are 1 files."
        assert (await session.call("list_files", {})).text == '["a"]'
        assert (await session.call("read_file", {"path": "a"})).text == "1"
        assert (await session.call("read_file", {"path": "c"})).text.startswith("Error: FileNotF")
        assert await session.reward() == 0.5
        assert (await session.call("write_file", {"path": "b", "content": "1"})).error == ""
        assert await session.reward() == 1.0

    in_session(tools, use)
    tools.close()


def test_the_database() -> None:
    tools = Tools([], "examples.tools.database:Database")
    schema = (
        "CREATE TABLE pets (name TEXT, age INT); INSERT INTO pets VALUES ('Kim', 3), ('Ada', 5)"
    )
    row = {"prompt": "Who is the oldest?", "schema": schema, "answer": "Ada"}

    async def use(session: ToolSession) -> None:
        assert "CREATE TABLE pets (name TEXT, age INT)" in (await session.reset(row) or "")
        query = "SELECT name, max(age) FROM pets"
        assert (await session.call("query", {"sql": query})).text == '[["Ada", 5]]'
        for sql in ("DELETE FROM pets", "ATTACH 'x.db' AS x", "PRAGMA user_version = 3"):
            result = await session.call("query", {"sql": sql})
            assert (result.error, "not authorized" in result.text) == ("exception", True)
        assert await session.reward() == 0.0
        await session.call("submit", {"answer": "Ada"})
        assert await session.reward() == 1.0

    in_session(tools, use)
    tools.close()
