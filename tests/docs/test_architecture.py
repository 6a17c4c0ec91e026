"""The page about the organization of the code: its trace of a row, and its list of packages."""

from __future__ import annotations

import re

import pytest

from examples.trace import main, trace
from tests.docs.blocks import ROOT, blocks

PAGE = "dev/architecture.md"
MAX_FILES = 16
"""A reader who follows a row through more files loses the thread."""


@pytest.mark.parametrize("method", ["kto", "grpo"])
def test_the_trace_is_as_shown(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([method]) == 0
    printed = capsys.readouterr().out
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert f"```sh\npython -m examples.trace {method}\n```\n\n```text\n{printed}```" in text


def test_a_row_passes_through_few_files() -> None:
    recorder = trace("kto")
    files = list(recorder.files)
    assert 10 < len(files) <= MAX_FILES
    assert files[0] == "data/sources.py"
    assert files[-1] == "training/step.py"
    recorder = trace("grpo")
    assert 10 < len(recorder.files) <= MAX_FILES
    assert next(iter(recorder.files)) == "rollouts/hf.py"


def test_every_package_is_described() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    named = set(re.findall(r"`valence/(\w+)/`", text))
    packages = {path.parent.name for path in (ROOT / "valence").glob("*/__init__.py")}
    assert named == packages
    assert len(blocks(text, "sh")) == 2
