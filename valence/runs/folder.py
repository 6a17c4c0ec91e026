"""The folder of a run: who may write into it, and what is written where."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from valence.checksums import add_checksum, verify
from valence.distributed.process_group import Group, SingleProcess, run_on_first_rank
from valence.errors import UserError
from valence.files import check_path, refuse_links
from valence.runs.lock import NAME, Lock
from valence.runs.store import write_whole

FOLDERS = (
    "eval",
    "checkpoints",
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
"""Folders that a run fills, some of them through libraries."""
IDENTITY = ("settings", "rows", "choices", "versions")
"""Facts that say what a run is: a checkpoint holds them too."""


class RunFolder:
    """config.yaml, audit.json, metrics.jsonl, run.json, rows.safetensors, eval/, checkpoints/,
    model/, report.html.

    ``taken_up``: it holds a run that is to go on. ``facts``: what run.json says, by now. It is
    locked against other processes from the moment it is known to exist until ``close``.
    """

    def __init__(
        self,
        path: Path,
        *,
        fresh: bool = False,
        say: Callable[[str], None] = lambda _: None,
        group: Group | None = None,
    ) -> None:
        """Looks whether the folder can be had.

        ``fresh``: a run that is there will be moved aside. group: of the processes of the run, of
        which rank 0 looks and writes; the others are told what it found.

        A run that ended before its first step leaves nothing worth keeping: its folder is free. A
        folder that holds anything but a run is never written into: a run replaces what is there
        under the names it uses.
        """
        check_path(path, "run.dir")
        self.path, self.say = path.resolve() if path.is_symlink() else path, say
        self.group = group or SingleProcess()
        self.writes = self.group.rank == 0
        self.facts: dict[str, Any] = {}
        self._unwritten: dict[str, str] = {}
        self._told = False
        self._guard = threading.Lock()
        self.lock = Lock(self.path)
        self.taken_up = self._looked = False
        self.taken_up, self.facts = run_on_first_rank(self.group, partial(self._look, fresh))

    def _look(self, fresh: bool) -> tuple[bool, dict[str, Any]]:
        """Whether a run is to go on there, and what its run.json says.

        Raises UserError when that cannot be found out.
        """
        try:
            return self._inspect(fresh)
        except OSError as error:
            fix = "make the folder readable, or choose another run.dir"
            raise UserError(
                f"the folder cannot be read ({error.strerror})",
                code="folder-not-readable",
                where=f"run.dir: {self.path}",
                fix=fix,
            ) from error

    def _inspect(self, fresh: bool) -> tuple[bool, dict[str, Any]]:
        path = self.path
        if path.exists() and not path.is_dir():
            raise UserError(
                "this is a file", code="path-is-file", where=f"run.dir: {path}", fix="name a folder"
            )
        if path.is_dir() and any(path.iterdir()):
            if not ((path / NAME).is_file() or (path / "run.json").is_file()):
                raise UserError(
                    "the folder holds other files",
                    code="folder-not-empty",
                    where=f"run.dir: {path}",
                    fix="name a new or an empty folder",
                )
            self._take()
            self._looked = True
            if _holds_work(path) and not fresh:
                return True, self._read_facts()
        return False, {}

    def _take(self) -> None:
        if said := self.lock.take(self.say):
            self.say(said)

    def _read_facts(self) -> dict[str, Any]:
        try:
            return read_object(self.path / "run.json")
        except (OSError, ValueError) as error:
            self.say(
                f"{self.path / 'run.json'} cannot be read ({error}): what a checkpoint says of "
                f"the run is used"
            )
            return {}

    def claim(self) -> None:
        """Makes the folder, moving an earlier run aside. Raises UserError when it cannot."""
        run_on_first_rank(self.group, self._claim)

    def _claim(self) -> None:
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._take()  # before anything else: its file says that this is a run's folder
            if _holds_work(path) and not self._looked:
                fix = "give the command again: it goes on with it"
                raise UserError(
                    "another program has trained here meanwhile",
                    code="run-modified",
                    where=f"run.dir: {path}",
                    fix=fix,
                )
            if _holds_work(path) and not self.taken_up:
                free = _free_name(path)
                path.rename(free)
                self.lock.release()
                self.say(f"moved the earlier run to {free}")
                path.mkdir()
                self.lock = Lock(path)
                self._take()
            for name in FOLDERS:
                refuse_links(path / name, path)
            (path / "eval").mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the folder ({error.strerror})",
                code="folder-not-writable",
                where=f"run.dir: {path}",
                fix="choose another run.dir",
            ) from error

    def close(self) -> None:
        """Lets others have the folder."""
        if self.writes:
            self.lock.release()

    def write(self, name: str, content: bytes | str | Mapping[str, Any] | Sequence[Any]) -> Path:
        """Writes a file as a whole: bytes, text, or anything JSON can say."""
        target = self.path / name
        if not self.writes:
            return target
        raw = (
            content
            if isinstance(content, bytes)
            else _text(content).encode("utf-8", errors="backslashreplace")
        )
        try:
            write_whole(target, raw, self.path)
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})",
                code="file-not-writable",
                where=str(target),
                fix="make room, or restore the folder",
            ) from error
        return target

    def keep(self, name: str, content: str | Mapping[str, Any] | Sequence[Any]) -> None:
        """Writes a file; if it cannot be written, that is told once, and tried again with each
        checkpoint.
        """
        if not self.writes:
            return
        with self._guard:
            self._unwritten[name] = _text(content)
        try:
            self.sync()
        except OSError as error:
            if not self._told:
                self.say(
                    f"{self.path / name}: cannot be written ({error.strerror}); it is tried again"
                )
            self._told = True

    def sync(self) -> None:
        """Returns when all that was to be kept is written. Raises OSError when it cannot be."""
        with self._guard:
            for name in list(self._unwritten):
                content = self._unwritten[name].encode("utf-8", errors="backslashreplace")
                write_whole(self.path / name, content, self.path)
                del self._unwritten[name]
            self._told = False

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint says about the run that it is of."""
        return {name: self.facts.get(name) for name in IDENTITY}

    def state(self, **facts: Any) -> None:
        """Adds to run.json: the command, versions, times, status."""
        self.facts |= facts
        self.keep("run.json", add_checksum(self.facts))

    def note(self, kind: str, message: str) -> None:
        """Adds a line to the notes or warnings in run.json, unless it is there: a run that is taken
        up says some things again.
        """
        if message not in self.facts.get(kind, []):
            self.state(**{kind: [*self.facts.get(kind, []), message]})

    def evaluation(
        self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """eval/step-N.json with every row and number, and the same to read as eval/step-N.txt."""
        self.keep(f"eval/step-{step}.json", as_json(step, metrics, rows))
        self.keep(f"eval/step-{step}.txt", "\n".join(_readable(step, metrics, rows)))


def _text(content: str | Mapping[str, Any] | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a run has written, without its checksum.

    Raises OSError, and ValueError when it has changed.
    """
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return verify(found)


def as_json(
    step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An evaluation as its file has it."""
    return add_checksum(
        {"step": step, "metrics": finite(metrics), "rows": [finite(row) for row in rows]}
    )


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with numbers that are not finite as strings, since JSON has no word for them."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in row.items()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    import torch
    import transformers

    from valence.version import __version__

    return {
        "valence": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def refuse_own_inputs(run_dir: Path, inputs: Mapping[str, str | None]) -> None:
    """Raises UserError when something that the run reads (setting -> path) lies in the folder that
    it writes.
    """
    for setting, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                f"{name} lies in the run's own folder, which the run writes",
                code="data-in-run-folder",
                where=setting,
                fix="choose another run.dir",
            )


def _holds_work(path: Path) -> bool:
    """Whether a run in this folder has come to its first step, or to its first evaluation."""
    log = path / "metrics.jsonl"
    return (
        (path / "model").exists()
        or (path / "checkpoints").exists()
        or (log.is_file() and log.stat().st_size > 0)
    )


def _free_name(path: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    names = (
        path.with_name(f"{path.name}.{stamp}-{os.getpid()}{more}")
        for more in chain([""], (f"-{n}" for n in count(2)))
    )
    return next(name for name in names if not name.exists())


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
            for name in ("prompt", "completion", "chosen", "rejected")
            if name in row
        ]
    return [*lines, ""]
