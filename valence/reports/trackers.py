"""Experiment trackers as sinks: each runs in a thread of its own, so that no step waits for it, and
neither lacks nor repeats anything when a run is taken up.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from valence.checksums import add_checksum, verify
from valence.errors import UserError, install_command
from valence.files import make_folder, open_file, write_all
from valence.reports.backends import OPEN, Backend, Opening, wandb_key, wandb_mode
from valence.reports.sinks import SAMPLES, Record, attempt, samples

LIBRARIES = {
    "tensorboard": "torch.utils.tensorboard.writer",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""What each kind of tracker imports. Package and extra have the name of the kind."""
PRIVATE = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Variables, unless they are set, that keep libraries from telling their makers of crashes and
use.
"""
BEHIND = 10_000
"""Records and tables that may wait for a tracker; one that is further behind has failed."""


class Tracker:
    """A sink that hands everything to a library on a thread of its own.

    What the thread meets with is raised by the next call here, so that the sink is reported and
    left. The library is imported by ``start``, before training: a thread beside it would take many
    times as long. The log is what counts: when a run is taken up, the tracker is given what it
    lacks of it, and skips what it has.
    """

    def __init__(self, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """settings: a sink of a recipe. say: tells the user something."""
        self.name = str(settings["kind"])
        self._settings, self._say, self._status = settings, say, "failed"
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(BEHIND)
        self._backend: Backend | None = None
        self._again = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, config: Mapping[str, Any], folder: Path | None, taken_up: bool) -> None:
        """Begins to open the library. Raises UserError without a folder."""
        if folder is None:
            raise UserError(
                "a tracker needs the folder of a run",
                code="tracker-needs-run",
                where="run.sinks",
                fix="give the run a folder",
            )
        if note := check(self._settings):
            self._say(note)
        for name, value in PRIVATE.items():
            os.environ.setdefault(name, value)
        if self.name != "trackio":  # which has to be told its folder first, and is small
            importlib.import_module(LIBRARIES[self.name])
        before = list(_log_of(folder)) if taken_up else []
        plain = json.loads(json.dumps(config, default=str))
        self._put(lambda: self._open(plain, folder, taken_up, before))
        self._thread = threading.Thread(target=self._work, name=f"valence {self.name}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        step, numbers = int(record["step"]), numbers_of(record)
        self._put(lambda: self._log(step, numbers))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put(lambda: self._table(name, step, rows))

    def end(self, status: str) -> None:
        self._status = status

    def close(self) -> None:
        """Returns when everything has been handed over; there is no limit to that here.

        Raises what the library raised.
        """
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._put(self._close)
            self._put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def waiting(self) -> int:
        """Records and tables that are still to be handed over."""
        return self._jobs.qsize()

    def _put(self, job: Callable[[], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise TimeoutError(f"it is {BEHIND} records behind") from None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._error = attempt(job)
            if self._error is not None:
                return

    # ------------------------------------------------------------------ on the thread

    def _open(
        self, config: Mapping[str, Any], folder: Path, taken_up: bool, before: Sequence[Record]
    ) -> None:
        path = folder / "trackers" / f"{self.name}.json"
        state = (
            verify(json.loads(path.read_text(encoding="utf-8")))
            if taken_up and path.is_file()
            else {}
        )
        last = max((int(record["step"]) for record in before), default=-1)
        opening = Opening(self._settings, config, folder, state, lambda: _write(path, state), last)
        self._again = bool(state)
        self._backend = OPEN[self.name](opening)
        for record in before:
            step = int(record["step"])
            if any(name.startswith("eval/") for name in record):
                self._table(SAMPLES, step, _rows_of(folder, step))
            self._log(step, numbers_of(record))

    def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._backend is not None
        lacking = {
            name: value
            for name, value in numbers.items()
            if not (self._again and self._backend.has(name, step))
        }
        if lacking:
            self._backend.log(step, lacking)

    def _table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._backend is not None
        if rows and not (self._again and self._backend.has(name, step)):
            self._backend.table(name, step, rows)

    def _close(self) -> None:
        assert self._backend is not None
        self._backend.close(self._status)


def trackers(sinks: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> list[Tracker]:
    """Those that a recipe asks for."""
    return [Tracker(settings, say) for settings in sinks]


def check(settings: Mapping[str, Any]) -> str | None:
    """Raises UserError when the library of a sink is not installed, or would ask for a login.

    Returns what is to be said.
    """
    kind = str(settings["kind"])
    if find_spec(kind) is None:
        what = f"{kind!r} is not installed"
        raise UserError(
            what,
            code="library-missing",
            where="run.sinks",
            fix=f"{install_command(kind)}, or leave it out of run.sinks",
        )
    if kind == "wandb" and wandb_mode(settings) != "offline" and not wandb_key():
        if settings.get("mode") == "online":
            fix = "run `wandb login`, set WANDB_API_KEY, or set the sink's mode to offline"
            raise UserError(
                "wandb has no key to log in with",
                code="tracker-login-missing",
                where="run.sinks (wandb)",
                fix=fix,
            )
        return (
            "wandb has no key to log in with: its files stay on this machine until `wandb "
            "login` and `wandb sync`"
        )
    return None


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record but its step; those that are not finite may be the words that JSON
    has for them.
    """
    return {
        name: float(value)
        for name, value in record.items()
        if name != "step" and (not isinstance(value, str) or value in ("nan", "inf", "-inf"))
    }


def _log_of(folder: Path) -> Iterator[Record]:
    """The records in the log of a run so far."""
    path = folder / "metrics.jsonl"
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Samples of an evaluation of earlier; none where its file is gone."""
    path = folder / "eval" / f"step-{step}.json"
    return (
        samples(verify(json.loads(path.read_text(encoding="utf-8")))["rows"])
        if path.is_file()
        else []
    )


def _write(path: Path, state: Mapping[str, Any]) -> None:
    run = path.parent.parent
    make_folder(path.parent, run)
    aside = path.with_suffix(".tmp")
    with open_file(aside, run) as file:
        write_all(file, json.dumps(add_checksum(state)).encode())
    os.replace(aside, path)
