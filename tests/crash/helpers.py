"""Runs in the process of the test: the state after a kill, and failing disks, jumping clocks and
signals.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.crash.cases import CASES, Case, recipe
from benchmarks.crash.process import on_file_change
from tests.command import command, command_error
from valence.errors import UserError
from valence.models.policy_model import PolicyModel
from valence.training.trainer import Trainer

CASE = {case.name: case for case in CASES}
STEPS = 13
"""Default number of steps of a run. An epoch has 5 steps, and no epoch ends with a save, an
evaluation or a logging window.
"""
WITHOUT_EFFECT = ("save_every", "keep_best", "max_failed_saves", "max_time")
"""Settings of ``run`` that change no metric and no weight."""
Act = Callable[[str, str], None]


class Halt(BaseException):
    """Ends a run in a test. The test ignores files that the run writes afterwards."""


class Disk:
    """Calls ``fault`` with the name and path of every operation that changes a file, before the
    operation. ``fault`` may raise OSError.
    """

    fault: Act | None = None
    _watched = False

    def __init__(self) -> None:
        if not Disk._watched:
            on_file_change(lambda name, path: Disk.fault(name, path) if Disk.fault else None)
        Disk._watched = True

    def call_for(self, act: Act, folder: Path) -> None:
        """Call ``act`` for all operations on a folder and its content, except those of ``act``."""
        busy = False

        def within(name: str, path: str) -> None:
            nonlocal busy
            if busy or not Path(path).is_relative_to(folder):
                return
            busy = True
            try:
                act(name, path)
            finally:
                busy = False

        Disk.fault = within

    def rest(self) -> None:
        Disk.fault = None


class Place:
    """A folder with a model, rows, and undisturbed runs of recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undisturbed_runs: dict[str, Path] = {}

    def recipe(self, case: Case, **sections: dict[str, Any]) -> dict[str, Any]:
        settings = recipe(case, self.folder)
        settings["train"] = {"max_steps": STEPS} | settings["train"]
        return settings | {
            name: settings.get(name, {}) | section for name, section in sections.items()
        }

    def train(self, case: Case, run: Path, /, *more: str, **sections: dict[str, Any]) -> int:
        """Run `valence train` in this process and return its exit status."""
        return command(*self._arguments(case, run, sections), *more)

    def error(self, case: Case, run: Path, /, **sections: dict[str, Any]) -> UserError:
        """Run `valence train` in this process and return its error."""
        return command_error(*self._arguments(case, run, sections))

    def _arguments(self, case: Case, run: Path, sections: dict[str, dict[str, Any]]) -> list[str]:
        recipe_path = run.parent / f"{run.name}.yaml"
        recipe_path.write_text(json.dumps(self.recipe(case, **sections)), encoding="utf-8")
        return ["train", str(recipe_path), f"run.dir={run}"]

    def undisturbed_run(self, case: Case, /, **sections: dict[str, Any]) -> Path:
        """The undisturbed run of a recipe. Runs that differ only in WITHOUT_EFFECT share it."""
        settings = sections.get("run", {})
        remaining = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
        sections = {
            name: section for name, section in (sections | {"run": remaining}).items() if section
        }
        key = json.dumps([case.name, sections])
        if key not in self._undisturbed_runs:
            run = self.folder / f"alone {len(self._undisturbed_runs)}"
            assert self.train(case, run, **sections) == 0
            self._undisturbed_runs[key] = run
        return self._undisturbed_runs[key]


def copy_as_killed(run: Path, to: Path) -> Path:
    """Copy a run's folder as a kill would leave it now. The lock is empty, because the process that
    it names is still alive.
    """
    if run.is_dir():
        shutil.copytree(run, to)
        if (to / "run.lock").exists():
            (to / "run.lock").write_bytes(b"")
    return to


def warnings_of(run: Path) -> list[str]:
    """The warnings that a run has recorded."""
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return facts.get("warnings", [])


@contextmanager
def count_steps() -> Iterator[list[int]]:
    """Yield a list that gets an item for every optimizer step of this process."""
    steps: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(len(steps)))
    try:
        yield steps
    finally:
        handle.remove()


def in_step(monkeypatch: Any, step: int, act: Callable[[], None], *, batch: int = 0) -> None:
    """Call ``act`` once, in optimizer step number ``step`` (from 1), before its micro-batch number
    ``batch`` (from 0).
    """
    at = {"step": 0, "batch": 0, "done": 0}
    update, forward = Trainer._update, PolicyModel.forward

    def counted_update(self: Trainer) -> Any:
        at.update(step=self.step + 1, batch=0)
        return update(self)

    def counted_forward(self: PolicyModel, *args: Any, **more: Any) -> Any:
        if torch.is_grad_enabled():
            if (at["step"], at["batch"]) == (step, batch) and not at["done"]:
                at["done"] = 1
                act()
            at["batch"] += 1
        return forward(self, *args, **more)

    monkeypatch.setattr(Trainer, "_update", counted_update)
    monkeypatch.setattr(PolicyModel, "forward", counted_forward)
