"""Fixtures that several files of this folder use."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.tiny import tiny_tokenizer
from tests.training.resuming import Undisturbed, killed, settings, settings_for, train
from tests.training.scoring import FILES, write
from tests.training.test_run import finished, folder
from valence import cli
from valence.training import score_rows as module

__all__ = ["finished", "folder", "settings"]


def two_models(folder: Path) -> None:
    """The folders of two tiny models that differ in their weights alone: `model` and `other`."""
    tokenizer = tiny_tokenizer()
    for name, seed in (("model", 0), ("other", 1)):
        tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, seed=seed).save_pretrained(folder / name)  # type: ignore[operator]
        tokenizer.save_pretrained(folder / name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and a file of each kind of rows, which is the current one. Windows are small."""
    two_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setattr(cli.console, "width", 200)
    for name, rows in FILES.items():
        write(f"{name}.jsonl", rows)
    return tmp_path


@pytest.fixture(scope="session")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run of ``settings`` that was neither stopped nor changed."""
    place = tmp_path_factory.mktemp("undisturbed")
    run, _ = train(settings_for(folder, place), quiet=True)
    return Undisturbed(place / "run", run)


@pytest.fixture(scope="session")
def killed_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of ``settings``, killed after step 6 of 9 with a state of step 4."""
    place = tmp_path_factory.mktemp("killed")
    killed(settings_for(folder, place), 6)
    return place / "run"


@pytest.fixture
def killed_run(killed_folder: Path, settings: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of it where ``settings`` have their run."""
    return shutil.copytree(killed_folder, tmp_path / "run")
