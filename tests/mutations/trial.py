"""Runs tests in a copy of the tree, in a process of its own that has loaded none of the project yet."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest

OPTIONS = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no")
NEEDED = ["torch", "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2", "hypothesis"]
"""What is loaded once for all trials: none of it changes."""


@dataclass(eq=False)  # plugins are kept in sets
class First:
    """The first test that fails, and how."""

    test: str = ""
    how: str = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test, self.how = report.nodeid, report.longrepr.reprcrash.message


def failure(tests: Sequence[str], tree: str) -> str | None:
    """The first of these tests whose assertion fails there; None if all pass. Raises RuntimeError when one could not be run."""
    os.chdir(tree)
    sys.path.insert(0, tree)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    first = First()
    with redirect_stdout(StringIO()) as said:
        code = pytest.main([*OPTIONS, *tests], plugins=[first])
    if code == pytest.ExitCode.OK:
        return None
    if code != pytest.ExitCode.TESTS_FAILED or not first.how.startswith(("assert", "AssertionError", "Failed")):
        raise RuntimeError(f"{first.test}: {first.how or said.getvalue()}")
    return first.test
