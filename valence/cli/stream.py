"""--json: events of a run go to standard output, one JSON object per line, and messages for people
to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

from valence.cli.common import MISTAKE, console
from valence.errors import UserError
from valence.terminal import ResilientStream, json_line, write_line


class EventStream:
    """A sink that writes each record like metrics.jsonl: strict JSON, non-finite numbers as
    strings.

    The first line names the run, the last line says how it ended.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._folder: Path | None = None
        self.has_ended = False

    def start(self, config: Mapping[str, Any], folder: Path | None, resumed: bool) -> None:
        self._folder = folder
        self._write({"event": "started", "run": _text(folder), "resumed": resumed})

    def log(self, record: Mapping[str, float | int | str]) -> None:
        # imports torch, which the run has imported already
        from valence.training.folder import finite

        self._write(finite(record))

    def close(self) -> None:
        """Do nothing: ``ended`` writes the last line."""

    def ended(self, status: str, exit_status: int, **fields: Any) -> None:
        """Write the last line."""
        self.has_ended = True
        folder = self._folder
        outputs = {
            key: folder / name if folder else None
            for key, name in (("model", "model"), ("report", "report.html"))
        }
        paths = {
            key: _text(path if path and path.exists() else None) for key, path in outputs.items()
        }
        self._write(
            {
                "event": "done",
                "run": _text(folder),
                **paths,
                "status": status,
                "exit_status": exit_status,
                **fields,
            }
        )

    def done(self, folder: Path) -> None:
        """Write the last line of a run that has finished, now or earlier."""
        self._folder = folder
        self.ended("done", 0)

    def _write(self, line: Mapping[str, Any]) -> None:
        write_line(json_line(line), self._file)


def must_be_open(as_json: bool) -> None:
    """Raise UserError if JSON lines are requested and standard output is closed."""
    if as_json and sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # `>&-`
        raise UserError(
            "standard output is closed",
            code="output-closed",
            where="--json",
            fix="remove --json, or redirect standard output to a file or a program",
        )


@contextmanager
def failing(as_json: bool) -> Iterator[None]:
    """Write the last line for a UserError in the block, before a run starts."""
    try:
        yield
    except UserError as error:
        if as_json:
            EventStream(sys.stdout).ended("failed", MISTAKE, error=str(error), code=error.code)
        raise


@contextmanager
def streaming(as_json: bool, rank: int = 0) -> Iterator[EventStream | None]:
    """Open the stream of events on rank 0, if requested.

    Inside the block all other output goes to standard error, also that of other ranks, of C
    libraries and of processes that a reward starts. An error that leaves the block ends the stream.
    """
    if not as_json:
        yield None
        return
    must_be_open(as_json)
    if rank:
        with _stdout_to_stderr():
            yield None
        return
    console.plain = sys.stdout.isatty()  # a progress bar would be mixed with the lines
    with _stdout_to_stderr() as file:
        stream = EventStream(file)
        try:
            yield stream
        except UserError as error:
            stream.ended("failed", MISTAKE, error=str(error), code=error.code)
            raise
        finally:
            console.plain = False
            if not stream.has_ended:
                stream.ended("failed", 1, error="a bug in Valence; see standard error")


@contextmanager
def _stdout_to_stderr() -> Iterator[IO[str]]:
    """A file that writes to standard output.

    Inside the block ``sys.stdout`` and file descriptor 1 are standard error.
    """
    stdout = sys.stdout
    with suppress(OSError):
        stdout.flush()
    if _descriptor(stdout) != 1:  # not inherited by other programs
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    try:
        os.fstat(2)
    except OSError:  # standard error is closed: the next opened file would replace it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    duplicate = os.dup(1)  # not inherited by other programs
    file = os.fdopen(duplicate, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield ResilientStream(file, "standard output")  # type: ignore[misc]
    finally:
        with suppress(OSError):  # each line was flushed; write errors were reported
            file.close()
        os.dup2(duplicate, 1)
        os.close(duplicate)


@contextmanager
def stdout_to_stderr(wanted: bool) -> Iterator[IO[str] | None]:
    """A file that writes to standard output, if one is wanted. Inside the block everything else
    that is printed goes to standard error."""
    if not wanted:
        yield None
        return
    console.plain = sys.stdout.isatty()
    try:
        with _stdout_to_stderr() as file:
            yield file
    finally:
        console.plain = False


def _descriptor(file: IO[str]) -> int | None:
    try:
        return file.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
