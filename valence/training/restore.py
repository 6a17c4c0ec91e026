"""A finished or interrupted run brought back from its folder, to be measured, sampled from or
exported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from valence.config.load import LoadedRecipe, load_recipe
from valence.config.parse import COMMAND_LINE
from valence.config.schema import Recipe
from valence.distributed import shards
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.together import by_first
from valence.errors import UserError
from valence.reports.runs import config_of
from valence.rewards.build import is_function, is_server
from valence.runs import store
from valence.runs.folder import read_object
from valence.runs.keeper import Checkpoints, Damaged, Saved, check
from valence.training.build import build_models
from valence.training.loop import Run
from valence.training.methods import Method, method_in, method_of
from valence.training.online.sources import InProcess
from valence.training.saving import HEAVY, load_weights
from valence.training.setup import prepare

At = int | Literal["best"] | None
"""Which checkpoint: that of a step, of the best evaluation (run.keep_best), or the newest."""
TRUST = (
    "read these files, then allow it: --trust-remote-code, or for a reward model "
    "settings.trust_remote_code: true"
)
ATTEMPTS = 20
"""How often a checkpoint is looked for while the run that writes them removes older ones."""


def restore(
    run_dir: Path,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    quiet: bool = False,
    group: Group | None = None,
    rewards: bool = False,
    trust_reward: bool = False,
) -> Run:
    """The run of a folder with its newest weights, or those of another checkpoint, without anything
    being written there.

    overrides: settings to change, such as the data to evaluate on. group: of the processes that it
    is to be measured on.
    rewards: load the rewards that the folder's recipe names, which is needed to evaluate an online
    run; trust_reward: they may be code or a server. Raises UserError when the folder holds no run,
    or names code that is not allowed to run.
    """
    world = group or Single()
    source = load_run_recipe(run_dir, overrides)
    # it was trained by more processes than are there to look at it
    if world.size % source.recipe.parallel.tensor:
        source = load_run_recipe(run_dir, [*overrides, "parallel.tensor=1"])
    if rewards and not trust_reward:
        _refuse_rewards(run_dir, source.recipe)

    def read(place: Path) -> Mapping[str, Any]:
        return store.load(place, shards.read, HEAVY)

    place, state = _read_checkpoint(run_dir, at, world, read)
    policy, reference = build_models(prepared := prepare(source, rewards=rewards), group=world)
    run = Run(
        prepared,
        policy,
        reference,
        console=console,
        quiet=quiet,
        micro_batch_tokens=state["budget"][-1][2],
        world=world,
    )

    def put(found: Path) -> None:
        load_weights(run, state if found == place else read(found))

    _read_checkpoint(run_dir, at, world, put, checked=place)
    if run.rounds is not None and source.settings["rollout.engine"].origin != COMMAND_LINE:
        # the folder's recipe may name a program or an address
        run.rounds.collector.generator = InProcess(run)
    run.facts = _read(run_dir / "run.json")
    run.audit = _read(run_dir / "audit.json").get("train", {})
    return run


def load_run_recipe(run_dir: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a run's folder.

    Raises UserError when the folder holds no run, or when the folder alone, and no override, allows
    Python files of a model to be executed.
    """
    config = config_of(run_dir)
    source = load_recipe(config, overrides, method_of=method_of, training=False)
    setting = source.settings["model.trust_remote_code"]
    if setting.value and setting.origin != COMMAND_LINE:
        name = source.recipe.model.name
        what = f"this run would execute the Python files that come with the model {name}"
        raise UserError(what, code="code-not-trusted", where=setting.origin, fix=TRUST)
    return source


def _refuse_rewards(run_dir: Path, recipe: Recipe) -> None:
    """Raises UserError for a reward of a run's folder that is code, or a server that would be sent
    prompts and completions.
    """
    for spec in recipe.reward:
        code = "code-not-trusted"
        if is_function(spec.reward) or spec.settings.get("trust_remote_code"):
            what = f"this run would execute the reward {spec.reward}"
        elif is_server(spec.reward):
            what = f"this run would send prompts and completions to the reward server {spec.reward}"
            code = "server-not-trusted"
        else:
            continue
        fix = (
            "read the reward's code, or ask who runs the server, then give --trust-reward to "
            "allow it"
        )
        raise UserError(what, code=code, where=str(run_dir / "config.yaml"), fix=fix)


