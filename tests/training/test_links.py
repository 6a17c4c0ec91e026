"""Symbolic links inside a run's folder are refused: a run writes only into its folder, whatever the
folder contained before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import command
from tests.errors import raises_error
from tests.training.conftest import SharedRuns
from tests.training.resuming import settings, train
from tests.training.scoring import invoke
from tests.training.test_run import folder
from valence.models.log_prob_store import LogProbStore
from valence.rewards.cache import ScoreCache
from valence.storage import atomic_folder, atomic_write, make_folder, open_file
from valence.training.folder import FOLDERS
from valence.types import Score

__all__ = ["folder", "settings"]

CONTENT = b"x" * 10**4


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file that no run may change."""
    result = tmp_path / "outside"
    result.mkdir()
    (result / "file").write_bytes(CONTENT)
    return result


def is_untouched(outside: Path) -> bool:
    return [path.name for path in outside.iterdir()] == ["file"] and (
        outside / "file"
    ).read_bytes() == CONTENT


def put_link(place: Path, target: Path) -> None:
    """A link in place of what is there."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", [
    "run.lock", "metrics.jsonl", ".run.json.part", ".config.yaml.part", ".rows.safetensors.part",
    "eval/.step-4.json.part",
    pytest.param("eval/.train.json.part", marks=pytest.mark.slow),
    pytest.param(".audit.json.part", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_file_of_a_run_is_not_written_through_a_link(
    name: str,
    shared_runs: SharedRuns,
    tmp_path: Path,
    outside: Path,
) -> None:
    settings = shared_runs.copy(tmp_path, killed_at=3)
    put_link(tmp_path / "run" / name, outside / "file")
    with raises_error(
        "file-not-writable" if name == "run.lock" else "path-is-symlink",
        where=str(tmp_path / "run"),
    ) as raised:
        train(settings)
    assert str(tmp_path / "run" / name) in str(raised.error)
    assert is_untouched(outside)


@pytest.mark.parametrize("name", [
    "eval", "checkpoints", "wandb", ".model.part", "checkpoints/.step-4.part",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (*FOLDERS, ".model.old", "checkpoints/.step-8.part")
        if name not in ("eval", "checkpoints", "wandb")
    ),
])  # fmt: skip
def test_a_folder_of_a_run_is_not_written_through_a_link(
    name: str, shared_runs: SharedRuns, tmp_path: Path, outside: Path
) -> None:
    settings = shared_runs.copy(tmp_path, killed_at=3)
    put_link(tmp_path / "run" / name, outside)
    with raises_error("path-is-symlink", where=str(tmp_path / "run" / name)):
        train(settings)
    assert is_untouched(outside)


def test_a_page_is_not_written_through_a_link(
    shared_runs: SharedRuns,
    tmp_path: Path,
    outside: Path,
) -> None:
    shared_runs.copy(tmp_path, killed_at=3)
    put_link(tmp_path / "run/.report.html.part", outside / "file")
    with raises_error("path-is-symlink", where=".report.html.part"):
        invoke("report", str(tmp_path / "run"))
    assert is_untouched(outside)


def test_a_link_in_place_of_a_finished_file_is_replaced(
    shared_runs: SharedRuns,
    tmp_path: Path,
    outside: Path,
) -> None:
    """A file that is written as a whole gets its name by renaming, which does not follow links."""
    settings = shared_runs.copy(tmp_path, killed_at=3)
    put_link(tmp_path / "run/run.json", outside / "file")
    assert train(settings)[0].step == 9
    assert not (tmp_path / "run/run.json").is_symlink()
    assert is_untouched(outside)


@pytest.mark.slow
def test_the_folder_of_a_run_may_be_reached_through_links(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """People keep runs on other disks."""
    (tmp_path / "disk/first").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/second").symlink_to(tmp_path / "disk/first")
    for name in ("runs/first", "runs/second"):
        settings["run"]["dir"] = str(tmp_path / name)
        assert train(settings, fresh=True)[0].step == 9
        assert command("export", str(tmp_path / name), str(tmp_path / f"runs/out {name[5:]}")) == 0
        assert command("report", str(tmp_path / name)) == 0


def test_caches_are_not_written_through_links(tmp_path: Path, outside: Path) -> None:
    identity = {"a": 1}
    path = ScoreCache(tmp_path / "scores", identity).path
    assert path is not None
    put_link(path, outside / "file")
    cache = ScoreCache(tmp_path / "scores", identity)
    with raises_error("path-is-symlink", where=path.name):
        cache.add({"key": Score(1.0)})
    put_link(tmp_path / "scores", outside)
    with raises_error("path-is-symlink", where="scores"):
        ScoreCache(tmp_path / "scores", identity)
    (tmp_path / "reference").symlink_to(outside)
    with raises_error("path-is-symlink", where="reference"):
        LogProbStore(tmp_path / "reference", {}, {}).add({b"0" * 16: np.ones(1)})
    assert is_untouched(outside)


def test_writers_refuse_links_below_their_root(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "inner/.a.part").symlink_to(outside / "file")
    (root / "inner/.b.part").symlink_to(outside)
    (root / "inner/c").symlink_to(outside / "file")
    (root / "inner/dangling").symlink_to(outside / "new")
    with raises_error("path-is-symlink", where="root/link"):
        atomic_write(root / "link/a", b"y", root)
    with raises_error("path-is-symlink", where="inner/.a.part"):
        atomic_write(root / "inner/a", b"y", root)
    with (
        raises_error("path-is-symlink", where="inner/.b.part"),
        atomic_folder(root / "inner/b") as aside,
    ):
        (aside / "file").write_bytes(b"y")
    for name in ("inner/c", "inner/dangling", "link/new"):
        for append in (False, True):
            with raises_error("path-is-symlink", where="root/link" if "link" in name else name):
                open_file(root / name, root, append=append)
    with raises_error("path-is-symlink", where="root/link"):
        make_folder(root / "link/deeper", root)
    assert is_untouched(outside)
    (tmp_path / "way").symlink_to(root)  # the root itself may be a link
    atomic_write(tmp_path / "way/inner/d", b"y", tmp_path / "way")
    assert (root / "inner/d").read_bytes() == b"y"
