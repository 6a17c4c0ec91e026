"""The folder of a run: its lock, its files, and the warnings and notes of the run."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.distributed.process_group import Group, SingleProcess, run_on_first_rank
from valence.errors import UserError, are_arguments_named, for_interface, naming_arguments
from valence.files import check_path, refuse_links
from valence.reports.run_record import (
    CHECKPOINTS,
    EVALUATIONS,
    FACTS,
    LOG,
    MODEL,
    evaluation_file,
    read_facts,
)
from valence.storage import (
    LOCK_FILE,
    Lock,
    add_checksum,
    atomic_write,
    rename,
    writing,
)
from valence.terminal import print_message, print_warning

FOLDERS = (
    EVALUATIONS,
    CHECKPOINTS,
    "reference",
    "scores",
    "trackers",
    "server",
    "weights",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
)
"""Folders that a run or its libraries write into."""
IDENTITY = ("settings", "rows", "choices", "versions")
"""The facts of run.json that are also stored in each checkpoint."""


class RunFolder:
    """The folder with config.yaml, run.json, metrics.jsonl, checkpoints/, model/ and others.

    ``is_resumed``: it contains a run to resume. ``facts``: the content of run.json. The folder is
    locked from its first inspection until ``close``.
    """

    def __init__(
        self,
        path: Path,
        *,
        fresh: bool = False,
        say: Callable[[str], None] = lambda _: None,
        group: Group | None = None,
    ) -> None:
        """Inspect the folder, and lock it if it exists.

        fresh: rename the folder of an earlier run. group: the processes of the run; rank 0 inspects
        and writes, and sends the result to the others.

        The folder of a run that ended before its first step is reused. Folders with other files
        than those of a run are refused, because a run overwrites files with its names.
        """
        check_path(path, "run.dir")
        self.path, self.say = path.resolve() if path.is_symlink() else path, say
        self.group = group or SingleProcess()
        self.writes = self.group.rank == 0
        self.facts: dict[str, Any] = {}
        self._unwritten: dict[str, str] = {}
        self._has_warned = False
        self._guard = threading.Lock()
        self.lock = Lock(self.path)
        self.is_resumed = self._is_inspected = False
        self.is_resumed, self.facts = run_on_first_rank(self.group, partial(self._inspect, fresh))

    def _inspect(self, fresh: bool) -> tuple[bool, dict[str, Any]]:
        """Whether there is a run to resume, and the content of its run.json.

        Raises UserError if the folder cannot be read, or contains other files.
        """
        try:
            return self._find_run(fresh)
        except OSError as error:
            raise UserError(
                f"the folder cannot be read ({error.strerror})",
                code="folder-not-readable",
                where=f"run.dir: {self.path}",
                fix="make the folder readable, or choose another run.dir",
            ) from error

    def _find_run(self, fresh: bool) -> tuple[bool, dict[str, Any]]:
        path = self.path
        if path.exists() and not path.is_dir():
            raise UserError(
                "the path is a file, not a folder",
                code="path-is-file",
                where=f"run.dir: {path}",
                fix="choose another run.dir",
            )
        if path.is_dir() and any(path.iterdir()):
            if not ((path / LOCK_FILE).is_file() or (path / FACTS).is_file()):
                raise UserError(
                    "the folder contains files that are not from a run",
                    code="folder-not-empty",
                    where=f"run.dir: {path}",
                    fix="choose a new or empty folder for run.dir",
                )
            self._take()
            self._is_inspected = True
            if _has_progress(path) and not fresh:
                return True, self._read_facts()
        return False, {}

    def _take(self) -> None:
        if message := self.lock.take(self.say):
            self.say(message)

    def _read_facts(self) -> dict[str, Any]:
        try:
            return read_facts(self.path)
        except (OSError, ValueError) as error:
            self.say(
                f"{self.path / FACTS} cannot be read ({error}); using the facts of the newest "
                f"checkpoint"
            )
            return {}

    def claim(self) -> None:
        """Create the folder, and rename that of an earlier run. Raises UserError if that fails."""
        run_on_first_rank(self.group, self._claim)

    def _claim(self) -> None:
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._take()  # before anything else: the lock file marks the folder of a run
            if _has_progress(path) and not self._is_inspected:
                raise UserError(
                    "another process has trained in this folder since this command checked it",
                    code="run-modified",
                    where=f"run.dir: {path}",
                    fix="rerun the same command, without --fresh, to resume that run",
                )
            if _has_progress(path) and not self.is_resumed:
                free = rename(path, _other_names(path))
                self.lock.release()
                self.say(f"renamed the folder of the earlier run to {free}")
                path.mkdir()
                self.lock = Lock(path)
                self._take()
            for name in FOLDERS:
                refuse_links(path / name, path)
            (path / EVALUATIONS).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the folder cannot be created ({error.strerror})",
                code="folder-not-writable",
                where=f"run.dir: {path}",
                fix="choose another run.dir",
            ) from error

    def close(self) -> None:
        """Release the folder."""
        if self.writes:
            self.lock.release()

    def write(self, name: str, content: bytes | str | Mapping[str, Any] | Sequence[Any]) -> Path:
        """Write a file atomically: bytes, text, or a JSON value."""
        target = self.path / name
        if not self.writes:
            return target
        raw = content if isinstance(content, bytes) else _text(content)
        with writing(target, "free disk space, or make the folder writable"):
            atomic_write(target, raw, self.path)
        return target

    def write_or_retry(self, name: str, content: str | Mapping[str, Any] | Sequence[Any]) -> None:
        """Write a file; after a failure, warn once and retry with each checkpoint."""
        if not self.writes:
            return
        with self._guard:
            self._unwritten[name] = _text(content)
        try:
            self.sync()
        except OSError as error:
            if not self._has_warned:
                self.say(
                    f"{self.path / name}: cannot be written ({error.strerror}); retrying with "
                    f"each checkpoint"
                )
            self._has_warned = True

    def sync(self) -> None:
        """Write all files that ``write_or_retry`` could not write. Raises OSError."""
        with self._guard:
            for name in list(self._unwritten):
                atomic_write(self.path / name, self._unwritten[name], self.path)
                del self._unwritten[name]
            self._has_warned = False

    @property
    def identity(self) -> dict[str, Any]:
        """The facts of the run that each checkpoint records."""
        return {name: self.facts.get(name) for name in IDENTITY}

    def record(self, **facts: Any) -> None:
        """Add facts to run.json: the command, versions, times, status."""
        self.facts |= facts
        self.write_or_retry(FACTS, add_checksum(self.facts))

    def note(self, kind: str, message: str) -> None:
        """Add a line to the notes or warnings in run.json; resumed runs repeat some of them."""
        if message not in self.facts.get(kind, []):
            self.record(**{kind: [*self.facts.get(kind, []), message]})

    def evaluation(
        self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write eval/step-N.json with all rows and numbers, and eval/step-N.txt for readers."""
        name = evaluation_file(step)
        self.write_or_retry(name, as_json(step, metrics, rows))
        text = "\n".join(_readable(step, metrics, rows))
        self.write_or_retry(name.replace(".json", ".txt"), text)


