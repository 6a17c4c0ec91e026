"""The checkpoints of a run: saved atomically, verified by checksums, and pruned."""

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

import torch
from torch import Tensor

from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.files import refuse_links
from valence.models.cache import CachedReference
from valence.reports.run_record import CHECKPOINTS
from valence.reports.sinks import JsonlSink
from valence.storage import atomic_folder, fsync_path, part_path, read_json, rename
from valence.training.folder import Messages, RunFolder
from valence.training.model_files import ModelWriter, SavedWith
from valence.training.state import TrainState
from valence.training.state_files import PLAIN, Snapshot, State, Write, agreed

FORMAT = 2
MANIFEST = "manifest.json"
NUMBER = re.compile(r"0|[1-9][0-9]*")
MIN_BACKGROUND_BYTES = 2**22
"""States of at least this size are written in the background."""


class Damaged(UserError):
    """A checkpoint with missing or changed files."""


@dataclass(frozen=True)
class Saved:
    """An undamaged checkpoint. facts: what the run recorded about itself."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def has_state(self) -> bool:
        return (self.path / PLAIN).is_file()


class Checkpoints:
    """The folders checkpoints/step-N of a run.

    A failed save leaves earlier checkpoints unchanged. ``failed``: failures since the last
    successful save. keep: how many of the newest to keep (None: all). group: the processes over
    which tensors are sharded; all of them call the constructor, ``save`` and ``wait`` in the same
    order, and get the same results. write: writes the sharded tensors. Rank 0 does everything else.
    in_background: False makes every save block.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None,
        group: Group | None = None,
        write: Write | None = None,
        *,
        in_background: bool = True,
    ) -> None:
        self.folder, self.keep, self.in_background = folder, keep, in_background
        # Its own collectives: those of training continue while a thread writes.
        self.group = group.background if group is not None and group.size > 1 else None
        self.leads = group is None or group.rank == 0
        self.write = write or _no_writer
        self.failed = 0
        self.messages: list[str] = []
        self._writing: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._saving_step: int | None = None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, damaged ones included, ascending.

        Raises UserError if the folder cannot be read, which is not the same as an empty one.
        """
        names = [name.removeprefix("step-") for name in self._names() if name.startswith("step-")]
        return sorted(int(name) for name in names if NUMBER.fullmatch(name))

    def _names(self) -> list[str]:
        """Names in the folder; empty if it does not exist.

        Raises UserError if it cannot be read.
        """
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"the checkpoints cannot be listed ({error.strerror})",
                code="file-not-readable",
                where=str(self.folder),
                fix="make the folder readable, or start over with --fresh",
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
        add_files: Callable[[Path], None] | None = None,
        spare: int | None = None,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint, in the background if it is large.

        first: functions that write other files, called before the checkpoint is complete.
        add_files: adds files to the checkpoint's folder; blocks training. spare: a step that is
        never pruned. wait: block until it is written. Failures are reported by ``failed`` and
        ``take_messages``, those of processes that save together after the next ``wait``.
        """
        self.wait()
        at_once = wait or add_files is not None or not self.in_background
        snapshot = Snapshot(state, copied=not at_once) if state is not None else None
        num_bytes = 0  # the same in all processes
        if snapshot is not None:
            num_bytes = snapshot.sharded_size if self.group else snapshot.size

        def write() -> None:
            try:
                self._write(step, snapshot, facts, first, add_files)
                self._record_end(step)
            except (OSError, UserError) as error:
                self._record_end(step, str(error))
                return
            try:
                self.prune(spare)
            except (OSError, UserError) as error:
                self.messages.append(f"an old checkpoint could not be removed: {error}")

        self._saving_step = step
        if at_once or num_bytes < MIN_BACKGROUND_BYTES:
            write()
        else:
            self._has_ended.clear()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

            def write_in_background() -> None:
                try:
                    if device is not None:
                        # A thread starts with device 0, where waiting for its stream, as PyTorch's
                        # writer does, would create a context of several hundred megabytes.
                        torch.cuda.set_device(device)
                    write()
                finally:
                    self._has_ended.set()

            name = f"save step-{step}"
            self._writing = threading.Thread(target=write_in_background, name=name, daemon=True)
            self._writing.start()

    @property
    def is_pending(self) -> bool:
        """Whether processes save together, and their result waits for the next ``wait``.

        Until then, it may have reached some of the processes only.
        """
        return self.group is not None and self._writing is not None

    def wait(self) -> None:
        """Block until no save is in progress.

        If a signal's handler raises here, the save goes on, and the next call waits for it. After
        such an exception in ``Thread.join``, Python before 3.13 takes the thread for ended.
        """
        if self._writing is not None:
            self._has_ended.wait()
            self._writing.join()  # a program that ends while the thread frees memory is aborted
            self._writing = None
            if self._saving_step is not None:
                self._record_end(self._saving_step, "the thread that wrote it failed")

    def _record_end(self, step: int, error: str = "") -> None:
        self._saving_step = None
        self.failed = self.failed + 1 if error else 0
        if error:
            self.messages.append(f"checkpoint step-{step} was not saved: {error}")

    def take_messages(self) -> list[str]:
        """The failures since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def _write(
        self,
        step: int,
        snapshot: Snapshot | None,
        facts: Mapping[str, Any],
        first: Iterable[Callable[[], None]],
        add_files: Callable[[Path], None] | None,
    ) -> None:
        """Write a checkpoint. A failure in one process ends the block in all of them."""
        target = self.path(step)
        with ExitStack() as opened:
            with agreed(self.group):
                for write_file in first:
                    write_file()
                folder = (
                    opened.enter_context(self._open_folder(target))
                    if self.leads
                    else part_path(target)
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
                    self.write(folder, snapshot.shards, self.group)
                    if snapshot is not None and snapshot.shards
                    else []
                )
            with agreed(self.group):
                if add_files is not None:
                    self._add(add_files, folder, alone=snapshot is None)
            files = self._describe_files(parts)
            with agreed(self.group):
                if self.leads:
                    self._write_manifest(folder, step, files, facts)
                opened.close()

    def _open_folder(self, target: Path) -> AbstractContextManager[Path]:
        """The folder that becomes a checkpoint."""
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(
                2, "the run's folder was moved or deleted during the run", str(self.folder.parent)
            )
        refuse_links(self.folder, self.folder.parent)
        if not self.folder.is_dir():
            self.folder.mkdir()
            fsync_path(self.folder.parent)
        return atomic_folder(target)

    def _describe_files(self, parts: Collection[Path]) -> dict[str, Any]:
        """Sizes and checksums of the files of all processes, each computed by its writer."""
        with agreed(self.group):
            local_files = {path.name: _describe(path) for path in parts}
        if self.group is None:
            return local_files
        return {
            name: description
            for files in gather_objects(self.group, local_files)
            for name, description in files.items()
        }

    def _write_manifest(
        self, folder: Path, step: int, files: dict[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Add the manifest. files: those with known sizes and checksums."""
        for name, description in files.items():
            if (folder / name).stat().st_size != description["bytes"]:
                raise OSError(
                    f"{name} does not have the size that was written; all processes must share "
                    "the disk of the run folder"
                )
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (name := path.relative_to(folder).as_posix()) not in files:
                files[name] = _describe(path)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"format": FORMAT, "step": step, "saved": when, "files": files, "facts": facts}
        manifest = json.loads(json.dumps(content, default=str))
        (folder / MANIFEST).write_text(
            json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1), encoding="utf-8"
        )

    def _add(self, add_files: Callable[[Path], None], folder: Path, alone: bool) -> None:
        """Add files to a checkpoint. If that fails, the state is saved without them."""
        before = set(folder.iterdir())
        try:
            add_files(folder)
        except Exception as error:  # any exception of the libraries that write models
            if alone or self.group or isinstance(error, OSError | UserError):
                raise
            for path in set(folder.iterdir()) - before:
                shutil.rmtree(path, ignore_errors=True)
            self.messages.append(
                f"the model could not be written into checkpoint {folder.name}: {error!r}"
            )

    def prune(self, spare: int | None) -> None:
        """Remove all but the newest checkpoints and the one to spare."""
        if self.keep is None or not self.leads:
            return
        for step in set(self.steps()[: -self.keep]) - {spare}:
            _remove(self.path(step))

    def tidy(self) -> None:
        """Remove incomplete folders of a killed process.

        Raises UserError if the folder is a symbolic link.
        """
        refuse_links(self.folder, self.folder.parent)
        for path in (self.folder / name for name in self._names() if name.startswith(".step-")):
            refuse_links(path, self.folder)
            target = self.folder / path.name[1:].removesuffix(".old")
            if path.name.endswith(".old") and not target.exists():
                rename(path, [target])  # killed while it was being replaced
            else:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self, say: Callable[[str], None]) -> Saved | None:
        """The newest undamaged checkpoint; None if there are no checkpoints.

        Damaged ones are reported through ``say`` and renamed. Raises UserError if all are damaged,
        or the newest has another format version.
        """
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            try:
                saved = check(self.path(step))
            except Damaged as error:
                damaged[self.path(step)] = error.message
                continue
            for path, problem in damaged.items():
                say(
                    f"{path}: {problem}; renamed it to {_rename_damaged(path).name}, and using "
                    f"{saved.path.name}"
                )
            return saved
        if damaged:
            problems = "; ".join(
                f"{path.name}: {problem.removeprefix('this checkpoint is damaged: ')}"
                for path, problem in damaged.items()
            )
            raise UserError(
                f"all checkpoints are damaged ({problems})",
                code="checkpoint-damaged",
                where=str(self.folder),
                fix="restore an undamaged checkpoint, or start over with --fresh",
            )
        return None


