"""A finished or interrupted run brought back from its folder, to be measured, sampled from or exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.checkpoint import store
from valence.config.load import load_recipe
from valence.errors import UserError
from valence.training.build import build_models
from valence.training.loop import Run
from valence.training.methods import Method, method_of
from valence.training.setup import prepare


def newest_checkpoint(run_dir: Path) -> Path:
    """The checkpoint with the largest step. Raises UserError when there is none."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    if not found:
        raise UserError("the run has no checkpoint", where=str(run_dir), fix="name a run that finished or was interrupted")
    return max(found, key=lambda path: int(path.name[5:]))


def restore(run_dir: Path, *, overrides: Sequence[str] = (), console: Console | None = None, quiet: bool = False) -> Run:
    """The run of a folder with its newest weights, without anything being written there.

    overrides: settings to change, such as the data to evaluate on. Raises UserError when the folder holds no run.
    """
    source = load_recipe(_config_of(run_dir), overrides, method_of=method_of, training=False)
    checkpoint = newest_checkpoint(run_dir)
    policy, reference = build_models(prepared := prepare(source))
    state = store.load(checkpoint)
    run = Run(prepared, policy, reference, console=console, quiet=quiet, micro_batch_tokens=state["micro_batch_tokens"])
    run.load_weights(state)
    run.step = state["step"]
    run.facts = _read(run_dir / "run.json")
    run.audit = _read(run_dir / "audit.json").get("train", {})
    for path in (run_dir / "eval").glob("step-*.json"):
        saved = _read(path)
        run.evaluations[saved["step"]] = saved["metrics"]
    return run


def method_of_run(run_dir: Path) -> Method:
    """What a run trains with. Raises UserError when the folder holds no run."""
    return method_of(load_recipe(_config_of(run_dir), method_of=method_of, training=False).recipe.method)


def _config_of(run_dir: Path) -> Path:
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise UserError("this folder holds no run (no config.yaml)", where=str(run_dir), fix="name a run's folder")
    return config


def _read(path: Path) -> dict[str, Any]:
    """A JSON object of a run's folder; empty when it is not there. Raises UserError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"this file is damaged ({error})", where=str(path), fix="use another run") from error
