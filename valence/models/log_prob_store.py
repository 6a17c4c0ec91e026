"""A folder of floating-point arrays, each stored under a 16-byte key.

Any number of processes can add entries at the same time. An entry never changes.

Each process that adds entries writes two files. NAME.values contains the numbers of its entries,
concatenated. NAME.index contains a header that describes the numbers, then one row per entry, which
is written after the entry's numbers. Processes need no lock. A process that is killed leaves at
most numbers without a row or an incomplete last row, and readers ignore both. The header, the rows
and the numbers have checksums: a damaged entry counts as absent, with a warning that names the
file.
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
from valence.storage import fsync_path, make_folder, write_all

Array = NDArray[np.floating[Any]]
Header = Mapping[str, Any]

HEADER_SIZE = 1024  # bytes: JSON, padding with spaces, and the checksum of both
ROW = np.dtype(
    [("key", "V16"), ("start", "<u8"), ("count", "<u4"), ("sum", "<u4"), ("check", "<u4")]
)
# a row without its last column, and the last column, which is the checksum of the others
FIELDS, CHECK = (
    struct.Struct("<16sQII"),
    struct.Struct("<I"),
)
OPEN_FILES = 64


@dataclass(slots=True, eq=False)
class StoreFile:
    """The index and the values file of one process.

    path: without the suffix. header: of the index. num_rows: rows of the index that were read.
    """

    path: Path
    header: Header
    num_rows: int = 0

    @property
    def values(self) -> Path:
        return self.path.with_suffix(".values")

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.header["dtype"])


Location = tuple[StoreFile, int, int, int]
"""Where an entry is stored: its file, the index of its first number in that file, the count of its
numbers, and their checksum.
"""


class LogProbStore:
    """The entries of one folder.

    ``identity`` describes the entries. Files with another identity are an error.

    ``damaged`` is the number of entries that could not be used. ``is_writable``: whether ``add``
    writes entries.
    """

    def __init__(
        self, folder: Path, identity: Header, about: Header, *, is_writable: bool = True
    ) -> None:
        """Read the index of all entries. Numbers are read on demand.

        ``about``: additional fields for the header of new files.

        Raises UserError when the folder cannot be created or read, or contains entries of another
        identity.
        """
        self.folder, self.about = folder, {**identity, **about}
        self.identity, self.is_writable = identity, is_writable
        self.damaged = 0
        self._locations: dict[bytes, Location] = {}
        # by the name of the index; None if its header is damaged
        self._files: dict[str, StoreFile | None] = {}
        self._readers: dict[StoreFile, BinaryIO] = {}
        self._output: tuple[StoreFile, BinaryIO, BinaryIO] | None = None  # and index and values
        self._num_written = 0  # numbers in the output file
        self._unwritten: dict[bytes, Array] = {}
        self._lock = threading.Lock()
        self._warned: set[Path] = set()
        try:
            if is_writable:
                make_folder(folder, folder.parent)
        except OSError as error:
            raise self._unusable(error) from error
        self.refresh()

    def __len__(self) -> int:
        return len(self._locations) + len(self._unwritten)

    def __contains__(self, key: bytes) -> bool:
        return key in self._locations or key in self._unwritten

    def header(self, key: bytes) -> Header:
        """Return the header of the file that contains an entry, or will contain it."""
        return self._locations[key][0].header if key in self._locations else self.about

    def refresh(self) -> None:
        """Read the entries that other processes have added. Entries already known do not change.

        Raises UserError when the folder cannot be read.
        """
        try:
            names = os.listdir(self.folder) if self.folder.is_dir() else []
            # Newest first: an entry that was damaged is written again, to a later file.
            for name in sorted((name for name in names if name.endswith(".index")), reverse=True):
                known = self._files.get(name)
                if known is None and name in self._files:
                    continue
                with suppress(FileNotFoundError):  # deleted after it was listed
                    if (
                        os.path.getsize(self.folder / name)
                        >= HEADER_SIZE + ((known.num_rows if known else 0) + 1) * ROW.itemsize
                    ):
                        self._read_index(self.folder / name)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"cannot use the reference cache ({error})",
            code="reference-cache-unusable",
            where=str(self.folder),
            fix="repair the folder, or set another one",
        )

    def _read_index(self, path: Path) -> None:
        """Read the new rows of an index, except an incomplete last row."""
        with path.open("rb") as stream:
            if path.name not in self._files:
                self._files[path.name] = self._open(path, stream.read(HEADER_SIZE))
            file = self._files[path.name]
            if file is None:
                return
            stream.seek(HEADER_SIZE + file.num_rows * ROW.itemsize)
            raw = stream.read()
        rows = np.frombuffer(raw, ROW, count=len(raw) // ROW.itemsize)
        file.num_rows += len(rows)
        view = memoryview(raw)
        sums = [
            crc32(view[offset : offset + FIELDS.size])
            for offset in range(0, len(rows) * ROW.itemsize, ROW.itemsize)
        ]
        valid = rows["check"] == np.array(sums, np.uint32)
        if not valid.all():
            self._report_damage(path, int((~valid).sum()))
        keys, *columns = (rows[name][valid].tolist() for name in ("key", "start", "count", "sum"))
        for key, start, count, checksum in zip(keys, *columns, strict=True):
            self._locations.setdefault(key, (file, start, count, checksum))

    def _open(self, path: Path, raw: bytes) -> StoreFile | None:
        """Return the file with this index and raw header; None if the header is damaged."""
        header = _parse_header(raw)
        if header is None:
            self._report_damage(path, 1)
            return None
        for name, value in self.identity.items():
            if header.get(name) != value:
                raise UserError(
                    f"the file has {name} {header.get(name)!r}, but its folder has {value!r}",
                    code="reference-cache-foreign",
                    where=str(path),
                    fix="move it, and the .values file of the same name, back to the folder that "
                    "it came from, or delete both",
                )
        return StoreFile(path.with_suffix(""), header)

    def get(self, key: bytes) -> Array | None:
        """Return the numbers of an entry; None if it does not exist or is damaged."""
        if key not in self._locations:
            return self._unwritten.get(key)
        file, start, count, checksum = self._locations[key]
        size = file.dtype.itemsize
        try:
            reader = self._reader(file)
            reader.seek(start * size)
            raw = reader.read(count * size)
        except OSError:
            raw = b""
        if len(raw) < count * size or crc32(raw) != checksum:
            del self._locations[key]
            self._report_damage(file.values, 1)
            return None
        return np.frombuffer(raw, file.dtype)

    def _reader(self, file: StoreFile) -> BinaryIO:
        if file not in self._readers:
            if len(self._readers) == OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[file] = file.values.open("rb", buffering=0)
        return self._readers[file]

    def add(self, entries: Mapping[bytes, Array]) -> None:
        """Add entries, all of one dtype. Entries already known do not change.

        If writing fails, these entries and all later ones stay in memory, with a warning. ``sync``
        tries to write them again.
        """
        new = {key: values for key, values in entries.items() if key not in self}
        if not new or not self.is_writable:
            return
        try:
            with self._lock:
                has_failed = bool(self._unwritten)
                self._unwritten |= new
                if not has_failed:
                    self._write_out()
        except OSError as error:
            warnings.warn(
                f"{self.folder}: cannot write the reference cache ({error}); new entries stay in "
                "memory",
                stacklevel=3,
            )

    def sync(self) -> None:
        """Block until all entries of this process are on the disk. Raises OSError."""
        with self._lock:  # the caller may be a thread that writes a checkpoint
            self._write_out()
        if self._output:
            file = self._output[0]
            for path in (file.path.with_suffix(".index"), file.values, self.folder):
                fsync_path(path)

    def _write_out(self) -> None:
        if not self._unwritten:
            return
        try:
            self._append(self._unwritten)
        except OSError:
            # The files may end anywhere: start new ones.
            self._output, self._num_written = None, 0
            raise
        self._unwritten = {}

    def _append(self, entries: Mapping[bytes, Array]) -> None:
        self._output = self._output or self._create_output(next(iter(entries.values())).dtype)
        file, index, values = self._output
        locations: dict[bytes, Location] = {}
        numbers, rows = bytearray(), bytearray()
        start = self._num_written
        for key, array in entries.items():
            raw = array.tobytes()
            locations[key] = file, start, len(array), crc32(raw)
            fields = FIELDS.pack(key, *locations[key][1:])
            rows += fields + CHECK.pack(crc32(fields))
            numbers += raw
            start += len(array)
        write_all(values, numbers)
        write_all(index, rows)
        self._num_written, file.num_rows = start, file.num_rows + len(locations)
        self._locations |= locations

    def _create_output(self, dtype: np.dtype[Any]) -> tuple[StoreFile, BinaryIO, BinaryIO]:
        """Create the files of this process, with a name that sorts after the existing ones."""
        name = f"{time.time_ns():020}-{os.getpid()}-{secrets.token_hex(4)}"
        file = StoreFile(self.folder / name, {**self.about, "dtype": dtype.str})
        header = json.dumps(file.header).encode().ljust(HEADER_SIZE - CHECK.size)
        path = file.path.with_suffix(".index")
        index, values = path.open("xb", buffering=0), file.values.open("xb", buffering=0)
        write_all(index, header + CHECK.pack(crc32(header)))
        self._files[path.name] = file
        return file, index, values

    def _report_damage(self, path: Path, num_entries: int) -> None:
        self.damaged += num_entries
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"{path} is damaged: a checksum is wrong. Damaged entries are computed again; to "
                "stop this warning, delete the .index and the .values file of this name",
                stacklevel=4,
            )


def count_entries(folder: Path) -> tuple[int, Header]:
    """Return the number of entries of a folder, computed from the sizes of its files, and the
    header of one file.
    """
    count = 0
    header: Header = {}
    for path in folder.glob("*.index"):
        count += max(0, path.stat().st_size - HEADER_SIZE) // ROW.itemsize
        with path.open("rb") as file:
            header = header or _parse_header(file.read(HEADER_SIZE)) or {}
    return count, header


def _parse_header(raw: bytes) -> Header | None:
    """Return the header of an index; None if it is damaged."""
    text, check = raw[: -CHECK.size], raw[-CHECK.size :]
    return json.loads(text) if CHECK.pack(crc32(text)) == check else None
