"""Commands about runs: train and go on, list, check before, fill a cache or score rows."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from valence.cli import complete
from valence.cli.common import (
    NOTHING_BEGUN,
    Allow,
    AsJson,
    Fresh,
    Nproc,
    Overrides,
    Quiet,
    RecipeArg,
    RunArg,
    TrustRemoteCode,
    allow_remote_code,
    app,
    command_line,
    console,
    processes,
    status_of,
    stoppable,
    table_of_settings,
)
from valence.cli.stream import failing, must_be_open, streaming
from valence.errors import UserError
from valence.terminal import json_line, print_message, write_line

if TYPE_CHECKING:
    from valence.config.load import LoadedRecipe

RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help="Judge the answers by this, as a recipe's reward section names it: a function, a "
        "rule, an address, a reward model; "
        "several add up. Default: that of the recipe, if it has one.",
    ),
]


@app.command()
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    fresh: Fresh = False,
    allow: Allow = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    nproc: Nproc = None,
) -> None:
    """Train a model: audit the data, run the recipe, write model, log and report into its run
    folder.

    A run that was stopped or killed goes on where it was saved last, also on another number of
    processes.
    """
    must_be_open(as_json)
    _check_recipe(recipe, overrides or [], as_json)
    with processes(nproc) as group:
        _train(
            recipe,
            overrides or [],
            as_json,
            fresh=fresh,
            allow=allow or [],
            quiet=quiet,
            group=group,
        )


def _check_recipe(recipe: Path, overrides: list[str], as_json: bool) -> None:
    """Raise UserError for mistakes of the recipe itself, before torch is imported and before
    processes are started.
    """
    from valence.config.load import load_recipe
    from valence.trainer.methods import method_of

    with failing(as_json and os.environ.get("RANK", "0") == "0"):
        load_recipe(recipe, overrides, method_of=method_of)


def _train(recipe: Path, overrides: list[str], as_json: bool, **how: Any) -> None:
    with stoppable(NOTHING_BEGUN):
        from valence.lifecycle.start import train_in_folder
        from valence.reports.verdict import outputs

    with streaming(as_json, how["group"].rank) as stream:
        sinks = [stream] if stream else []
        try:
            folder = train_in_folder(
                recipe,
                overrides=overrides,
                console=console,
                command=command_line(),
                sinks=sinks,
                **how,
            )
        except KeyboardInterrupt as stopped:
            print_message(console, _last_words(stopped), "yellow")
            if stream:
                stream.ended("interrupted", status_of(stopped), reason=str(stopped))
            raise typer.Exit(
                status_of(stopped)
            ) from None  # typer makes 130 of every KeyboardInterrupt
        for line in () if how["quiet"] else outputs(folder):
            print_message(console, line)
        if stream:
            stream.done(folder)


def _last_words(stopped: KeyboardInterrupt) -> str:
    """What is said about a run that was stopped."""
    if getattr(stopped, "at_once", True):
        return (
            f"{stopped}: ended at once; the steps since the last checkpoint are lost, and the "
            f"same command does them again"
        )
    if "stopped after step" not in str(stopped):
        return f"{stopped}: nothing was lost; the same command goes on"
    return f"{stopped}; its state is saved, and the same command goes on from there"


@app.command()
def resume(
    run_dir: RunArg,
    overrides: Overrides = None,
    allow: Allow = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    nproc: Nproc = None,
) -> None:
    """Go on with a run by its folder, wherever its recipe is now.

    It is read and written where the run was started from.
    """
    must_be_open(as_json)
    from valence.reports.runs import place_of_run

    if any(each.split("=")[0] == "run.dir" for each in overrides or []):
        raise UserError(
            "a run goes on where it is",
            code="option-conflict",
            where="run.dir",
            fix="move the folder, and name it",
        )
    folder = run_dir.absolute()
    recipe, place = place_of_run(folder)
    cwd = place if place and place.is_dir() else Path()
    ours = [*(overrides or []), f"run.dir={json.dumps(str(folder))}"]
    with chdir(cwd):
        _check_recipe(recipe, ours, as_json)
    with processes(nproc) as group:
        os.chdir(cwd)
        _train(recipe, ours, as_json, fresh=False, allow=allow or [], quiet=quiet, group=group)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run.")] = False,
) -> None:
    """List the runs in a folder: state, step, time left, last numbers."""
    from valence.reports import runs as listed

    found = listed.list_runs(folder)
    if not as_json:
        console.print(listed.table(found))
    for line in listed.as_json(found) if as_json else ():
        write_line(json_line(line))


@app.command()
def check(
    recipe: RecipeArg,
    overrides: Overrides = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Predict for so many processes; none are started.")
    ] = 1,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list the settings that have their defaults, and details of the steps.",
        ),
    ] = False,
) -> None:
    """Say what training would do, and do nothing: the data, the settings and where each came
    from, steps, predicted memory and time.
    """
    from valence.config.load import load_recipe
    from valence.trainer.methods import method_of

    source = load_recipe(recipe, overrides or [], method_of=method_of)  # before torch is imported

    from valence.distributed.process_group import PlannedGroup
    from valence.lifecycle.start import check_sinks, show_audit
    from valence.planning.plan import crowding, describe, make_plan
    from valence.trainer.prepare import prepare, with_dtype

    source = with_dtype(source)
    check_sinks(source)
    prepared = prepare(source, training=True, console=console)
    if (Path(source.recipe.run.dir) / "run.json").is_file():
        said = (
            f"{source.recipe.run.dir} already contains a run: `valence train` resumes it, or "
            f"reports what has changed"
        )
        print_message(console, said, "yellow")
    show_audit(prepared, console)
    console.rule("settings", align="left")
    _show_settings(source, every)
    console.rule("plan", align="left")
    if crowded := crowding(nproc):
        print_message(console, crowded, "yellow")
    for line in describe(make_plan(prepared, group=PlannedGroup(nproc)), in_detail=every):
        print_message(console, line)


def _show_settings(source: LoadedRecipe, every: bool) -> None:
    """A table of the settings that are not at their defaults, or of all, with where each value
    is from.
    """
    from valence.config.describe import shorten_value
    from valence.reports.formatting import exact

    table = table_of_settings("value", "from")
    shown = {
        name: setting
        for name, setting in source.settings.items()
        if every or setting.is_automatic or not setting.is_default
    }
    for name, setting in shown.items():
        style = "dim" if setting.is_default and not setting.is_automatic else ""
        value = shorten_value(setting.value)
        value = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else exact(value)
        table.add_row(name, value, setting.origin, style=style)
    console.print(table)
    if left := len(source.settings) - len(shown):
        print_message(console, f"({left} at their defaults: --all)", "dim")


@app.command()
def score(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|MODEL|RUN",
            help="A recipe; with --data also a model's folder or hub id, or a run's folder; with "
            "--reward it may be left out.",
            autocompletion=complete.runs_or_recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    reward: RewardOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Score the answers of this file of rows, or of a section as in a recipe; may be "
            "given several times. "
            "Columns are named as in the recipe's data where they fit.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the rows with their scores to this .jsonl; go on with it where it ends.",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", help="A model to compare with: adds rewards.")
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            "--beta",
            help="Of the rewards. Default: the recipe's, or 0.1; a run is scored with the reward "
            "that it trains.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, bfloat16 or float64. Default: the recipe's; float32 for a model.",
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Longest row, in tokens. Default: 1024.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens that run at once. Default: 8192.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Format of the rows. Default: detected.")
    ] = None,
    column: Annotated[str, typer.Option("--column", help="Name of the new column.")] = "valence",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier --out aside and start anew.")
    ] = False,
    verify: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of a reference cache: compute this many sequences once more afterwards, and "
            "compare.",
        ),
    ] = 0,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", help="Print nothing but errors, and failed rows on standard error."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Score answers in a file, or fill a recipe's reference cache.

    With --data and --out: log-probabilities and implicit rewards of each answer, or a reward of it.
    Stopped, it goes on.
    """
    target, overrides = _target(target, overrides or [])
    overrides = allow_remote_code(trust_remote_code, overrides)
    ours = _as_settings(
        {"model.dtype": dtype, "data.max_length": max_length, "reference.model": reference}
    )
    every = [*overrides, *ours]
    how = {"format": format, "fresh": fresh, "console": console, "quiet": quiet}
    of_models = {
        "reference": reference,
        "beta": beta,
        "tokens": tokens,
        "column": column,
        "dtype": dtype if reward else None,
    }
    with processes(nproc) as group, stoppable():
        if data and out and not verify and _by_reward(target, reward, every, of_models):
            from valence.jobs.reward_rows import score_by_reward

            score_by_reward(
                data, out, rewards=reward or (), target=target, overrides=every, **how, group=group
            )
        elif target and data and out and not verify:
            from valence.jobs.score_rows import score_rows

            score_rows(
                target,
                data,
                out,
                overrides=every,
                beta=beta,
                tokens=tokens,
                column=column,
                **how,
                group=group,
            )
        else:
            target = _filled(
                target,
                any((data, out, reward, ours, beta, tokens, format, fresh, column != "valence")),
                bool(reward),
            )
            from valence.lifecycle.reference_cache import score as fill

            fill(
                target,
                overrides,
                verify=verify,
                console=console,
                quiet=quiet,
                command=command_line(),
                group=group,
            )


