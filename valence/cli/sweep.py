"""The command that trains a recipe with several settings and seeds, and compares the results."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from valence import completion
from valence.cli.common import MISTAKE, Quiet, RecipeArg, app, command_line, console, with_options
from valence.cli.stream import must_be_open, stdout_to_stderr
from valence.errors import UserError, refuse_unused
from valence.options import SweepOptions, changed_options
from valence.terminal import json_line, print_message, print_warning, write_line

if TYPE_CHECKING:
    from valence.apps.sweep.state import SweepState, Trial

OVER = "--over"


class _SweepCommand(TyperCommand):
    """Takes several words after ``--over``: all that follow up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_over(args))


def repeat_over(words: list[str]) -> list[str]:
    """The words of a command with ``--over`` before each of its values."""
    repeated: list[str] = []
    is_over = False
    for word in words:
        if is_over and "=" in word and not word.startswith("-") and repeated[-1] != OVER:
            repeated += [OVER, word]
            continue
        is_over = word == OVER or word.startswith(f"{OVER}=") or (is_over and repeated[-1] == OVER)
        repeated.append(word)
    return repeated


def missing_over(words: Sequence[str]) -> UserError | None:
    """The error for a setting with several values that no ``--over`` comes before, if there is one.

    words: of the command line.
    """
    from valence.config.messages import settings_named

    if any(word.partition("=")[0] == OVER for word in words):
        return None
    for word in words:
        name, _, values = word.partition("=")
        if name.startswith("-") or "," not in values or values.startswith(("[", "{", '"', "'")):
            continue
        settings = [] if "." in name else settings_named(name)
        return UserError(
            f"{word} has several values, but no {OVER} comes before it",
            code="sweep-over-missing",
            where="sweep",
            fix=f"write {OVER} {settings[0] if settings else name}={values}",
        )
    return None


@app.command(cls=_SweepCommand)
@with_options
def sweep(
    recipe: RecipeArg,
    options: SweepOptions,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of all trials, before --over.",
            autocompletion=completion.settings,
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON object for each trial, and one with the results. Other output goes "
            "to standard error.",
        ),
    ] = False,
) -> None:
    """Train a recipe with all combinations of some settings, and say whether differences exceed the
    noise of seeds.

    Each trial is a run in OUT/trials. Rerun the same command to resume; more values or seeds add
    trials. All trials share one cache of reference log-probabilities.
    """
    must_be_open(as_json)
    with stdout_to_stderr(as_json) as stream, _mistakes_as_json(stream):
        _check_options(options)
        if not options.over and (error := missing_over(overrides or [])):
            raise error
        status = _sweep(recipe, overrides or [], options, stream)
    raise typer.Exit(status)


@contextmanager
def _mistakes_as_json(stream: IO[str] | None) -> Iterator[None]:
    """Write the last line, if lines are wanted, for an error that ends the block."""
    line: dict[str, Any] | None = {
        "exit_status": 1,
        "error": "a bug in Valence; see standard error",
    }
    try:
        yield
        line = None
    except UserError as error:
        line = {"exit_status": MISTAKE, "error": str(error), "code": error.code}
        raise
    finally:
        if stream and line:
            write_line(json_line({"event": "done", "status": "failed", **line}), stream)


def _check_options(options: SweepOptions) -> None:
    """Raise UserError for options that do not fit together."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "`valence sweep` cannot run under torchrun, because it starts all processes itself",
            code="nproc-conflict",
            where="sweep",
            fix="run `valence sweep ... --nproc N` without torchrun",
        )
    if options.search not in (None, "optuna"):
        raise UserError(
            f"there is no search method {options.search!r}",
            code="option-value",
            where="--search",
            fix="use --search optuna, or remove --search to try all combinations",
        )
    if options.search is None:
        reason = "without --search, because a grid tries all combinations"
        refuse_unused(changed_options(options, "trials"), reason, "add --search optuna")


def _sweep(
    recipe: Path,
    overrides: list[str],
    options: SweepOptions,
    stream: IO[str] | None,
) -> int:
    """Run the sweep, print its table or its JSON lines, and return the exit status."""
    from valence.apps.sweep.results import conclusions_of, terminal_table
    from valence.apps.sweep.sweep import run_sweep

    def print_trial(state: SweepState, trial: Trial) -> None:
        if stream:
            fields = ("name", "state", "value", "step", "reason", "seconds")
            record = {field: getattr(trial, field) for field in fields}
            line = {"event": "trial", **record, "run": str(state.run_dir(trial))}
            write_line(json_line(line), stream)

    state, stopped = run_sweep(
        recipe, overrides, options, console, command=command_line(), on_trial=print_trial
    )
    out = options.out
    failed = state.results["failed"]
    status = stopped.status if stopped else MISTAKE if failed else 0
    console.print(terminal_table(state))
    for line in conclusions_of(state):
        print_message(console, line)
    print_message(console, f"report  {out / 'sweep.html'}")
    for trial in failed:
        print_warning(console, f"failed: {trial['trial']}: {trial['reason']}")
    if stopped:
        done = sum(trial.state == "done" for trial in state.included)
        message = f"{stopped.reason}: {done} of {len(state.included)} trials are done; rerun the "
        print_warning(console, f"{message}same command to resume")
    elif failed:
        message = f"{len(failed)} trials failed; rerun the same command to try them again"
        print_message(console, message, "yellow")
    if stream:
        word = "interrupted" if stopped else "failed" if failed else "done"
        line = {"event": "done", "sweep": str(out), "status": word, "exit_status": status}
        more = {"objective": state.objective, "report": str(out / "sweep.html")}
        write_line(json_line({**line, **more, **state.results}), stream)
    return status
