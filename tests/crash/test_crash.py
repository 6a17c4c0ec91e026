"""A run that is killed at any moment and restarted ends with the weights, log and evaluations of an
undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.crash.cases import recipe, write_rows
from benchmarks.crash.process import Kill, ProcessRecord, train
from benchmarks.crash.trial import CrashHarness, Trial, differences, logged, newest
from tests.command import command
from tests.crash.helpers import CASE, STEPS, Disk, Halt, Place, copy_as_killed, count_steps, in_step
from tests.programs import fork_server
from valence.config.load import load_recipe

KILLED = ("kto, lora", "dpo")
SHORT = {"train": {"max_steps": 10}, "run": {"keep_best": None}}
LAST_OF_SAVE = 9
"""The step of the third save of a short run, which removes the checkpoint of step 3."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> CrashHarness:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        fork_server()
        return CrashHarness(tmp_path_factory.mktemp("harness"))


@pytest.mark.parametrize("name", CASE)
def test_every_case_has_a_valid_recipe(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path)
    loaded = load_recipe(recipe(CASE[name], tmp_path))
    assert loaded.recipe.method == CASE[name].method


@pytest.mark.slow
@pytest.mark.dist
def test_randomly_killed_processes_end_like_undisturbed_ones(harness: CrashHarness) -> None:
    def killed(name: str) -> list[Trial]:
        draw, trials = random.Random(name), list[Trial]()
        while sum(trial.kills for trial in trials) < 3:
            trials.append(
                harness.run_with_random_kills(
                    CASE[name], harness.folder / f"{name} {len(trials)}", draw
                )
            )
        return trials

    with ThreadPoolExecutor(len(KILLED)) as workers:
        result = dict(zip(KILLED, workers.map(killed, KILLED), strict=True))
    assert [
        (name, trial.errors) for name, trials in result.items() for trial in trials if trial.errors
    ] == []


