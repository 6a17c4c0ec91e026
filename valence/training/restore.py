"""A finished or interrupted run brought back from its folder, to be measured, sampled from or exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from valence.checkpoint import store
from valence.checkpoint.keeper import Checkpoints, Saved, check
from valence.config.load import load_recipe
from valence.dist import shards
from valence.dist.protocol import Group
from valence.dist.single import Single
from valence.dist.together import by_first
from valence.errors import UserError
from valence.report.runs import config_of
from valence.training.build import build_models
from valence.training.loop import Run
from valence.training.methods import Method, method_in, method_of
from valence.training.saving import HEAVY, load_weights
from valence.training.setup import prepare

At = int | Literal["best"] | None
"""Which checkpoint: that of a step, of the best evaluation (run.keep_best), or the newest."""


def _checkpoint(run_dir: Path, at: At) -> Saved:
    """A checkpoint of a run, if it is whole. Raises UserError when there is none."""
    checkpoints = Checkpoints(run_dir / "checkpoints", None)
    steps = checkpoints.steps()
    if not steps:
        raise UserError("the run has no checkpoint", where=str(run_dir), fix="name a run that finished or was interrupted")
    step = steps[-1] if at is None else at
    if step == "best":
        step = store.load(check(checkpoints.path(steps[-1])).path, lazy=HEAVY)["best"]["step"]
        if step is None:
            raise UserError("no checkpoint is the best one", where=str(run_dir), fix="set run.keep_best before training")
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise UserError(f"the run has no checkpoint of step {step}", where=str(run_dir), fix=f"name one of {kept}")
    found = check(checkpoints.path(step))
    if not found.has_state:
        fix = "use the model in it, which transformers loads"
        raise UserError("this checkpoint holds no state (run.save_state was false)", where=str(found.path), fix=fix)
    return found


def restore(
    run_dir: Path,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    quiet: bool = False,
    group: Group | None = None,
) -> Run:
    """The run of a folder with its newest weights, or those of another checkpoint, without anything being written there.

    overrides: settings to change, such as the data to evaluate on. group: of the processes that it is to be measured on. Raises
    UserError when the folder holds no run.
    """
    world = group or Single()
    source = load_recipe(config_of(run_dir), overrides, method_of=method_of, training=False)
    if world.size % source.recipe.parallel.tensor:  # it was trained by more processes than are there to look at it
        ours = [*overrides, "parallel.tensor=1"]
        source = load_recipe(config_of(run_dir), ours, method_of=method_of, training=False)
    place = Path(by_first(world, lambda: str(_checkpoint(run_dir, at).path)))
    state = store.load(place, shards.read, HEAVY)
    policy, reference = build_models(prepared := prepare(source), group=world)
    run = Run(prepared, policy, reference, console=console, quiet=quiet, micro_batch_tokens=state["budget"][-1][2], world=world)
    load_weights(run, state)
    run.facts = _read(run_dir / "run.json")
    run.audit = _read(run_dir / "audit.json").get("train", {})
    return run


def method_of_run(run_dir: Path) -> Method:
    """What a run trains with. Raises UserError when the folder holds no run."""
    return method_in(load_recipe(config_of(run_dir), method_of=method_of, training=False).recipe)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object of a run's folder; empty when it is not there. Raises UserError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"this file is damaged ({error})", where=str(path), fix="use another run") from error
