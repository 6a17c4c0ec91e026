"""Fixtures that several files of this folder use."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.resuming import Undisturbed, killed, settings, settings_for, train
from tests.training.scoring import FILES, write
from tests.training.test_run import finished, folder, recipe
from valence.jobs import score_rows as module
from valence.storage import add_checksum

__all__ = ["finished", "folder", "settings"]


def two_models(folder: Path) -> None:
    """The folders of two tiny models that differ in their weights alone: `model` and `other`."""
    tokenizer = tiny_tokenizer()
    for name, seed in (("model", 0), ("other", 1)):
        tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, seed=seed).save_pretrained(
            folder / name
        )  # type: ignore[operator]
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, to be copied."""
    folder = tmp_path_factory.mktemp("models")
    two_models(folder)
    return folder


@pytest.fixture
def report_free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes Linux report this number of available bytes, rounded up to kB."""
    read_text = Path.read_text

    def report(size: int) -> None:
        def read(path: Path, *args: Any, **options: Any) -> str:
            if path == Path("/proc/meminfo"):
                return f"MemAvailable: {-(-size // 1024)} kB"
            return read_text(path, *args, **options)

        monkeypatch.setattr(Path, "read_text", read)

    return report


@pytest.fixture
def instant_compiler(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler for the layers that does nothing: the real one takes its time."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "g++").touch(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and a file of each kind of rows, which is the current one.

    Windows are small.
    """
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setenv("COLUMNS", "200")
    for name, rows in FILES.items():
        write(f"{name}.jsonl", rows)
    return tmp_path


def copy_run(run: Path, target: Path) -> None:
    """Copy a run's folder as if it had been trained in the current folder."""
    shutil.copytree(run, target)
    facts = json.loads((target / "run.json").read_text())
    (target / "run.json").write_text(json.dumps(add_checksum({**facts, "cwd": str(Path.cwd())})))


class SharedRuns:
    """Runs of 9 steps that are trained once, and copied for each test that needs one."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.runs: dict[str, dict[str, Any]] = {}

    def copy(
        self,
        target: Path,
        *,
        killed_at: int | None = None,
        **sections: Any,
    ) -> dict[str, Any]:
        """Copy a run, killed after this step or else finished, to ``target / "run"``.

        sections: more of its recipe. Returns the recipe of the copy: training with it resumes.
        """
        key = json.dumps([killed_at, sections], sort_keys=True)
        if key not in self.runs:
            self.runs[key] = self._train(self.root / str(len(self.runs)), killed_at, sections)
        settings = copy.deepcopy(self.runs[key])
        copy_run(Path(settings["run"]["dir"]), target / "run")
        settings["run"]["dir"] = str(target / "run")
        return settings

    def _train(
        self,
        folder: Path,
        killed_at: int | None,
        sections: dict[str, Any],
    ) -> dict[str, Any]:
        folder.mkdir()
        settings = recipe(self.model, folder, model={"lora": {"rank": 2}}, train={"epochs": 3})
        settings["run"] |= {"save_every": 2, "log_every": 3}
        for name, section in sections.items():
            settings[name] = {**settings[name], **section}
        if killed_at is None:
            train(settings, quiet=True)
        else:
            killed(settings, killed_at)
        return settings


@pytest.fixture(scope="session")
def shared_runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> SharedRuns:
    return SharedRuns(tmp_path_factory.mktemp("runs"), models / "model")


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
