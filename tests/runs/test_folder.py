"""Detection of run folders that can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from valence.training.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that ended before its first step."""
    path = tmp_path / "run"
    actual = RunFolder(path)
    actual.claim()
    actual.record(status="failed")
    actual.close()
    return path


def holds_a_run(path: Path) -> bool:
    opened = RunFolder(path)
    try:
        return opened.is_resumed
    finally:
        opened.close()


def test_a_run_without_a_step_leaves_its_folder_free(folder: Path) -> None:
    assert not holds_a_run(folder)
    (folder / "metrics.jsonl").touch()
    assert not holds_a_run(folder)


@pytest.mark.parametrize("name", ["model", "checkpoints", "metrics.jsonl"])
def test_any_result_of_a_step_is_kept(name: str, folder: Path) -> None:
    if name.endswith(".jsonl"):
        (folder / name).write_text('{"step": 1}\n')
    else:
        (folder / name).mkdir()
    assert holds_a_run(folder)
    again = RunFolder(folder, fresh=True)
    assert not again.is_resumed
    again.claim()
    again.close()
    moved = [path for path in folder.parent.iterdir() if path != folder]
    assert [(path / name).exists() for path in moved] == [True]
