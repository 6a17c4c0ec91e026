"""Damage by a power loss to a run's folder: a corrupt newest checkpoint, or a log that is ahead of
it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crash.trial import differences, newest
from tests.command import command, command_error
from tests.crash.helpers import CASE, STEPS, Halt, Place, copy_as_killed, count_steps, in_step
from tests.errors import check_error, raises_error
from valence.training import saved_models
from valence.training.checkpoints import Damaged, Saved, check
from valence.training.open_run import restore

CASES = KTO_LORA, FULL_MODELS = ("kto, lora", "sft, whole models")
STOPPED_IN = 11
slow = pytest.mark.slow


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    """What is left of a file whose length reached the disk and whose content did not."""
    path.write_bytes(bytes(path.stat().st_size))


def rename(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.part"))


DAMAGES = (cut, empty, flip, zero, Path.unlink, rename)


@pytest.fixture(scope="module")
def stopped(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a case as it was during step 11, with checkpoints of steps 8 and 9 or 6 and 9."""

    @cache
    def at(name: str) -> Path:
        folder = tmp_path_factory.mktemp("stopped")

        def halt() -> None:
            copy_as_killed(folder / "run", folder / "left")
            raise Halt

        with pytest.MonkeyPatch.context() as patch:
            in_step(patch, STOPPED_IN, halt)
            with pytest.raises(Halt):
                place.train(CASE[name], folder / "run")
        return folder / "left"

    return at


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("name", "damage"), [
    (KTO_LORA, flip),
    *(pytest.param(KTO_LORA, damage, marks=slow) for damage in DAMAGES if damage is not flip),
    *(pytest.param(FULL_MODELS, damage, marks=slow) for damage in (flip, Path.unlink)),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_a_damaged_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_used(
    name: str,
    damage: Callable[[Path], None],
    stopped: Callable[[str], Path],
    place: Place,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    last = f"checkpoints/step-{newest(stopped(name))}"
    assert len(steps(stopped(name))) >= 2
    files = [
        p.relative_to(stopped(name) / last)
        for p in (stopped(name) / last).rglob("*")
        if p.is_file()
    ]
    assert len(files) >= 3
    for i, file in enumerate(files):
        run = copy_as_killed(stopped(name), tmp_path / f"run {i}")
        if (run / last / file).stat().st_size == 0:
            continue
        damage(run / last / file)
        assert place.train(CASE[name], run) == 0, file
        output = capfd.readouterr().out
        assert f"{run}/{last}" in output, file
        assert str(file) in output, file
        assert differences(run, place.undisturbed_run(CASE[name])) == [], file


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=slow)])
def test_no_bit_of_a_manifest_may_change(
    stride: int, stopped: Callable[[str], Path], tmp_path: Path
) -> None:
    """It says what the run was: a wrong word would have a resumed run refused, or go on as another
    one.
    """
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    path = run / "checkpoints" / f"step-{newest(run)}"
    full = (path / "manifest.json").read_bytes()
    unseen: list[str] = []
    for at in range(0, len(full), stride):
        (path / "manifest.json").write_bytes(full[:at] + bytes([full[at] ^ 1]) + full[at + 1 :])
        try:
            check(path)
        except Damaged:
            continue
        unseen.append(full[max(0, at - 20) : at + 1].decode(errors="replace"))
    assert unseen == []


