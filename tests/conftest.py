"""Settings of the test suite."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator

# Before torch is imported: threads that spin slow a busy machine several times over, and tiny
# models gain nothing from many.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"
# What `model.dtype: auto` stands for depends on the machine. Most tests compare numbers in float32.
os.environ["VALENCE_DTYPE"] = "float32"
# Tests that name a model which does not exist must not wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Runs are synced to the disk at each save, thousands of times in all. No test asks whether a disk
# keeps its word.
if (
    os.path.isdir(SHM := "/dev/shm")
    and shutil.disk_usage(SHM).free > 8e9
    and not os.statvfs(SHM).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", SHM)

import pytest
import torch
from hypothesis import settings

from tests.durations import function_of, long_tests

# What commands print does not depend on the terminal of whoever runs the tests.
for variable in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "LINES"):
    os.environ.pop(variable, None)
os.environ["COLUMNS"] = "160"

# Triton reads this when it is imported. Its interpreter then runs the kernels on a CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# how long an example takes depends on what else the machine does
settings.register_profile("valence", deadline=None)
settings.load_profile("valence")

# as in what a script starts in the background: tests send this signal
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def forgets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No module that a test has imported from its folder is there for the next one, whose own may
    have the same name.
    """
    last = next(reversed(sys.modules))
    yield
    folder = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    # in the order of import
    for name in list(itertools.takewhile(lambda name: name != last, reversed(sys.modules))):
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def forking_python() -> Iterator[str]:
    """The path of a Python whose programs are forked from one that has torch loaded."""
    from tests.programs import Copies

    copies = Copies()
    yield str(copies.python)
    copies.end()


@pytest.fixture(scope="session")
def forking_vllm() -> Iterator[str]:
    """The path of a Python whose programs are forked from one that has vLLM loaded, as are the
    processes that vLLM starts.
    """
    from tests.rollouts.vllm_server import forking_vllm_python

    copies = forking_vllm_python()
    yield str(copies.python)
    copies.end()


TOGETHER = ("dist", "real", "vllm", "site")
"""Marks of tests that one worker runs, one after the other: they start processes with deadlines, or
share something large.
"""


LONG = (
    "docs/scale.md",
    "README.md",
    "docs/train/runs.md",
    "test_trackers.py",
    "test_crash.py",
    "test_faults.py",
)
"""Of tests that take long.

They begin before others, so that no worker has one of them left when the other is done.
"""


class _Order:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Order())
    gc.disable()  # nothing of what is collected is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # and none of it is looked at again
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = long_tests()
    for item in items:
        if function_of(item.nodeid) in long:
            item.add_marker(pytest.mark.long)
    # Without pytest-xdist its mark is unknown, and one process runs all tests.
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        for mark in TOGETHER:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.xdist_group(mark))
                if getattr(item.config.option, "loadgroup", False) and hasattr(item, "_id"):
                    # pytest-xdist 3.8 renames tests by their group in a way that pytest 9.2 no
                    # longer heeds.
                    item._id = type(item.id).parse(f"{item.nodeid}@{mark}")


REQUIRE_ALL = os.environ.get("VALENCE_REQUIRE_ALL") == "1"
"""If this variable is set, skipped tests fail, except those that need a GPU or instructions of a
CPU.
"""


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if REQUIRE_ALL and report.skipped and "CPU has no instructions" not in str(report.longrepr):
        report.outcome, report.longrepr = (
            "failed",
            f"skipped although all are required: {report.longrepr}",
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not item.get_closest_marker("gpu"):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report
