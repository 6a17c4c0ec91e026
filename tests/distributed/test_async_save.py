"""Checkpoints of sharded weights that are written while training continues."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from tests.distributed.process_groups import run
from tests.distributed.test_run import SHARDED, records, train, written
from tests.errors import check_error
from tests.runs.test_shards import Model, differing
from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import Group
from valence.training import checkpoints as checkpoint_files
from valence.training import state_files
from valence.training.checkpoints import Checkpoints, check

pytestmark = pytest.mark.dist
slow = pytest.mark.slow


class Writer:
    """Writes shards when the test allows it."""

    def __init__(self) -> None:
        self.may_write = threading.Event()

    def __call__(
        self, folder: Path, tensors: Mapping[str, Tensor], group: Group | None
    ) -> list[Path]:
        assert self.may_write.wait(20)
        return sharded_checkpoint.write(folder, tensors, group)


def saves(group: Group, folder: str) -> dict[str, Any]:
    """Save once while training waits, and once while it continues."""
    checkpoint_files.MIN_BACKGROUND_BYTES = 0
    results: dict[str, Any] = {}
    model = Model(sharded=True)
    model.step()
    blocking = Checkpoints(
        Path(folder, "blocking"), None, group, sharded_checkpoint.write, in_background=False
    )
    blocking.save(2, model.state(), {})
    results["blocked"] = (blocking.is_pending, blocking.steps())

    writer = Writer()
    background = Checkpoints(Path(folder, "background"), 1, group, writer)
    numbers = {name: value.clone() for name, value in model.numbers().items()}
    background.save(2, model.state(), {})
    model.step()  # its collectives, while the other thread has not started with its own
    results["while writing"] = (background.is_pending, background.steps())
    results["changed"] = len(differing(model.numbers(), numbers))
    writer.may_write.set()
    background.wait()
    group.barrier("written")
    results["written"] = (background.is_pending, background.steps(), background.failed)

    saved = Model(sharded=True)
    saved.take(state_files.load(Path(folder, "background/step-2"), sharded_checkpoint.read, _HEAVY))
    results["restored"] = differing(saved.numbers(), numbers)

    writer.may_write.clear()
    background.save(3, model.state(), {})
    model.step()
    group.barrier("seen")
    results["old remains"] = background.steps()
    threading.Timer(0.2, writer.may_write.set).start()
    background.save(4, model.state(), {}, wait=True)  # waits for the save of step 3
    group.barrier("seen")
    results["pruned"] = background.steps()
    return results


_HEAVY = ("weights", "reference", "optimizer")


def files(folder: Path) -> dict[str, Any]:
    """Content of the files of a checkpoint, except its manifest.

    safetensors writes the metadata in the header in a random order.
    """
    return {
        path.name: _parts(path.read_bytes()) if path.suffix == ".safetensors" else path.read_text()
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def test_training_continues_while_two_processes_write_the_state_of_before(tmp_path: Path) -> None:
    ranks = run(saves, 2, str(tmp_path))
    assert [rank.error for rank in ranks] == ["", ""]
    for rank in ranks:
        results = rank.value
        assert results["blocked"] == (False, [2])
        assert results["while writing"] == (True, [])
        assert results["changed"] > 3
        assert results["written"] == (False, [2], 0)
        assert results["restored"] == []
        assert results["old remains"] == [2]
        assert results["pruned"] == [4]


def test_the_files_are_those_of_a_blocking_save(tmp_path: Path) -> None:
    assert [rank.error for rank in run(saves_equal, 2, str(tmp_path))] == ["", ""]
    blocking, background = (tmp_path / name / "step-2" for name in ("blocking", "background"))
    assert files(blocking) == files(background)
    assert len(files(blocking)) == 4
    assert check(blocking).step == check(background).step == 2


def saves_equal(group: Group, folder: str) -> None:
    checkpoint_files.MIN_BACKGROUND_BYTES = 0
    model = Model(sharded=True)
    model.step()
    for name in ("blocking", "background"):
        saver = Checkpoints(
            Path(folder, name),
            None,
            group,
            sharded_checkpoint.write,
            in_background=name == "background",
        )
        saver.save(2, model.state(), {})
        assert saver.is_pending == (name == "background")
        saver.wait()


def fails(group: Group, folder: str) -> list[Any]:
    """Rank 1 has no space left during the second of three saves."""
    checkpoint_files.MIN_BACKGROUND_BYTES = 0
    write = HuggingFaceStorageWriter.write_data
    saver = Checkpoints(Path(folder), 1, group, sharded_checkpoint.write)
    model, results = Model(sharded=True), []
    for step in (2, 3, 4):
        model.step()
        if step == 3 and group.rank == 1:
            HuggingFaceStorageWriter.write_data = _full  # type: ignore[method-assign]
        saver.save(step, model.state(), {})
        saver.wait()
        HuggingFaceStorageWriter.write_data = write  # type: ignore[method-assign]
        group.barrier("written")
        results.append((saver.steps(), saver.failed, saver.take_messages()))
        group.barrier("seen")
    return results


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_in_one_process_is_reported_by_all(tmp_path: Path) -> None:
    ranks = run(fails, 2, str(tmp_path / "checkpoints"))
    assert [rank.error for rank in ranks] == ["", ""]
    assert ranks[0].value == ranks[1].value
    first, second, third = ranks[0].value
    assert first == ([2], 0, [])
    assert second[:2] == ([2], 1)
    assert len(second[2]) == 1
    assert "checkpoint step-3 was not saved" in second[2][0]
    assert "rank 1" in second[2][0]
    assert "No space left on device" in second[2][0]
    assert third == ([4], 0, [])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


# Runs


def trains(group: Group, recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    checkpoint_files.MIN_BACKGROUND_BYTES = 0
    return train(group, recipes)


@slow
def test_a_run_has_the_same_log_and_checkpoints_either_way(place: Path, tmp_path: Path) -> None:
    def settings(name: str, *, is_async: bool) -> dict[str, Any]:
        return written(
            "dpo",
            place,
            tmp_path / name,
            **SHARDED,
            run={"save_every": 2, "keep": None, "async_save": is_async},
        )

    recipes = [settings("background", is_async=True), settings("blocking", is_async=False)]
    ranks = run(trains, 2, recipes, deadline=60.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done", "done"])] * 2
    background, blocking = tmp_path / "background", tmp_path / "blocking"
    assert records(background) == records(blocking)
    steps = sorted(path.name for path in (blocking / "checkpoints").iterdir())
    assert steps == [f"step-{step}" for step in (2, 4, 6, 8)]
    for step in steps:
        states = [files(folder / "checkpoints" / step) for folder in (background, blocking)]
        for state in states:
            state.pop("state.json")  # times of the log's window
        assert states[0] == states[1]
        assert len(states[0]) == 3


def fails_always(group: Group, recipe: Mapping[str, Any]) -> list[str]:
    checkpoint_files.MIN_BACKGROUND_BYTES = 0
    write, calls = HuggingFaceStorageWriter.write_data, []

    def full_after_first(self: Any, *args: Any) -> Any:
        calls.append(1)
        return write(self, *args) if len(calls) == 1 else _full()

    if group.rank == 1:
        HuggingFaceStorageWriter.write_data = full_after_first  # type: ignore[method-assign]
    return train(group, [recipe])


@slow
def test_failed_writes_in_a_row_end_the_run_in_all_processes(place: Path, tmp_path: Path) -> None:
    settings = {"run": {"save_every": 2, "max_failed_saves": 2}}
    recipe = written("dpo", place, tmp_path / "run", **SHARDED, **settings)
    ranks = run(fails_always, 2, recipe, deadline=60.0)
    for rank in ranks:
        assert rank.mistake is not None
        check_error(rank.mistake, "checkpoint-not-saved", where=str(tmp_path / "run/checkpoints"))
        assert "2 in a row failed; the last good one is step-2" in rank.mistake.message
    ranks = run(trains, 2, [recipe], deadline=60.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * 2
    alone = written("dpo", place, tmp_path / "alone", **SHARDED)
    assert [rank.value for rank in run(trains, 2, [alone], deadline=60.0)] == [["done"]] * 2
    assert records(tmp_path / "run") == records(tmp_path / "alone")
