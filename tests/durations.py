"""``python -m tests.durations`` runs the tests that are not marked slow, and writes the names of
those that take long to long_tests.txt. ``make test`` leaves these out, and CI runs them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("long_tests.txt")
SECONDS = 0.5
"""A test function is long if the mean of its cases is above this."""


def long_tests() -> frozenset[str]:
    """The test functions that take long, as ``tests/FILE.py::NAME``."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def function_of(node_id: str) -> str:
    """The test function of a test case."""
    return node_id.partition("[")[0].partition("@")[0]


class Durations:
    """A plugin that collects the seconds of each case, with those of its fixtures."""

    def __init__(self) -> None:
        self.cases: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases[report.nodeid] += report.duration

    def slow_functions(self) -> list[str]:
        by_function: defaultdict[str, list[float]] = defaultdict(list)
        for node_id, seconds in self.cases.items():
            by_function[function_of(node_id)].append(seconds)
        return sorted(name for name, s in by_function.items() if sum(s) / len(s) > SECONDS)


if __name__ == "__main__":
    durations = Durations()
    words = ["-n", "2", "--dist", "loadgroup", "-m", "not slow and not real and not site"]
    status = pytest.main([*words, *sys.argv[1:]], plugins=[durations])
    if status == 0:
        LIST.write_text("".join(f"{name}\n" for name in durations.slow_functions()))
    sys.exit(status)
