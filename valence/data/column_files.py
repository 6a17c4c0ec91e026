"""Columns of numbers that grow: in memory while they are small, then in files that are mapped into
memory; and the cache of such files.

An entry of the cache is a folder with a file for each column and ``entry.json``, which has the
checksums of all of them. It is written under another name, and gets its own when it is complete. So
a process that is killed leaves no entry, and what is damaged is not used.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from valence.checksums import ChecksumError, add_checksum, verify
from valence.data.tokenized_dataset import Array

ENTRY = "entry.json"
FORMAT = 1
BLOCK = 1 << 20
MEMORY_BYTES = 32 << 20
"""Bytes of columns that are collected before any is written to a file."""
CACHE_BYTES = 20 << 30
"""Size from which on the entries that were used longest ago are deleted."""
ABANDONED = 24 * 3600
"""Seconds after which an entry that is still incomplete belongs to a process that was killed."""
PREFIX = "incomplete-"


class ColumnWriter:
    """Collects columns piece by piece. dtypes: by the names of the columns."""

    def __init__(self, dtypes: Mapping[str, Any], folder: Path | None) -> None:
        """folder: for the files; by default a temporary one. It is made when it is needed."""
        self._dtypes, self._parent = dtypes, folder
        self._pieces: dict[str, list[Array]] = {name: [] for name in dtypes}
        self._num_bytes = 0
        self._folder: Path | None = None
        self._files: dict[str, BinaryIO] = {}
        self._sums = dict.fromkeys(dtypes, 0)

    def append(self, columns: Mapping[str, Array]) -> None:
        for name, values in columns.items():
            self._pieces[name].append(values)
            self._num_bytes += values.nbytes
        if self._num_bytes > (BLOCK if self._folder else MEMORY_BYTES):
            self._write()

    def _write(self) -> None:
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = Path(mkdtemp(prefix=PREFIX, dir=self._parent))
            self._files = {
                name: (self._folder / name).open("wb", buffering=0) for name in self._dtypes
            }
        for name, pieces in self._pieces.items():
            for values in pieces:
                content = memoryview(values.tobytes())
                self._sums[name] = crc32(content, self._sums[name])
                while content:
                    content = content[self._files[name].write(content) or 0 :]
            pieces.clear()
        self._num_bytes = 0

    def columns(self) -> dict[str, Array]:
        """The columns; those in files are mapped, and the files of a temporary folder removed."""
        if self._folder is None:
            return {
                name: np.concatenate([*pieces, np.empty(0, self._dtypes[name])])
                for name, pieces in self._pieces.items()
            }
        self._write()
        found = {name: _mapped(self._folder / name, dtype) for name, dtype in self._dtypes.items()}
        self.discard()
        return found

    def discard(self) -> None:
        """Remove the files. What is mapped stays readable."""
        for file in self._files.values():
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Make the columns an entry of the cache. facts: more that JSON can hold.

        Raises OSError.
        """
        self._write()
        assert self._folder is not None
        for file in self._files.values():
            os.fsync(file.fileno())
            file.close()
        entry = add_checksum({"format": FORMAT, "sums": self._sums, "facts": facts})
        with (self._folder / ENTRY).open("w", encoding="utf-8") as file:
            json.dump(entry, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)
        self._folder.rename(path)
        self._folder = None


def _mapped(path: Path, dtype: Any) -> Array:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def load_entry(
    path: Path, dtypes: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """The columns and the facts of an entry of the cache; None if there is none that is intact."""
    try:
        entry = verify(json.loads((path / ENTRY).read_bytes()), required=True)
        if entry["format"] != FORMAT or entry["sums"].keys() != dtypes.keys():
            return None
        if any(_sum(path / name) != known for name, known in entry["sums"].items()):
            return None
        os.utime(path)  # used just now
        return {name: _mapped(path / name, dtype) for name, dtype in dtypes.items()}, entry["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ChecksumError):
        return None


def _sum(path: Path) -> int:
    """The CRC-32 of a file, read without mapping it."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            found = crc32(block, found)
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time build an entry. Raises OSError where files cannot be locked."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune(folder: Path, keep: Path, limit: int = CACHE_BYTES) -> None:
    """Delete the entries that were used longest ago until the cache is small enough, but ``keep``;
    and incomplete ones that nobody completes.
    """
    with suppress(OSError):
        entries = sorted(
            (path for path in folder.iterdir() if path.is_dir() and path != keep),
            key=lambda path: -path.stat().st_mtime,
        )
        total = _size(keep)
        for path in entries:
            is_incomplete = path.name.startswith(PREFIX)
            total += 0 if is_incomplete else _size(path)
            is_abandoned = is_incomplete and time.time() - path.stat().st_mtime > ABANDONED
            if is_abandoned or (total > limit and not is_incomplete):
                shutil.rmtree(path, ignore_errors=True)
                path.with_suffix(".lock").unlink(missing_ok=True)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir())
