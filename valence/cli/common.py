"""What the commands share: the application, the terminal, and arguments that several of them
take.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.guide import HELP
from valence.errors import UserError, install_command
from valence.terminal import Terminal, print_message

if TYPE_CHECKING:
    from valence.distributed.process_group import Group

NOTHING_BEGUN = "stopped before anything was begun"
MISTAKE = 2
"""Exit status of the user's mistake, or something in the way."""

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
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.", autocompletion=complete.recipes)
]
RunArg = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete.run_folders)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, e.g. train.seed=1; `valence check RECIPE --all` lists them all.",
        autocompletion=complete.settings,
    ),
]

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Take the run up although this setting, or something in this section (as `data`), "
        "has changed. May be repeated.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Move an earlier run in the same folder aside and start anew."),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Print nothing but errors and warnings, both on standard error."),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print each logged record as a JSON object, the last of which says how it ended; "
        "all else goes to stderr.",
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        help="Of a run: which checkpoint, by its step or as `best` (run.keep_best). Default: the "
        "newest.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Execute Python files that come with the model. A run's folder alone does not allow "
        "it.",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        help="Address to listen at. 127.0.0.1: this machine alone; 0.0.0.0: other machines can "
        "connect too, which needs a token."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another host name that clients use for this server, or * for any; may be given "
        "several times. IP addresses, localhost, --host and the name of this machine are always "
        "allowed.",
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Run in so many processes of this host (torchrun and accelerate launch work as well).",
    ),
]


def require_server_libraries(command: str, *others: str) -> None:
    """Raises UserError if a library that a server needs is not installed."""
    for library in ("fastapi", "uvicorn", *others):
        if find_spec(library) is None:
            raise UserError(
                f"{library} is not installed",
                code="library-missing",
                where=command,
                fix=install_command("serve"),
            )


def allow_remote_code(allowed: bool, overrides: list[str] | None) -> list[str]:
    """The overrides of a command, with that of --trust-remote-code if it is given."""
    return [*(overrides or []), *(["model.trust_remote_code=true"] if allowed else [])]


def checkpoint_of(step: str | None) -> Any:
    """The value of --step: a number, the word best, or None."""
    if step is None or step == "best":
        return step
    if not step.isdecimal():
        raise UserError(
            f"{step} is neither a step nor the word best",
            code="step-invalid",
            where="--step",
            fix="name a step of the run's checkpoints",
        )
    return int(step)


@contextmanager
def processes(nproc: int | None) -> Iterator[Group]:
    """The processes that the command runs in.

    Started here where several are asked for: then this one only waits for them, and ends as they
    do. Only rank 0 prints.
    """
    from valence.distributed.launcher import launch, needs_launch

    if needs_launch(nproc):
        raise typer.Exit(launch(sys.argv[1:], nproc or 1))
    with stoppable(NOTHING_BEGUN):
        from valence.distributed.process_group import start

        group = start()
    if group.rank:
        console.quiet = True
        warnings.simplefilter("ignore")
    with closing(group):
        yield group


@contextmanager
def stoppable(
    said: str = "stopped; what was computed is kept, and the same command goes on from there",
) -> Iterator[None]:
    """Around what an interrupt ends in order. said: what is told then, by default of what goes on
    with its file.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        print_message(console, said, "yellow")
        raise typer.Exit(status_of(stopped)) from None


def refuse_dashes(words: Sequence[str]) -> None:
    """Raise UserError for a setting that is written as an option: ``--train.seed=1`` or
    ``--train.seed 1``.
    """
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and re.fullmatch(r"[a-z]\w*(\.\w+)+", name):
            value = value if equals else next(iter(words[i + 1 :]), "VALUE")
            raise UserError(
                f"{word} is not an option",
                code="option-unknown",
                where="command line",
                fix=f"write {name}={value}, without dashes",
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
    """The exit status of a program that was stopped."""
    return getattr(stopped, "status", 130)
