"""The command line."""

from __future__ import annotations

import errno
import os
import sys
import time
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.rich_utils import rich_format_error

from valence.cli.common import GATE_FAILED, MISTAKE, app, console, refuse_dashes, status_of
from valence.cli.guide import arrange, name
from valence.cli.usage import usage_error
from valence.errors import UserError, out_of_memory
from valence.terminal import Terminal, print_message, print_traceback, safe_streams

# Each module registers its commands.
from valence.cli import runs, sweep, report, models, compare, export, inspection  # isort: skip
from valence.cli import init, imports, split, collect, audit  # isort: skip
from valence.cli import serve, doctor, docs, demo  # isort: skip

arrange(app)

ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
HEAD_START = 2.0
"""Seconds that other ranks wait before they print the error that rank 0 probably has too."""


CLICK_ERROR: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""The base class of usage errors: typer's own copy of click, or click."""


def main() -> None:
    """Run a command.

    Exit status: 0 success, 1 a bug in Valence, 2 a user error or a problem of the environment,
    3 a release gate failed, or an exported model differs from its run, 124 run.max_time was
    reached, 128 + n stopped by signal n.
    """
    sys.excepthook = print_traceback
    _set_environment()
    _hide_deprecations()
    with safe_streams():
        _main()


def _set_environment() -> None:
    """Set variables that libraries read when they are loaded, unless the user has set them."""
    defaults = {
        # By default idle threads wait by spinning, which slows everything on a busy machine.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # Micro-batches of many sizes would fragment the memory of a CUDA device. Only Linux supports
    # this.
    if sys.platform == "linux" and os.environ.keys().isdisjoint(ALLOCATOR_VARIABLES):
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)


def _hide_deprecations() -> None:
    """Hide deprecation warnings, which are for developers, unless PYTHONWARNINGS or -W is set."""
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)


def _main() -> None:
    if "_VALENCE_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "10000"  # a shell would complete each line of a wrapped help text
    try:
        refuse_dashes(sys.argv[1:])
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except CLICK_ERROR as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            commands = [name(command) for command in app.registered_commands]
            _exit_with(usage_error(error, sys.argv[1:], commands))
        rich_format_error(error)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except UserError as error:
        _exit_with(error)
    except KeyboardInterrupt as stopped:
        sys.exit(status_of(stopped))
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        problem = _problem_of_the_system(error)
        if problem is None:
            raise
        _exit_with(problem)


def _problem_of_the_system(error: Exception) -> UserError | None:
    """The message for an error of the operating system that the user can fix."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(
            "the file name is too long",
            code="path-too-long",
            where=f"{str(error.filename)[:60]}...",
            fix="choose a shorter name",
        )
    if out_of_memory(error):
        text = str(error).partition("\n")[0][:200]
        return UserError(
            f"out of memory{f' ({text})' if text else ''}",
            code="out-of-memory",
            fix="close other programs, raise the memory limit of this one (such as `ulimit -v` or "
            "the limit of a container), or use a smaller model or less data",
        )
    return None


def _exit_with(error: UserError) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        # rank 0 has usually printed the same error, and its exit ends this process
        time.sleep(HEAD_START)
    print_message(Terminal(stderr=True), f"valence: {error}")
    raise SystemExit(MISTAKE) from error


def _version(is_set: bool) -> None:
    if is_set:
        from valence.version import __version__

        print_message(console, __version__)
        raise typer.Exit


@app.callback()
def valence(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version
    console.warnings_only = False  # several commands may run in one process


__all__ = [
    "GATE_FAILED",
    "MISTAKE",
    "app",
    "audit",
    "collect",
    "compare",
    "console",
    "demo",
    "docs",
    "doctor",
    "export",
    "imports",
    "init",
    "inspection",
    "main",
    "models",
    "report",
    "runs",
    "serve",
    "split",
    "sweep",
]
