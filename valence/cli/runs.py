"""Commands about runs: train and resume, check a recipe, and score rows."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from valence import completion
from valence.cli.common import (
    NOTHING_STARTED,
    Allow,
    AsJson,
    Fresh,
    Nproc,
    Overrides,
    Quiet,
    RecipeArg,
    TrustRemoteCode,
    allow_remote_code,
    app,
    command_line,
    console,
    processes,
    status_of,
    stoppable,
    table_of_settings,
    with_options,
)
from valence.cli.stream import failing, must_be_open, streaming
from valence.errors import UserError, refuse_unused
from valence.options import ScoreOptions, changed_options
from valence.terminal import print_message, print_warning

if TYPE_CHECKING:
    from valence.config.load import LoadedRecipe


@app.command()
def train(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A YAML recipe, or the folder of a run to resume.",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    fresh: Fresh = False,
    allow: Allow = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    nproc: Nproc = None,
) -> None:
    """Check the data, train, and write the model, the log and a report into the run folder.

    Rerun the same command to resume a run that was stopped or killed from its last checkpoint, on
    any number of processes. Or name its folder instead of the recipe; relative paths are then
    resolved in the folder in which the run was started.
    """
    must_be_open(as_json)
    recipe, settings, folder = _recipe_of(target, overrides or [], fresh)
    with chdir(folder):
        _check_recipe(recipe, settings, as_json)
    with processes(nproc) as group:
        os.chdir(folder)
        _train(recipe, settings, as_json, fresh=fresh, allow=allow or [], group=group)


def _recipe_of(target: Path, overrides: list[str], fresh: bool) -> tuple[Path, list[str], Path]:
    """The recipe to train with, its settings, and the folder to which its paths are relative: those
    of a run if the target is a folder.
    """
    if not target.is_dir():
        return target, overrides, Path()
    from valence.reports.run_record import place_of_run

    if any(override.split("=")[0] == "run.dir" for override in overrides):
        raise UserError(
            "a run can only be resumed in its folder, so run.dir cannot be changed",
            code="option-conflict",
            where="run.dir",
            fix="remove run.dir; to use another folder, move the run folder and pass its new path",
        )
    run_dir = target.absolute()
    recipe, start_folder = place_of_run(run_dir)
    if fresh:
        raise UserError(
            "--fresh starts a run over, but a run folder is resumed",
            code="option-conflict",
            where="--fresh",
            fix=f"remove --fresh, or name the recipe: `valence train {recipe} --fresh`",
        )
    folder = start_folder if start_folder and start_folder.is_dir() else Path()
    return recipe, [*overrides, f"run.dir={json.dumps(str(run_dir))}"], folder


def _check_recipe(recipe: Path, overrides: list[str], as_json: bool) -> None:
    """Raise UserError for errors in the recipe itself, before torch is imported and before
    processes are started.
    """
    from valence.config.load import load_recipe

    with failing(as_json and os.environ.get("RANK", "0") == "0"):
        load_recipe(recipe, overrides)


def _train(recipe: Path, overrides: list[str], as_json: bool, **options: Any) -> None:
    with stoppable(NOTHING_STARTED):
        from valence.reports.verdict import outputs
        from valence.training.start import train_in_folder

    with streaming(as_json, options["group"].rank) as stream:
        sinks = [stream] if stream else []
        try:
            folder = train_in_folder(
                recipe,
                overrides=overrides,
                console=console,
                command=command_line(),
                sinks=sinks,
                **options,
            )
        except KeyboardInterrupt as stopped:
            print_warning(console, _stop_message(stopped))
            if stream:
                stream.ended("interrupted", status_of(stopped), reason=str(stopped))
            raise typer.Exit(
                status_of(stopped)
            ) from None  # typer would exit with 130 for every KeyboardInterrupt
        for line in outputs(folder):
            print_message(console, line)
        if stream:
            stream.done(folder)


def _stop_message(stopped: KeyboardInterrupt) -> str:
    """What happened to a run that was stopped, and how to resume it."""
    if getattr(stopped, "at_once", True):
        return (
            f"{stopped}: stopped immediately; the steps since the last checkpoint are lost. Rerun "
            f"the same command to resume from that checkpoint"
        )
    if "stopped after step" not in str(stopped):
        return f"{stopped}: nothing was lost; rerun the same command to resume"
    return f"{stopped}; the state is saved, rerun the same command to resume"


@app.command()
def check(
    recipe: RecipeArg,
    overrides: Overrides = None,
    nproc: Annotated[
        int,
        typer.Option("--nproc", min=1, metavar="N", help="Estimate for N processes."),
    ] = 1,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list default settings, and details of the plan.",
        ),
    ] = False,
) -> None:
    """Check a recipe and its data: audit the rows, list the settings with their origin, and
    estimate steps and memory.
    """
    from valence.config.load import load_recipe

    source = load_recipe(recipe, overrides or [])  # before torch is imported

    from valence.distributed.process_group import PlannedGroup
    from valence.reports.run_record import FACTS
    from valence.targets import with_dtype
    from valence.training.models import check_model_files
    from valence.training.plan import crowding, describe, make_plan
    from valence.training.prepare import prepare
    from valence.training.start import check_judge_labels, check_sinks, show_audit

    source = with_dtype(source)
    check_sinks(source)
    with source.placing():
        check_judge_labels(source.recipe.reward)
    prepared = prepare(source, training=True, console=console)
    if (Path(source.recipe.run.dir) / FACTS).is_file():
        message = (
            f"{source.recipe.run.dir} already contains a run: `valence train` resumes it, or "
            f"lists the settings and rows that have changed since it started"
        )
        print_message(console, message, "yellow")
    show_audit(prepared, console)
    console.rule("settings", align="left")
    _show_settings(source, show_all)
    console.rule("plan", align="left")
    if crowded := crowding(nproc):
        print_message(console, crowded, "yellow")
    for line in describe(make_plan(prepared, group=PlannedGroup(nproc)), in_detail=show_all):
        print_message(console, line)
    with console.status("reading the weights of the models"):
        check_model_files(prepared)


def _show_settings(source: LoadedRecipe, show_all: bool) -> None:
    """Print the settings that differ from their defaults, or all, with the origin of each value."""
    from valence.config.describe import shorten_value
    from valence.reports.formatting import exact

    table = table_of_settings("value", "from")
    settings = {
        name: setting
        for name, setting in source.settings.items()
        if show_all or setting.is_automatic or not setting.is_default
    }
    for name, setting in settings.items():
        style = "dim" if setting.is_default and not setting.is_automatic else ""
        value = shorten_value(setting.value)
        value = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else exact(value)
        table.add_row(name, value, setting.origin, style=style)
    console.print(table)
    if num_hidden := len(source.settings) - len(settings):
        message = f"({num_hidden} more settings have their defaults; list them with --all)"
        print_message(console, message, "dim")


@app.command()
@with_options
def score(
    options: ScoreOptions,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|MODEL|RUN",
            help="A recipe; with --data also a run, or the folder or hub id of a model. Optional "
            "with --reward, if the rows have token ids, as those of `valence sample`.",
            autocompletion=completion.runs_or_recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Score the answers in a file, or fill a recipe's reference cache.

    With --data and --out, add to each row the log-probabilities and implicit rewards of its
    answers, or their score by a reward.
    """
    target, overrides = _target(target, overrides or [])
    overrides = allow_remote_code(trust_remote_code, overrides)
    has_rows = options.data and options.out and not options.verify
    with processes(nproc) as group, stoppable():
        if has_rows and _uses_reward(target, options, overrides):
            from valence.jobs.reward_rows import score_by_reward

            score_by_reward(target, options, overrides=overrides, console=console, group=group)
        elif has_rows and target:
            from valence.jobs.score_rows import score_rows

            score_rows(target, options, overrides=overrides, console=console, group=group)
        else:
            recipe = _cache_recipe(target, options)
            from valence.training.reference_cache import score as fill

            fill(
                recipe,
                overrides,
                verify=options.verify,
                console=console,
                command=command_line(),
                group=group,
            )


