"""Warnings and notes of a run: on the terminal, and in its folder for the report."""

from __future__ import annotations

from rich.console import Console

from valence.runs.folder import RunFolder
from valence.terminal import print_message, warn_on_stderr


class Messages:
    """Where a run reports to.

    quiet: print nothing but warnings, and those on standard error.
    """

    def __init__(self, console: Console, quiet: bool, folder: RunFolder | None) -> None:
        self.console, self.quiet = console, quiet
        self._folder = folder
        self._noted: set[str] = set()

    def print(self, message: str) -> None:
        """Print a message, unless quiet."""
        if not self.quiet:
            print_message(self.console, message)

    def warn(self, message: str) -> None:
        """Print a warning and record it in the folder."""
        self._record("warnings", message)

    def note_once(self, message: str) -> None:
        """Print a note and record it in the folder, unless it was printed before."""
        if message not in self._noted:
            self._noted.add(message)
            self._record("notes", message)

    def record_note(self, message: str) -> None:
        """Record a note in the folder without printing it."""
        if self._folder:
            self._folder.note("notes", message)

    def _record(self, kind: str, message: str) -> None:
        if not self.quiet:
            print_message(self.console, message, "yellow")
        elif kind == "warnings":
            warn_on_stderr(self.console, message)
        if self._folder:
            self._folder.note(kind, message)