def _no_writer(folder: Path, tensors: Mapping[str, Tensor], _: Group | None) -> list[Path]:
    raise TypeError(
        f"{folder}: no function was passed that writes sharded tensors such as "
        f"{next(iter(tensors))}"
    )


def check(path: Path) -> Saved:
    """Verify the checksums of a checkpoint. Raises Damaged if a file is missing or has changed."""

    def damaged(problem: str) -> Damaged:
        return Damaged(
            f"this checkpoint is damaged: {problem}",
            code="checkpoint-damaged",
            where=str(path),
            fix="choose another checkpoint with --step, or move this folder away to use an "
            "earlier one",
        )

    try:
        manifest = read_json(path / MANIFEST)
        is_intact = manifest.pop("sha256") == _digest(manifest)
        files, step, facts, form = (manifest[name] for name in ("files", "step", "facts", "format"))
    except FileNotFoundError:
        raise damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(f"{MANIFEST} cannot be read ({error})") from error
    if not is_intact:
        raise damaged(f"{MANIFEST} has changed (its sha256 differs)")
    if form != FORMAT:
        raise UserError(
            f"the checkpoint has format {form}, but this version of Valence reads format {FORMAT}",
            code="checkpoint-format",
            where=str(path),
            fix="use the version of Valence that saved it",
        )
    if path.name != f"step-{step}":
        raise damaged(f"{MANIFEST} is that of step {step}")
    for name, described in files.items():
        try:
            actual = _describe(path / name)
        except FileNotFoundError:
            raise damaged(f"{name} is missing") from None
        except OSError as error:
            raise damaged(f"{name} cannot be read ({error.strerror})") from error
        if actual["bytes"] != described["bytes"]:
            raise damaged(f"{name} has {actual['bytes']} bytes instead of {described['bytes']}")
        if actual["sha256"] != described["sha256"]:
            raise damaged(f"{name} has changed (its sha256 differs)")
    return Saved(path, step, facts)


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a manifest, independent of its formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    """Size and checksum of a file. Raises OSError."""
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to the first free name damaged-step-N. Raises UserError."""
    names = (
        path.with_name(f"damaged-{path.name}{ending}")
        for ending in ("", *(f".{n}" for n in range(2, 1000)))
    )
    try:
        return rename(path, names)
    except OSError as error:
        raise UserError(
            f"this checkpoint is damaged and cannot be renamed ({error.strerror})",
            code="folder-not-writable",
            where=str(path),
            fix=f"make {path.parent} writable, then rerun the same command",
        ) from error


def _remove(path: Path) -> None:
    """Remove a checkpoint. Renamed first, so that a partly removed one never looks complete."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    rename(path, [gone])
    shutil.rmtree(gone)


