"""Full, read-only and vanished disks, and a clock that jumps: the run reports them, continues if it
can, and loses nothing.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from benchmarks.crash.trial import differences, newest
from tests.crash.helpers import CASE, STEPS, Disk, Halt, Place, in_step, warnings_of
from tests.errors import check_error
from valence import build_run, storage
from valence.training import checkpoints, state_files
from valence.training import folder as folders
from valence.training.checkpoints import check

KTO = CASE["kto, lora"]
SHORT = {"train": {"max_steps": 10}, "run": {"keep_best": None}}
NO_ROOM, READ_ONLY = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EROFS, "Read-only file system"),
)
slow = pytest.mark.slow
BACKGROUND = pytest.mark.parametrize("background", [
    pytest.param(False, id="at once"), pytest.param(True, id="in the background", marks=slow)
])  # fmt: skip


def saved_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MIN_BACKGROUND_BYTES", 0)


def fails(disk: Disk, folder: Path, part: str, index: int) -> list[str]:
    """Lets one operation fail, counted (from 0) among those whose path has this part.

    Returns all of those, as it goes on.
    """
    observed = list[str]()

    def fail(name: str, path: str) -> None:
        # which comes before what it removes, of which there is nothing
        if part in path and name != "shutil.rmtree":
            observed.append(name)
            if len(observed) == index + 1:
                raise NO_ROOM

    disk.call_for(fail, folder)
    return observed


def complete_checkpoints(run: Path) -> list[int]:
    """The steps of the checkpoints that are there, all of which are whole."""
    results = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    return [check(run / f"checkpoints/step-{step}").step for step in results]


def fail_in_save(
    index: int, case: str, place: Place, disk: Disk, folder: Path
) -> tuple[list[str], bool]:
    """A run in which operation ``index`` of the save of step 6 fails, if it has that many.

    The run warns of it and goes on, and later saves succeed. Returns the operations of that save,
    and whether one failed.
    """
    run = folder / f"run {index}"
    observed = fails(disk, run, "step-6.part", index)
    assert place.train(CASE[case], run, **SHORT) == 0, (index, observed)
    disk.rest()
    assert complete_checkpoints(run) == [9, 10], observed
    assert differences(run, place.undisturbed_run(CASE[case], **SHORT)) == [], observed
    failed = len(observed) > index
    warned = [warning for warning in warnings_of(run) if "step-6" in warning]
    assert len(warned) == failed, observed
    assert all(str(NO_ROOM.strerror) in warning for warning in warned)
    return observed, failed


@pytest.mark.parametrize("index", [pytest.param(0, marks=slow), 5])
def test_some_operation_of_a_save_may_fail_once(
    index: int, place: Place, disk: Disk, tmp_path: Path
) -> None:
    """The first operation, and one in the middle. The slow test covers all of them."""
    assert fail_in_save(index, "kto, lora", place, disk, tmp_path)[1]


@slow
@pytest.mark.parametrize(("name", "background", "stride"), [
    ("kto, lora", False, 2), ("kto, lora", True, 5), ("sft, whole models", False, 9),
])  # fmt: skip
def test_any_operation_of_a_save_may_fail_once(
    name: str,
    background: bool,
    stride: int,
    place: Place,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if background:
        saved_in_background(monkeypatch)
    index, failed = 0, True
    while failed:
        observed, failed = fail_in_save(index, name, place, disk, tmp_path)
        index += stride
    assert index > 8 + stride
    assert {"os.mkdir", "open", "os.fsync", "os.rename"} <= set(observed)


def test_fit_returns_when_the_last_checkpoint_is_written(
    place: Place, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may end here."""
    saved_in_background(monkeypatch)
    disk.call_for(lambda *_: time.sleep(0.02), tmp_path / "run" / "checkpoints")
    sections: dict[str, Any] = SHORT | {"run": {"dir": str(tmp_path / "run")}}
    run = build_run(place.recipe(KTO, **sections))
    run.fit()
    assert complete_checkpoints(tmp_path / "run")[-1] == run.step == 10
    run.close()