def method_of_run(run_dir: Path) -> Method:
    """The method that a run trains with. Raises UserError when the folder holds no run."""
    return method_in(load_run_recipe(run_dir, ["model.trust_remote_code=false"]).recipe)


# Finding a checkpoint


def _read_checkpoint(
    run_dir: Path, at: At, world: Group, read: Callable[[Path], Any], *, checked: Path | None = None
) -> tuple[Path, Any]:
    """A checkpoint and the result of ``read`` on it.

    The run may still be training and remove old checkpoints: when the folder is gone before all of
    it is read, the next one is used. checked: a checkpoint that is known to be whole, tried first.

    All processes call it. Raises UserError when no checkpoint can be read.
    """
    place = checked
    for _ in range(ATTEMPTS):
        place = place or Path(by_first(world, lambda: str(_find_checkpoint(run_dir, at).path)))
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
    """A checkpoint of a run that is whole: the one asked for, or the newest.

    Raises UserError when there is none.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", None)
    for _ in range(ATTEMPTS):
        steps = checkpoints.steps()
        try:
            found = _checked(checkpoints, steps, at, run_dir)
        except UserError:
            if steps == checkpoints.steps():
                raise
            continue  # the run has removed or written a checkpoint meanwhile
        if not found.has_state:
            fix = "use the model in it, which transformers loads"
            raise UserError(
                "this checkpoint holds no state (run.save_state was false)",
                code="checkpoint-without-state",
                where=str(found.path),
                fix=fix,
            )
        return found
    raise _removed_too_fast(run_dir)


def _checked(checkpoints: Checkpoints, steps: Sequence[int], at: At, run_dir: Path) -> Saved:
    """One of these checkpoints, if it is whole."""
    if not steps:
        raise UserError(
            "the run has no checkpoint",
            code="checkpoint-not-found",
            where=str(run_dir),
            fix="name a run that finished or was interrupted",
        )
    if at is None:
        return _newest_whole(checkpoints, steps)
    step = at
    if step == "best":
        step = store.load(_newest_whole(checkpoints, steps).path, lazy=HEAVY)["best"]["step"]
        if step is None:
            raise UserError(
                "no checkpoint is the best one",
                code="checkpoint-not-found",
                where=str(run_dir),
                fix="set run.keep_best before training",
            )
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise UserError(
            f"the run has no checkpoint of step {step}",
            code="checkpoint-not-found",
            where=str(run_dir),
            fix=f"name one of {kept}",
        )
    return check(checkpoints.path(step))


def _newest_whole(checkpoints: Checkpoints, steps: Sequence[int]) -> Saved:
    """The newest of these checkpoints that is whole, with a warning that names newer ones that are
    not. Raises Damaged when there is none, or when the run removes the one that is being read.
    """
    damaged: list[Damaged] = []
    for step in reversed(steps):
        try:
            found = check(checkpoints.path(step))
        except Damaged as error:
            if not checkpoints.path(step).is_dir():
                raise
            damaged.append(error)
            continue
        for error in damaged:
            warnings.warn(
                f"{error.where}: {error.what}; {found.path.name} is used instead", stacklevel=2
            )
        return found
    raise damaged[0]


def _removed_too_fast(run_dir: Path) -> UserError:
    what = "checkpoints of the run are removed faster than they can be read"
    return UserError(
        what,
        code="checkpoints-pruned",
        where=str(run_dir),
        fix="raise run.keep, or wait until the run has ended",
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object of a run's folder; empty when it is not there.

    Raises UserError when it is damaged.
    """
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        fix = "put the file back, or remove it: the model card then lacks its content"
        raise UserError(
            f"this file is damaged ({error})", code="file-damaged", where=str(path), fix=fix
        ) from error
