"""A run that is killed after any step, and started again by the same command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import valence
from tests.logs import repeatable
from tests.training.test_run import logged, recipe
from valence.errors import UserError
from valence.training.trainer import Trainer


class Killed(BaseException):
    """Ends a run like kill -9, without a save."""


def until(step: int) -> Any:
    """A callback that kills after the record of this step."""

    def kill(run: Trainer, record: Any) -> None:
        if record["step"] == step:
            run.state.is_consistent = False  # no state is saved any more
            raise Killed

    return kill


def train(settings: dict[str, Any], **more: Any) -> tuple[Trainer, str]:
    """Train; return the run and what was printed."""
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    try:
        return valence.train(settings, console=console, **more), console.export_text()
    except (Killed, KeyboardInterrupt, UserError) as error:
        error.add_note(console.export_text())
        raise


def killed(settings: dict[str, Any], step: int, **more: Any) -> None:
    with pytest.raises(Killed):
        train(settings, callbacks=[until(step)], quiet=True, **more)


def records(path: Path) -> list[dict[str, Any]]:
    return [repeatable(row) for row in logged(path)]


def settings_for(folder: Path, place: Path) -> dict[str, Any]:
    """Twelve thumbs in steps of four, three times; a checkpoint after every second step."""
    result = recipe(folder, place, model={"lora": {"rank": 2}}, train={"epochs": 3})
    result["run"] |= {"save_every": 2, "log_every": 3}
    return result


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return settings_for(folder, tmp_path)


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in run.state.trained_weights.items()}


def facts(path: Path) -> dict[str, Any]:
    """The summary of the run in this folder."""
    return json.loads((path / "run.json").read_text())


def resumed_steps(path: Path) -> list[int]:
    """The steps from which the run in this folder was resumed."""
    return [entry["step"] for entry in facts(path).get("resumes", [])]


@dataclass(frozen=True)
class Undisturbed:
    """A finished run of ``settings``: its folder, and the run. Only to be read."""

    path: Path
    run: Trainer

    def assert_same(self, other: Trainer, path: Path) -> None:
        """The other run has the same weights and the same log, in its folder ``path``."""
        assert records(path) == records(self.path)
        ours, theirs = weights(self.run), weights(other)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