@pytest.mark.parametrize("background", [
    pytest.param(False, id="at once", marks=slow), pytest.param(True, id="in the background")
])  # fmt: skip
def test_the_last_save_is_tried_again(
    background: bool, place: Place, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if background:
        saved_in_background(monkeypatch)
    observed = fails(disk, tmp_path / "run", "step-10.part", 0)
    assert place.train(KTO, tmp_path / "run", **SHORT) == 0
    assert len(observed) > 1
    assert complete_checkpoints(tmp_path / "run") == [9, 10]
    assert differences(tmp_path / "run", place.undisturbed_run(KTO, **SHORT)) == []


@pytest.mark.parametrize("operation", [
    "os.rename", pytest.param("os.remove", marks=slow), pytest.param("os.rmdir", marks=slow)
])  # fmt: skip
def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_save(
    operation: str, place: Place, disk: Disk, tmp_path: Path
) -> None:
    """As where another program has its files open."""
    run = tmp_path / "run"

    def busy(name: str, path: str) -> None:
        if name == operation and "step-3" in path and not path.endswith("step-3.part"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    disk.call_for(busy, run / "checkpoints")
    assert place.train(KTO, run, **SHORT) == 0
    assert {9, 10} <= set(complete_checkpoints(run))
    assert [
        warning for warning in warnings_of(run) if "step-9" in warning or "step-6" in warning
    ] == []
    assert differences(run, place.undisturbed_run(KTO, **SHORT)) == []


def test_weights_that_cannot_be_written_are_warned_of(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library for tensors has its own errors."""
    run, write, calls = tmp_path / "run", state_files.save_file, itertools.count()

    def full(tensors: Any, path: Any, *more: Any) -> None:
        write(tensors, path, *more)
        if next(calls) == 1:
            os.truncate(path, os.path.getsize(path) // 2)
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(state_files, "save_file", full)
    assert place.train(KTO, run) == 0
    assert len([warning for warning in warnings_of(run) if "os error 28" in warning]) == 1
    assert complete_checkpoints(run)[-1] == STEPS
    assert differences(run, place.undisturbed_run(KTO)) == []


@BACKGROUND
@pytest.mark.parametrize("error", [
    pytest.param(NO_ROOM, id="full"), pytest.param(READ_ONLY, id="read-only", marks=slow)
])  # fmt: skip
@pytest.mark.parametrize("part", [
    pytest.param("checkpoints", id="saves"), pytest.param(".", id="all of the run", marks=slow)
])  # fmt: skip
def test_saves_that_fail_in_a_row_end_the_run_and_leave_the_last_good_one(
    part: str,
    error: OSError,
    background: bool,
    place: Place,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if background:
        saved_in_background(monkeypatch)
    run = tmp_path / "run"
    more = {"run": {"max_failed_saves": 2, "keep_best": None}}
    with monkeypatch.context() as patch:
        in_step(patch, 5, lambda: disk.call_for(_raise(error), run / part))
        mistake = place.error(KTO, run, **more)
    disk.rest()
    check_error(mistake, "checkpoint-not-saved", where=str(run / "checkpoints"))
    assert "step-3" in mistake.message
    printed = capfd.readouterr().out
    assert "step-6" in printed
    assert "step-9" in printed
    assert complete_checkpoints(run) == [3]
    assert place.train(KTO, run, **more) == 0
    assert complete_checkpoints(run)[-1] == STEPS
    assert differences(run, place.undisturbed_run(KTO)) == []


def _raise(error: OSError) -> Callable[[str, str], None]:
    def act(*_: str) -> None:
        raise error

    return act


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB in memory."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"no file system can be mounted here: {result.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def fill(disk: Path, left: int) -> None:
    """Fill the disk up to ``left`` free bytes."""
    with (disk / "filler").open("wb") as filler:
        free = os.statvfs(disk)
        filler.write(bytes(free.f_bavail * free.f_bsize - left))


@slow
@pytest.mark.parametrize("left", [0, 16 * 1024], ids=["nothing", "room for the log"])
@pytest.mark.parametrize("from_step", [2, 8])
def test_a_disk_that_is_full_for_a_while(
    from_step: int,
    left: int,
    place: Place,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From step 2 or 8 to step 11.

    The first epoch, in which the reference is asked, has five steps.
    """
    run = small_disk / "run"
    in_step(monkeypatch, from_step, lambda: fill(small_disk, left))
    in_step(monkeypatch, 11, (small_disk / "filler").unlink)
    assert place.train(KTO, run, run={"max_failed_saves": 100}) == 0
    assert str(NO_ROOM.strerror) in capfd.readouterr().out
    assert complete_checkpoints(run)[-1] == STEPS
    assert differences(run, place.undisturbed_run(KTO)) == []


@slow
@pytest.mark.parametrize("left", [0, 16 * 1024], ids=["nothing", "room for the log"])
def test_a_disk_that_stays_full(
    left: int, place: Place, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, is started in vain, and goes on once there is room."""
    run = small_disk / "run"
    more = {"run": {"max_failed_saves": 2, "keep_best": None}}
    with monkeypatch.context() as patch:
        in_step(patch, 8, lambda: fill(small_disk, left))
        error = place.error(KTO, run, **more)
    check_error(error, "checkpoint-not-saved", where=str(run / "checkpoints"))
    assert complete_checkpoints(run) == [3, 6]
    assert place.train(KTO, run, **more) == 2
    assert complete_checkpoints(run) == [3, 6]
    (small_disk / "filler").unlink()
    assert place.train(KTO, run, **more) == 0
    assert differences(run, place.undisturbed_run(KTO)) == []


@slow
def test_deleted_checkpoints_are_written_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_step(monkeypatch, 8, lambda: shutil.rmtree(run / "checkpoints"))
    assert place.train(KTO, run) == 0
    assert complete_checkpoints(run)[-1] == STEPS
    assert differences(run, place.undisturbed_run(KTO)) == []


@slow
def test_a_run_without_its_checkpoints_begins_at_the_start(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        in_step(patch, 8, _halt)
        with pytest.raises(Halt):
            place.train(KTO, run)
    shutil.rmtree(run / "checkpoints")
    assert place.train(KTO, run) == 0
    assert differences(run, place.undisturbed_run(KTO)) == []


def _halt() -> None:
    raise Halt


def vanish(folder: Path) -> None:
    """Removes a folder, also while a save in the background still puts files into it."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@slow
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_run_whose_folder_vanishes_is_an_error(
    background: bool,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if background:
        saved_in_background(monkeypatch)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        in_step(patch, 5, lambda: vanish(run))
        error = place.error(KTO, run)
    check_error(error, "checkpoint-not-saved", where=str(run / "checkpoints"))
    assert "step-6" in capfd.readouterr().out
    assert not (run / "checkpoints").exists()


@slow
def test_a_clock_that_jumps_by_years_changes_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = itertools.cycle((0, 5, -9, 30, -30, 2))
    real = time.time

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(days=365 * next(jumps))

    monkeypatch.setattr(time, "time", lambda: real() + 365 * 86400 * next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    for module in (checkpoints, storage, folders):
        monkeypatch.setattr(module, "datetime", Jumping)
    run, more = tmp_path / "run", {"run": {"max_time": "01:00:00"}}
    with monkeypatch.context() as patch:
        in_step(patch, 8, _halt)
        with pytest.raises(Halt):
            place.train(KTO, run, **more)
    assert newest(run) == 7
    for path in run.rglob("*"):  # files of the past and of the future
        then = real() + 365 * 86400 * next(jumps)
        os.utime(path, (then, then))
    assert place.train(KTO, run, **more) == 0
    assert differences(run, place.undisturbed_run(KTO)) == []
