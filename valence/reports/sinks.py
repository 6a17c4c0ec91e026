"""Where the metrics of a run go: one small protocol, the log file that every run has, and a way to
serve several.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from valence.errors import UserError
from valence.files import open_file

Record = Mapping[str, float | int | str]
"""The numbers of one logged step, by metric name; ``step`` is among them."""


CLOSING = 10.0
"""Seconds that the sinks of a run may take to close in which none of them gets anywhere; six times
as many in all.
"""
SHOWN_ROWS = 20
"""Most rows of one table of samples."""
LONGEST_CELL = 4000
"""Characters of a text in such a table."""
SAMPLES = "eval/samples"
"""Name of the table of samples of an evaluation."""
COLUMNS = (
    "origin",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "reward",
    "score",
    "stop",
    "error",
)
"""Columns of an evaluation's rows that such a table has, with those that begin like them and
``_``.
"""


class Sink(Protocol):
    """Something that keeps the records of a run.

    Two methods are enough; these are called where a sink has them:

    ``start(config, folder, taken_up)`` once, before the first record: every setting by its dotted
    name, the run's folder (None without one), and whether the run was in it before; its records so
    far are then in the folder's metrics.jsonl. ``table(name, step, rows)`` with each evaluation,
    before its record: at most 20 rows, as mappings with the same keys. ``end(status)`` before
    ``close``: done, interrupted or failed.
    """

    def log(self, record: Record) -> None:
        """Take one record.

        The sink neither keeps nor changes the mapping. Called on the thread that trains.
        """
        ...

    def close(self) -> None:
        """Write out what is left.

        Nothing is logged afterwards. Called on a thread of its own, which is left alone when it
        takes longer than ``CLOSING`` seconds; once more on the thread that trains when that raised
        an error. A number ``waiting`` of records that are still to be handed over gives it longer,
        while it falls.
        """
        ...


class JsonlSink:
    """One JSON object per line, written at once.

    The file is strict JSON, which has no word for numbers that are not finite: they are written as
    the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which Python's ``float`` reads back. Records
    are added to a file that exists.

    What cannot be written is kept in memory and tried again with the next record; ``warn`` is told
    once. Its state is the file's length and a checksum of its content: loading it cuts off what was
    written since, so that a run that is resumed leaves no gap and no repeat, and warns when a line
    before that has changed.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = warnings.warn) -> None:
        """Raises UserError when the file cannot be opened for writing."""
        self.path, self._warn = path, warn
        self._unwritten, self._told = b"", False
        # a checkpoint is written by a thread of its own, after the log
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_file(path, path.parent, append=True)
            content = _cut_torn_line(path)
            self._length, self._checksum = len(content), crc32(content)
        except OSError as error:
            raise UserError(
                f"cannot write the log ({error.strerror})",
                code="file-not-writable",
                where=str(path),
                fix="choose another run.dir, or make this one writable",
            ) from error

    def log(self, record: Record) -> None:
        """Write one line. Raises TypeError for a value that is neither a number nor text."""
        line = json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False)
        with self._lock:
            raw = line.encode() + b"\n"
            self._unwritten += raw
            self._length, self._checksum = self._length + len(raw), crc32(raw, self._checksum)
        try:
            self._write()
        except OSError as error:
            if not self._told:
                self._warn(
                    f"{self.path}: cannot be written ({error.strerror}); its lines are kept in "
                    f"memory and tried again"
                )
            self._told = True

    def _write(self) -> None:
        with self._lock:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._told = False

    def sync(self) -> None:
        """Returns when all lines so far are on the disk.

        Raises OSError when they cannot be, or the file is no longer there.
        """
        self._write()
        os.fsync(self._file.fileno())
        self.path.stat()

    def state_dict(self) -> dict[str, int]:
        return {"bytes": self._length, "crc": self._checksum}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._unwritten = b""
        content = self.path.read_bytes()
        before = content[: state["bytes"]]
        if len(content) < state["bytes"]:
            self._warn(
                f"{self.path}: {state['bytes'] - len(content)} bytes of the log are gone; it "
                f"goes on with a gap"
            )
        elif state.get("crc", crc32(before)) != crc32(before):
            where = _first_bad_line(before)
            self._warn(
                f"{self.path}{where}: the log has changed since it was written; it goes on, the "
                f"change stays"
            )
        os.truncate(self.path, min(len(content), state["bytes"]))
        content = _cut_torn_line(self.path)
        self._length, self._checksum = len(content), crc32(content)

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._warn(
                f"{self.path}: the last {self._unwritten.count(10)} lines could not be written "
                f"({error.strerror})"
            )
        self._file.close()


