"""Where the metrics of a run go: one small protocol, the log file that every run has, and a way to serve several."""

from __future__ import annotations

import json
import math
import os
import threading
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
    """One JSON object per line, written at once.

    The file is strict JSON, which has no word for numbers that are not finite: they are written as the strings
    ``"nan"``, ``"inf"`` and ``"-inf"``, which Python's ``float`` reads back. Records are added to a file that exists.

    What cannot be written is kept in memory and tried again with the next record; ``warn`` is told once. Its state is the
    file's length: loading it cuts off what was written since, so that a run that is taken up leaves no gap and no repeat.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = warnings.warn) -> None:
        """Raises UserError when the file cannot be opened for writing."""
        self.path, self._warn = path, warn
        self._unwritten, self._told = b"", False
        self._lock = threading.Lock()  # a checkpoint is written by a thread of its own, after the log
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0, opener=_no_link)  # noqa: SIM115
            _cut_torn_line(path)
            self._length = path.stat().st_size
        except OSError as error:
            raise UserError(
                f"cannot write the log ({error.strerror})",
                where=str(path),
                fix="choose another run.dir, or make this one writable",
            ) from error

    def log(self, record: Record) -> None:
        """Write one line. Raises TypeError for a value that is neither a number nor text."""
        line = json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False)
        with self._lock:
            self._unwritten += line.encode() + b"\n"
            self._length += len(line.encode()) + 1
        try:
            self._write()
        except OSError as error:
            if not self._told:
                self._warn(f"{self.path}: cannot be written ({error.strerror}); its lines are kept in memory and tried again")
            self._told = True

    def _write(self) -> None:
        with self._lock:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._told = False

    def sync(self) -> None:
        """Returns when all lines so far are on the disk. Raises OSError when they cannot be, or the file is no longer there."""
        self._write()
        os.fsync(self._file.fileno())
        self.path.stat()

    def state_dict(self) -> dict[str, int]:
        return {"bytes": self._length}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._unwritten = b""
        there = self.path.stat().st_size
        if there < state["bytes"]:
            self._warn(f"{self.path}: {state['bytes'] - there} bytes of the log are gone; it goes on with a gap")
        os.truncate(self.path, min(there, state["bytes"]))
        _cut_torn_line(self.path)
        self._length = self.path.stat().st_size

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._warn(f"{self.path}: the last {self._unwritten.count(10)} lines could not be written ({error.strerror})")
        self._file.close()


def _strict(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _no_link(path: str, flags: int) -> int:
    """Opens a file, but not what a link in its place points to: a log is cut, and that would cut another's file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


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
