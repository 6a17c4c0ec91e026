"""Warnings and notes of a run: on the terminal, and in its folder for the report."""

from __future__ import annotations

from rich.console import Console

from valence.errors import are_arguments_named, for_interface, naming_arguments
from valence.runs.folder import RunFolder
from valence.terminal import print_message, warn_on_stderr


class Messages:
    """Where a run reports to.

    quiet: print nothing but warnings, and those on standard error. ``names_arguments``: whether the
    run was started from Python.
    """

    def __init__(self, console: Console, quiet: bool, folder: RunFolder | None) -> None:
        self.console, self.quiet = console, quiet
        self.names_arguments = are_arguments_named()
        self._folder = folder
        self._noted: set[str] = set()

    def print(self, message: str) -> None:
        """Print a message, unless quiet."""
        if not self.quiet:
            print_message(self.console, self._text(message))

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
            self._folder.note("notes", self._text(message))

    def _text(self, message: str) -> str:
        with naming_arguments(self.names_arguments):
            return for_interface(message)

    def _record(self, kind: str, message: str) -> None:
        message = self._text(message)
        if not self.quiet:
            print_message(self.console, message, "yellow")
        elif kind == "warnings":
            warn_on_stderr(self.console, message)
        if self._folder:
            self._folder.note(kind, message)
