"""Examples of a list of any size, of which only those exist as objects that are being read."""

from __future__ import annotations

import hashlib
import os
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np

from valence.data.tokenized_dataset import Array, LazySequence, Names
from valence.types import Example

MEMORY_BYTES = 64 << 20
"""Bytes of examples that are held in memory; further ones are written to a temporary file."""
BLOCK = 1 << 20
"""Bytes that are written at once."""


class ExampleStore(LazySequence[Example]):
    """Examples in the order in which they were appended.

    Each is made when it is read. They are pickled, into memory and then into a temporary file that
    has no name: no other program can have written what is read here. An example that cannot be
    pickled, such as one whose ``info`` holds a function, stays an object.
    """

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        self._ends = array("q", [0])
        self._file: BinaryIO | None = None
        self._written = 0  # bytes in the file
        self._unwritten = bytearray()
        self._objects: dict[int, Example] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._files, self._file_numbers = Names(), array("i")
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
        if len(self._unwritten) > (BLOCK if self._file else MEMORY_BYTES):
            self._write()

    def _write(self) -> None:
        if self._file is None:
            # kept open as long as the store
            self._file = TemporaryFile(prefix="valence-", buffering=0)  # noqa: SIM115
        view = memoryview(bytes(self._unwritten))
        while view:
            written = self._file.write(view) or 0
            self._written, view = self._written + written, view[written:]
        self._unwritten.clear()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def item(self, index: int) -> Example:
        if index in self._objects:
            return self._objects[index]
        start, end = self._ends[index], self._ends[index + 1]
        if start >= self._written:
            start, end = start - self._written, end - self._written
            return pickle.loads(memoryview(self._unwritten)[start:end])
        assert self._file is not None
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))

    @property
    def digest(self) -> str | None:
        """Of all examples; None if some cannot be pickled."""
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
    """The examples by content id: of several with the same content the last.

    ids: of the examples, as numbers. parts: further examples, of which there are few.
    """

    def __init__(self, examples: Sequence[Example], ids: Array, parts: Sequence[Example]) -> None:
        self._examples, self._parts = examples, parts
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self._part_numbers = {part.id: i for i, part in enumerate(parts)}

    def __getitem__(self, id: str) -> Example:
        if id in self._part_numbers:
            return self._parts[self._part_numbers[id]]
        try:
            number = np.uint64(int(id, 16))
        except (ValueError, OverflowError):
            raise KeyError(id) from None
        place = int(np.searchsorted(self._ids, number, side="right")) - 1
        if place < 0 or self._ids[place] != number:
            raise KeyError(id)
        return self._examples[int(self._order[place])]

    def __iter__(self) -> Iterator[str]:
        ids = (f"{number:016x}" for number in np.unique(self._ids).tolist())
        return iter(dict.fromkeys([*ids, *self._part_numbers]))

    def __len__(self) -> int:
        return sum(1 for _ in self)