def _strict(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first_bad_line(content: bytes) -> str:
    """``:N`` of the first line of a log that is not a record; empty when all of them are."""
    for number, line in enumerate(content.splitlines(), 1):
        try:
            is_record = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            is_record = False
        if not is_record:
            return f":{number}"
    return ""


def _cut_torn_line(path: Path) -> bytes:
    """Cut what follows the last newline of a file. Returns what is left."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
        warnings.warn(
            f"{path}: cut off an unfinished last line of {len(content) - whole} bytes", stacklevel=3
        )
    return content[:whole]


class FanOut:
    """Hand each record to several sinks: an error of a required sink is raised; an optional one
    that fails is reported once by ``warn`` and left alone for the rest of the run.
    """

    def __init__(
        self,
        required: Sequence[Sink],
        optional: Sequence[Sink] = (),
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._required, self._optional, self._warn = tuple(required), list(optional), warn
        self._started = False

    def start(self, config: Mapping[str, Any], folder: Path | None, taken_up: bool) -> None:
        """Tells the optional sinks what run it is; once, however often it is called."""
        if not self._started:
            self._try_each(lambda sink: _call(sink, "start", config, folder, taken_up))
        self._started = True

    def log(self, record: Record) -> None:
        for sink in self._required:
            sink.log(record)
        self._try_each(lambda sink: sink.log(record))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hands the first rows of an evaluation to the optional sinks that take tables."""
        if self._optional:
            shown = samples(rows)
            self._try_each(lambda sink: _call(sink, "table", name, step, shown))

    @property
    def waiting(self) -> int:
        """Records that the optional sinks still have to hand over."""
        return sum(int(getattr(sink, "waiting", 0)) for sink in self._optional)

    def close(self, status: str = "done") -> None:
        """Closes all of them; the optional ones together, and for them it does not wait for
        ever.
        """
        self._try_each(lambda sink: _call(sink, "end", status))
        closing = [_Closing(sink) for sink in self._optional]
        _wait(closing)
        for each in closing:
            sink = each.sink
            if each.is_alive():
                self._warn(
                    f"{_name(sink)} has not closed within {CLOSING:g} seconds and is left; it "
                    f"may lack the last metrics"
                )
            elif each.error is not None:
                # What belongs to the thread that made it, as a connection of sqlite3 does, can only
                # be closed there.
                self._try_each(lambda sink: sink.close(), [sink])
        for sink in self._required:
            sink.close()

    def _try_each(
        self, action: Callable[[Sink], None], sinks: Sequence[Sink] | None = None
    ) -> None:
        for sink in tuple(self._optional) if sinks is None else sinks:
            error = attempt(lambda sink=sink: action(sink))
            if error is not None:
                self._optional.remove(sink)
                self._warn(f"{_name(sink)} failed and gets no more metrics in this run: {error!r}")


class _Closing(threading.Thread):
    """Closes a sink. ``error``: what that raised."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(name=f"valence closes {_name(sink)}", daemon=True)
        self.sink, self.error = sink, None
        self.start()

    def run(self) -> None:
        self.error = attempt(self.sink.close)


def _wait(closing: Sequence[_Closing]) -> None:
    """Until all have closed, or nothing has moved for too long."""
    began = moved = time.monotonic()
    before = -1
    while (
        alive := [each for each in closing if each.is_alive()]
    ) and time.monotonic() - began < 6 * CLOSING:
        alive[0].join(0.05)
        left = sum(int(getattr(each.sink, "waiting", 0)) + 1 for each in alive)
        if left != before:
            before, moved = left, time.monotonic()
        elif time.monotonic() - moved >= CLOSING:
            return


def attempt(action: Callable[[], None]) -> Exception | None:
    """What the action raised, if it did."""
    try:
        action()
    except Exception as error:  # other people's code: whatever it raises must not end the training
        return error
    return None


def samples(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first rows of an evaluation with what a reader looks at: texts, rewards, labels.

    A long text ends with how much of it is missing.
    """
    first = rows[:SHOWN_ROWS]
    named = dict.fromkeys(name for row in first for name in row if name.startswith(COLUMNS))
    columns = sorted(
        named, key=lambda name: next(i for i, begin in enumerate(COLUMNS) if name.startswith(begin))
    )
    return [{name: _cell(row.get(name)) for name in columns} for row in first]


def _cell(value: Any) -> float | int | str | None:
    if value is None or isinstance(value, float | int):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return (
        text
        if len(text) <= LONGEST_CELL
        else f"{text[:LONGEST_CELL]} ... ({len(text) - LONGEST_CELL} more characters)"
    )


def _name(sink: Sink) -> str:
    return str(getattr(sink, "name", type(sink).__name__))


def _call(sink: Sink, method: str, *arguments: Any) -> None:
    """Calls a method that a sink may have."""
    found = getattr(sink, method, None)
    if found is not None:
        found(*arguments)
