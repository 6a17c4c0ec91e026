"""The checkpoints of a run: written whole or not at all, checked before they are used, the oldest
removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.files import refuse_links
from valence.runs.store import (
    PLAIN,
    Snapshot,
    Write,
    agreed,
    place_aside,
    synced,
    written_aside,
)

FORMAT = 2
MANIFEST = "manifest.json"
NUMBER = re.compile(r"0|[1-9][0-9]*")
WORTH_A_THREAD = 2**22
"""Bytes of state from which on a save is written while training goes on."""


class Damaged(UserError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole.

    ``facts``: what the run said about itself when it was saved.
    """

    path: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def has_state(self) -> bool:
        return (self.path / PLAIN).is_file()


class Checkpoints:
    """checkpoints/step-N of a run's folder.

    A save that fails leaves the earlier ones as they are. ``failed``: how many have failed since
    one was written; ``trouble``: what went wrong with them, until it is told. ``keep``: how many of
    the newest stay (None: all). ``group``: the processes that save together, where the state has
    tensors sharded over them: all of these then call ``save`` alike, and come back from it with the
    same success or failure. ``write``: writes such tensors. All else is done by rank 0 alone.
    """

    def __init__(
        self, folder: Path, keep: int | None, group: Group | None = None, write: Write | None = None
    ) -> None:
        self.folder, self.keep = folder, keep
        self.group = group if group is not None and group.size > 1 else None
        self.leads = group is None or group.rank == 0
        self.write = write or _unwritten
        self.failed = 0
        self.trouble: list[str] = []
        self._writing: threading.Thread | None = None
        self._open: int | None = None  # the step that is being saved

    def steps(self) -> list[int]:
        """Of the checkpoints that there are, whole or not, ascending.

        Raises UserError when the folder cannot be read: what is in it is then unknown, which is not
        the same as nothing.
        """
        names = [name.removeprefix("step-") for name in self._names() if name.startswith("step-")]
        return sorted(int(name) for name in names if NUMBER.fullmatch(name))

    def _names(self) -> list[str]:
        """Names in the folder; none when it does not exist.

        Raises UserError when it cannot be read.
        """
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            fix = "make the folder readable, or start over with --fresh"
            raise UserError(
                f"the checkpoints cannot be listed ({error.strerror})",
                code="file-not-readable",
                where=str(self.folder),
                fix=fix,
            ) from error

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None,
        facts: Mapping[str, Any],
        *,
        first: Iterable[Callable[[], None]] = (),
        beside: Callable[[Path], None] | None = None,
        spare: int | None = None,
        wait: bool = False,
    ) -> None:
        """Writes a checkpoint, in the background where its size makes that worth while, else (and
        with ``wait``) at once.

        first: what must be on the disk before it counts. beside: adds files to its folder (training
        then waits). spare: the step of one that stays whatever its age. Whether it went well is
        told by ``failed`` and ``trouble``. Processes that save together do so at once.
        """
        self.wait()
        at_once = wait or beside is not None or self.group is not None
        snapshot = Snapshot(state, copied=not at_once) if state is not None else None

        def write() -> None:
            try:
                self._write(step, snapshot, facts, first, beside)
                self._ended(step)
            except (OSError, UserError) as error:
                self._ended(step, str(error))
                return
            try:
                self.prune(spare)
            except (OSError, UserError) as error:
                self.trouble.append(f"an old checkpoint could not be removed: {error}")

        self._open = step
        if at_once or snapshot is None or snapshot.size < WORTH_A_THREAD:
            write()
        else:
            self._writing = threading.Thread(target=write, name=f"save step-{step}", daemon=True)
            self._writing.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
            if self._open is not None:
                self._ended(self._open, "the thread that wrote it has failed")

    def _ended(self, step: int, error: str = "") -> None:
        """A save came to its end."""
        self._open = None
        self.failed = self.failed + 1 if error else 0
        if error:
            self.trouble.append(f"checkpoint step-{step} was not saved: {error}")

    def told(self) -> list[str]:
        """What went wrong since this was last asked."""
        found, self.trouble = self.trouble, []
        return found

    def _write(
        self,
        step: int,
        snapshot: Snapshot | None,
        facts: Mapping[str, Any],
        first: Iterable[Callable[[], None]],
        beside: Callable[[Path], None] | None,
    ) -> None:
        """What can fail in one process alone is in blocks that end in all of them, in the same
        way.
        """
        target = self.path(step)
        with ExitStack() as opened:
            with agreed(self.group):
                for each in first:
                    each()
                folder = (
                    opened.enter_context(self._made(target)) if self.leads else place_aside(target)
                )
                if snapshot is not None and self.leads:
                    snapshot.write(folder)
            with agreed(self.group):
                if not folder.is_dir():
                    raise FileNotFoundError(
                        2, "run.dir is not on a disk that all hosts share", str(folder)
                    )
            with agreed(self.group):
                parts = (
                    self.write(folder, snapshot.shards)
                    if snapshot is not None and snapshot.shards
                    else []
                )
            with agreed(self.group):
                if beside is not None:
                    self._add(beside, folder, alone=snapshot is None)
            files = self._described(folder, parts)
            with agreed(self.group):
                if self.leads:
                    self._sign(folder, step, files, facts)
                opened.close()

    def _made(self, target: Path) -> AbstractContextManager[Path]:
        """The folder that becomes a checkpoint."""
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(2, "the run's folder is gone", str(self.folder.parent))
        refuse_links(self.folder, self.folder.parent)
        if not self.folder.is_dir():
            self.folder.mkdir()
            synced(self.folder.parent)
        return written_aside(target)

    def _described(self, folder: Path, parts: Collection[Path]) -> dict[str, Any]:
        """Sizes and checksums of the files that several processes have written, each found by its
        own.
        """
        with agreed(self.group):
            own = {path.name: _describe(path) for path in parts}
        return (
            {name: said for each in gather_objects(self.group, own) for name, said in each.items()}
            if self.group
            else own
        )

    def _sign(
        self, folder: Path, step: int, files: dict[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Adds the manifest. files: those that are described already."""
        for name, said in files.items():
            if (folder / name).stat().st_size != said["bytes"]:
                raise OSError(f"{name} is not as another process wrote it")
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (name := path.relative_to(folder).as_posix()) not in files:
                files[name] = _describe(path)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        found = {"format": FORMAT, "step": step, "saved": when, "files": files, "facts": facts}
        said = json.loads(json.dumps(found, default=str))
        (folder / MANIFEST).write_text(
            json.dumps({**said, "sha256": _sum(said)}, indent=1), encoding="utf-8"
        )

    def _add(self, beside: Callable[[Path], None], folder: Path, alone: bool) -> None:
        """Adds files to a checkpoint. That this fails does not cost the state beside them."""
        before = set(folder.iterdir())
        try:
            beside(folder)
        except Exception as error:  # of the libraries that write models, whichever
            if alone or self.group or isinstance(error, OSError | UserError):
                raise
            for path in set(folder.iterdir()) - before:
                shutil.rmtree(path, ignore_errors=True)
            self.trouble.append(f"no model was written into checkpoint {folder.name}: {error!r}")

    def prune(self, spare: int | None) -> None:
        """Removes those that are neither among the newest nor spared."""
        if self.keep is None or not self.leads:
            return
        for step in set(self.steps()[: -self.keep]) - {spare}:
            _remove(self.path(step))

    def tidy(self) -> None:
        """Removes what a program that was killed left half done.

        Raises UserError when the folder is a link: it is another's.
        """
        refuse_links(self.folder, self.folder.parent)
        for path in (self.folder / name for name in self._names() if name.startswith(".step-")):
            refuse_links(path, self.folder)
            whole = self.folder / path.name[1:].removesuffix(".old")
            if path.name.endswith(".old") and not whole.exists():
                path.rename(whole)  # killed while it was being replaced
            else:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self, say: Callable[[str], None]) -> Saved | None:
        """The newest that is whole.

        Damaged ones are told of, and renamed so that they are not in the way. None without any.

        Raises UserError when all there are have been damaged, or the newest is of another version.
        """
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            try:
                found = check(self.path(step))
            except Damaged as error:
                damaged[self.path(step)] = error.what
                continue
            for path, what in damaged.items():
                say(
                    f"{path}: {what}; it is kept as {_aside(path).name}, and {found.path.name} "
                    f"is used instead"
                )
            return found
        if damaged:
            said = "; ".join(
                f"{path.name}: {what.removeprefix('this checkpoint is damaged: ')}"
                for path, what in damaged.items()
            )
            raise UserError(
                f"all checkpoints are damaged ({said})",
                code="checkpoint-damaged",
                where=str(self.folder),
                fix="put back a whole one, or start over with --fresh",
            )
        return None


def _unwritten(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    raise TypeError(
        f"nothing was given that writes sharded tensors into {folder}, such as "
        f"{next(iter(tensors))}"
    )


def check(path: Path) -> Saved:
    """A checkpoint whose files are as they were written. Raises Damaged when they are not."""

    def damaged(what: str) -> Damaged:
        return Damaged(
            f"this checkpoint is damaged: {what}",
            code="checkpoint-damaged",
            where=str(path),
            fix="use another one",
        )

    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest.pop("sha256") == _sum(manifest)
        files, step, facts, form = (manifest[name] for name in ("files", "step", "facts", "format"))
    except FileNotFoundError:
        raise damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(f"{MANIFEST} cannot be read ({error})") from error
    if not whole:
        raise damaged(f"{MANIFEST} has changed (its own sha256 is another)")
    if form != FORMAT:
        raise UserError(
            f"its format is {form}, and this version reads {FORMAT}",
            code="checkpoint-format",
            where=str(path),
            fix="use the version that saved it",
        )
    if path.name != f"step-{step}":
        raise damaged(f"it is of step {step}, whatever its name says")
    for name, described in files.items():
        try:
            size, digest = (found := _describe(path / name))["bytes"], found["sha256"]
        except FileNotFoundError:
            raise damaged(f"{name} is missing") from None
        except OSError as error:
            raise damaged(f"{name} cannot be read ({error.strerror})") from error
        if size != described["bytes"]:
            raise damaged(f"{name} has {size} bytes instead of {described['bytes']}")
        if digest != described["sha256"]:
            raise damaged(f"{name} has changed (its sha256 is another)")
    return Saved(path, step, facts)


def _sum(manifest: Mapping[str, Any]) -> str:
    """Of what a manifest says, however it is written down."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    """Size and checksum of a file. Raises OSError."""
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _aside(path: Path) -> Path:
    """Renames a damaged checkpoint to the first free name that is none of a checkpoint.

    Raises UserError when it cannot.
    """
    names = (
        path.with_name(f"damaged-{path.name}{ending}")
        for ending in ("", *(f".{n}" for n in range(2, 1000)))
    )
    free = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(free)
    except OSError as error:
        what = f"this checkpoint is damaged, and cannot be renamed ({error.strerror})"
        raise UserError(
            what,
            code="folder-not-writable",
            where=str(path),
            fix="make the folder writable, or move the checkpoint away",
        ) from error
    return free


def _remove(path: Path) -> None:
    """Under another name first: what is half removed must not be taken for a checkpoint."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)
