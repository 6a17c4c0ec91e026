"""Sweeps: their trials, how they end and resume, and what they write."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.command import command_error
from tests.sweeps.conftest import GRID, num_logged, read, start, starts, states, sweep, wait_for
from tests.sweeps.trial_program import STEPS, objective
from valence.apps.sweep.sweep import run_sweep
from valence.errors import UserError
from valence.options import SweepOptions
from valence.storage import Lock, holder


def test_every_combination_runs_once_with_every_seed(place: Path) -> None:
    assert sweep(*GRID, "--seeds", "2") == 0
    trials = read()["trials"]
    assert [(t["values"]["loss.beta"], t["seed"]) for t in trials[:8]] == [
        *((beta, 0) for beta in (0.03, 0.03, 0.1, 0.1, 0.3, 0.3)), (0.03, 1), (0.03, 1)
    ]  # fmt: skip
    assert len(trials) == 12
    for trial in trials:
        beta, rate = trial["values"]["loss.beta"], trial["values"]["train.learning_rate"]
        assert trial["value"] == objective(beta, rate, trial["seed"], STEPS)
        assert trial["state"] == "done"
    results = read()["results"]
    assert results["best"] == "beta=0.1,lr=0.001"
    assert results["configurations"][0]["is_default"]
    assert sorted(starts()) == sorted(t["name"] for t in trials)
    assert (place / "sweep/sweep.html").exists()
    assert sweep(*GRID, "--seeds", "2") == 0  # nothing is left to do
    assert all(steps == [0] for steps in starts().values())


def test_the_trials_share_one_cache_and_are_named_by_their_settings(place: Path) -> None:
    assert (
        sweep("train.epochs=2", "--over", "loss.beta=0.1,0.3", "--out", "a b", "--nproc", "2") == 0
    )
    commands = sorted(place.glob("a b/trials/*/command.json"))
    for command, beta in zip(commands, ("0.1", "0.3"), strict=True):
        words = json.loads(command.read_text())
        assert words[-2:] == ["--nproc", "2"]
        assert {f"loss.beta={beta}", "train.epochs=2", "train.seed=0"} <= set(words)
        assert f'run.dir="a b/trials/beta={beta},seed=0"' in words
        assert 'reference.cache="a b/reference"' in words


def test_the_recipe_itself_is_tried_unless_it_is_told_not_to(place: Path) -> None:
    assert sweep("--over", "loss.beta=0.3", "--out", "with") == 0
    assert [t["is_default"] for t in read("with")["trials"]] == [True, False]
    assert sweep("--over", "loss.beta=0.3", "--out", "without", "--no-baseline") == 0
    assert [t["is_default"] for t in read("without")["trials"]] == [False]


@pytest.mark.parametrize("with_trial", [False, True])
def test_a_killed_sweep_resumes_where_it_was(place: Path, with_trial: bool) -> None:
    """Killed twice, in the middle of the second and of the fourth trial. with_trial: the trial's
    process is killed as well.
    """
    words = (*GRID, "--seeds", "1")
    for name in ("beta=0.03,lr=0.003,seed=0", "beta=0.1,lr=0.003,seed=0"):
        process = start(*words, pause=0.1)
        trial = place / "sweep/trials" / name
        wait_for(lambda trial=trial: num_logged(trial) > 2)
        worker = holder(trial)
        process.kill()
        if with_trial:
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
        process.wait()
        assert states()[name] == "running"
    assert sweep(*words) == 0
    begun = starts()
    assert [len(begun[name]) for name in sorted(begun)] == [1, 2, 1, 2, 1, 1]
    assert all(later > 2 for steps in begun.values() for later in steps[1:])
    assert sweep(*GRID[:-1], "undisturbed") == 0
    assert read()["results"] == read("undisturbed")["results"]


def test_a_killed_sweep_waits_for_its_trial_to_save(place: Path) -> None:
    """The next start does not meet the folder of a trial that is still in use."""
    trial = place / "sweep/trials/beta=0.03,lr=0.001,seed=0"
    process = start(*GRID, pause=0.5)
    wait_for(lambda: num_logged(trial) > 0)
    process.kill()
    process.wait()
    assert sweep(*GRID) == 0
    assert set(states().values()) == {"done"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_trial_and_ends_with_its_status(
    place: Path, number: signal.Signals, status: int
) -> None:
    trial = place / "sweep/trials/beta=0.03,lr=0.003,seed=0"
    process = start(*GRID, pause=0.1)
    wait_for(lambda: num_logged(trial) > 2)
    process.send_signal(number)
    assert process.wait(60) == status
    assert json.loads((trial / "run.json").read_text())["status"] == "interrupted"
    assert holder(trial) is None
    assert list(states().values()).count("done") == 1
    assert (place / "sweep/sweep.html").exists()
    assert sweep(*GRID) == 0
    assert starts()[trial.name][0] == 0
    assert len(starts()[trial.name]) == 2


def test_the_time_limit_of_the_recipe_is_that_of_the_sweep(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", json.dumps({"pause": 0.3}))
    began = time.monotonic()
    assert sweep("run.max_time=0:00:02", *GRID) == 124
    assert time.monotonic() - began < 20
    assert "waiting" in states().values()
    monkeypatch.delenv("FAKE")
    assert sweep(*GRID) == 0


@pytest.mark.parametrize("fault", ["crash", "kill", "mistake", "nan"])
def test_a_trial_that_fails_does_not_end_the_sweep(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("FAKE", json.dumps({"fails": {"0.03": fault}}))
    assert sweep(*GRID) == 2
    trials = read()["trials"]
    assert [t["state"] for t in trials] == ["failed"] * 2 + ["done"] * 4
    expected = {"crash": "log", "kill": "SIGKILL", "mistake": "not finite", "nan": "not finite"}
    assert expected[fault] in trials[0]["reason"]
    assert read()["results"]["failed"][0]["trial"] == trials[0]["name"]
    if fault == "crash":
        log = place / "sweep/logs" / f"{trials[0]['name']}.log"
        assert "a defect of the trial" in log.read_text()
    if fault != "nan":  # whose log has the value
        monkeypatch.delenv("FAKE")
        assert sweep(*GRID) == 0
        assert set(states().values()) == {"done"}
        assert [len(s) for s in starts().values()].count(2) == 2


def test_a_mistake_that_all_trials_share_ends_the_sweep(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = dict.fromkeys(("0.03", "0.1", "0.3"), "rows")
    monkeypatch.setenv("FAKE", json.dumps({"fails": fails}))
    assert command_error("sweep", "recipe.yaml", *GRID).code == "rows-unusable"
    assert list(states().values()) == ["failed"] * 2 + ["waiting"] * 4


def test_a_changed_grid_adds_trials_and_keeps_the_others(place: Path) -> None:
    assert sweep("--over", "loss.beta=0.03,0.1", "--out", "sweep") == 0
    over = ("--over", "loss.beta=0.1,0.3", "train.learning_rate=1e-3,3e-3", "--out", "sweep")
    assert sweep(*over, "--seeds", "2") == 0
    trials = read()["trials"]
    assert [t["included"] for t in trials] == [True] * 8 + [False]
    assert trials[-1]["values"] == {"loss.beta": 0.03, "train.learning_rate": 1e-3}
    assert read()["results"]["not_part"] == ["beta=0.03,seed=0"]
    assert "beta=0.1,seed=0" in states()  # the same configuration under its first name
    assert all(steps == [0] for steps in starts().values())
    assert len(starts()) == 9


def test_other_settings_of_the_recipe_are_refused(place: Path) -> None:
    assert sweep(*GRID) == 0
    error = command_error("sweep", "recipe.yaml", "train.batch_size=4", *GRID)
    assert error.code == "sweep-differs"
    assert "train.batch_size" in error.message
    assert sweep("run.save_every=7", *GRID) == 0  # changes no result


def test_a_recipe_that_is_edited_between_two_trials_ends_the_sweep(place: Path) -> None:
    def edit(*_: object) -> None:
        text = Path("recipe.yaml").read_text()
        Path("recipe.yaml").write_text(text.replace("train: {", "train: {batch_size: 3, "))

    options = SweepOptions(over=["loss.beta=0.03,0.1,0.3"], out=Path("sweep"))
    with pytest.raises(UserError) as caught:
        run_sweep(Path("recipe.yaml"), [], options, Console(), on_trial=edit)
    assert caught.value.code == "sweep-differs"
    assert list(states().values()) == ["done", "waiting", "waiting"]


def test_folders_of_others_are_refused(place: Path) -> None:
    Path("other").mkdir()
    Path("other/file").write_text("")
    grid = GRID[:-1]
    assert command_error("sweep", "recipe.yaml", *grid, "other").code == "folder-not-empty"
    assert command_error("sweep", "recipe.yaml", *grid, "rows.jsonl").code == "path-is-file"
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    assert command_error("sweep", "recipe.yaml", *grid, "run").code == "folder-not-empty"


def test_two_sweeps_do_not_use_one_folder(place: Path) -> None:
    process = start(*GRID, pause=0.2)
    wait_for(lambda: bool(starts()))
    assert command_error("sweep", "recipe.yaml", *GRID).code == "run-locked"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    with Lock(place / "sweep"):
        pass  # it is free again


def test_a_damaged_state_is_written_again_from_the_runs(place: Path) -> None:
    assert sweep(*GRID) == 0
    results = read()["results"]
    text = (place / "sweep/sweep.json").read_text()
    (place / "sweep/sweep.json").write_text(text.replace('"done"', '"dine"', 1))
    assert sweep(*GRID) == 0
    assert read()["results"] == results
    assert all(steps in ([0], [0, STEPS + 1]) for steps in starts().values())
    (place / "sweep/sweep.json").write_text("[" * 100_000)
    assert sweep(*GRID) == 0
    assert read()["results"] == results


def test_bad_trials_are_stopped_early_and_can_be_continued(place: Path) -> None:
    over = ("--over", "loss.beta=0.1,0.12,0.14,0.16,0.9,0.11", "--out", "sweep", "--seeds", "2")
    assert sweep(*over, "--stop-early") == 0
    trials = {t["name"]: t for t in read()["trials"]}
    stopped = trials["beta=0.9,seed=0"]
    assert (stopped["state"], stopped["step"]) == ("stopped", 2)
    assert stopped["value"] == objective(0.9, 1e-3, 0, 2)
    assert trials["beta=0.9,seed=1"]["state"] == "stopped"  # not started
    assert "beta=0.9,seed=1" not in starts()
    assert trials["beta=0.11,seed=0"]["state"] == "done"
    assert read()["results"]["configurations"][-1]["mean"] is None
    assert sweep(*over, "--stop-early") == 0
    assert len(starts()["beta=0.9,seed=0"]) == 1
    assert sweep(*over) == 0
    assert set(states().values()) == {"done"}
    assert len(starts()["beta=0.9,seed=0"]) == 2


def test_held_out_rows_and_a_comparable_metric_are_needed(place: Path) -> None:
    none = command_error("sweep", "recipe.yaml", "data.eval=[]", *GRID)
    assert none.code == "sweep-without-eval"
    scale = command_error("sweep", "recipe.yaml", *GRID, "--objective", "loss")
    assert scale.code == "objective-scale"
    unknown = command_error("sweep", "recipe.yaml", *GRID, "--objective", "my_metric")
    assert unknown.code == "objective-direction"
    missing = command_error("sweep", "recipe.yaml", *GRID, "--objective", "rewards/accuracies")
    assert missing.code == "metric-unknown"
    over = ("--over", "train.learning_rate=1e-3,3e-3", "--out", "other")
    assert sweep(*over, "--objective", "eval/loss") == 0
    assert (read("other")["objective"], read("other")["goal"]) == ("loss", "min")
    assert sweep(*over, "--objective", "rewards/auc") == 0  # the same trials by another metric
    assert read("other")["results"]["best"] == "lr=0.001"


def test_json_lines(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--over", "loss.beta=0.1,0.3", "--out", "sweep", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["trial", "trial", "done"]
    assert lines[0]["run"] == "sweep/trials/beta=0.1,seed=0"
    assert lines[-1]["best"] == "beta=0.1"
    assert (lines[-1]["status"], lines[-1]["exit_status"]) == ("done", 0)
    assert command_error("sweep", "recipe.yaml", "--out", "sweep", "--json").code == "sweep-empty"
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["code"] == "sweep-empty"


def test_options_that_contradict_each_other(place: Path) -> None:
    assert command_error("sweep", "recipe.yaml", *GRID, "--trials", "3").code == "option-unused"
    assert command_error("sweep", "recipe.yaml", *GRID, "--search", "x").code == "option-value"


def test_what_is_printed_says_which_trial_runs_and_what_is_best(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*GRID) == 0
    shown = capsys.readouterr().out
    assert "trial 4 of 6: beta=0.1,lr=0.003, seed 0" in shown
    assert "beta=0.1,lr=0.001" in shown
    assert "--seeds 3" in shown
    assert sweep(*GRID, "--quiet") == 0
    assert capsys.readouterr().out == ""
