"""Load the models of a run from one of its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from valence.config.load import LoadedRecipe
from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import Group, SingleProcess, run_on_first_rank
from valence.errors import UserError
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.reports.run_record import CHECKPOINTS
from valence.targets import load_run_recipe
from valence.training import state_files
from valence.training.checkpoints import Checkpoints, Damaged, Saved, check
from valence.training.models import build_models
from valence.training.prepare import Prepared, prepare
from valence.training.state import HEAVY, load_weights

At = int | Literal["best"] | None
"""Which checkpoint: that of a step, of the best evaluation (run.keep_best), or the newest."""

ATTEMPTS = 20
"""How often to look for a checkpoint while the run that writes them removes older ones."""


@dataclass(frozen=True)
class SavedModels:
    """The models of a run as a checkpoint holds them.

    state: of the checkpoint.
    """

    source: LoadedRecipe
    prepared: Prepared
    policy: PolicyModel
    reference: Reference | None
    state: Mapping[str, Any]


def load_saved_models(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    at: At = None,
    world: Group | None = None,
    rewards: bool = False,
    tools: bool = False,
    check_recipe: Callable[[LoadedRecipe], None] = lambda _: None,
) -> SavedModels:
    """Load the models of a run with the weights of a checkpoint.

    overrides: settings to change, such as the data to evaluate on. rewards, tools: whether those
    of the recipe may be imported and called. check_recipe: called before anything is loaded.

    Raises UserError when the folder holds no run or no checkpoint, or names code that is not
    allowed to run.
    """
    world = world or SingleProcess()
    source = load_run_recipe(run_dir, overrides)
    # The run may have used more processes.
    num_neighbours, setting = source.recipe.parallel.neighbours
    if world.size % num_neighbours:
        overrides = [*overrides, f"parallel.{setting}=1"]
        source = load_run_recipe(run_dir, overrides)
    parallel = source.recipe.parallel
    if world.size % (parallel.tensor * (parallel.shard_size or 1)):
        source = load_run_recipe(run_dir, [*overrides, "parallel.shard_size=null"])
    check_recipe(source)

    def read(place: Path) -> Mapping[str, Any]:
        return state_files.load(place, sharded_checkpoint.read, HEAVY)

    place, state = _read_checkpoint(run_dir, at, world, read)
    prepared = prepare(source, rewards=rewards, tools=tools)
    policy, reference = build_models(prepared, group=world)

    def load(path: Path) -> Mapping[str, Any]:
        saved = state if path == place else read(path)
        load_weights(policy, reference, saved)
        return saved

    _, state = _read_checkpoint(run_dir, at, world, load, checked=place)
    return SavedModels(source, prepared, policy, reference, state)


# Find a checkpoint


def _read_checkpoint(
    run_dir: Path, at: At, world: Group, read: Callable[[Path], Any], *, checked: Path | None = None
) -> tuple[Path, Any]:
    """A checkpoint and the result of ``read`` on it.

    The run may still be training and remove old checkpoints: if a folder disappears while it is
    read, the next one is used. checked: an undamaged checkpoint to try first.

    All processes call it. Raises UserError if no checkpoint can be read.
    """
    place = checked
    for _ in range(ATTEMPTS):
        place = place or Path(
            run_on_first_rank(world, lambda: str(_find_checkpoint(run_dir, at).path))
        )
        result, failure = None, None
        try:
            result = read(place)
        except UserError as error:
            failure = error
        if not world.any(failure is not None and not place.is_dir()):
            if failure is not None:
                raise failure
            return place, result
        place = None
    raise _removed_too_fast(run_dir)


def _find_checkpoint(run_dir: Path, at: At) -> Saved:
    """The requested checkpoint, or the newest, without damage.

    Raises UserError if there is none.
    """
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, None)
    for _ in range(ATTEMPTS):
        steps = checkpoints.steps()
        try:
            saved = _checked(checkpoints, steps, at, run_dir)
        except UserError:
            if steps == checkpoints.steps():
                raise
            continue  # the run has removed or written a checkpoint meanwhile
        if not saved.has_state:
            raise UserError(
                "this checkpoint contains no state (run.save_state was false)",
                code="checkpoint-without-state",
                where=str(saved.path),
                fix=f"use its model instead of the run: {saved.path / 'model'}",
            )
        return saved
    raise _removed_too_fast(run_dir)


def _checked(checkpoints: Checkpoints, steps: Sequence[int], at: At, run_dir: Path) -> Saved:
    """One of these checkpoints, if it is undamaged."""
    if not steps:
        raise UserError(
            "the run has no checkpoint",
            code="checkpoint-not-found",
            where=str(run_dir),
            fix="wait until the run saves one (run.save_every), or use a run that finished or was "
            "stopped",
        )
    if at is None:
        return _newest_undamaged(checkpoints, steps)
    step = at
    if step == "best":
        step = state_files.load(_newest_undamaged(checkpoints, steps).path, lazy=HEAVY)["best"][
            "step"
        ]
        if step is None:
            raise UserError(
                "the run has not recorded a best checkpoint",
                code="checkpoint-not-found",
                where=str(run_dir),
                fix="use --step N; for the best checkpoint, train with run.keep_best",
            )
    if step not in steps:
        raise UserError(
            f"the run has no checkpoint of step {step}",
            code="checkpoint-not-found",
            where=str(run_dir),
            fix=f"use one of these steps: {', '.join(map(str, steps))}",
        )
    return check(checkpoints.path(step))


def _newest_undamaged(checkpoints: Checkpoints, steps: Sequence[int]) -> Saved:
    """The newest undamaged checkpoint of these; warns about newer ones that are damaged.

    Raises Damaged if there is none, or if the run removes the one that is being read.
    """
    damaged: list[Damaged] = []
    for step in reversed(steps):
        try:
            saved = check(checkpoints.path(step))
        except Damaged as error:
            if not checkpoints.path(step).is_dir():
                raise
            damaged.append(error)
            continue
        for error in damaged:
            warnings.warn(
                f"{error.where}: {error.message}; {saved.path.name} is used instead", stacklevel=2
            )
        return saved
    raise damaged[0]


def _removed_too_fast(run_dir: Path) -> UserError:
    return UserError(
        "the run removes its checkpoints faster than they can be read",
        code="checkpoints-pruned",
        where=str(run_dir),
        fix="raise run.keep, or wait until the run has ended",
    )
