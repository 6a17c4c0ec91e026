"""Open a finished or interrupted run, to measure, sample or export it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.config.load import LISTS, LoadedRecipe, load_recipe
from valence.config.parse import COMMAND_LINE
from valence.config.schema import Recipe
from valence.distributed.process_group import Group, SingleProcess
from valence.errors import UserError, refuse_unused
from valence.reports.run_record import RECIPE, is_run, read_for_card
from valence.rewards.build import is_function, is_server
from valence.targets import recipe_of, require_loss
from valence.training.assemble import make_trainer
from valence.training.changes import mark_training_rows
from valence.training.models import build_models
from valence.training.plan import planned_tokens
from valence.training.prepare import prepare
from valence.training.saved_models import At, load_saved_models
from valence.training.trainer import Trainer
from valence.user_code.load import is_import_path


def restore(
    run_dir: Path,
    *,
    overrides: Sequence[str] = (),
    at: At = None,
    console: Console | None = None,
    group: Group | None = None,
    rewards: bool = False,
    tools: bool = False,
    trust_reward: bool = False,
) -> Trainer:
    """Return the run of a folder with its newest weights, or those of another checkpoint.

    Nothing is written there. overrides: settings to change, such as the data to evaluate on.
    group: the processes that measure it. rewards: load the rewards that the folder's recipe names,
    which is needed to evaluate an online run. tools: the completions that are sampled may call its
    tools. trust_reward: rewards and tools may be code or a server.

    Raises UserError when the folder holds no run, or names code that is not allowed to run.
    """
    world = group or SingleProcess()

    def check_recipe(source: LoadedRecipe) -> None:
        if any(source.recipe.data.files(name) for name in LISTS):
            require_loss(run_dir, source.recipe)
            refuse_formats(source)
        if rewards and not trust_reward:
            _refuse_rewards(run_dir, source.recipe)
        if (rewards or tools) and not trust_reward:
            refuse_tools(source)

    saved = load_saved_models(
        run_dir,
        overrides,
        at=at,
        world=world,
        rewards=rewards,
        tools=rewards or tools,
        check_recipe=check_recipe,
    )
    # The folder's recipe may name a program or an address to sample with.
    is_trusted = saved.source.settings["rollout.engine"].origin == COMMAND_LINE
    facts, audit = read_for_card(run_dir)
    trainer = make_trainer(
        mark_training_rows(run_dir, saved.prepared),
        saved.policy,
        saved.reference,
        console=console,
        micro_batch_tokens=saved.state["budget"][-1][2],
        world=world,
        facts=facts,
        audit=audit,
        samples_in_process=not is_trusted,
    )
    trainer.state.load_progress(saved.state)
    return trainer


def refuse_formats(source: LoadedRecipe) -> None:
    """Raise UserError for a row format that is code, and that only the folder's recipe names."""
    for name in LISTS:
        for number, file in enumerate(source.recipe.data.files(name)):
            setting = source.settings.get(f"data.{name}.{number}.format")
            is_named_here = setting is not None and setting.origin == COMMAND_LINE
            if file.format is not None and is_import_path(file.format) and not is_named_here:
                raise UserError(
                    f"this run would execute the row format {file.format}",
                    code="code-not-trusted",
                    where=setting.origin if setting else name,
                    fix=f"check this code, then add 'data.{name}=[{{path: {file.path}, format: "
                    f'"{file.format}"}}]\'',
                )


def refuse_tools(source: LoadedRecipe) -> None:
    """Raise UserError for tools that only the folder's recipe names, because they are code."""
    written: dict[str, str] = {}
    origin = ""
    for name in ("rollout.tools", "rollout.environment"):
        setting = source.settings.get(name)
        value = getattr(source.recipe.rollout, name.removeprefix("rollout."))
        if value and (setting is None or setting.origin != COMMAND_LINE):
            written[name] = f"[{','.join(value)}]" if isinstance(value, list) else value
            origin = origin or (setting.origin if setting else name)
    if written:
        raise UserError(
            f"this run would execute the tools {', '.join(written.values())}",
            code="code-not-trusted",
            where=origin,
            fix="check this code, then add "
            + " ".join(f"'{name}={value}'" for name, value in written.items())
            + "; to use no tools, add "
            + " ".join(f"{name}=null" for name in written),
        )


def _refuse_rewards(run_dir: Path, recipe: Recipe) -> None:
    """Raise UserError for a reward in a run's recipe that is code or a server, or a teacher on a
    server.

    Code would be executed; a server would receive prompts and completions.
    """
    if recipe.teacher.is_served:
        raise UserError(
            f"this run would send prompts and completions to the teacher {recipe.teacher.model}",
            code="server-not-trusted",
            where=str(run_dir / RECIPE),
            fix="check the operator of the server, then add --trust-reward",
        )
    for spec in recipe.reward:
        code = "code-not-trusted"
        if is_function(spec.reward) or spec.settings.get("trust_remote_code"):
            problem = f"this run would execute the reward {spec.reward}"
        elif is_server(spec.reward):
            problem = (
                f"this run would send prompts and completions to the reward server {spec.reward}"
            )
            code = "server-not-trusted"
        else:
            continue
        fix = "check the code of the reward or the operator of the server, then add --trust-reward"
        raise UserError(problem, code=code, where=str(run_dir / RECIPE), fix=fix)


def open_run(
    target: str,
    overrides: Sequence[str] = (),
    *,
    group: Group,
    at: At = None,
    console: Console | None = None,
    tools: bool = True,
) -> Trainer:
    """Open the run, recipe or model that a target names, without rows, to sample from it. tools:
    completions may call those of its recipe."""
    overrides = [*(f"data.{name}=[]" for name in LISTS), *overrides]
    if is_run(target):
        return restore(
            Path(target), overrides=overrides, group=group, at=at, console=console, tools=tools
        )
    recipe = recipe_of(target)
    return open_recipe(
        recipe, overrides, group=group, at=at, console=console, tools=tools, name=target
    )


def open_recipe(
    recipe: Path | dict[str, Any],
    overrides: Sequence[str],
    *,
    group: Group,
    at: At,
    console: Console | None,
    rewards: bool = False,
    tools: bool | None = None,
    name: str = "recipe",
) -> Trainer:
    """Build the run of a recipe before its first step. rewards, tools: load those that it names.
    name: of a recipe that is a mapping, for messages.
    """
    if at is not None:
        refuse_unused(["--step"], "because only a run folder has checkpoints", "pass a run folder")
    source = load_recipe(recipe, overrides, training=False, name=name)
    prepared = prepare(source, rewards=rewards, tools=tools)
    policy, reference = build_models(prepared, group=group)
    return make_trainer(
        prepared,
        policy,
        reference,
        micro_batch_tokens=planned_tokens(prepared, policy, group),
        console=console,
        world=group,
    )
