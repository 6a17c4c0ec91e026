"""Sinks receive the metrics of a run: the protocol, the log file of every run, and a fan-out."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from valence.errors import UserError
from valence.reports.run_record import parse_log
from valence.storage import LineFile

Record = Mapping[str, float | int | str]
"""The numbers of one logged step, by metric name; ``step`` is among them."""

CLOSING = 10.0
"""Seconds without progress after which closing sinks are abandoned; six times as many in all."""
MAX_SAMPLES = 20
"""Rows of one table of samples."""
MAX_CELL = 4000
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
"""Columns of such a table: those of an evaluation's rows whose names start with one of these."""


class Sink(Protocol):
    """Something that stores the records of a run.

    A sink needs only the methods ``log`` and ``close``. These optional methods are called if a
    sink has them:

    ``start(config, folder, resumed)`` is called once, before the first record. ``config`` maps the
    dotted name of every setting to its value; ``folder`` is the run's folder (None without one);
    ``resumed`` is true for a resumed run, whose earlier records are in the folder's metrics.jsonl.

    ``table(name, step, rows)`` is called at each evaluation, before its record. ``rows`` are at
    most 20 mappings with the same keys.

    ``end(status)`` is called before ``close``. ``status`` is done, interrupted or failed.
    """

    def log(self, record: Record) -> None:
        """Receive one record, on the training thread.

        The sink must neither store nor change the mapping itself.
        """
        ...

    def close(self) -> None:
        """Write all remaining records. ``log`` is not called afterwards.

        ``close`` runs on a separate thread, which is abandoned after ``CLOSING`` seconds. If it
        raises an error, it is called once more on the training thread. A sink may have an
        attribute ``waiting``, the number of records that it still has to send. It gets more time
        as long as this number decreases.
        """
        ...


class JsonlSink:
    """Append each record to a file as one line of JSON, immediately.

    The file is strict JSON, so non-finite numbers are written as the strings ``"nan"``, ``"inf"``
    and ``"-inf"``, which Python's ``float`` reads.

    If a line cannot be written, it stays in memory and is written with the next record; ``warn`` is
    called once. ``state_dict`` contains the file's length and a checksum of its content.
    ``load_state_dict`` removes later lines, so that the log of a resumed run has neither gaps nor
    duplicates, and warns if an earlier line has changed.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = warnings.warn) -> None:
        """Raises UserError when the file cannot be opened for writing."""
        self.path, self._warn = path, warn
        self._unwritten, self._has_warned = list[bytes](), False
        # checkpoints are written on another thread
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(path, sync=False)
            if self._file.num_incomplete:
                warn(
                    f"{path}: cut off an unfinished last line of {self._file.num_incomplete} bytes"
                )
                self._file.truncate(len(self._file))
            self._read()
        except OSError as error:
            raise UserError(
                f"cannot open the log for writing ({error.strerror})",
                code="file-not-writable",
                where=str(path),
                fix="make the file and its folder writable, or choose another run.dir",
            ) from error

    def _read(self) -> None:
        content = self.path.read_bytes()
        self._length, self._checksum = len(content), crc32(content)

    def log(self, record: Record) -> None:
        """Write one line. Raises TypeError for a value that is neither a number nor text."""
        line = json.dumps({name: _strict(value) for name, value in record.items()}, allow_nan=False)
        with self._lock:
            raw = line.encode() + b"\n"
            self._unwritten.append(raw)
            self._length, self._checksum = self._length + len(raw), crc32(raw, self._checksum)
        try:
            self._write()
        except OSError as error:
            if not self._has_warned:
                self._warn(
                    f"{self.path}: cannot be written ({error.strerror}); its lines stay in memory "
                    f"and are tried again"
                )
            self._has_warned = True

    def _write(self) -> None:
        with self._lock:
            if self._unwritten:
                self._file.write(self._unwritten)
                self._unwritten = []
            self._has_warned = False

    def sync(self) -> None:
        """Block until all lines are on the disk.

        Raises OSError if they cannot be written or the file has been removed.
        """
        self._write()
        self._file.sync()
        self.path.stat()

    def state_dict(self) -> dict[str, int]:
        return {"bytes": self._length, "crc": self._checksum}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._unwritten = []
        content = self.path.read_bytes()
        before = content[: state["bytes"]]
        if len(content) < state["bytes"]:
            self._warn(
                f"{self.path}: {state['bytes'] - len(content)} bytes of the log are missing; "
                f"it continues with a gap"
            )
        elif state.get("crc", crc32(before)) != crc32(before):
            where = _first_bad_line(before)
            self._warn(
                f"{self.path}{where}: the log has changed since it was written; the change stays"
            )
        self._file.truncate(before.count(b"\n"))
        self._read()

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._warn(
                f"{self.path}: the last {len(self._unwritten)} lines could not be written "
                f"({error.strerror})"
            )
        self._file.close()


def _strict(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first_bad_line(content: bytes) -> str:
    """``:N`` of the first line of a log that is not a record; empty when all of them are."""
    bad_lines = (number for number, record in parse_log(content) if record is None)
    return next((f":{number}" for number in bad_lines), "")


class FanOut:
    """Pass each record to several sinks. An error of a required sink is raised. An optional sink
    that fails is reported once by ``warn`` and dropped.
    """

    def __init__(
        self,
        required: Sequence[Sink],
        optional: Sequence[Sink] = (),
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._required, self._optional, self._warn = tuple(required), list(optional), warn
        self._started = False

    def start(self, config: Mapping[str, Any], folder: Path | None, resumed: bool) -> None:
        """Tell the optional sinks which run this is. Later calls do nothing."""
        if not self._started:
            self._run_for_sinks(lambda sink: _call(sink, "start", config, folder, resumed))
        self._started = True

    def log(self, record: Record) -> None:
        for sink in self._required:
            sink.log(record)
        self._run_for_sinks(lambda sink: sink.log(record))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass the first rows of an evaluation to the optional sinks that take tables."""
        if self._optional:
            table_rows = samples(rows)
            self._run_for_sinks(lambda sink: _call(sink, "table", name, step, table_rows))

    @property
    def waiting(self) -> int:
        """Records that the optional sinks still have to pass on."""
        return sum(int(getattr(sink, "waiting", 0)) for sink in self._optional)

    def close(self, status: str = "done") -> None:
        """Close all sinks, the optional ones at the same time and with a time limit."""
        self._run_for_sinks(lambda sink: _call(sink, "end", status))
        threads = [_ClosingThread(sink) for sink in self._optional]
        _join(threads)
        for thread in threads:
            sink = thread.sink
            if thread.is_alive():
                self._warn(
                    f"{_name(sink)} has not closed within {CLOSING:g} seconds and is abandoned; it "
                    f"may lack the last metrics"
                )
            elif thread.error is not None:
                # An object that belongs to the thread that made it, such as a connection of
                # sqlite3, can only be closed there.
                self._run_for_sinks(lambda sink: sink.close(), [sink])
        for sink in self._required:
            sink.close()

    def _run_for_sinks(
        self, action: Callable[[Sink], None], sinks: Sequence[Sink] | None = None
    ) -> None:
        for sink in tuple(self._optional) if sinks is None else sinks:
            error = capture_error(lambda sink=sink: action(sink))
            if error is not None:
                self._optional.remove(sink)
                self._warn(
                    f"{_name(sink)} failed and receives no more metrics in this run: {error!r}"
                )


