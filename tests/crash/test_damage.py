"""What a loss of power can do to a run's folder: the newest checkpoint is not what was written, the log goes on behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.crash.trial import differences, newest
from tests.crash.rig import CASE, Halt, Place, frozen, in_step
from valence.checkpoint.keeper import Damaged, check

CASES = ("kto, lora", "sft, whole models")
STOPPED_IN, SHORT = 11, {"train": {"max_steps": 12}}


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
def stopped(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs as they were amid step 11, with checkpoints of steps 8 and 9 or 6 and 9."""

    def at(name: str) -> Path:
        folder = tmp_path_factory.mktemp("stopped")

        def halt() -> None:
            frozen(folder / "run", folder / "left")
            raise Halt

        with pytest.MonkeyPatch.context() as patch:
            in_step(patch, STOPPED_IN, halt)
            with pytest.raises(Halt):
                place.train(CASE[name], folder / "run", **SHORT)
        return folder / "left"

    return {name: at(name) for name in CASES}


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "damage"), [(CASES[0], damage) for damage in DAMAGES] + [(CASES[1], flip), (CASES[1], Path.unlink)],
    ids=lambda given: getattr(given, "__name__", given),
)  # fmt: skip
def test_a_damaged_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_used(
    name: str,
    damage: Callable[[Path], None],
    stopped: dict[str, Path],
    place: Place,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    last = f"checkpoints/step-{newest(stopped[name])}"
    assert len(steps(stopped[name])) >= 2
    files = [p.relative_to(stopped[name] / last) for p in (stopped[name] / last).rglob("*") if p.is_file()]
    assert len(files) >= 3
    for i, file in enumerate(files):
        run = frozen(stopped[name], tmp_path / f"run {i}")
        if (run / last / file).stat().st_size == 0:
            continue
        damage(run / last / file)
        assert place.train(CASE[name], run, **SHORT) == 0, file
        said = capfd.readouterr().out
        assert f"{run}/{last}" in said, file
        assert str(file) in said, file
        assert differences(run, place.alone(CASE[name], **SHORT)) == [], file


def test_no_bit_of_a_manifest_may_change(stopped: dict[str, Path], tmp_path: Path) -> None:
    """It says what the run was: a wrong word would have a resumed run refused, or go on as another one."""
    run = frozen(stopped["kto, lora"], tmp_path / "run")
    path = run / "checkpoints" / f"step-{newest(run)}"
    whole = (path / "manifest.json").read_bytes()
    unseen: list[str] = []
    for at in range(len(whole)):
        (path / "manifest.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            check(path)
        except Damaged:
            continue
        unseen.append(whole[max(0, at - 20) : at + 1].decode(errors="replace"))
    assert unseen == []


@pytest.mark.parametrize(("ending", "used"), [("part", False), ("gone", False), ("old", True)])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_was_being_renamed(
    name: str, ending: str, used: bool, stopped: dict[str, Path], place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that was not finished, one that was being removed, and one that another of the same step was to replace."""
    run = frozen(stopped[name], tmp_path / "run")
    last = newest(run)
    (run / f"checkpoints/step-{last}").rename(run / f"checkpoints/.step-{last}.{ending}")
    assert place.train(CASE[name], run, **SHORT) == 0
    assert (f"after step {last} of" in capfd.readouterr().out) is used
    assert differences(run, place.alone(CASE[name], **SHORT)) == []
    assert not list((run / "checkpoints").glob(".*"))


def test_all_checkpoints_damaged_is_said_and_nothing_is_done(
    stopped: dict[str, Path], place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = frozen(stopped["kto, lora"], tmp_path / "run")
    for step in steps(run):
        cut(run / f"checkpoints/step-{step}/tensors.safetensors")
    log = (run / "metrics.jsonl").read_bytes()
    assert place.train(CASE["kto, lora"], run, **SHORT) == 2
    assert "--fresh" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == log
    assert place.train(CASE["kto, lora"], run, **SHORT) == 2  # and again, since nothing has changed


LATER = b'{"step": 12, "loss": 0.5, "seconds": 1.0}\n'


@pytest.mark.parametrize("tail", [LATER, LATER * 3, LATER[:17], LATER + LATER[:-1], b"\0" * 64, b"\xff\xfe\n"])
def test_what_the_log_says_after_the_checkpoint_is_cut_off(
    tail: bytes, stopped: dict[str, Path], place: Place, tmp_path: Path
) -> None:
    run = frozen(stopped["kto, lora"], tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(tail)
    assert place.train(CASE["kto, lora"], run, **SHORT) == 0
    assert differences(run, place.alone(CASE["kto, lora"], **SHORT)) == []


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "audit.json", "rows.safetensors"])
@pytest.mark.parametrize("damage", [cut, flip, zero, Path.unlink], ids=lambda f: f.__name__)
def test_other_files_of_the_run_are_not_what_it_goes_on_from(
    name: str, damage: Callable[[Path], None], stopped: dict[str, Path], place: Place, tmp_path: Path
) -> None:
    run = frozen(stopped["kto, lora"], tmp_path / "run")
    damage(run / name)
    assert place.train(CASE["kto, lora"], run, **SHORT) == 0
    assert differences(run, place.alone(CASE["kto, lora"], **SHORT)) == []


@pytest.mark.parametrize("damage", [cut, empty, zero])
def test_what_the_reference_cache_got_after_the_checkpoint_may_be_lost(
    damage: Callable[[Path], None], place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held when the checkpoint was written is on the disk; what came later is computed again, to the same bits."""
    case, run, left = CASE["kto, lora"], tmp_path / "run", tmp_path / "left"
    sizes, no_best = dict[str, int](), {"run": {"keep_best": None}}

    def note() -> None:
        sizes.update({path.name: path.stat().st_size for path in (run / "reference").rglob("*") if path.is_file()})

    def halt() -> None:
        frozen(run, left)
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
    assert differences(left, place.alone(case)) == []
