"""The command line."""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from valence.cli.common import MISTAKE, app, console, refuse_dashes, status_of
from valence.cli.guide import arrange
from valence.errors import UserError

# Each registers its commands, in the order of the help.
from valence.cli import runs, report, models, look, rewards, serve, doctor  # isort: skip

arrange(app)

HEAD_START = 2.0
"""Seconds."""


def main() -> None:
    """Runs a command. Exit status: 0 done, 2 the user's mistake or something in the way, 124 run.max_time is over, 128 + n
    stopped by signal n, 1 a defect."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "_VALENCE_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "10000"  # a help that is wrapped would be taken for several words
    try:
        refuse_dashes(sys.argv[1:])
        app(standalone_mode=True)
    except UserError as error:
        _exit_with(error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        where = f"{str(error.filename)[:60]}..."
        _exit_with(UserError("the name is too long for a file", where=where, fix="choose a shorter one"))
    except KeyboardInterrupt as stopped:
        sys.exit(status_of(stopped))


def _exit_with(error: UserError) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(HEAD_START)  # rank 0 has mostly met the same, and with its end this process's comes
    Console(stderr=True).print(f"valence: {error}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(MISTAKE)


def _version(asked: bool) -> None:
    if asked:
        from valence import __version__

        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def valence(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version


__all__ = ["MISTAKE", "app", "console", "doctor", "look", "main", "models", "report", "rewards", "runs", "serve"]
