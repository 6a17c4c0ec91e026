"""Where the metrics of a run go: one small protocol, the log file that every run has, and a way to serve several."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from valence.errors import UserError

Record = Mapping[str, float | int | str]
"""The numbers of one logged step, by metric name; ``step`` is among them."""


class Sink(Protocol):
    """Something that keeps the records of a run."""

    def log(self, record: Record) -> None:
        """Take one record. The sink neither keeps nor changes the mapping."""
        ...

    def close(self) -> None:
        """Write out what is left. Nothing is logged afterwards."""
        ...


class JsonlSink:
    """One JSON object per line, flushed per line.

    The file is strict JSON, which has no word for numbers that are not finite: they are written as the strings
    ``"nan"``, ``"inf"`` and ``"-inf"``, which Python's ``float`` reads back. Records are added to a file that
    exists; a last line that was torn by a crash is cut off first, so that every line stays a whole object.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError when the file cannot be opened for writing."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            _cut_torn_line(path)
        except OSError as error:
            raise UserError(
                f"cannot write the log ({error.strerror})",
                where=str(path),
                fix="choose another run.dir, or make this one writable",
            ) from error

    def log(self, record: Record) -> None:
        """Write one line. Raises TypeError for a value that is neither a number nor text."""
        line = json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _strict(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline of a file."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        warnings.warn(f"{path}: cut off an unfinished last line of {len(content) - whole} bytes", stacklevel=3)


class FanOut:
    """Hand each record to several sinks: an error of a required sink is raised; an optional one that fails
    is reported once by ``warn`` and left alone for the rest of the run."""

    def __init__(
        self, required: Sequence[Sink], optional: Sequence[Sink] = (), warn: Callable[[str], None] = warnings.warn
    ) -> None:
        self._required, self._optional, self._warn = tuple(required), list(optional), warn

    def log(self, record: Record) -> None:
        for sink in self._required:
            sink.log(record)
        self._try_each(lambda sink: sink.log(record))

    def close(self) -> None:
        self._try_each(lambda sink: sink.close())
        for sink in self._required:
            sink.close()

    def _try_each(self, action: Callable[[Sink], None]) -> None:
        for sink in tuple(self._optional):
            try:
                action(sink)
            except Exception as error:  # other people's code: whatever it raises must not end the training
                self._optional.remove(sink)
                self._warn(f"{type(sink).__name__} failed and gets no more metrics in this run: {error!r}")