def _as_settings(options: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None]


def _target(target: str | None, overrides: list[str]) -> tuple[str | None, list[str]]:
    """A setting in the place of the target is one: the target may be left out."""
    is_setting = target is not None and "=" in target and not Path(target).exists()
    return (None, [target, *overrides]) if is_setting and target else (target, overrides)


def _by_reward(
    target: str | None, reward: list[str] | None, overrides: list[str], of_models: dict[str, Any]
) -> bool:
    """Whether a reward judges the rows, not a model's log-probabilities.

    Raises UserError for options of the latter.
    """
    from valence.config.load import load_recipe
    from valence.trainer.methods import method_of

    if not reward:
        is_recipe = target is not None and Path(target).suffix in (".yaml", ".yml")
        if (
            not is_recipe
            or not load_recipe(
                Path(target or ""), overrides, method_of=method_of, training=False
            ).recipe.reward
        ):
            return False
    odd = [
        name
        for name, value in of_models.items()
        if value is not None and (name, value) != ("column", "valence")
    ]
    if odd:
        raise UserError(
            "a reward judges these rows, which does not read it",
            code="option-unused",
            where=f"--{odd[0]}",
            fix="leave it out",
        )
    return True


def _filled(target: str | None, for_rows: bool, reward: bool) -> str:
    """The recipe whose reference cache is filled. Raises UserError unless `score` was called so."""
    if reward:
        fix = "give --data FILE and --out FILE, and not --verify"
        raise UserError(
            "--reward judges the answers of rows, and writes them to a file",
            code="option-missing",
            where="score",
            fix=fix,
        )
    if (
        for_rows
        or not target
        or not (Path(target).is_file() or Path(target).suffix in (".yaml", ".yml"))
    ):
        raise UserError(
            "rows are scored with --data FILE and --out FILE, a recipe's reference cache is "
            "filled with neither",
            code="option-missing",
            where="score",
            fix="give both (and not --verify), and a model to score with or --reward; or a "
            "recipe alone",
        )
    return target
