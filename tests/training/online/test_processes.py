"""Rounds of several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.online.rig import logged, make, recipe

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("dist")]
DIFFER = {"ranks", "tokens/rank_max", "tokens/rank_min", "micro_batches", "tokens", "tokens_seen", "waste"}


def run(place: Path, settings: dict[str, Any], *more: str) -> str:
    (place / "recipe.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "valence", "train", str(place / "recipe.yaml"), *more]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 0, found.stderr + found.stdout
    return found.stdout


@pytest.mark.parametrize("method", ["ppo", "online_kto"])
def test_two_processes_give_the_numbers_of_one(method: str, tmp_path: Path) -> None:
    """Each samples and judges some of the answers: of three prompts one has two."""
    make(tmp_path)
    more: dict[str, Any] = {"model": {"dtype": "float64"}, "rollout": {"epochs": 2}, "train": {"max_steps": 4}}
    settings = recipe(tmp_path, method, **more)
    run(tmp_path, settings)
    run(tmp_path, settings, "run.dir=" + json.dumps(str(tmp_path / "two")), "--nproc", "2")
    one, two = logged(tmp_path), logged(tmp_path, "two")
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() - DIFFER == theirs.keys() - DIFFER
        for name in ours.keys() - DIFFER:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), name