class Saver:
    """The checkpoints of a run with a folder.

    log: of the process that writes it. saved: step and settled step of the newest checkpoint.
    """

    def __init__(
        self,
        state: TrainState,
        folder: RunFolder,
        log: JsonlSink | None,
        model_writer: ModelWriter,
        messages: Messages,
    ) -> None:
        self._state, self._folder, self._log = state, folder, log
        self._model_writer, self._messages = model_writer, messages
        self._world, self._settings = model_writer.world, state.recipe.run
        self._is_split = state.has_split_weights
        self.checkpoints = Checkpoints(
            folder.path / CHECKPOINTS,
            self._settings.keep,
            self._world if self._is_split else None,
            sharded_checkpoint.write,
            in_background=self._settings.async_save,
        )
        self.saved: tuple[int, int] | None = None
        self._saved_with: SavedWith | None = None

    @property
    def _cached(self) -> CachedReference | None:
        reference = self._state.reference
        return reference if isinstance(reference, CachedReference) else None

    def prepare(self) -> None:
        """Bring everything that a checkpoint depends on to the disk. All processes call it."""
        self.check_best()
        self._saved_with = self._model_writer.saved_with() if self._settings.save_hf else None
        if self._cached is None or self._world.size == 1:
            return
        failure = None
        try:
            self._cached.sync()
        except OSError as error:
            failure = (
                f"rank {self._world.rank}: {self._cached.folder} cannot be written "
                f"({error.strerror})"
            )
        for message in filter(None, gather_objects(self._world, failure)):
            self._messages.warn(message)

    def save(self, state: State, *, wait: bool) -> None:
        """Start to write a checkpoint, unless the newest one holds the same.

        wait: return when it is written, and try again if it failed before. All processes call it;
        where each holds all weights, one alone writes. Raises UserError in all processes that save
        together when too many of their saves failed before.
        """
        if not (self._folder.writes or self._is_split):
            return
        if wait or self._is_split:
            self.checkpoints.wait()
            self._report_failures()
        if self._is_split and not wait:
            self.check_failures()
        counters = state["counters"]
        position = counters["step"], counters["settled"]
        if not counters["step"] or self.saved == position:
            return
        self.checkpoints.save(
            counters["step"],
            state if self._settings.save_state else None,
            self._folder.identity,
            first=[
                *([self._log.sync] if self._log else []),
                self._folder.sync,
                *([self._cached.sync] if self._cached else []),
            ],
            add_files=self._write_model if self._settings.save_hf else None,
            spare=self._state.best.step,
            wait=wait,
        )
        self.saved = position

    def _write_model(self, folder: Path) -> None:
        self._model_writer.write(folder / "model", self._settings.export, self._saved_with)

    def check_best(self) -> None:
        """Go back to the previous best checkpoint if the save of the best one has failed.

        Otherwise the previous one would be removed, and there would be none. All processes call it.
        """
        best = self._state.best
        if (best.best, best.step) == best.saved or best.step == self._state.step:
            return
        self.checkpoints.wait()
        is_missing = (
            self._folder.writes
            and best.step is not None
            and not os.path.isdir(self.checkpoints.path(best.step))
        )
        if any(gather_objects(self._world, is_missing)):
            step = best.step
            best.withdraw()
            again = "" if best.step is None else f"; step {best.step} is the best again"
            self._messages.warn(f"step {step}, the best by its evaluation, was not saved{again}")
        else:
            best.confirm()

    def _report_failures(self) -> None:
        for message in self.checkpoints.take_messages():
            self._messages.warn(message)
        if self.checkpoints.failed:
            self.saved = None

    def check_failures(self, *, is_last: bool = False) -> None:
        """Report saves that failed.

        Raises UserError when too many in a row failed; is_last: when the last one failed. Does
        nothing while processes that save together do not all have the result.
        """
        if self.checkpoints.is_pending:
            return
        self._report_failures()
        num_failed = self.checkpoints.failed
        if num_failed < (1 if is_last else self._settings.max_failed_saves):
            return
        steps = self.checkpoints.steps()
        last_good = f"the last good one is step-{steps[-1]}" if steps else "there is no earlier one"
        raise UserError(
            f"the state could not be saved ({num_failed} in a row failed; {last_good})",
            code="checkpoint-not-saved",
            where=str(self.checkpoints.folder),
            fix="free disk space or repair the folder, then run the same command again to resume "
            "from the last good checkpoint",
        )
