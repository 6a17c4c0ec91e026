"""The same command again: it goes on where the run was, ends as if nothing had been, and spoils nothing in its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import Program
from tests.training.resuming import killed, records, settings, train, weights
from tests.training.test_run import folder
from valence.api import build_run
from valence.errors import UserError
from valence.training import finish, measure
from valence.training.loop import Run
from valence.training.signals import Interrupted

__all__ = ["folder", "settings"]


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_killed_run_ends_as_one_that_was_not(step: int, settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    killed(settings, step)
    again, said = train(settings)
    assert re.search(rf"taking up the run in .* after step {(step - 1) // 2 * 2} of 9", said)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_resumed_again_and_again_also_where_an_epoch_ends(settings: dict[str, Any], tmp_path: Path) -> None:
    """Epochs have three steps: the second start goes on from step 2, the third from step 6, the last from 8."""
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    for step in (4, 8, 9):
        killed(settings, step)
    again, said = train(settings)
    assert "after step 8 of 9" in said
    assert (again.tokens_seen, again.counters.examples_seen) == (whole.tokens_seen, 36)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_no_number_is_read_from_a_path(settings: dict[str, Any], tmp_path: Path) -> None:
    """Neither from folders above the run's, nor from the name of a checkpoint."""
    settings["run"]["dir"] = str(tmp_path / "step-70/step=9/epoch=3/run")
    killed(settings, 6)
    checkpoints = tmp_path / "step-70/step=9/epoch=3/run/checkpoints"
    (checkpoints / "step-4").rename(checkpoints / "step-8")
    again, said = train(settings)
    assert "this checkpoint is damaged: it is of step 4" in said
    assert "after step 2 of 9" in said
    assert again.step == 9


def test_without_a_checkpoint_it_begins_again_with_the_same_choices(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings["run"]["save_every"] = 100
    killed(settings, 3)
    assert not (tmp_path / "run/checkpoints").exists()
    before = records(tmp_path / "run")
    monkeypatch.setattr("valence.training.plan.free_memory", lambda _: 1)
    again, said = train(settings)
    assert "no checkpoint yet" in said
    assert again.budget.at(0, "training") == json.loads((tmp_path / "run/run.json").read_text())["micro_batch_tokens"][0][2] > 512
    assert records(tmp_path / "run")[: len(before)] == before
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3, 4, 6, 8, 9]


def test_nothing_is_done_about_a_finished_run(settings: dict[str, Any], tmp_path: Path) -> None:
    done, _ = train(settings)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "run.lock"}
    again, said = train(settings)
    assert "is finished (9 steps" in said
    assert "there is nothing to do" in said
    assert again.step == 9
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(done).items())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "run.lock"} == files


def test_a_run_that_was_stopped_behind_its_last_step_says_what_is_left(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run, *_: Any) -> None:
        run.stop._ask("SIGTERM", 143)
        raise run.stop.ended()

    with monkeypatch.context() as patch:
        patch.setattr(finish, "_tell_of_the_end", stopped)
        with pytest.raises(Interrupted):
            train(settings)
    _, said = train(settings)
    assert "after step 9 of 9: what comes after the last step is left, such as evaluation and model" in " ".join(said.split())


def test_a_signal_in_an_evaluation_leaves_it_to_the_next_start(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    unstopped = measure._measure

    def stopped(run: Run, *args: Any) -> Any:
        if run.step == 4:
            run.stop._ask("SIGTERM", 143)
        return unstopped(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_measure", stopped)
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 4 of 9") as error:
            train(settings)
    assert error.value.status == 143
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 2, 3]
    again, _ = train(settings)
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_two_runs_are_not_in_one_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    run = build_run(settings, quiet=True)
    recipe, said = tmp_path / "recipe.yaml", tmp_path / "said"
    recipe.write_text(json.dumps(settings))
    assert Program("train", str(recipe), said=said).wait() == 2
    assert "another run is using this folder: pid" in said.read_text()
    assert run.folder is not None
    run.folder.close()


def test_a_start_that_fails_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 6)
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "rows.safetensors")}
    wider = {**settings, "model": {**settings["model"], "lora": {"rank": 4}}}
    with pytest.raises(UserError, match="another model"):
        train(wider, allow=["model"])
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == kept
    assert train(settings)[0].step == 9
    assert len(json.loads((tmp_path / "run/run.json").read_text())["taken_up"]) == 1


def test_a_run_that_began_meanwhile_is_not_moved_away(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two starts look at a folder that is not there yet; the second comes to claim it when the first has trained."""
    from valence.training.folder import RunFolder

    late = RunFolder(tmp_path / "run")
    killed(settings, 6)
    with pytest.raises(UserError, match="trained here meanwhile"):
        late.claim()
    assert (tmp_path / "run/checkpoints").is_dir()
    late.close()


def test_time_that_is_too_short_for_anything_is_no_reason_to_start_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from valence.training.signals import Stop

    killed(settings, 6)
    settings["run"]["max_time"] = "00:00:01"
    monkeypatch.setattr(Stop, "limit", lambda self, _: setattr(self, "_ends_at", 0.0))
    with pytest.raises(UserError, match="nothing was done within run.max_time"):
        train(settings)