@pytest.mark.dist
def test_a_process_that_is_killed_in_a_save_leaves_its_lock_and_is_resumed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL, in a separate process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run, recipe_path = tmp_path / "run", tmp_path / "recipe.json"
    recipe_path.write_text(json.dumps(place.recipe(CASE["kto, lora"])), encoding="utf-8")
    server = fork_server()
    (notes,) = several = server.RawArray(ProcessRecord, 1)
    kill, printed = Kill("saving", 30), str(tmp_path / "printed")
    process = server.Process(
        target=train, args=(str(recipe_path), str(run), several, kill, printed)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert notes.saving == 30
    before = newest(run)
    assert before > 0
    held = json.loads((run / "run.lock").read_text(encoding="utf-8"))
    assert held["pid"] == notes.pid
    with count_steps() as steps:
        assert command("train", str(recipe_path), f"run.dir={run}") == 0
    assert before + len(steps) == STEPS
    assert differences(run, place.undisturbed_run(CASE["kto, lora"])) == []


def killed_in_save(
    case: str, place: Place, disk: Disk, folder: Path, only: str | None = None
) -> list[tuple[str, Path]]:
    """The file operations of a save, or those of one name, with the run as it was before each."""
    run = folder / "run"
    left: list[tuple[str, Path]] = []

    def freeze(operation: str, path: str) -> None:
        at = {"step-9": 6, "step-3": LAST_OF_SAVE}  # which checkpoint is the newest then
        steps = [step for part, step in at.items() if part in path]
        if only in (None, operation) and newest(run) in steps:
            left.append((operation, copy_as_killed(run, folder / f"left {len(left)}")))

    disk.call_for(freeze, run / "checkpoints")
    assert place.train(CASE[case], run, **SHORT) == 0
    disk.rest()
    return left


def resumes(case: str, place: Place, run: Path, about: object) -> None:
    assert place.train(CASE[case], run, **SHORT) == 0, about
    assert differences(run, place.undisturbed_run(CASE[case], **SHORT)) == [], about


def test_some_operations_of_a_save_may_be_the_last(
    place: Place, disk: Disk, tmp_path: Path
) -> None:
    """The renames: of the new checkpoint, and of the old one that is removed.

    The slow test has all operations.
    """
    left = killed_in_save("kto, lora", place, disk, tmp_path, only="os.rename")
    assert [newest(run) for _, run in left] == [6, LAST_OF_SAVE]
    for _, run in left:
        resumes("kto, lora", place, run, run.name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stride"), [("kto, lora", 1), ("sft, whole models", 4)])
def test_every_operation_of_a_save_may_be_the_last(
    name: str, stride: int, place: Place, disk: Disk, tmp_path: Path
) -> None:
    """What is there before each of its operations is resumed."""
    left = killed_in_save(name, place, disk, tmp_path)
    assert {"os.mkdir", "os.fsync", "os.rename", "open"} <= {operation for operation, _ in left}
    for operation, run in left[::stride]:
        assert newest(run) in (6, LAST_OF_SAVE)
        resumes(name, place, run, (run.name, operation))


def killed_elsewhere(
    case: str, place: Place, disk: Disk, folder: Path
) -> dict[tuple[str, str], Path]:
    """The run as it was before the second file operation of each kind on each kind of file, or the
    only one.

    These are files of the start, the log, evaluations, the model and the page. Before a file is
    flushed the folder looks as it does before what comes next.
    """
    run = folder / "run"
    observed = Counter[tuple[str, str]]()
    left: dict[tuple[str, str], Path] = {}

    def freeze(operation: str, path: str) -> None:
        kind = operation, re.sub(r"\d+", "N", os.path.relpath(path, run))
        observed[kind] += 1
        if operation != "os.fsync" and "checkpoints" not in path and observed[kind] <= 2:
            shutil.rmtree(left.get(kind, folder / "none"), ignore_errors=True)
            left[kind] = copy_as_killed(run, folder / f"left {observed.total()}")

    disk.call_for(freeze, run)
    assert place.train(CASE[case], run, **SHORT) == 0
    disk.rest()
    files = " ".join(file for _, file in left)
    names = ("config.yaml", "metrics.jsonl", "run.json", "report.html", "eval", "model")
    assert all(name in files for name in names)
    return left


def test_some_other_file_operations_may_be_the_last(
    place: Place, disk: Disk, tmp_path: Path
) -> None:
    """Renames of the run's state, before its first checkpoint, and of the model.

    The slow test has all operations.
    """
    left = killed_elsewhere("kto, lora", place, disk, tmp_path)
    for file in (".run.json.part", ".model.part"):
        resumes("kto, lora", place, left["os.rename", file], file)


@pytest.mark.slow
def test_every_other_file_operation_may_be_the_last(
    place: Place, disk: Disk, tmp_path: Path
) -> None:
    for kind, run in killed_elsewhere("dpo", place, disk, tmp_path).items():
        resumes("dpo", place, run, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "step", "batch"), [
    (5, 6, 0),  # an epoch is over, and saved
    (3, 6, 0),  # an epoch is over, and not saved since step 3
    (3, 9, 1),  # amid the gradients of a step
    (1, 5, 1),  # amid those of an epoch's last step, which is short
])  # fmt: skip
def test_two_resumes_in_a_row(
    save_every: int,
    step: int,
    batch: int,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed at the same place of one epoch and of the next."""
    case, cut = CASE["kto, lora"], {"train": {"micro_batch_tokens": 40, "max_steps": 17}}
    more = cut | {"run": {"save_every": save_every, "keep_best": None}}
    run, left = tmp_path / "run", [tmp_path / "left 1", tmp_path / "left 2"]
    for at, to in zip((step, step + 5), left, strict=True):

        def halt(run: Path = run, to: Path = to) -> None:
            copy_as_killed(run, to)
            raise Halt

        with monkeypatch.context() as patch:
            in_step(patch, at, halt, batch=batch)
            with pytest.raises(Halt):
                place.train(case, run, **more)
        assert newest(to) == (at - 1) // save_every * save_every
        run = to
    assert place.train(case, run, **more) == 0
    assert differences(run, place.undisturbed_run(case, **cut)) == []
    assert min(r["micro_batches"] for r in logged(run) if "loss" in r) > batch


def test_a_run_is_resumed_from_its_folder_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run, left = CASE["kto, lora"], tmp_path / "run", tmp_path / "left"

    def halt() -> None:
        copy_as_killed(run, left)
        raise Halt

    with monkeypatch.context() as patch:
        in_step(patch, 8, halt)
        with pytest.raises(Halt):
            place.train(case, run)
    (tmp_path / "run.yaml").unlink()
    shutil.rmtree(run)
    assert command("train", str(left)) == 0
    assert differences(left, place.undisturbed_run(case)) == []
    assert not run.exists()