class _ClosingThread(threading.Thread):
    """Closes a sink. ``error``: the error that this raised."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(name=f"valence closes {_name(sink)}", daemon=True)
        self.sink, self.error = sink, None
        self.start()

    def run(self) -> None:
        self.error = capture_error(self.sink.close)


def _join(threads: Sequence[_ClosingThread]) -> None:
    """Wait until all threads have ended, or none has made progress for too long."""
    started = last_progress = time.monotonic()
    previous = -1
    while (
        alive := [thread for thread in threads if thread.is_alive()]
    ) and time.monotonic() - started < 6 * CLOSING:
        alive[0].join(0.05)
        left = sum(int(getattr(thread.sink, "waiting", 0)) + 1 for thread in alive)
        if left != previous:
            previous, last_progress = left, time.monotonic()
        elif time.monotonic() - last_progress >= CLOSING:
            return


def capture_error(action: Callable[[], None]) -> Exception | None:
    """Run the action and return the error that it raises."""
    try:
        action()
    except Exception as error:  # code of others, whose errors must not end the training
        return error
    return None


def samples(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The texts, rewards and labels of the first rows of an evaluation. Long texts are cut."""
    first = rows[:MAX_SAMPLES]
    names = dict.fromkeys(name for row in first for name in row if name.startswith(COLUMNS))
    columns = sorted(
        names, key=lambda name: next(i for i, start in enumerate(COLUMNS) if name.startswith(start))
    )
    return [{name: _cell(row.get(name)) for name in columns} for row in first]


def _cell(value: Any) -> float | int | str | None:
    if value is None or isinstance(value, float | int):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MAX_CELL:
        return text
    return f"{text[:MAX_CELL]} ... ({len(text) - MAX_CELL} more characters)"


def _name(sink: Sink) -> str:
    return str(getattr(sink, "name", type(sink).__name__))


def _call(sink: Sink, name: str, *arguments: Any) -> None:
    """Call an optional method."""
    method = getattr(sink, name, None)
    if method is not None:
        method(*arguments)
