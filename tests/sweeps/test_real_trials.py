"""A sweep whose trials train a tiny model: one reference pass, and a kill that changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.command import command, write_place
from tests.sweeps.conftest import num_logged, read, wait_for
from valence.models.log_prob_store import count_entries
from valence.reports.run_record import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_TRAIN, NUM_EVAL = 10, 4
STEPS = 20
GRID = ("--over", "loss.beta=0.03,0.1", "train.learning_rate=1e-3,3e-3", "--out", "sweep")
KILLED = "beta=0.1,lr=0.001,seed=0"


def pair(i: int) -> str:
    return json.dumps(
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {7 * i}"}
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = [pair(i) for i in range(NUM_TRAIN + NUM_EVAL)]
    Path("pairs.jsonl").write_text("\n".join(rows[:NUM_TRAIN]))
    Path("held_out.jsonl").write_text("\n".join(rows[NUM_TRAIN:]))
    Path("recipe.yaml").write_text(
        "method: dpo\nmodel: {name: ./model, dtype: float32, lora: {rank: 2}}\n"
        "data: {train: pairs.jsonl, eval: held_out.jsonl, max_length: 128}\n"
        f"train: {{batch_size: 5, learning_rate: 1e-3, max_steps: {STEPS}, epochs: 20}}\n"
        "eval: {every: 5}\n"
        "run: {save_every: 4}\n"
    )
    return tmp_path


def test_four_trials_with_one_reference_pass_and_one_kill(place: Path, forking_python: str) -> None:
    """The trial that was killed ends as an undisturbed run of the same settings."""
    words = [forking_python, "-m", "valence", "sweep", "recipe.yaml", *GRID]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    trial = place / "sweep/trials" / KILLED
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: num_logged(trial) > 6, seconds=900)
        worker = json.loads((trial / "run.lock").read_text())["pid"]
        process.send_signal(signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in place.glob("sweep/trials/*/model/*")}
    assert len({path.parent for path in before}) == 2
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trials = read()["trials"]
    assert [t["state"] for t in trials] == ["done"] * 4
    assert {path: path.stat().st_mtime_ns for path in before} == before  # not trained again

    computed = [t["computed"] for t in trials]
    assert computed == [2 * (NUM_TRAIN + NUM_EVAL)] + [0] * 3
    (store,) = (place / "sweep/reference").iterdir()
    assert count_entries(store)[0] == 2 * (NUM_TRAIN + NUM_EVAL)

    facts = json.loads((trial / "run.json").read_text())
    assert 0 < facts["resumes"][0]["step"] < STEPS
    assert not any("resumes" in json.loads(p.read_text()) for p in others(place, trial))
    undisturbed = ("loss.beta=0.1", "train.learning_rate=0.001", "run.dir=alone")
    alone_words = [*words[:3], "train", "recipe.yaml", *undisturbed, "--quiet"]
    assert subprocess.run(alone_words, env=environment, check=False).returncode == 0
    name = "model/model.safetensors"
    assert (trial / name).read_bytes() == (place / "alone" / name).read_bytes()
    alone, killed = RunRecord.read(place / "alone"), RunRecord.read(trial)
    objective = f"eval/{read()['objective']}"
    values = [
        [(r["step"], r[objective]) for r in run.metrics if objective in r]
        for run in (alone, killed)
    ]
    assert values[0] == values[1]
    assert len(values[0]) == 5
    value = next(t["value"] for t in trials if t["name"] == KILLED)
    assert value == values[0][-1][1]
    assert command("report", "sweep/trials", "--out", "comparison.html") == 0


def others(place: Path, trial: Path) -> list[Path]:
    return [p for p in place.glob("sweep/trials/*/run.json") if p.parent != trial]


def test_a_trial_that_is_not_finite_is_named(place: Path) -> None:
    """A learning rate that no model survives. All processes start from nothing."""
    over = ("--over", "train.learning_rate=1e-3,1e30", "--out", "sweep")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "valence", "sweep", "recipe.yaml", "train.clip_norm=null", *over]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    good, bad = read()["trials"]
    assert (good["state"], bad["state"]) == ("done", "failed")
    assert "finite" in bad["reason"]
