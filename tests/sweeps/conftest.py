"""A recipe, and sweeps whose trials a small program pretends to train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.command import command
from valence.apps.sweep import run

PROGRAM = str(ROOT / "tests/sweeps/trial_program.py")
GRID = ("--over", "loss.beta=0.03,0.1,0.3", "train.learning_rate=1e-3,3e-3", "--out", "sweep")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "PROGRAM", (sys.executable, PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    Path("recipe.yaml").write_text(
        "method: kto\nmodel: {name: tiny}\ndata: {train: rows.jsonl, eval: rows.jsonl}\n"
        "train: {learning_rate: 1e-3}\n"
    )
    return tmp_path


def sweep(*words: str) -> int:
    """The exit status of ``valence sweep recipe.yaml`` with these words."""
    return command("sweep", "recipe.yaml", *words)


def start(*words: str, **fake: Any) -> subprocess.Popen[bytes]:
    """A sweep in another process."""
    launch = str(ROOT / "tests/sweeps/launch.py")
    return subprocess.Popen(
        [sys.executable, launch, "sweep", "recipe.yaml", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE": json.dumps(fake)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def read(folder: str | Path = "sweep") -> dict[str, Any]:
    return json.loads((Path(folder) / "sweep.json").read_text())


def states(folder: str | Path = "sweep") -> dict[str, str]:
    return {trial["name"]: trial["state"] for trial in read(folder)["trials"]}


def starts(folder: str | Path = "sweep") -> dict[str, list[int]]:
    """For each trial the step at which each of its processes began."""
    return {
        path.parent.name: [int(line) for line in path.read_text().split()]
        for path in sorted(Path(folder).glob("trials/*/starts"))
    }


def num_logged(trial: Path) -> int:
    log = trial / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0