def _text(content: str | Mapping[str, Any] | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)


def as_json(
    step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An evaluation as the content of its file."""
    return add_checksum(
        {"step": step, "metrics": finite(metrics), "rows": [finite(row) for row in rows]}
    )


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with non-finite numbers as strings, because JSON cannot represent them."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in row.items()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of the software that the numbers of a run depend on."""
    import torch
    import transformers

    from valence.version import __version__

    return {
        "valence": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def refuse_inputs_in_folder(run_dir: Path, inputs: Mapping[str, str | None]) -> None:
    """Raise UserError if an input of a run (setting -> path) is inside the run's folder."""
    for setting, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                f"{name} is inside run.dir, where the run writes files",
                code="data-in-run-folder",
                where=setting,
                fix="move it to another folder, or choose another run.dir",
            )


def _has_progress(path: Path) -> bool:
    """Whether a run in this folder has reached its first step or evaluation."""
    log = path / LOG
    return (
        (path / MODEL).exists()
        or (path / CHECKPOINTS).exists()
        or (log.is_file() and log.stat().st_size > 0)
    )


def _other_names(path: Path) -> Iterator[Path]:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in chain([""], (f"-{n}" for n in count(2))):
        yield path.with_name(f"{path.name}.{stamp}-{os.getpid()}{suffix}")


def _readable(
    step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    lines = [
        f"evaluation after {step} steps",
        *(f"  {name}: {value:.6g}" for name, value in metrics.items()),
        "",
    ]
    for row in rows:
        numbers = "  ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
            for k, v in row.items()
            if isinstance(v, float | bool | int)
        )
        lines.append(f"{row['origin']}  {numbers}")
        lines += [
            f"  {name}: {row[name]}"
            for name in ("prompt", "completion", "feedback", "chosen", "rejected")
            if name in row
        ]
    return [*lines, ""]


class Messages:
    """Where a run reports to.

    ``names_arguments``: whether the run was started from Python.
    """

    def __init__(self, console: Console, folder: RunFolder | None) -> None:
        self.console = console
        self.names_arguments = are_arguments_named()
        self._folder = folder
        self._noted: set[str] = set()

    def print(self, message: str) -> None:
        print_message(self.console, self._text(message))

    def warn(self, message: str) -> None:
        """Print a warning and record it in the folder."""
        message = self._text(message)
        print_warning(self.console, message)
        self._record("warnings", message)

    def note_once(self, message: str) -> None:
        """Print a note and record it in the folder, unless it was printed before."""
        if message not in self._noted:
            self._noted.add(message)
            message = self._text(message)
            print_message(self.console, message, "yellow")
            self._record("notes", message)

    def record_note(self, message: str) -> None:
        """Record a note in the folder without printing it."""
        self._record("notes", self._text(message))

    def _text(self, message: str) -> str:
        with naming_arguments(self.names_arguments):
            return for_interface(message)

    def _record(self, kind: str, message: str) -> None:
        if self._folder:
            self._folder.note(kind, message)
