"""A pytest plugin that notes what each test executes: ``-p tests.mutations.recorder``.

It runs in a copy of the tree whose package has marks (``blocks.py``). Results that several tests
share, of fixtures and of cached functions, count for every test that uses them.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import pkgutil
import re
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.blocks import VARIABLE

FOLDER = "BLOCK_MARKS_FOLDER"
"""Environment variable: where the records of tests are written."""
SIZE = "BLOCK_MARKS_SIZE"
PACKAGE = "BLOCK_MARKS_PACKAGE"


class Marks:
    """The marks of this process and those that it starts."""

    def __init__(self, path: Path, size: int) -> None:
        path.write_bytes(bytes(size))
        os.environ[VARIABLE] = str(path)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._empty = bytes(size)

    def take(self) -> int:
        """All marks as one number, which are then cleared."""
        marks = int.from_bytes(self._memory[:], "little")
        self._memory[:] = self._empty
        return marks

    def add(self, marks: int) -> None:
        if marks:
            both = marks | int.from_bytes(self._memory[:], "little")
            self._memory[:] = both.to_bytes(len(self._empty), "little")

    def numbers(self, marks: int) -> list[int]:
        return [
            match.start()
            for match in re.finditer(b"\x01", marks.to_bytes(len(self._empty), "little"))
        ]


class Recorder:
    def __init__(self, folder: Path, size: int, package: str) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.marks = Marks(folder / f"{worker}.marks", size)
        self._lines = (folder / f"{worker}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._package = package
        self._fixtures: dict[int, tuple[str, int, float]] = {}
        self._shared: list[float] = []
        self._definitions: list[Any] = []
        self._has_passed = True

    def _write(self, **record: Any) -> None:
        self._lines.write(json.dumps(record) + "\n")

    def pytest_collection_finish(self) -> None:
        """Code that runs while modules are imported is recorded for no test."""
        package = importlib.import_module(self._package)
        for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError:
                    continue  # a plugin of a library that is not here
        self._write(imported=self.marks.numbers(self.marks.take()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        self.marks.take()
        self._has_passed, self._shared, self._definitions = True, [], []
        began = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - began - sum(self._shared)
        marks, shared = self.marks.take(), {}
        for definition in set(self._definitions):
            if id(definition) in self._fixtures:
                name, of_fixture, cost = self._fixtures[id(definition)]
                shared[name] = cost
                marks |= of_fixture
        self._write(
            test=_node_id(item),
            seconds=max(seconds, 0.0),
            passed=self._has_passed,
            shared=shared,
            markers=sorted({mark.name for mark in item.iter_markers()}),
            blocks=self.marks.numbers(marks),
        )
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        self._definitions = list(item._request._fixture_defs.values())
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_passed = self._has_passed and not report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, began = self.marks.take(), time.perf_counter()
        try:
            return (yield)
        finally:
            marks, seconds = self.marks.take(), time.perf_counter() - began
            self.marks.add(before | marks)
            self._shared.append(seconds)
            name = f"{request.node.nodeid}:{fixturedef.argname}"
            self._fixtures[id(fixturedef)] = name, marks, seconds


def _node_id(item: pytest.Item) -> str:
    """Id of a test without the group that pytest-xdist appends."""
    group = item.get_closest_marker("xdist_group")
    return item.nodeid.removesuffix(f"@{group.args[0]}") if group and group.args else item.nodeid


def shared_between_tests(
    lru_cache: Callable[..., Any], marks: Marks, packages: tuple[str, ...]
) -> Callable[..., Any]:
    """``functools.lru_cache``, with cached results of these packages counted as computed again."""

    def caching(maxsize: Any = 128, typed: bool = False) -> Any:
        if callable(maxsize):
            return caching()(maxsize)

        def decorate(function: Callable[..., Any]) -> Any:
            cached = lru_cache(maxsize, typed)(function)
            if function.__module__.partition(".")[0] not in packages:
                return cached
            records: dict[Any, int] = {}

            @functools.wraps(cached)
            def run(*args: Any, **kwargs: Any) -> Any:
                misses = cached.cache_info().misses
                key = (args, tuple(kwargs.items()))
                if key in records:
                    marks.add(records[key])
                    return cached(*args, **kwargs)
                before = marks.take()
                try:
                    return cached(*args, **kwargs)
                finally:
                    executed = marks.take()
                    marks.add(before | executed)
                    if cached.cache_info().misses > misses:
                        records[key] = executed

            for name in ("cache_info", "cache_clear", "cache_parameters"):
                setattr(run, name, getattr(cached, name))
            return run

        return decorate

    return caching


def _make_recorder() -> Recorder | None:
    if FOLDER not in os.environ:
        return None
    package = os.environ[PACKAGE]
    recorder = Recorder(Path(os.environ[FOLDER]), int(os.environ[SIZE]), package)
    caching = shared_between_tests(functools.lru_cache, recorder.marks, (package, "tests"))
    functools.lru_cache = caching  # type: ignore[assignment]
    functools.cache = caching(None)  # type: ignore[assignment]
    return recorder


RECORDER = _make_recorder()
"""Made when pytest loads the plugin: before any file of the tests, whose caches it has to see."""


def pytest_configure(config: pytest.Config) -> None:
    if RECORDER is not None:
        config.pluginmanager.register(RECORDER)
