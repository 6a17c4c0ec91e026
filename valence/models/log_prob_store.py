"""Arrays of numbers kept in a folder under 16-byte keys.

Any number of processes add entries at once; none is ever changed.

Each process that adds entries writes two files of its own: NAME.values, the numbers end to end, and
NAME.index, a head that says what they are, then one row per entry, written after its numbers. So
there is nothing to lock, and a process that is killed leaves at most numbers without a row or an
unfinished last row, which nobody reads. Head, rows and numbers have checksums: what is damaged
counts as absent, with a warning that names the file.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from valence.errors import UserError
from valence.files import make_folder

Array = NDArray[np.floating[Any]]
Head = Mapping[str, Any]

HEAD = 1024  # bytes: JSON, spaces, and the checksum of both
ROW = np.dtype(
    [("key", "V16"), ("start", "<u8"), ("count", "<u4"), ("sum", "<u4"), ("check", "<u4")]
)
# a row without its last column, and that: the row's own checksum
FIELDS, CHECK = (
    struct.Struct("<16sQII"),
    struct.Struct("<I"),
)
OPEN_FILES = 64


@dataclass(slots=True, eq=False)
class StoreFile:
    """The two files of one process: their path without the ending, what the head says, how many
    rows of the index were read.
    """

    path: Path
    head: Head
    rows: int = 0

    @property
    def values(self) -> Path:
        return self.path.with_suffix(".values")

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.head["dtype"])


Place = tuple[StoreFile, int, int, int]
"""Where an entry is: its part, the position of its first number there, how many they are, their
checksum.
"""


class LogProbStore:
    """The entries of one folder.

    ``identity`` says what they are: files that say otherwise are refused.

    ``damaged``: how many entries could not be used. ``keeps``: whether ``add`` keeps anything.
    """

    def __init__(self, folder: Path, identity: Head, about: Head, *, adds: bool = True) -> None:
        """Finds out which entries there are; numbers are read when they are asked for.

        ``about``: more for the head of new files.

        Raises UserError when the folder cannot be made or read, or holds entries of another
        identity.
        """
        self.folder, self.about = folder, {**identity, **about}
        self.identity, self.keeps = identity, adds
        self.damaged = 0
        self._places: dict[bytes, Place] = {}
        self._parts: dict[
            str, StoreFile | None
        ] = {}  # by the name of the index; None: its head is damaged
        self._readers: dict[StoreFile, BinaryIO] = {}
        self._own: tuple[StoreFile, BinaryIO, BinaryIO] | None = None
        self._written = 0  # numbers in the own file
        self._unwritten: dict[bytes, Array] = {}
        self._lock = threading.Lock()
        self._warned: set[Path] = set()
        try:
            if adds:
                make_folder(folder, folder.parent)
        except OSError as error:
            raise self._unusable(error) from error
        self.refresh()

    def __len__(self) -> int:
        return len(self._places) + len(self._unwritten)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._unwritten

    def head(self, key: bytes) -> Head:
        """What is said about the file that an entry is in, or will be."""
        return self._places[key][0].head if key in self._places else self.about

    def refresh(self) -> None:
        """Takes in what other processes have added.

        Entries that are known already stay as they are.

        Raises UserError when the folder cannot be read.
        """
        try:
            names = os.listdir(self.folder) if self.folder.is_dir() else []
            # The newest first: an entry that was found damaged is there again in a later file.
            for name in sorted((name for name in names if name.endswith(".index")), reverse=True):
                known = self._parts.get(name)
                if known is None and name in self._parts:
                    continue
                with suppress(FileNotFoundError):  # deleted since it was listed
                    if (
                        os.path.getsize(self.folder / name)
                        >= HEAD + ((known.rows if known else 0) + 1) * ROW.itemsize
                    ):
                        self._read_index(self.folder / name)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"the cache cannot be used ({error})",
            code="reference-cache-unusable",
            where=str(self.folder),
            fix="repair the folder, or choose another one",
        )

    def _read_index(self, path: Path) -> None:
        """Takes in the rows of an index that are new. An unfinished last row is left alone."""
        with path.open("rb") as file:
            if path.name not in self._parts:
                self._parts[path.name] = self._opened(path, file.read(HEAD))
            part = self._parts[path.name]
            if part is None:
                return
            file.seek(HEAD + part.rows * ROW.itemsize)
            raw = file.read()
        rows = np.frombuffer(raw, ROW, count=len(raw) // ROW.itemsize)
        part.rows += len(rows)
        view = memoryview(raw)
        sums = [
            crc32(view[at : at + FIELDS.size])
            for at in range(0, len(rows) * ROW.itemsize, ROW.itemsize)
        ]
        whole = rows["check"] == np.array(sums, np.uint32)
        if not whole.all():
            self._damage(path, int((~whole).sum()))
        keys, *columns = (rows[name][whole].tolist() for name in ("key", "start", "count", "sum"))
        for key, start, count, checksum in zip(keys, *columns, strict=True):
            self._places.setdefault(key, (part, start, count, checksum))

    def _opened(self, path: Path, head: bytes) -> StoreFile | None:
        """A part that is seen for the first time; None when its head is damaged."""
        found = _head(head)
        if found is None:
            self._damage(path, 1)
            return None
        for name, value in self.identity.items():
            if found.get(name) != value:
                raise UserError(
                    f"the {name} of this file is {found.get(name)}, and that of its folder is "
                    f"{value}",
                    code="reference-cache-foreign",
                    where=str(path),
                    fix="move it, and the .values file of the same name, to where they came "
                    "from, or delete both",
                )
        return StoreFile(path.with_suffix(""), found)

    def get(self, key: bytes) -> Array | None:
        """The numbers of an entry; None when there is none, or it is damaged."""
        if key not in self._places:
            return self._unwritten.get(key)
        part, start, count, checksum = self._places[key]
        size = part.dtype.itemsize
        try:
            reader = self._reader(part)
            reader.seek(start * size)
            raw = reader.read(count * size)
        except OSError:
            raw = b""
        if len(raw) < count * size or crc32(raw) != checksum:
            del self._places[key]
            self._damage(part.values, 1)
            return None
        return np.frombuffer(raw, part.dtype)

    def _reader(self, part: StoreFile) -> BinaryIO:
        if part not in self._readers:
            if len(self._readers) == OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[part] = part.values.open("rb", buffering=0)
        return self._readers[part]

    def add(self, entries: Mapping[bytes, Array]) -> None:
        """Adds entries, all of one type of number; one that is known already stays as it is.

        When they cannot be written, they and all later ones stay in memory, with a warning;
        ``sync`` tries again.
        """
        new = {key: values for key, values in entries.items() if key not in self}
        if not new or not self.keeps:
            return
        try:
            with self._lock:
                full = bool(self._unwritten)
                self._unwritten |= new
                if not full:
                    self._write_out()
        except OSError as error:
            warnings.warn(
                f"{self.folder}: the cache cannot be written ({error}); it is only kept in memory",
                stacklevel=3,
            )

    def sync(self) -> None:
        """Returns when what this process added is on the disk. Raises OSError."""
        with self._lock:  # this may be a thread that writes a checkpoint
            self._write_out()
        for file in self._own[1:] if self._own else ():
            os.fsync(file.fileno())
        if self._own:
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _write_out(self) -> None:
        if not self._unwritten:
            return
        try:
            self._append(self._unwritten)
        except OSError:
            # where these files end is not known: others come next
            self._own, self._written = (
                None,
                0,
            )
            raise
        self._unwritten = {}

    def _append(self, entries: Mapping[bytes, Array]) -> None:
        self._own = self._own or self._begin(next(iter(entries.values())).dtype)
        part, index, values = self._own
        places: dict[bytes, Place] = {}
        numbers, rows = bytearray(), bytearray()
        start = self._written
        for key, array in entries.items():
            raw = array.tobytes()
            places[key] = part, start, len(array), crc32(raw)
            fields = FIELDS.pack(key, *places[key][1:])
            rows += fields + CHECK.pack(crc32(fields))
            numbers += raw
            start += len(array)
        _write(values, numbers)
        _write(index, rows)
        self._written, part.rows = start, part.rows + len(places)
        self._places |= places

    def _begin(self, dtype: np.dtype[Any]) -> tuple[StoreFile, BinaryIO, BinaryIO]:
        """Files of this process alone, later in the order of names than those that are there."""
        name = f"{time.time_ns():020}-{os.getpid()}-{secrets.token_hex(4)}"
        part = StoreFile(self.folder / name, {**self.about, "dtype": dtype.str})
        head = json.dumps(part.head).encode().ljust(HEAD - CHECK.size)
        path = part.path.with_suffix(".index")
        index, values = path.open("xb", buffering=0), part.values.open("xb", buffering=0)
        _write(index, head + CHECK.pack(crc32(head)))
        self._parts[path.name] = part
        return part, index, values

    def _damage(self, path: Path, entries: int) -> None:
        self.damaged += entries
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"{path} is damaged: a checksum is wrong. The damaged values are computed again. "
                f"To stop this warning, delete the file and the other file of its name",
                stacklevel=4,
            )


def entries_of(folder: Path) -> tuple[int, Head]:
    """How many entries a folder holds, by the sizes of its files alone, and what the head of one of
    them says.
    """
    count = 0
    found: Head = {}
    for path in folder.glob("*.index"):
        count += max(0, path.stat().st_size - HEAD) // ROW.itemsize
        with path.open("rb") as file:
            found = found or _head(file.read(HEAD)) or {}
    return count, found


def _head(raw: bytes) -> Head | None:
    """What the head of an index says; None when it is damaged."""
    text, check = raw[: -CHECK.size], raw[-CHECK.size :]
    return json.loads(text) if CHECK.pack(crc32(text)) == check else None


def _write(file: BinaryIO, data: bytes | bytearray) -> None:
    if file.write(data) != len(data):
        raise OSError("no space left")
