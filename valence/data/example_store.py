"""Examples of a list of any size. They are in a file, and are created when they are read."""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

from valence.data.tokenized_dataset import Array, LazySequence, NameTable
from valence.types import Example

MAX_MEMORY_BYTES = 64 << 20
"""Examples of more bytes are written to a temporary file."""
BLOCK = 1 << 20
"""Bytes that are written at once."""


class ExampleStore(LazySequence[Example]):
    """Examples in the order in which they were appended.

    Each is created when it is read. They are pickled to memory and then to a temporary file without
    a name, to which no other program can write. If the file cannot be written, they stay in memory.
    An example that cannot be pickled, such as one with a function in ``info``, stays an object.
    """

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        self._ends = array("q", [0])
        self._file: BinaryIO | None = None
        self._can_write = True
        self._num_written = 0  # bytes in the file
        self._unwritten = bytearray()
        self._objects: dict[int, Example] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._files, self._file_numbers = NameTable(), array("i")
        self.extend(examples)

    def extend(self, examples: Iterable[Example]) -> None:
        for example in examples:
            self.append(example)

    def append(self, example: Example) -> None:
        try:
            content = pickle.dumps(example, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
            self._objects[len(self)] = example
            content = b""
        self._digest.update(content)
        self._unwritten += content
        self._ends.append(self._ends[-1] + len(content))
        self._file_numbers.append(self._files.number(example.origin.path))
        if len(self._unwritten) > (BLOCK if self._file else MAX_MEMORY_BYTES) and self._can_write:
            self._write()

    def _write(self) -> None:
        content = bytes(self._unwritten)
        try:
            if self._file is None:
                # open as long as the store exists
                self._file = TemporaryFile(prefix="valence-", buffering=0)  # noqa: SIM115
            num_bytes = 0
            while num_bytes < len(content):
                num_bytes += self._file.write(content[num_bytes:]) or 0
        except OSError as error:
            self._can_write = False  # a part of the content may be in the file, but is not read
            warnings.warn(
                f"further rows stay in memory: {error}; set TMPDIR to a folder with free space",
                stacklevel=2,
            )
            return
        self._num_written += len(content)
        self._unwritten.clear()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def item(self, index: int) -> Example:
        if index in self._objects:
            return self._objects[index]
        start, end = self._ends[index], self._ends[index + 1]
        if start >= self._num_written:
            start, end = start - self._num_written, end - self._num_written
            return pickle.loads(memoryview(self._unwritten)[start:end])
        assert self._file is not None
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))

    @property
    def digest(self) -> str | None:
        """Hash of all examples; None if some cannot be pickled."""
        return None if self._objects else self._digest.hexdigest()

    @property
    def sources(self) -> Sequence[str]:
        """The file of each example."""
        return _Sources(self._files.names, self._file_numbers)


class _Sources(LazySequence[str]):
    def __init__(self, files: Sequence[str], numbers: Sequence[int]) -> None:
        self._files, self._numbers = files, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def item(self, index: int) -> str:
        return self._files[self._numbers[index]]


class ExamplesById(Mapping[str, Example]):
    """The examples by content id, the last one if several have the same content.

    ids: content ids of the examples as integers. turn_examples: further examples, of which there
    are few.
    """

    def __init__(
        self, examples: Sequence[Example], ids: Array, turn_examples: Sequence[Example]
    ) -> None:
        self._examples, self._turn_examples = examples, turn_examples
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self._turn_indices = {turn.id: i for i, turn in enumerate(turn_examples)}

    def __getitem__(self, id: str) -> Example:
        if id in self._turn_indices:
            return self._turn_examples[self._turn_indices[id]]
        try:
            number = np.uint64(int(id, 16))
        except (ValueError, OverflowError):
            raise KeyError(id) from None
        index = int(np.searchsorted(self._ids, number, side="right")) - 1
        if index < 0 or self._ids[index] != number:
            raise KeyError(id)
        return self._examples[int(self._order[index])]

    def __iter__(self) -> Iterator[str]:
        ids = (f"{number:016x}" for number in np.unique(self._ids).tolist())
        return iter(dict.fromkeys([*ids, *self._turn_indices]))

    def __len__(self) -> int:
        return sum(1 for _ in self)
