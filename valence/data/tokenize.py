"""Tokenize many examples: in several processes, and once, because the results are cached."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from valence.data.column_files import (
    ColumnWriter,
    Progress,
    StorageError,
    load_entry,
    locked,
    prune,
    remove_incomplete,
)
from valence.data.encode import Encoder, build_encoded_set
from valence.data.encoded_set import (
    ALL_DTYPES,
    ALL_NAME_LISTS,
    EXAMPLE_INDICES,
    EncodedChunk,
    EncodedSet,
    Unusable,
)
from valence.data.example_store import ExampleStore
from valence.data.tokenized_dataset import NameTable
from valence.types import Origin

CHUNK_SIZE = 256
"""Examples that a process tokenizes at once."""
MIN_EXAMPLES = 2000
"""Number of examples from which several processes and the cache are used."""
MAX_PROCESSES = 32


def tokenize(
    encoder: Encoder,
    examples: ExampleStore,
    progress: Progress = lambda num_examples, num_tokens: None,
) -> EncodedSet:
    """Tokenize examples, with the result of ``Encoder.encode_all``.

    The environment variable ``VALENCE_TOKEN_CACHE`` is the folder of the cache, or 0 to turn it
    off. Processes that tokenize the same examples wait for the first one, show its progress, and
    read its result. If files cannot be written, the tokens stay in memory.
    """
    folder = _cache_folder()
    key = _key(encoder, examples) if folder and len(examples) >= MIN_EXAMPLES else None
    if folder and key:
        try:
            with locked(folder / key, progress) as publish:

                def report(num_examples: int, num_tokens: int) -> None:
                    publish(num_examples, num_tokens)
                    progress(num_examples, num_tokens)

                chunk = _cached_chunk(encoder, examples, report, folder / key)
            return build_encoded_set(chunk, examples)
        except StorageError as error:
            warnings.warn(
                f"tokens are not cached: {error}; set VALENCE_TOKEN_CACHE to a folder with free "
                f"space, or to 0 to turn the cache off",
                stacklevel=2,
            )
    try:
        with ColumnWriter(ALL_DTYPES) as writer:
            merger = _merge_chunks(writer, encoder, examples, progress)
            return build_encoded_set(merger.chunk(), examples)
    except StorageError as error:
        warnings.warn(
            f"tokens stay in memory: {error}; set TMPDIR to a folder with free space",
            stacklevel=2,
        )
    with ColumnWriter(ALL_DTYPES, in_memory=True) as writer:
        merger = _merge_chunks(writer, encoder, examples, progress)
        return build_encoded_set(merger.chunk(), examples)


def _cached_chunk(
    encoder: Encoder, examples: ExampleStore, progress: Progress, entry: Path
) -> EncodedChunk:
    """Read the columns of all examples from the cache, after writing them if they are missing.

    Raises StorageError.
    """
    stored = load_entry(entry, ALL_DTYPES)
    if stored is None:
        remove_incomplete(entry)
        with ColumnWriter(ALL_DTYPES, entry) as writer:
            _merge_chunks(writer, encoder, examples, progress, is_alone=True).save()
        prune(entry)
        stored = load_entry(entry, ALL_DTYPES)
        if stored is None:
            raise StorageError(f"{entry} cannot be read back")
    columns, metadata = stored
    progress(len(examples), len(columns["tokens"]))
    names = metadata["names"] | {
        "columns": [tuple(names) for names in metadata["names"]["columns"]]
    }
    unusable = [
        Unusable(**row | {"origin": Origin(**row["origin"])}) for row in metadata["unusable"]
    ]
    return EncodedChunk(columns, names, unusable, len(examples))


class _Merger:
    """Concatenates the columns of chunks."""

    def __init__(self, writer: ColumnWriter) -> None:
        self._writer = writer
        self._tables = {name: NameTable() for name in {*ALL_NAME_LISTS.values()}}
        self._unusable: list[Unusable] = []
        self.num_examples = self.num_tokens = 0

    def add(self, chunk: EncodedChunk) -> None:
        columns = dict(chunk.columns)
        for column, list_name in ALL_NAME_LISTS.items():
            numbers = [self._tables[list_name].number(name) for name in chunk.names[list_name]]
            columns[column] = np.array(numbers, np.int32)[columns[column]]
        for column in EXAMPLE_INDICES:
            columns[column] = columns[column] + self.num_examples
        self._writer.append(columns)
        self._unusable += chunk.unusable
        self.num_examples += chunk.num_examples
        self.num_tokens += len(columns["tokens"])

    @property
    def _names(self) -> dict[str, list[Any]]:
        return {name: table.names for name, table in self._tables.items()}

    def chunk(self) -> EncodedChunk:
        return EncodedChunk(self._writer.columns(), self._names, self._unusable, self.num_examples)

    def save(self) -> None:
        """Complete the cache entry of the writer."""
        unusable = list(map(asdict, self._unusable))
        self._writer.save({"names": self._names, "unusable": unusable})


def _merge_chunks(
    writer: ColumnWriter,
    encoder: Encoder,
    examples: ExampleStore,
    progress: Progress,
    *,
    is_alone: bool = False,
) -> _Merger:
    """Tokenize all examples. is_alone: whether the other ranks on this machine only wait."""
    merger = _Merger(writer)
    for chunk in _chunks(encoder, examples, is_alone):
        merger.add(chunk)
        progress(merger.num_examples, merger.num_tokens)
    return merger


# Processes


def _chunks(encoder: Encoder, examples: ExampleStore, is_alone: bool) -> Iterator[EncodedChunk]:
    """Encode the examples chunk by chunk, in order."""
    starts = range(0, len(examples), CHUNK_SIZE)
    num_processes = min(_num_processes(is_alone), len(starts))
    num_chunks = 0
    if len(examples) >= MIN_EXAMPLES and num_processes > 1:
        try:
            for chunk in _chunks_from_workers(encoder, examples, starts, num_processes):
                yield chunk
                num_chunks += 1
            return
        except (BrokenProcessPool, OSError) as error:  # OSError: a process cannot be forked
            warnings.warn(
                f"a tokenizer process failed ({error}); continuing in one process, which is slower",
                stacklevel=2,
            )
    for start in starts[num_chunks:]:
        yield _encode_chunk(encoder, examples, start)


def _chunks_from_workers(
    encoder: Encoder, examples: ExampleStore, starts: Sequence[int], num_processes: int
) -> Iterator[EncodedChunk]:
    """Encode in forked processes, which share the tokenizer and the examples without a copy."""
    pool = ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(encoder, examples, os.getpid()),
    )
    try:
        remaining = iter(starts)
        pending: deque[Future[EncodedChunk]] = deque()
        for start in islice(remaining, 4 * num_processes):
            pending.append(pool.submit(_encode_in_worker, start))
        while pending:
            yield pending.popleft().result()
            for start in islice(remaining, 1):
                pending.append(pool.submit(_encode_in_worker, start))
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Encoder, ExampleStore] | None = None


def _start_worker(encoder: Encoder, examples: ExampleStore, parent: int) -> None:
    """Leave signals to the parent process, and end when it ends, even if it is killed."""
    global _worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = encoder, examples


def _encode_in_worker(start: int) -> EncodedChunk:
    assert _worker is not None
    return _encode_chunk(*_worker, start)


def _encode_chunk(encoder: Encoder, examples: ExampleStore, start: int) -> EncodedChunk:
    span = slice(start, start + CHUNK_SIZE)
    return encoder.encode_chunk(examples[span], examples.sources[span])


def _num_processes(is_alone: bool) -> int:
    """Number of processes to fork; 1 where this process cannot fork safely."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 1
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_cores = len(os.sched_getaffinity(0))
    return min(num_cores if is_alone else max(1, num_cores // int(num_ranks)), MAX_PROCESSES)


# Cache


def _cache_folder() -> Path | None:
    setting = os.environ.get("VALENCE_TOKEN_CACHE")
    if setting == "0":
        return None
    try:
        if setting:
            return Path(setting).expanduser()
        root = os.environ.get("XDG_CACHE_HOME")
        return (Path(root) if root else Path.home() / ".cache") / "valence" / "tokens"
    except RuntimeError:  # there is no home folder
        return None


def _key(encoder: Encoder, examples: ExampleStore) -> str | None:
    """Hash of everything that the tokens depend on: examples, tokenizer, template, settings, code.

    None if a part cannot be hashed: an example that cannot be pickled, or a tokenizer with Python
    code outside transformers.
    """
    tokenizer: Any = encoder.tokenizer
    in_transformers = type(tokenizer).__module__.startswith("transformers.")
    if examples.digest is None or not (in_transformers and encoder.vocab.is_backend_only):
        return None
    is_dated = "strftime_now" in str(tokenizer.chat_template)
    parts = {
        "examples": examples.digest,
        "encoder": encoder.digest,
        "day": date.today().isoformat() if is_dated else "",
        "code": _code_digest(),
    }
    content = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """Hash of the code that reads and tokenizes rows, and of the versions of its libraries."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("*.py"), folder.parent / "types.py"]):
        digest.update(path.read_bytes())
    for name in ("tokenizers", "transformers", "jinja2", "numpy"):
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            digest.update(name.encode())
    return digest.hexdigest()
