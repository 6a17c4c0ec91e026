"""Experiment trackers as sinks: tensorboard, wandb, trackio and mlflow.

Each tracker works on a separate thread, so that no step waits for it. ``metrics.jsonl`` is the
authority: a tracker of a resumed run receives the records that it lacks, and no record twice.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from valence.errors import UserError, install_command
from valence.reports.run_record import LOG, read_log, read_rows
from valence.reports.sinks import SAMPLES, Record, Sink, capture_error, samples
from valence.reports.tracker_backends import (
    BACKENDS,
    Backend,
    Rows,
    TrackedRun,
    has_wandb_key,
    wandb_mode,
)
from valence.storage import read_object
from valence.user_code.plugins import load_plugin

LIBRARIES = {
    "tensorboard": "torch.utils.tensorboard.writer",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""The module that each kind of tracker imports. Package and extra are named like the kind."""
PRIVACY = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Environment variables that keep the libraries from reporting crashes and use to their makers, set
unless the user has set them.
"""
MAX_WAITING = 10_000
"""Records that may wait for a tracker. One that falls further behind has failed."""


class Tracker:
    """A sink that passes everything to a library on a separate thread.

    An error on the thread is raised by the next call, so that the sink is reported and dropped.
    ``start`` imports the library before training, because an import next to training takes many
    times as long.
    """

    def __init__(self, settings: Mapping[str, Any], notify: Callable[[str], None]) -> None:
        """settings: a sink of a recipe. notify: shows a message to the user."""
        self.name = str(settings["kind"])
        self._settings, self._notify, self._status = settings, notify, "failed"
        self._tables: dict[str, Rows] = {}
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._backend: Backend | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, config: Mapping[str, Any], folder: Path | None, resumed: bool) -> None:
        """Start opening the library. Raises UserError without a folder."""
        if folder is None:
            raise UserError(
                "a tracker needs a run folder",
                code="tracker-needs-run",
                where="run.sinks",
                fix="set run.dir to a folder",
            )
        if note := check(self._settings):
            self._notify(note)
        for name, value in PRIVACY.items():
            os.environ.setdefault(name, value)
        if self.name != "trackio":  # it reads its folder on import; see _import_trackio
            importlib.import_module(LIBRARIES[self.name])
        records = read_log(folder / LOG) if resumed else []
        plain = json.loads(json.dumps(config, default=str))
        self._submit(lambda: self._open(plain, folder, records, resumed))
        self._thread = threading.Thread(target=self._work, name=f"valence {self.name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        step, numbers, tables = int(record["step"]), numbers_of(record), self._tables
        self._tables = {}
        self._submit(lambda: self._log(step, numbers, tables))

    def table(self, name: str, step: int, rows: Rows) -> None:
        """The table is logged with the record of its step, which follows."""
        self._tables[name] = rows

    def end(self, status: str) -> None:
        self._status = status

    def close(self) -> None:
        """Wait until the library has received everything. Raises the library's error."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._submit(self._close)
            self._submit(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def waiting(self) -> int:
        """Records that the library has not received yet."""
        return self._jobs.qsize()

    def _submit(self, job: Callable[[], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise TimeoutError(f"it is {MAX_WAITING} records behind") from None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._error = capture_error(job)
            if self._error is not None:
                return

    # The methods below run on the thread.

    def _open(
        self, config: Mapping[str, Any], folder: Path, records: Sequence[Record], resumed: bool
    ) -> None:
        path = folder / "trackers" / f"{self.name}.json"
        state = read_object(path) if resumed and path.is_file() else {}
        last_step = max((int(record["step"]) for record in records), default=-1)
        run = TrackedRun(self._settings, config, folder, state, last_step)
        self._backend = BACKENDS[self.name](run)
        for record in records:
            step, tables = int(record["step"]), dict[str, Rows]()
            if any(name.startswith("eval/") for name in record):
                tables[SAMPLES] = _read_samples(folder, step)
            self._log(step, numbers_of(record), tables)

    def _log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        """Log what the tracker does not hold yet."""
        assert self._backend is not None
        has = self._backend.has
        missing = {name: value for name, value in numbers.items() if not has(name, step)}
        tables = {name: rows for name, rows in tables.items() if rows and not has(name, step)}
        if missing or tables:
            self._backend.log(step, missing, tables)

    def _close(self) -> None:
        assert self._backend is not None
        self._backend.finish(self._status)


def make_trackers(sinks: Sequence[Mapping[str, Any]], notify: Callable[[str], None]) -> list[Sink]:
    """The trackers of a recipe. A plugin is a function of the section that returns a sink."""
    return [
        Tracker(settings, notify)
        if settings["kind"] in LIBRARIES
        else _plugin(settings)(dict(settings))
        for settings in sinks
    ]


def _plugin(settings: Mapping[str, Any]) -> Callable[[dict[str, Any]], Sink]:
    return load_plugin("trackers", str(settings["kind"]), "run.sinks", tuple(LIBRARIES))


def check(settings: Mapping[str, Any]) -> str | None:
    """Raise UserError if the library of a sink is not installed, or would ask for a login.

    Returns a note for the user, if there is one.
    """
    kind = str(settings["kind"])
    if kind not in LIBRARIES:
        _plugin(settings)
        return None
    if find_spec(kind) is None:
        raise UserError(
            f"{kind!r} is not installed",
            code="library-missing",
            where="run.sinks",
            fix=f"{install_command(kind)}, or remove it from run.sinks",
        )
    if kind != "wandb" or wandb_mode(settings) == "offline" or has_wandb_key():
        return None
    if settings.get("mode") == "online":
        raise UserError(
            "wandb has no key to log in with",
            code="tracker-login-missing",
            where="run.sinks (wandb)",
            fix="run `wandb login`, set WANDB_API_KEY, or set the sink's mode to offline",
        )
    return "wandb has no key to log in with: its files stay here until you run `wandb sync`"


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record without its step. JSON stores non-finite numbers as text."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "step" and (not isinstance(value, str) or value in ("nan", "inf", "-inf"))
    }


def _read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples of an earlier evaluation; empty if its file has been removed."""
    try:
        return samples(read_rows(folder, step))
    except FileNotFoundError:
        return []
