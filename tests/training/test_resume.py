"""The same command again resumes a run, which ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.programs import Program
from tests.training.resuming import (
    Undisturbed,
    facts,
    killed,
    records,
    resumed_steps,
    settings_for,
    train,
    weights,
)
from valence.api import build_run
from valence.training.callbacks import Callback
from valence.training.folder import RunFolder
from valence.training.signals import OUT_OF_TIME, Interrupted, Stop
from valence.training.trainer import Trainer


def test_a_killed_run_ends_as_an_undisturbed_one(
    killed_run: Path,
    settings: dict[str, Any],
    undisturbed: Undisturbed,
) -> None:
    run, _ = train(settings)
    assert resumed_steps(killed_run) == [4]
    undisturbed.assert_same(run, killed_run)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 8])
def test_a_run_killed_after_any_step_ends_as_an_undisturbed_one(
    step: int, settings: dict[str, Any], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    killed(settings, step)
    run, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [(step - 1) // 2 * 2]
    undisturbed.assert_same(run, tmp_path / "run")


@pytest.mark.slow
def test_a_run_is_resumed_several_times_also_where_an_epoch_ends(
    settings: dict[str, Any], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Epochs have three steps: the second start continues from step 2, the others from 6 and 8."""
    for step in (4, 8, 9):
        killed(settings, step)
    run, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [2, 6, 8]
    assert (run.tokens_seen, run.state.counters.examples_seen) == (undisturbed.run.tokens_seen, 36)
    undisturbed.assert_same(run, tmp_path / "run")


def test_no_number_is_read_from_a_path(
    killed_folder: Path,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Neither from folders above the run's, nor from the name of a checkpoint."""
    path = tmp_path / "step-70/step=9/epoch=3/run"
    settings["run"]["dir"] = str(path)
    shutil.copytree(killed_folder, path)
    (path / "checkpoints/step-4").rename(path / "checkpoints/step-8")
    run, printed = train(settings)
    assert "checkpoints/step-8" in printed.replace("\n", "")
    assert resumed_steps(path) == [2]
    assert run.step == 9


def test_without_a_checkpoint_a_run_starts_over_with_the_same_choices(
    settings: dict[str, Any], tmp_path: Path, report_free_memory: Callable[[int], None]
) -> None:
    settings["run"]["save_every"] = 100
    killed(settings, 3)
    assert not (tmp_path / "run/checkpoints").exists()
    before = records(tmp_path / "run")
    report_free_memory(1)
    run, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [0]
    assert (
        run.state.budget.at(0, "training")
        == facts(tmp_path / "run")["micro_batch_tokens"][0][2]
        > 512
    )
    assert records(tmp_path / "run")[: len(before)] == before
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3, 4, 6, 8, 9]


def test_a_finished_run_is_left_as_it_is(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    shutil.copytree(undisturbed.path, tmp_path / "run")

    def times() -> dict[Path, int]:
        files = (tmp_path / "run").rglob("*")
        return {path: path.stat().st_mtime_ns for path in files if path.name != "run.lock"}

    files = times()
    run, printed = train(settings)
    assert str(tmp_path / "run") in printed.replace("\n", "")
    assert run.finished
    assert run.step == 9
    undisturbed.assert_same(run, tmp_path / "run")
    assert times() == files


@dataclass
class Terminated(Callback):
    """Sends SIGTERM in the first forward pass after this event of this step."""

    step: int
    event: str = "on_step"

    def on_step(self, run: Trainer) -> None:
        self._wait(run, "on_step")

    def on_save(self, run: Trainer, folder: Path) -> None:
        self._wait(run, "on_save")

    def _wait(self, run: Trainer, event: str) -> None:
        if (run.step, event) == (self.step, self.event):
            run.policy.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGTERM))


def test_a_signal_in_an_evaluation_leaves_it_to_the_next_start(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    with pytest.raises(Interrupted, match="SIGTERM.*step 4 of 9") as error:
        train(settings, callbacks=[Terminated(4)])
    assert error.value.status == 128 + signal.SIGTERM
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-2",
        "step-4",
    ]
    run, _ = train(settings)
    undisturbed.assert_same(run, tmp_path / "run")


def test_a_signal_in_the_test_evaluation_keeps_what_was_trained(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    """What comes after the last step is left to the next start."""
    settings["data"]["test"] = settings["data"]["eval"]
    settings["eval"]["train_examples"] = 0
    with pytest.raises(KeyboardInterrupt):
        train(settings, callbacks=[Terminated(9, "on_save")])
    assert facts(tmp_path / "run")["status"] == "interrupted"
    assert (tmp_path / "run/checkpoints/step-9").is_dir()
    assert not (tmp_path / "run/model").exists()
    run, _ = train(settings)
    assert resumed_steps(tmp_path / "run") == [9]
    assert facts(tmp_path / "run")["status"] == "done"
    assert (tmp_path / "run/model").is_dir()
    assert all(torch.equal(p, weights(run)[name]) for name, p in weights(undisturbed.run).items())


@pytest.mark.slow
def test_two_runs_are_not_in_one_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    run = build_run(settings, quiet=True)
    recipe, printed = tmp_path / "recipe.yaml", tmp_path / "printed"
    recipe.write_text(json.dumps(settings))
    assert Program("train", str(recipe), output=printed).wait() == 2
    assert f"pid {os.getpid()}" in printed.read_text()
    assert run.folder is not None
    run.folder.close()


def test_a_start_that_fails_changes_nothing(
    killed_run: Path,
    settings: dict[str, Any],
    undisturbed: Undisturbed,
) -> None:
    saved = {name: (killed_run / name).read_bytes() for name in ("config.yaml", "rows.safetensors")}
    wider = {**settings, "model": {**settings["model"], "lora": {"rank": 4}}}
    with raises_error("model-changed", where="checkpoint"):
        train(wider, allow=["model"])
    assert {name: (killed_run / name).read_bytes() for name in saved} == saved
    run, _ = train(settings)
    assert resumed_steps(killed_run) == [4]
    undisturbed.assert_same(run, killed_run)


def test_a_run_that_began_meanwhile_is_not_moved_away(killed_folder: Path, tmp_path: Path) -> None:
    """Two starts look at a folder that does not exist. One claims it after the other trained."""
    late = RunFolder(tmp_path / "run")
    shutil.copytree(killed_folder, tmp_path / "run", dirs_exist_ok=True)
    with raises_error("run-modified", where=str(tmp_path / "run")):
        late.claim()
    assert (tmp_path / "run/checkpoints").is_dir()
    late.close()


def test_a_time_limit_that_allows_no_step_is_an_error(
    killed_run: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def over(stop: Stop) -> bool:
        stop.adopt("run.max_time", OUT_OF_TIME)
        return True

    settings["run"]["max_time"] = "01:00:00"
    monkeypatch.setattr(Stop, "requested", property(over))
    with raises_error("max-time-too-short", where="run.max_time"):
        train(settings)


def test_the_settings_of_these_tests_train_on_all_weights_of_the_adapter(
    undisturbed: Undisturbed, folder: Path, tmp_path: Path
) -> None:
    """Comparisons with the undisturbed run would say nothing about weights that never move."""
    start = weights(build_run({**settings_for(folder, tmp_path)}, quiet=True))
    assert all(not torch.equal(p, start[name]) for name, p in weights(undisturbed.run).items())
