"""Sweeps whose values Optuna chooses."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import command_error
from tests.sweeps.conftest import num_logged, read, start, starts, states, sweep, wait_for

SEARCH = ("--search", "optuna", "--over", "train.learning_rate=1e-5:1e-2:log", "loss.beta=0.1,0.3")


def suggested(folder: str) -> list[dict[str, Any]]:
    return [trial["values"] for trial in read(folder)["trials"] if trial["number"] is not None]


def test_a_search_that_was_killed_suggests_the_same_values(place: Path) -> None:
    words = (*SEARCH, "--trials", "4", "--out", "sweep")
    process = start(*words, pause=0.1)
    wait_for(lambda: sum(number is not None for number in numbers()) >= 2)
    trial = read()["trials"][2]["name"]
    wait_for(lambda: num_logged(place / "sweep/trials" / trial) > 2)
    process.kill()
    process.wait()
    assert states()[trial] == "running"
    assert sweep(*words) == 0
    assert sum(len(steps) - 1 for steps in starts().values()) == 1
    assert sweep(*words[:-1], "undisturbed") == 0
    assert read()["results"] == read("undisturbed")["results"]
    rates = {values["train.learning_rate"] for values in suggested("sweep")}
    assert len(rates) == 4
    assert all(1e-5 <= rate <= 1e-2 for rate in rates)


def numbers() -> list[int | None]:
    if not Path("sweep/sweep.json").exists():
        return []
    return [trial["number"] for trial in read()["trials"]]


def test_a_search_goes_on_with_more_trials_and_seeds(place: Path) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    assert sweep(*SEARCH, "--trials", "2", "--out", "sweep") == 0
    before = suggested("sweep")
    assert sweep(*SEARCH, "--trials", "3", "--out", "sweep", "--seeds", "2") == 0
    assert suggested("sweep")[::2][:2] == before
    assert [(t["number"], t["seed"]) for t in read()["trials"]] == [
        *((None, 0), (None, 1), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    ]
    assert set(states().values()) == {"done"}
    assert all(steps == [0] for steps in starts().values())
    storage = optuna.storages.JournalStorage(JournalFileBackend("sweep/optuna.journal"))
    study = optuna.load_study(study_name="sweep", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    last = [t["value"] for t in read()["trials"] if t["number"] == 2]
    assert study.trials[2].value == pytest.approx(sum(last) / 2)


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated"])
def test_a_damaged_journal_is_written_again_from_the_trials(place: Path, damage: str) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    assert sweep(*SEARCH, "--trials", "2", "--out", "sweep") == 0
    before, journal = suggested("sweep"), Path("sweep/optuna.journal")
    if damage == "missing":
        journal.unlink()
    elif damage == "garbage":
        journal.write_bytes(b"garbage\n" + journal.read_bytes())
    else:
        journal.write_bytes(journal.read_bytes()[:-20])
    for num_trials in (3, 4):
        assert sweep(*SEARCH, "--trials", str(num_trials), "--out", "sweep") == 0
    assert suggested("sweep")[:2] == before
    assert [t["number"] for t in read()["trials"]] == [None, 0, 1, 2, 3]
    assert all(steps == [0] for steps in starts().values())
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.load_study(study_name="sweep", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4


def test_a_full_disk_is_a_mistake_after_which_the_search_resumes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optuna.storages.journal import JournalFileBackend

    def append_logs(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = (*SEARCH, "--trials", "2", "--out", "sweep")
    with monkeypatch.context() as full:
        full.setattr(JournalFileBackend, "append_logs", append_logs)
        assert command_error("sweep", "recipe.yaml", *words).code == "file-not-writable"
    assert sweep(*words) == 0
    assert set(states().values()) == {"done"}


def test_values_of_a_narrow_range_stay_in_it(place: Path) -> None:
    words = ("--search", "optuna", "--over", "loss.beta=0.99991:0.99999", "--out", "sweep")
    assert sweep(*words, "--trials", "3") == 0
    values = [value["loss.beta"] for value in suggested("sweep")]
    assert all(0.99991 <= value <= 0.99999 for value in values)
    assert len(set(values)) == 3


def test_a_search_is_no_grid_and_keeps_its_ranges(place: Path) -> None:
    assert sweep(*SEARCH, "--trials", "1", "--out", "sweep") == 0
    other = ("--over", "train.learning_rate=1e-4,1e-3", "--out", "sweep")
    assert command_error("sweep", "recipe.yaml", *other).code == "sweep-differs"
    narrower = ("--over", "train.learning_rate=1e-4:1e-3", "--search", "optuna", "--out", "sweep")
    assert command_error("sweep", "recipe.yaml", *narrower).code == "sweep-differs"


def test_without_optuna_the_extra_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    error = command_error("sweep", "recipe.yaml", *SEARCH, "--out", "sweep")
    assert error.code == "library-missing"
    assert "valence-align[optuna]" in str(error.fix)


def test_no_configuration_is_repeated(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--search", "optuna", "--over", "loss.beta=0.1,0.3,0.5", "--out", "sweep")
    for num_trials in ("2", "8"):
        assert sweep(*words, "--trials", num_trials) == 0
        values = [trial["values"]["loss.beta"] for trial in read()["trials"]]
        assert sorted(values) == sorted(set(values))
    assert {0.1, 0.3, 0.5} <= set(values)
    assert "instead of 8" in capsys.readouterr().out
    assert all(steps == [0] for steps in starts().values())
    before = read()["trials"]
    assert sweep(*words, "--trials", "8") == 0
    assert read()["trials"] == before
