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
from valence.cli.guide import arrange
from valence.errors import UserError
from valence.terminal import Terminal, escape_control, print_message, print_traceback, safe_streams

# Each registers its commands, in the order of the help.
from valence.cli import runs, report, models, compare, look  # isort: skip
from valence.cli import imports, collect, audit, rewards, serve, doctor  # isort: skip

arrange(app)

HEAD_START = 2.0
"""Seconds."""


CLICK_ERROR: Any = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
"""The base of usage errors, in whichever library this version of typer takes it from."""


def main() -> None:
    """Run a command.

    Exit status: 0 done, 2 a mistake of the user or something in the way, 3 a release gate failed,
    124 run.max_time is over, 128 + n stopped by signal n, 1 a defect.
    """
    sys.excepthook = print_traceback
    _hide_deprecations()
    with safe_streams():
        _main()


def _hide_deprecations() -> None:
    """Hide warnings about deprecated code, unless PYTHONWARNINGS or -W asks for warnings: they are
    for those who write programs, not for those who run them."""
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)


def _main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "_VALENCE_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "10000"  # a help that is wrapped would be taken for several words
    try:
        refuse_dashes(sys.argv[1:])
        status = app(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except CLICK_ERROR as error:
        error.message = escape_control(error.message)
        rich_format_error(error)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except UserError as error:
        _exit_with(error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        where = f"{str(error.filename)[:60]}..."
        _exit_with(
            UserError(
                "the name is too long for a file",
                code="path-too-long",
                where=where,
                fix="choose a shorter one",
            )
        )
    except KeyboardInterrupt as stopped:
        sys.exit(status_of(stopped))


def _exit_with(error: UserError) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        # rank 0 has mostly met the same, and with its end this process's comes
        time.sleep(HEAD_START)
    print_message(Terminal(stderr=True), f"valence: {error}")
    raise SystemExit(MISTAKE) from error


def _version(asked: bool) -> None:
    if asked:
        from valence.version import __version__

        print_message(console, __version__)
        raise typer.Exit


@app.callback()
def valence(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    del version


__all__ = [
    "GATE_FAILED",
    "MISTAKE",
    "app",
    "audit",
    "collect",
    "compare",
    "console",
    "doctor",
    "imports",
    "look",
    "main",
    "models",
    "report",
    "rewards",
    "runs",
    "serve",
]
