"""The application, the console, and the arguments and options that several commands share."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.table import Table

from valence import completion
from valence.cli.guide import HELP
from valence.errors import UserError, install_command
from valence.options import default_of
from valence.terminal import Terminal, print_message, print_warning

if TYPE_CHECKING:
    from valence.data.load import DataFile
    from valence.data.sources import BadRow
    from valence.distributed.process_group import Group

NOTHING_STARTED = "stopped before the command started"
MISTAKE = 2
"""Exit status of a user error, or of a problem of the environment such as a full disk."""

GATE_FAILED = 3
"""Exit status if a model is worse than a release gate demands."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Terminal()

RecipeArg = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="A recipe (YAML).", autocompletion=completion.recipes),
]
RunArg = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, such as runs/first.",
        autocompletion=completion.run_folders,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to override, e.g. train.seed=1. `valence check RECIPE --all` lists them.",
        autocompletion=completion.settings,
    ),
]

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Resume although this setting or section has changed, e.g. `loss`. Batch size, "
        "epochs and training rows cannot change. Can be repeated.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Rename the existing output, and start over."),
]


def _set_quiet(is_set: bool) -> bool:
    console.warnings_only = is_set
    return is_set


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        callback=_set_quiet,
        help="Print only errors and warnings.",
    ),
]
"""Sets the console."""
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the log as one JSON object per line; the last one has the exit status. Other "
        "output goes to standard error.",
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        help="Checkpoint of a run: a step, or `best` (needs run.keep_best). Default: the newest.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python files that come with the model. Also needed for runs that were trained "
        "with them.",
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Run in N processes on this machine. torchrun and accelerate launch work too.",
        metavar="N",
    ),
]


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter of a command whose annotation is a dataclass by the fields of the
    dataclass, so that an option is declared once for the command and for the function below it.

    The annotations of the fields are those of typer, such as ``Annotated[int,
    typer.Option(help="Maximum tokens per answer.")]``.
    """
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, Any] = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and name != "return"
    }
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name not in classes:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        options = classes[parameter.name]
        types = get_type_hints(options, include_extras=True)
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if default_of(field) is MISSING else default_of(field),
                annotation=types[field.name],
            )
            for field in fields(options)
        ]
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, options in classes.items():
            values[name] = options(**{f.name: values.pop(f.name) for f in fields(options)})
        return command(**values)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def json_console() -> Terminal:
    """The console of a command whose standard output is JSON."""
    return Terminal(stderr=True, warnings_only=console.warnings_only)


def print_bad_rows(bad: Sequence[BadRow], text: str) -> None:
    """Print the number of bad rows, if any, with the reasons of the first three. text: follows the
    number.
    """
    if bad:
        num_rows = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        print_message(console, f"{num_rows} {text}:", "yellow")
    for row in bad[:3]:
        print_message(console, f"  {row.origin}: {row.reason}", "yellow")


def data_file(argument: str) -> DataFile:
    """The file that an argument names: a path, or a section as in a recipe."""
    from valence.config.load import load_recipe
    from valence.data.load import DataFile

    is_section = argument.lstrip().startswith("{")
    section = argument if is_section else json.dumps({"path": argument}, ensure_ascii=False)
    recipe = {"method": "kto", "model": "none"}
    overrides = [f"data.train=[{section}]"]
    source = load_recipe(recipe, overrides, training=False)
    [file] = source.recipe.data.train
    return DataFile.of(file)


def require_server_libraries(command: str, *additional: str) -> None:
    """Raise UserError if a library that a server needs is not installed."""
    for library in ("fastapi", "uvicorn", *additional):
        if find_spec(library) is None:
            raise UserError(
                f"{library} is not installed",
                code="library-missing",
                where=command,
                fix=install_command("serve"),
            )


def allow_remote_code(allowed: bool, overrides: list[str] | None) -> list[str]:
    """The overrides of a command, with the one for --trust-remote-code if the option is set."""
    return [*(overrides or []), *(["model.trust_remote_code=true"] if allowed else [])]


def checkpoint_of(step: str | None) -> Any:
    """The value of --step: a number, the word best, or None."""
    if step is None or step == "best":
        return step
    if not step.isdecimal():
        raise UserError(
            f"{step!r} is neither a number nor `best`",
            code="step-invalid",
            where="--step",
            fix="use the step of a checkpoint, such as --step 100, or --step best",
        )
    return int(step)


@contextmanager
def processes(nproc: int | None) -> Iterator[Group]:
    """The process group that the command runs in.

    With ``nproc`` above 1 this process only starts the others, waits for them and exits with their
    status. Only rank 0 prints.
    """
    from valence.distributed.launcher import launch, needs_launch

    if needs_launch(nproc):
        raise typer.Exit(launch(sys.argv[1:], nproc or 1))
    with stoppable(NOTHING_STARTED):
        from valence.distributed.process_group import start

        group = start()
    if group.rank:
        console.quiet = True
        warnings.simplefilter("ignore")
    with closing(group):
        yield group


@contextmanager
def stoppable(
    message: str = "stopped; finished work is saved, rerun the same command to resume",
) -> Iterator[None]:
    """Exit with the right status and this message when the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        print_warning(console, message)
        raise typer.Exit(status_of(stopped)) from None


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raise UserError for a setting that is written as an option: ``--train.seed=1`` or
    ``--train.seed 1``.
    """
    for i, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and re.fullmatch(r"[a-z]\w*(\.\w+)+", name):
            value = value if equals else next(iter(arguments[i + 1 :]), "VALUE")
            raise UserError(
                f"there is no option {argument}",
                code="option-unknown",
                where="command line",
                fix=f"write a setting without dashes: {name}={value}",
            )


def command_line() -> str:
    return shlex.join(["valence", *sys.argv[1:]])


def table_of_settings(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def status_of(stopped: KeyboardInterrupt) -> int:
    """The exit status for an interrupt."""
    return getattr(stopped, "status", 130)
