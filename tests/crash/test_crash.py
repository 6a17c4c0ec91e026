"""Killed at any moment and started again, a run ends with the weights, the log and the evaluations it would have had."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.crash.process import Kill
from benchmarks.crash.trial import Laboratory, Trial, differences, logged, newest
from tests.command import command
from tests.crash.rig import CASE, Disk, Halt, Place, frozen, in_step
from tests.programs import fork_server

KILLED = ("kto, lora", "dpo")
SHORT = {"train": {"max_steps": 10}, "run": {"keep_best": None}}


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        fork_server()
        return Laboratory(tmp_path_factory.mktemp("laboratory"))


def test_processes_killed_at_random_end_as_if_nothing_had_been(laboratory: Laboratory) -> None:
    def killed(name: str) -> list[Trial]:
        draw, trials = random.Random(name), list[Trial]()
        while sum(trial.kills for trial in trials) < 3:
            trials.append(laboratory.until_done(CASE[name], laboratory.folder / f"{name} {len(trials)}", draw))
        return trials

    with ThreadPoolExecutor(len(KILLED)) as workers:
        found = dict(zip(KILLED, workers.map(killed, KILLED), strict=True))
    assert [(name, trial.wrong) for name, trials in found.items() for trial in trials if trial.wrong] == []


def test_a_process_that_is_killed_in_a_save_leaves_its_lock_and_is_taken_up(laboratory: Laboratory) -> None:
    case, run = CASE["kto, lora"], laboratory.folder / "once"
    first = laboratory.start(case, run, Kill("saving", 30))
    assert first.status == -9
    assert first.notes.saving == 30
    before = newest(run)
    assert before > 0
    second = laboratory.start(case, run)
    assert second.status == 0
    assert before + second.notes.steps == laboratory.left_alone(case)[1].notes.steps
    assert differences(run, laboratory.left_alone(case)[0]) == []


@pytest.mark.parametrize(("name", "stride"), [("kto, lora", 1), ("sft, whole models", 4)])
def test_every_operation_of_a_save_may_be_the_last(name: str, stride: int, place: Place, disk: Disk, tmp_path: Path) -> None:
    """The third save, which also removes the first checkpoint. What is there before each of its operations is taken up."""
    case, run = CASE[name], tmp_path / "run"
    left: list[Path] = []
    names: list[str] = []

    def freeze(operation: str, path: str) -> None:
        if newest(run) == (9 if "step-3" in path else 6) and ("step-9" in path or "step-3" in path):
            names.append(operation)
            left.append(frozen(run, tmp_path / f"left {len(left)}"))

    disk.each(freeze, run / "checkpoints")
    assert place.train(case, run, **SHORT) == 0
    disk.rest()
    assert {"os.mkdir", "os.fsync", "os.rename", "open"} <= set(names)
    for operation, each in zip(names[::stride], left[::stride], strict=True):
        assert newest(each) in (6, 9)
        assert place.train(case, each, **SHORT) == 0, operation
        assert differences(each, place.alone(case, **SHORT)) == [], operation


def test_every_other_file_operation_may_be_the_last(place: Place, disk: Disk, tmp_path: Path) -> None:
    """The second of each kind on each kind of file, or the only one: of the start, the log, evaluations, the model, the page.
    Before a file is flushed the folder looks as it does before what comes next."""
    case, run = CASE["dpo"], tmp_path / "run"
    seen = Counter[tuple[str, str]]()
    left: dict[tuple[str, str], Path] = {}

    def freeze(operation: str, path: str) -> None:
        kind = operation, re.sub(r"\d+", "N", os.path.relpath(path, run))
        seen[kind] += 1
        if operation != "os.fsync" and "checkpoints" not in path and seen[kind] <= 2:
            shutil.rmtree(left.get(kind, tmp_path / "none"), ignore_errors=True)
            left[kind] = frozen(run, tmp_path / f"left {seen.total()}")

    disk.each(freeze, run)
    assert place.train(case, run, **SHORT) == 0
    disk.rest()
    files = " ".join(file for _, file in left)
    assert all(name in files for name in ("config.yaml", "metrics.jsonl", "run.json", "report.html", "eval", "model"))
    for kind, each in left.items():
        assert place.train(case, each, **SHORT) == 0, kind
        assert differences(each, place.alone(case, **SHORT)) == [], kind


@pytest.mark.parametrize(("save_every", "step", "batch"), [
    (5, 6, 0),  # an epoch is over, and saved
    (3, 6, 0),  # an epoch is over, and not saved since step 3
    (3, 9, 1),  # amid the gradients of a step
    (1, 5, 1),  # amid those of an epoch's last step, which is short
])  # fmt: skip
def test_two_resumes_in_a_row(
    save_every: int, step: int, batch: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the same place of one epoch and of the next."""
    case, cut = CASE["kto, lora"], {"train": {"micro_batch_tokens": 40, "max_steps": 17}}
    more = cut | {"run": {"save_every": save_every, "keep_best": None}}
    run, left = tmp_path / "run", [tmp_path / "left 1", tmp_path / "left 2"]
    for at, to in zip((step, step + 5), left, strict=True):

        def halt(run: Path = run, to: Path = to) -> None:
            frozen(run, to)
            raise Halt

        with monkeypatch.context() as patch:
            in_step(patch, at, halt, batch=batch)
            with pytest.raises(Halt):
                place.train(case, run, **more)
        assert newest(to) == (at - 1) // save_every * save_every
        run = to
    assert place.train(case, run, **more) == 0
    assert differences(run, place.alone(case, **cut)) == []
    assert min(r["micro_batches"] for r in logged(run) if "loss" in r) > batch


def test_a_run_is_taken_up_from_its_folder_alone(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, run, left = CASE["kto, lora"], tmp_path / "run", tmp_path / "left"

    def halt() -> None:
        frozen(run, left)
        raise Halt

    with monkeypatch.context() as patch:
        in_step(patch, 8, halt)
        with pytest.raises(Halt):
            place.train(case, run)
    (tmp_path / "run.yaml").unlink()
    shutil.rmtree(run)
    assert command("resume", str(left)) == 0
    assert differences(left, place.alone(case)) == []
    assert not run.exists()
