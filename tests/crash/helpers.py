"""Runs inside the test's process: the state that a kill leaves, and failing disks, jumping clocks
and signals.
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
from valence.trainer.trainer import Trainer

CASE = {case.name: case for case in CASES}
STEPS = 13
"""Of a run, unless a test says otherwise: an epoch has 5, and none of it ends with a save, an
evaluation or the log's window.
"""
WITHOUT_EFFECT = ("save_every", "keep_best", "max_failed_saves", "max_time")
"""Settings of ``run`` that change none of a run's numbers."""
Act = Callable[[str, str], None]


class Halt(BaseException):
    """Ends a run in a test at once; nothing that it writes on its way out is looked at."""


class Disk:
    """Every operation that changes files, before it happens: ``fault`` gets its name and path, and
    may raise OSError.
    """

    fault: Act | None = None
    _watched = False

    def __init__(self) -> None:
        if not Disk._watched:
            on_file_change(lambda name, path: Disk.fault(name, path) if Disk.fault else None)
        Disk._watched = True

    def call_for(self, act: Act, folder: Path) -> None:
        """Has ``act`` called for all operations on a folder and in it, but for its own."""
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
    """A folder with a model and rows, and the runs of recipes on them that nothing has
    disturbed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone: dict[str, Path] = {}

    def recipe(self, case: Case, **sections: dict[str, Any]) -> dict[str, Any]:
        settings = recipe(case, self.folder)
        settings["train"] = {"max_steps": STEPS} | settings["train"]
        return settings | {
            name: settings.get(name, {}) | section for name, section in sections.items()
        }

    def train(self, case: Case, run: Path, /, *more: str, **sections: dict[str, Any]) -> int:
        """`valence train` in this process: its exit status."""
        return command(*self._words(case, run, sections), *more)

    def error(self, case: Case, run: Path, /, **sections: dict[str, Any]) -> UserError:
        """The mistake with which `valence train` ends in this process."""
        return command_error(*self._words(case, run, sections))

    def _words(self, case: Case, run: Path, sections: dict[str, dict[str, Any]]) -> list[str]:
        written = run.parent / f"{run.name}.yaml"
        written.write_text(json.dumps(self.recipe(case, **sections)), encoding="utf-8")
        return ["train", str(written), f"run.dir={run}"]

    def alone(self, case: Case, /, **sections: dict[str, Any]) -> Path:
        """The run without any disturbance, which runs share that differ in WITHOUT_EFFECT."""
        settings = sections.get("run", {})
        remaining = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
        sections = {
            name: section for name, section in (sections | {"run": remaining}).items() if section
        }
        key = json.dumps([case.name, sections])
        if key not in self._alone:
            run = self.folder / f"alone {len(self._alone)}"
            assert self.train(case, run, **sections) == 0
            self._alone[key] = run
        return self._alone[key]


def frozen(run: Path, to: Path) -> Path:
    """A run's folder as a kill would leave it now, but that its lock names nobody: whom it would
    name lives on.
    """
    if run.is_dir():
        shutil.copytree(run, to)
        if (to / "run.lock").exists():
            (to / "run.lock").write_bytes(b"")
    return to


def warnings_of(run: Path) -> list[str]:
    """What a run has warned of."""
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
    """Calls ``act`` once, in optimizer step number ``step`` (from 1), before its micro-batch number
    ``batch`` (from 0).
    """
    at = {"step": 0, "batch": 0, "done": 0}
    update, forward = Trainer._update, PolicyModel.forward

    def noted_update(self: Trainer) -> Any:
        at.update(step=self.step + 1, batch=0)
        return update(self)

    def noted_forward(self: PolicyModel, *args: Any, **more: Any) -> Any:
        if torch.is_grad_enabled():
            if (at["step"], at["batch"]) == (step, batch) and not at["done"]:
                at["done"] = 1
                act()
            at["batch"] += 1
        return forward(self, *args, **more)

    monkeypatch.setattr(Trainer, "_update", noted_update)
    monkeypatch.setattr(PolicyModel, "forward", noted_forward)
