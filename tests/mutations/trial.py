"""Runs tests in a copy of the tree, in a process that has loaded libraries and no project code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest

Outcome = Literal["passed", "failed", "import", "crash", "hang", "unknown"]
OPTIONS = (
    "-x",
    "-q",
    "-p",
    "no:randomly",
    "-p",
    "no:cacheprovider",
    "--tb=no",
    "--hypothesis-seed=0",
)
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.flop_counter",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "peft", "accelerate", "safetensors.torch", "hypothesis.strategies", "pydantic.main",
    "pydantic.json_schema", "ruamel.yaml", "httpx", "typer.rich_utils", "rich.markdown",
    "rich.traceback", "numpy", "xdist.plugin", "pytest_timeout",
]  # fmt: skip
"""What is loaded once for all trials: none of it changes."""


@dataclass(frozen=True)
class Trial:
    """How tests ended, and the first that failed. ``unknown``: no better without a mutant."""

    outcome: Outcome
    test: str = ""


class _Plugin:
    """Runs these tests alone, file by file, and notes the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._tests = tests
        self.missing: list[str] = []
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {file: place for place, file in enumerate(files_of(self._tests))}
        wanted = set(self._tests)
        remaining = [item for item in items if item.nodeid in wanted]
        self.missing = sorted(wanted - {item.nodeid for item in remaining})
        items[:] = sorted(remaining, key=lambda item: files[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def files_of(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def fork_server() -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


def run_tests(context: Any, tests: Sequence[str], tree: Path, limit: float) -> Trial:
    """Run tests in a process that is killed, with all that it started, after ``limit`` seconds.

    The time that a new process takes to load this module does not count.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, list(tests), str(tree)))
    process.start()
    sender.close()
    try:
        receiver.recv()
        if not receiver.poll(limit):
            return Trial("hang")
        return Trial(*receiver.recv())
    except EOFError:
        return Trial("crash")
    finally:
        _kill_group(process.pid)
        process.join()
        receiver.close()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has not become a group, or nothing is left of it
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run(sender: Connection, tests: list[str], tree: str) -> None:
    os.setsid()
    sender.send("started")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path[:] = [tree, *(path for path in sys.path if path)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    plugin = _Plugin(tests)
    code = pytest.main(
        [*OPTIONS, f"--basetemp={tree}.temporary", *files_of(tests)], plugins=[plugin]
    )
    if plugin.failed:
        sender.send(("failed", plugin.failed))
    elif code == pytest.ExitCode.OK and not plugin.missing:
        sender.send(("passed", ""))
    else:
        sender.send(("import", plugin.missing[0] if plugin.missing else ""))
    sender.close()
    os._exit(0)