def _target(target: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """Move a setting in the position of the target, which is optional, to the overrides."""
    is_setting = target is not None and "=" in target and not Path(target).exists()
    return (None, [target, *overrides]) if is_setting and target else (target, overrides)


def _uses_reward(target: str | None, options: ScoreOptions, overrides: list[str]) -> bool:
    """Whether rows are scored by a reward instead of a model's log-probabilities.

    Raises UserError if so and options that only apply to models are set.
    """
    from valence.config.load import load_recipe

    names = ["reference", "beta", "tokens", "column", "dtype"]
    if not options.reward:
        if target is None or Path(target).suffix not in (".yaml", ".yml"):
            return False
        overrides = [*overrides, *options.settings]
        if not load_recipe(Path(target), overrides, training=False).recipe.reward:
            return False
        names.remove("dtype")
    refuse_unused(changed_options(options, *names), "when a reward scores the rows")
    return True


def _cache_recipe(target: str | None, options: ScoreOptions) -> str:
    """The recipe of the reference cache to fill. Raises UserError for other options or targets."""
    is_recipe = target is not None and (
        Path(target).is_file() or Path(target).suffix in (".yaml", ".yml")
    )
    used = changed_options(replace(options, verify=0))
    if options.data and options.out and options.verify:
        problem = "--verify applies only to a reference cache, not to the rows of --data"
        fix = "remove --verify, or remove --data and --out to fill the reference cache of a recipe"
    elif options.reward:
        problem = "--reward scores the rows of a file, and needs --data FILE and --out FILE"
        fix = "add --data FILE and --out FILE"
    elif options.data and not options.out:
        problem = "--data needs a file for the scored rows"
        fix = "add --out FILE"
    elif is_recipe and used:
        problem = f"{used[0]} applies to the rows of a file, but --data FILE is missing"
        fix = (
            f"add --data FILE and --out FILE to score rows, or remove {used[0]} to fill the "
            "reference cache of the recipe"
        )
    elif is_recipe and target:
        return target
    else:
        problem = (
            "`valence score` needs --data FILE and --out FILE to score rows, or a recipe without "
            "these options to fill a reference cache"
        )
        fix = (
            "run `valence score MODEL --data FILE --out FILE` (or --reward NAME instead of MODEL) "
            "to score rows, or `valence score RECIPE` to fill a cache"
        )
    raise UserError(problem, code="option-missing", where="score", fix=fix)
