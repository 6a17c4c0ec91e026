"""The example that runs from chats in a real Open WebUI to a trained model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from examples.open_webui.__main__ import NO_OPEN_WEBUI, NUM_QUESTIONS, PYTHON, open_webui_python
from tests.arch.source import ROOT
from tests.serving.kit import rows, saved_model


def run_example(python: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "examples.open_webui", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_environment_is_named_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_example(sys.executable, "--out", str(out), **{PYTHON: str(tmp_path / "python")})
    assert result.returncode == 1
    assert NO_OPEN_WEBUI in result.stderr
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not open_webui_python().exists(), reason=NO_OPEN_WEBUI)
def test_votes_in_open_webui_become_a_model(forking_python: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_example(forking_python, "--model", saved_model().name, "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    labels = [row["label"] for row in rows(out / "feedback.jsonl")]
    assert len(labels) == NUM_QUESTIONS - 1  # one vote was deleted
    assert set(labels) == {True, False}
    raters = {vote["rater"] for vote in rows(out / "feedback.votes.jsonl")}
    assert len(raters) == 2
    # Open WebUI removes null characters, which the tiny model likes
    answers = rows(out / "served.answers.jsonl")
    served = {answer["completion"].replace("\0", "") for answer in answers}
    assert {row["completion"] for row in rows(out / "feedback.jsonl")} <= served
    assert (out / "run" / "model").is_dir()
    (url,) = re.findall(r"Starting Open WebUI at (\S+)", result.stdout)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
