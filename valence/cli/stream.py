"""--json: what a program reads of a run goes to standard output, an object a line, and what people
read to standard error.
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
    """A sink of a run that writes each record as metrics.jsonl has it: strict JSON, numbers that
    are not finite as strings. Before the records it says which run it is, behind them how it ended.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._folder: Path | None = None
        self.over = False

    def start(self, config: Mapping[str, Any], folder: Path | None, taken_up: bool) -> None:
        self._folder = folder
        self._write({"event": "started", "run": _text(folder), "resumed": taken_up})

    def log(self, record: Mapping[str, float | int | str]) -> None:
        from valence.runs.folder import finite  # imports torch, as whoever logs has

        self._write(finite(record))

    def close(self) -> None:
        """The last line is yet to come."""

    def ended(self, status: str, exit_status: int, **more: Any) -> None:
        """The last line."""
        self.over = True
        folder = self._folder
        there = {
            what: folder / name if folder else None
            for what, name in (("model", "model"), ("report", "report.html"))
        }
        paths = {
            what: _text(path if path and path.exists() else None) for what, path in there.items()
        }
        self._write(
            {
                "event": "done",
                "run": _text(folder),
                **paths,
                "status": status,
                "exit_status": exit_status,
                **more,
            }
        )

    def done(self, folder: Path) -> None:
        """The run has come to its end, now or earlier."""
        self._folder = folder
        self.ended("done", 0)

    def _write(self, line: Mapping[str, Any]) -> None:
        write_line(json_line(line), self._file)


def must_be_open(wanted: bool) -> None:
    """Raises UserError where lines are wanted and there is nothing to write them to."""
    if wanted and sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # `>&-`
        raise UserError(
            "the standard output is closed",
            code="output-closed",
            where="--json",
            fix="leave --json out, or let it write somewhere",
        )


@contextmanager
def failing(wanted: bool) -> Iterator[None]:
    """Write the last line for a mistake that is found inside the block, before a run starts."""
    try:
        yield
    except UserError as error:
        if wanted:
            EventStream(sys.stdout).ended("failed", MISTAKE, error=str(error), code=error.code)
        raise


@contextmanager
def streaming(wanted: bool, rank: int = 0) -> Iterator[EventStream | None]:
    """The stream, if one is wanted and this is rank 0. Inside the block everything else that is
    printed goes to standard error, also by other ranks, libraries in C and processes that a reward
    starts. An error that ends the block ends the stream as well."""
    if not wanted:
        yield None
        return
    must_be_open(wanted)
    if rank:
        with _stdout_to_stderr():
            yield None
        return
    console.plain = sys.stdout.isatty()  # else lines would be written into what is drawn there
    with _stdout_to_stderr() as file:
        stream = EventStream(file)
        try:
            yield stream
        except UserError as error:
            stream.ended("failed", MISTAKE, error=str(error), code=error.code)
            raise
        finally:
            console.plain = False
            if not stream.over:
                stream.ended("failed", 1, error="a defect; see standard error")


@contextmanager
def _stdout_to_stderr() -> Iterator[IO[str]]:
    """A file that writes to standard output.

    Inside the block ``sys.stdout`` and file descriptor 1 are standard error.
    """
    stdout = sys.stdout
    with suppress(OSError):
        stdout.flush()
    if _descriptor(stdout) != 1:  # an object that only this program writes to
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    try:
        os.fstat(2)
    except OSError:  # standard error is closed, and the next file that is opened would become it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    kept = os.dup(1)  # not inherited by other programs
    file = os.fdopen(kept, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield ResilientStream(file, "standard output")  # type: ignore[misc]
    finally:
        with suppress(OSError):  # each line was flushed; one that could not be written was reported
            file.close()
        os.dup2(kept, 1)
        os.close(kept)


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
