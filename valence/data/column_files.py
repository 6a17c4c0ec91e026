"""Columns of values that grow: in memory while they are small, then in memory-mapped files; and a
cache of such files.

A cache entry is a folder with one file per column and ``entry.json``, which has their checksums. It
is written under another name and renamed when it is complete. A killed process therefore leaves no
entry, and a damaged entry is written again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from struct import Struct
from tempfile import mkdtemp
from typing import Any, BinaryIO, Self
from zlib import crc32

import numpy as np

from valence.data.tokenized_dataset import Array
from valence.storage import (
    ChecksumError,
    add_checksum,
    lock_file,
    open_locked,
    publish_folder,
    read_json,
    verify,
    write_all,
)

ENTRY_FILE = "entry.json"
FORMAT = 1
ENTRY_NAME = re.compile(r"(?P<incomplete>incomplete-)?(?P<key>[0-9a-f]{32})(?(incomplete)-\w+)")
"""Names of folders of the cache: ``KEY``, and ``incomplete-KEY-RANDOM`` while it is written."""
BLOCK = 1 << 20
"""Bytes that are read or written at once."""
MAX_MEMORY_BYTES = 32 << 20
"""Columns of more bytes are written to files."""
MAX_CACHE_BYTES = 20 << 30
"""Size of the cache above which the least recently used entries are deleted."""


POLL_SECONDS = 0.25
"""Pause between attempts to lock an entry."""
COUNTS = Struct("<qq")
"""Content of a lock file: the arguments of the latest ``Progress`` call."""

Progress = Callable[[int, int], None]
"""Called with the number of examples and the number of tokens that are done."""


class StorageError(Exception):
    """A file cannot be written, read back or locked."""


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise OSErrors as StorageErrors."""
    try:
        yield
    except OSError as error:
        raise StorageError(str(error)) from error


class ColumnWriter:
    """Collects columns piece by piece, as a context manager that removes its files at the end.

    dtypes: by column name. entry: the cache entry to write; by default the columns go to temporary
    files. in_memory: write no files. Methods raise StorageError.
    """

    def __init__(
        self, dtypes: Mapping[str, Any], entry: Path | None = None, *, in_memory: bool = False
    ) -> None:
        self._dtypes, self._entry, self._in_memory = dtypes, entry, in_memory
        self._pieces: dict[str, list[Array]] = {name: [] for name in dtypes}
        self._num_bytes = 0  # in the pieces
        self._folder: Path | None = None
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(dtypes, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def append(self, columns: Mapping[str, Array]) -> None:
        for name, values in columns.items():
            self._pieces[name].append(values)
            self._num_bytes += values.nbytes
        if self._num_bytes > (BLOCK if self._folder else MAX_MEMORY_BYTES) and not self._in_memory:
            self._write()

    @_storage_errors()
    def _write(self) -> None:
        """Write the pieces to the files, which are created first."""
        if self._folder is None:
            if self._entry is None:
                self._folder = Path(mkdtemp(prefix="valence-"))
            else:
                parent = self._entry.parent
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                prefix = f"incomplete-{self._entry.name}-"
                self._folder = Path(mkdtemp(prefix=prefix, dir=parent))
            for name in self._dtypes:
                self._files[name] = (self._folder / name).open("wb", buffering=0)
        for name, pieces in self._pieces.items():
            for values in pieces:
                content = values.tobytes()
                self._checksums[name] = crc32(content, self._checksums[name])
                write_all(self._files[name], content)
            pieces.clear()
        self._num_bytes = 0

    @_storage_errors()
    def columns(self) -> dict[str, Array]:
        """The columns. Those in files are memory-mapped, and stay readable without the files."""
        if self._folder is None:
            return {
                name: np.concatenate([*pieces, np.empty(0, self._dtypes[name])])
                for name, pieces in self._pieces.items()
            }
        self._write()
        return {name: _map(self._folder / name, dtype) for name, dtype in self._dtypes.items()}

    @_storage_errors()
    def save(self, metadata: Mapping[str, Any]) -> None:
        """Complete the cache entry. metadata: further values, which must be JSON."""
        assert self._entry is not None
        self._write()
        assert self._folder is not None
        content = {"format": FORMAT, "checksums": self._checksums, "metadata": metadata}
        text = json.dumps(add_checksum(content))
        (self._folder / ENTRY_FILE).write_text(text, encoding="utf-8")
        publish_folder(self._folder, self._entry)
        self._folder = None

    def _discard(self) -> None:
        for file in self._files.values():
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _map(path: Path, dtype: Any) -> Array:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def load_entry(
    entry: Path, dtypes: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """The columns and the metadata of a cache entry; None if it does not exist or is damaged."""
    try:
        content = verify(read_json(entry / ENTRY_FILE), required=True)
        checksums = content["checksums"]
        if content["format"] != FORMAT or checksums.keys() != dtypes.keys():
            return None
        if any(_checksum(entry / name) != checksum for name, checksum in checksums.items()):
            return None
        with suppress(OSError):
            os.utime(entry)  # the time of its last use
        return {name: _map(entry / name, dtype) for name, dtype in dtypes.items()}, content[
            "metadata"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ChecksumError):
        return None


def _checksum(path: Path) -> int:
    """The CRC-32 of a file. Reads it without mapping it into memory."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            checksum = crc32(block, checksum)
    return checksum


@contextmanager
def locked(entry: Path, progress: Progress) -> Iterator[Progress]:
    """Let one process at a time read or write an entry.

    Yields a function that publishes the progress of this process in the lock file. Processes that
    wait for this one pass it to their ``progress``. Raises StorageError if the folder cannot be
    written to, or its file system has no locks.
    """
    while (file := _lock(entry, progress)) is None:
        time.sleep(POLL_SECONDS)
    with file:
        yield partial(_publish, file)


def _lock(entry: Path, progress: Progress) -> BinaryIO | None:
    """Open and lock the lock file of an entry; None if another process has locked it."""
    with _storage_errors():
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _lock_path(entry)
        file = open_locked(path)
        if file is not None:
            file.truncate(0)
            return file
        counts = path.read_bytes()[: COUNTS.size] if path.exists() else b""
    if len(counts) == COUNTS.size:
        progress(*COUNTS.unpack(counts))
    return None


def _publish(file: BinaryIO, num_examples: int, num_tokens: int) -> None:
    with suppress(OSError):
        os.pwrite(file.fileno(), COUNTS.pack(num_examples, num_tokens), 0)


def _lock_path(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.lock")


def remove_incomplete(entry: Path) -> None:
    """Remove what killed processes have written of an entry. Its lock must be held."""
    for path in entry.parent.glob(f"incomplete-{entry.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def prune(entry: Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
    """Make the cache of an entry smaller, without deleting this entry.

    Deletes incomplete entries of killed processes, and the least recently used entries above
    ``max_bytes``. Entries in use by another process and other folders stay.
    """
    with suppress(OSError):
        folders = [path for path in entry.parent.iterdir() if path.is_dir() and path != entry]
        size = _size(entry)
        for path in sorted(folders, key=lambda path: -path.stat().st_mtime):
            if (name := ENTRY_NAME.fullmatch(path.name)) is None:
                continue
            size += 0 if name["incomplete"] else _size(path)
            if name["incomplete"] or size > max_bytes:
                _remove_unlocked(path, entry.with_name(name["key"]))


def _remove_unlocked(path: Path, entry: Path) -> None:
    """Remove a folder unless another process holds the lock of its entry."""
    with lock_file(_lock_path(entry)) as is_locked:
        if is_locked:
            shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