@pytest.mark.parametrize(("ending", "used"), [
    ("part", False), pytest.param("gone", False, marks=slow), ("old", True)
])  # fmt: skip
@pytest.mark.parametrize("name", [KTO_LORA, pytest.param(FULL_MODELS, marks=slow)])
def test_a_checkpoint_that_was_being_renamed(
    name: str, ending: str, used: bool, stopped: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    """One that was not finished, one that was being removed, and one that another of the same step
    was to replace.
    """
    run = copy_as_killed(stopped(name), tmp_path / "run")
    *_, before, last = steps(run)
    (run / f"checkpoints/step-{last}").rename(run / f"checkpoints/.step-{last}.{ending}")
    with count_steps() as done:
        assert place.train(CASE[name], run) == 0
    assert len(done) == STEPS - (last if used else before)
    assert differences(run, place.undisturbed_run(CASE[name])) == []
    assert not list((run / "checkpoints").glob(".*"))


def test_all_checkpoints_damaged_is_an_error_and_nothing_is_done(
    stopped: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    for step in steps(run):
        cut(run / f"checkpoints/step-{step}/tensors.safetensors")
    log = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):  # and again, since nothing has changed
        error = place.error(CASE[KTO_LORA], run)
        check_error(error, "checkpoint-damaged", where=str(run / "checkpoints"), fix="--fresh")
        assert all(f"step-{step}" in error.message for step in steps(run))
        assert (run / "metrics.jsonl").read_bytes() == log


LATER = b'{"step": 12, "loss": 0.5, "seconds": 1.0}\n'


@pytest.mark.parametrize(
    "tail",
    [
        LATER + LATER[:-1],
        *(
            pytest.param(tail, marks=slow)
            for tail in (LATER, LATER * 3, LATER[:17], b"\0" * 64, b"\xff\xfe\n")
        ),
    ],
)
def test_log_records_after_the_checkpoint_are_removed(
    tail: bytes, stopped: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(tail)
    assert place.train(CASE[KTO_LORA], run) == 0
    assert differences(run, place.undisturbed_run(CASE[KTO_LORA])) == []


OTHER_FILES = ("run.json", "config.yaml", "audit.json", "rows.safetensors")


@slow
@pytest.mark.parametrize("name", OTHER_FILES)
@pytest.mark.parametrize("damage", [cut, flip, zero, Path.unlink], ids=lambda f: f.__name__)
def test_damage_to_files_outside_the_checkpoint_does_not_change_a_resumed_run(
    name: str,
    damage: Callable[[Path], None],
    stopped: Callable[[str], Path],
    place: Place,
    tmp_path: Path,
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    damage(run / name)
    assert place.train(CASE[KTO_LORA], run) == 0
    assert differences(run, place.undisturbed_run(CASE[KTO_LORA])) == []


def test_a_run_resumes_without_its_other_files(
    stopped: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    """Some cut, the others gone, at once. One at a time they are in the slow test."""
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    for damage, name in zip((cut, Path.unlink, cut, Path.unlink), OTHER_FILES, strict=True):
        damage(run / name)
    assert place.train(CASE[KTO_LORA], run) == 0
    assert differences(run, place.undisturbed_run(CASE[KTO_LORA])) == []


@pytest.mark.parametrize(
    "damage", [cut, pytest.param(empty, marks=slow), pytest.param(zero, marks=slow)]
)
def test_reference_values_stored_after_the_checkpoint_may_be_lost(
    damage: Callable[[Path], None], place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held when the checkpoint was written is on the disk; what came later is computed
    again, to the same bits.
    """
    case, run, left = CASE[KTO_LORA], tmp_path / "run", tmp_path / "left"
    sizes, no_best = dict[str, int](), {"run": {"keep_best": None}}

    def note() -> None:
        sizes.update(
            {
                path.name: path.stat().st_size
                for path in (run / "reference").rglob("*")
                if path.is_file()
            }
        )

    def halt() -> None:
        copy_as_killed(run, left)
        raise Halt

    with monkeypatch.context() as patch:
        in_step(patch, 4, note)  # before its reference is asked
        in_step(patch, 6, halt)
        with pytest.raises(Halt):
            place.train(case, run, **no_best)
    lost = 0
    for path in (left / "reference").rglob("*"):
        if path.is_file() and path.stat().st_size > sizes[path.name]:
            later = path.with_name("later")
            later.write_bytes(path.read_bytes()[sizes[path.name] :])
            damage(later)
            lost += later.read_bytes() != path.read_bytes()[sizes[path.name] :]
            path.write_bytes(path.read_bytes()[: sizes[path.name]] + later.read_bytes())
            later.unlink()
    assert lost == 2
    assert newest(left) == 3
    assert place.train(case, left, **no_best) == 0
    assert differences(left, place.undisturbed_run(case)) == []


def unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, error: OSError) -> None:
    """A file or folder that is there and cannot be read, as after a fault of the disk or with mode
    000.
    """
    opened, listed, scanned = Path.open, os.listdir, os.scandir

    def refuse(name: object) -> None:
        if Path(str(name)) == path or path in Path(str(name)).parents:
            raise error

    def open_file(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if "r" in mode:
            refuse(self)
        return opened(self, mode, *args, **more)

    def list_folder(name: Any = ".") -> Any:
        refuse(name)
        return listed(name)

    def scan_folder(name: Any = ".") -> Any:
        refuse(name)
        return scanned(name)

    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(os, "listdir", list_folder)
    monkeypatch.setattr(os, "scandir", scan_folder)


FAULTS = [
    OSError(errno.EIO, "Input/output error"),
    PermissionError(errno.EACCES, "Permission denied"),
]


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("state.json", FAULTS[0]),
        *(
            pytest.param(file, FAULTS[0], marks=slow)
            for file in ("manifest.json", "tensors.safetensors", "")
        ),
        *(
            pytest.param(file, FAULTS[1], marks=slow)
            for file in ("manifest.json", "state.json", "tensors.safetensors", "")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value.errno],
)
def test_a_checkpoint_that_cannot_be_read_is_named_and_the_one_before_is_used(
    file: str,
    fault: OSError,
    stopped: Callable[[str], Path],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    *_, before, last = steps(run)
    with monkeypatch.context() as patch:
        unreadable(patch, run / f"checkpoints/step-{last}" / file, fault)
        assert place.train(CASE[KTO_LORA], run) == 0
    output = capfd.readouterr().out
    assert f"{run}/checkpoints/step-{last}" in output
    assert str(fault.strerror) in output
    assert f"step-{before}" in output
    assert (run / f"checkpoints/damaged-step-{last}").is_dir()
    assert differences(run, place.undisturbed_run(CASE[KTO_LORA])) == []


@slow
def test_a_folder_in_place_of_a_file_of_the_newest_checkpoint(
    stopped: Callable[[str], Path], place: Place, tmp_path: Path
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    path = run / f"checkpoints/step-{newest(run)}" / "state.json"
    path.unlink()
    path.mkdir()
    assert place.train(CASE[KTO_LORA], run) == 0
    assert differences(run, place.undisturbed_run(CASE[KTO_LORA])) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: errno.errorcode[fault.errno])
@pytest.mark.parametrize(
    ("name", "code"), [("checkpoints", "file-not-readable"), ("", "folder-not-readable")]
)
def test_a_folder_that_cannot_be_read_is_no_fresh_start(
    name: str,
    code: str,
    fault: OSError,
    stopped: Callable[[str], Path],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    log = (run / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        unreadable(patch, run / name, fault)
        error = place.error(CASE[KTO_LORA], run)
    check_error(error, code, where=str(run / name))
    assert str(fault.strerror) in error.message
    assert (run / "metrics.jsonl").read_bytes() == log


@pytest.mark.parametrize("words", [
    ["export", "RUN", "OUT"],  # OUT: a new folder each time
    pytest.param(["sample", "RUN", "--prompt", "a", "--max-new-tokens", "2"], marks=slow),
])  # fmt: skip
def test_a_run_is_read_from_the_checkpoint_before_a_damaged_one(
    words: list[str], stopped: Callable[[str], Path], tmp_path: Path
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    *_, before, last = steps(run)
    flip(run / f"checkpoints/step-{last}/tensors.safetensors")
    first, second = (
        [{"RUN": str(run), "OUT": str(tmp_path / out)}.get(word, word) for word in words]
        for out in ("first", "second")
    )
    with pytest.warns(UserWarning, match=f"step-{last}.*step-{before}"):
        assert command(*first) == 0
    assert steps(run)[-1] == last  # nothing in the folder has changed
    error = command_error(*second, "--step", str(last))
    check_error(error, "checkpoint-damaged", where=f"step-{last}")


@pytest.mark.parametrize(
    "moment", ["before it is checked", "before it is loaded", "before its weights are read"]
)
def test_a_checkpoint_that_the_run_removes_while_it_is_read(
    moment: str, stopped: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does that saves the next one: the next one is used."""
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    *_, before, last = steps(run)
    later = run / f"checkpoints/step-{last}"
    later.rename(tmp_path / "later")
    done: list[int] = []

    def replace() -> None:
        if not done:
            done.append(1)
            (tmp_path / "later").rename(later)
            shutil.rmtree(run / f"checkpoints/step-{before}")

    def after_replacing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            replace()
            return function(*args, **more)

        return call

    if moment == "before it is checked":
        monkeypatch.setattr(saved_models, "check", after_replacing(saved_models.check))
    elif moment == "before it is loaded":
        monkeypatch.setattr(
            saved_models.state_files, "load", after_replacing(saved_models.state_files.load)
        )
    else:
        monkeypatch.setattr(
            saved_models, "load_weights", after_replacing(saved_models.load_weights)
        )
    assert restore(run).step == last
    assert done


def test_checkpoints_that_vanish_again_and_again_are_an_error(
    stopped: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_as_killed(stopped(KTO_LORA), tmp_path / "run")
    steps_there = [10]

    def check_removed(path: Path) -> Saved:
        steps_there[0] += 1
        path.rename(path.with_name(f"step-{steps_there[0]}"))
        return check(path)

    monkeypatch.setattr(saved_models, "check", check_removed)
    with raises_error("checkpoints-pruned", where=str(run), fix="run.keep"):
        restore(run)
