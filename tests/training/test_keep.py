"""The checkpoints that a run keeps, and early stopping."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.disk import full_disk, limit_file_size
from tests.errors import raises_error
from tests.training.conftest import SharedRuns
from tests.training.resuming import Killed, killed, records, settings, train
from tests.training.test_run import ROWS, folder, written
from valence.training.callbacks import Callback
from valence.training.evaluate import Evaluation
from valence.training.open_run import restore
from valence.training.trainer import Trainer

__all__ = ["folder", "settings"]

NO_BETTER = {"metric": "eval/loss", "mode": "max", "patience": 2, "min_delta": 100.0}
"""No evaluation after the first is better: a run ends after two more, at step 6."""


def test_the_best_checkpoint_stays_and_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"] |= {
        "save_every": 1,
        "keep": 1,
        "keep_best": {"metric": "eval/rewards/margins", "mode": "min"},
    }
    train(settings)
    margins = {
        row["step"]: row["eval/rewards/margins"]
        for row in records(tmp_path / "run")
        if "eval/loss" in row and row["step"]
    }
    best = min(margins, key=lambda step: margins[step])
    assert best != 9
    remaining = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert remaining == sorted([f"step-{best}", "step-9"])
    run = restore(tmp_path / "run", at="best")
    assert run.step == best
    assert run.evaluate().metrics["rewards/margins"] == pytest.approx(margins[best], rel=1e-4)
    with raises_error("checkpoint-not-found", where=str(tmp_path / "run"), fix=f"{best}, 9"):
        restore(tmp_path / "run", at=5)


@pytest.mark.slow
def test_a_best_one_that_could_not_be_saved_gives_way_to_the_one_before(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that was full for a moment, just when the best evaluation had been."""
    settings["run"] |= {"save_every": 2, "keep": 1, "keep_best": {}}
    settings["eval"] = {"every": 1}
    losses = [
        9.0,
        4.0,
        3.0,
        5.0,
        1.0,
        4.0,
        3.5,
        4.0,
        4.0,
        4.0,
    ]  # that of step 4 is the best, and of step 2 before
    monkeypatch.setattr(
        Trainer, "evaluate", lambda run, *_, **__: Evaluation({"loss": losses[run.step]}, [])
    )

    def full(run: Trainer, record: dict[str, Any]) -> None:
        limit_file_size(20_000 if record["step"] == 4 else -1)

    with full_disk(-1):  # until the callback fills it
        train(settings, callbacks=[full])
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-2",
        "step-9",
    ]
    assert restore(tmp_path / "run", at="best").step == 2
    warned = json.loads((tmp_path / "run/run.json").read_text())["warnings"]
    assert sum(re.findall(r"step (\d+)", warning) == ["4", "2"] for warning in warned) == 1


@pytest.mark.slow
def test_the_best_of_other_rows_is_forgotten(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["keep_best"] = {"metric": "eval/loss", "mode": "max"}
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[5:9])
    run, _ = train(settings, allow=["data.eval"])
    assert run.state.best.step is not None
    assert run.state.best.step > 4  # the highest loss of all was the first


def test_a_number_that_no_evaluation_has_is_named_at_the_first_one(
    settings: dict[str, Any],
) -> None:
    settings["run"]["keep_best"] = {"metric": "eval/los"}
    with raises_error("metric-unknown", where="run.keep_best", fix="eval/loss") as raised:
        train(settings)
    assert raised.error.message.endswith("eval/los")


def test_a_run_that_no_longer_gets_better_ends_early_until_made_longer(
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    settings["run"]["early_stop"] = NO_BETTER
    killed(settings, 4)
    run, message = train(settings)
    assert run.step == 6  # the best is the first, at 2; those at 4 and 6 are no better
    assert "step 6 of 9" in message
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert facts["status"] == "done"
    assert {"eval/loss", "2"} <= set(re.findall(r"[\w/]+", facts["ended_early"]))
    assert (tmp_path / "run/model").is_dir()
    done = records(tmp_path / "run")
    assert train(settings)[0].step == 6
    assert records(tmp_path / "run") == done
    settings["train"]["max_steps"] = 12
    run, message = train(settings)
    assert {"12", "9"} <= set(re.findall(r"\d+", message))
    assert (run.step, run.total_steps) == (10, 12)  # two more evaluations that were no better


@pytest.mark.slow
def test_a_run_that_is_killed_after_its_early_end_trains_no_further(
    settings: dict[str, Any],
) -> None:
    """What comes after the last step is left then, and nothing else."""
    settings["run"]["early_stop"] = NO_BETTER

    class KillAfterSave(Callback):
        def on_save(self, run: Trainer, folder: Path) -> None:
            def kill(*_: Any) -> None:
                run.state.is_consistent = False
                raise Killed

            if run.step == 6:
                run.policy.register_forward_pre_hook(kill)

    with pytest.raises(Killed):
        train(settings, quiet=True, callbacks=[KillAfterSave()])
    run, message = train(settings)
    assert run.step == 6
    assert "step 6 of 9" in message


@pytest.mark.slow
def test_a_run_that_was_made_longer_and_killed_at_once_is_still_longer(
    shared_runs: SharedRuns,
    tmp_path: Path,
) -> None:
    """Before a checkpoint could say so."""
    settings = shared_runs.copy(tmp_path, run={"early_stop": NO_BETTER})
    settings["train"]["max_steps"] = 12
    killed(settings, 8)
    run, message = train(settings)
    assert "step 6 of 12" in message
    assert run.step == 10


def test_a_run_that_saves_only_models_cannot_resume(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["run"] |= {"save_state": False, "save_hf": True}
    killed(settings, 3)
    (saved,) = (tmp_path / "run/checkpoints").iterdir()
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "model"]
    assert AutoModelForCausalLM.from_pretrained(saved / "model")
    with raises_error("checkpoint-without-state", where="checkpoints", fix="fresh=True"):
        train(settings)
    with raises_error("checkpoint-without-state", where="checkpoints"):
        restore(tmp_path / "run")


@pytest.mark.slow
def test_a_finished_run_of_models_alone_is_left_as_it_is(
    shared_runs: SharedRuns,
    tmp_path: Path,
) -> None:
    settings = shared_runs.copy(tmp_path, run={"save_state": False, "save_hf": True})
    done = records(tmp_path / "run")
    train(settings)
    assert records(tmp_path / "run") == done
    with raises_error("checkpoint-without-state", where="checkpoints"):
        restore(tmp_path / "run")


@pytest.mark.parametrize(("inputs", "code", "where"), [
    ({"max_time": "90"}, "setting-value", "run.max_time"),
    ({"max_time": "00:00:00"}, "setting-value", "run.max_time"),
    ({"max_time": "1:75:00"}, "setting-value", "run.max_time"),
    ({"save_state": False}, "setting-conflict", "run.save_state"),
    ({"keep_best": {"metric": "loss"}}, "setting-conflict", "metric"),
    ({"keep": 0}, "setting-type", "run.keep"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(
    inputs: dict[str, Any],
    code: str,
    where: str,
    settings: dict[str, Any],
) -> None:
    settings["run"] |= inputs
    with raises_error(code, where=where):
        train(settings)
