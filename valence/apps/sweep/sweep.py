"""Start or resume a sweep: read the grid, run its trials, and write the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from valence.apps.sweep.grid import Grid
from valence.apps.sweep.objective import Objectives
from valence.apps.sweep.results import compute_results, write_sweep_page
from valence.apps.sweep.run import Search, StopRequestedError, SweepRunner
from valence.apps.sweep.search import OptunaSearch, num_searched
from valence.apps.sweep.state import TRIALS, SweepState, Trial, locked_folder
from valence.errors import UserError
from valence.options import SweepOptions
from valence.terminal import print_message


def run_sweep(
    recipe: Path,
    overrides: Sequence[str],
    options: SweepOptions,
    console: Console,
    *,
    command: str = "",
    on_trial: Callable[[SweepState, Trial], None] = lambda *_: None,
) -> tuple[SweepState, StopRequestedError | None]:
    """Run the trials of a sweep that are not done yet, and write ``sweep.json`` and ``sweep.html``.

    Returns the state, and why it ended before the last trial, if it did.

    Raises UserError for mistakes in the grid or the recipe, for a folder that is in use or holds
    something else, and for a sweep with other settings in the folder.
    """
    folder, num_trials = options.out, options.num_trials
    grid = Grid(recipe, overrides, options.over)
    objectives = Objectives(grid.base, list(grid.axes), options.objective)
    configurations = grid.expand() if num_trials is None else []
    if options.baseline and not any(c.is_default for c in configurations):
        configurations = [grid.default, *configurations]
    seeds = range(grid.base.recipe.train.seed, grid.base.recipe.train.seed + options.seeds)
    with locked_folder(folder):
        state = SweepState(folder)
        if warning := state.load():
            print_message(console, warning, "yellow")
        _check_kind(state, options.over, num_trials is not None)
        state.check_settings(grid.base, list(grid.axes))
        searched = [t for t in state.trials if t.number is not None]
        state.trials = [t for t in state.trials if t.number is None]
        state.include(configurations, seeds)
        state.trials += searched
        state.definition = {
            "recipe": str(recipe),
            "overrides": list(overrides),
            "over": list(options.over),
            "seeds": list(seeds),
            "search": None if num_trials is None else {"optuna": num_trials},
            "stop_early": options.stop_early,
            "command": command,
        }
        _forget_other_objective(state, options.objective)
        (folder / TRIALS).mkdir(exist_ok=True)
        state.save()
        search: Search | None = None
        if num_trials is not None:
            optuna_search = OptunaSearch(grid, folder, seeds, num_trials)
            optuna_search.add_seeds(state)
            search = optuna_search
        print_message(console, _summary(state, num_trials))
        runner = SweepRunner(
            grid, state, objectives, options, console,
            search=search, on_trial=partial(on_trial, state),
        )  # fmt: skip
        stopped: StopRequestedError | None = None
        try:
            runner.run()
        except StopRequestedError as error:
            stopped = error
        finally:
            state.results = compute_results(state)
            state.save()
        if num_trials is not None and stopped is None and num_searched(state) < num_trials:
            message = (
                f"the search ended after {num_searched(state):,} configurations instead of "
                f"{num_trials:,}: every further suggestion repeats one of the sweep"
            )
            print_message(console, message, "yellow")
        try:
            write_sweep_page(state)
        except OSError as error:
            message = f"{folder / 'sweep.html'} cannot be written ({error.strerror})"
            print_message(console, message, "yellow")
    return state, stopped


def _check_kind(state: SweepState, over: Sequence[str], is_search: bool) -> None:
    """Raise UserError if the folder contains a search and this is a grid, or the other way round,
    or if the ranges of a search have changed.
    """
    if not state.definition:
        return
    was_search = state.definition["search"] is not None
    if was_search != is_search:
        before, now = ("search", "grid") if was_search else ("grid", "search")
        problem = f"this folder contains a {before}, and this command starts a {now}"
    elif is_search and state.definition["over"] != list(over):
        problem = f"this folder contains another search, over {' '.join(state.definition['over'])}"
    else:
        return
    raise UserError(
        problem, code="sweep-differs", where=str(state.folder), fix="choose another --out"
    )


def _forget_other_objective(state: SweepState, requested: str | None) -> None:
    """Read the values of finished trials again if another objective is requested now."""
    name = None if requested is None else requested.removeprefix("eval/").partition(":")[0]
    if state.objective is not None and name not in (None, state.objective):
        state.objective, state.sign = None, 0
        for trial in state.trials:
            if trial.state in ("done", "stopped"):
                trial.state, trial.value, trial.test, trial.reason = "waiting", None, None, ""


def _summary(state: SweepState, num_trials: int | None) -> str:
    """The number of trials, and how many of them are done."""
    included = state.included
    num_configurations = len({trial.key for trial in included})
    num_seeds = len({trial.seed for trial in included}) or 1
    num_done = sum(trial.state == "done" for trial in included)
    others = sum(not trial.included for trial in state.trials)
    if num_trials is not None:
        text = f"sweep: up to {num_trials} configurations chosen by Optuna"
    else:
        text = f"sweep: {num_configurations} configurations"
        text += f" x {num_seeds} seeds = {len(included)} trials" if num_seeds > 1 else ""
    text += f", {num_done} done" if num_done else ""
    return text + (f"; {others} in the folder are not part of it" if others else "")
