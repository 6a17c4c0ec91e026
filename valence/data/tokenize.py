"""Tokenize many examples: in several processes, and once, with what comes out in a cache."""

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
from collections.abc import Callable, Iterator, Sequence
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

from valence.data.column_files import ColumnWriter, load_entry, locked, prune
from valence.data.encode import Encoder, encoded_set
from valence.data.encoded_set import (
    ALL_COLUMNS,
    ALL_NAMES,
    EXAMPLE_INDICES,
    EncodedChunk,
    EncodedSet,
    Unusable,
)
from valence.data.example_store import ExampleStore
from valence.data.tokenized_dataset import Names
from valence.types import Origin

CHUNK = 256
"""Examples that a process tokenizes at once."""
MANY = 2000
"""Examples from which on several processes and the cache are used."""
MOST_PROCESSES = 32

Progress = Callable[[int, int], None]
"""Called with the numbers of examples and of tokens so far."""


def tokenize(
    encoder: Encoder, examples: ExampleStore, progress: Progress = lambda done, tokens: None
) -> EncodedSet:
    """The examples as tokens, as ``Encoder.encode_all`` gives them.

    Other processes that tokenize the same wait for the first one, and read what it has written.
    ``VALENCE_TOKEN_CACHE`` names the folder of the cache, or is 0 to use none.
    """
    folder = _cache_folder()
    key = _key(encoder, examples) if folder is not None and len(examples) >= MANY else None
    if folder is None or key is None:
        return _tokenize(encoder, examples, progress, None)
    try:
        with locked(folder / key):
            return _tokenize(encoder, examples, progress, folder / key)
    except OSError as error:
        warnings.warn(f"the cache of tokens cannot be used ({error})", stacklevel=2)
        return _tokenize(encoder, examples, progress, None)


def _tokenize(
    encoder: Encoder, examples: ExampleStore, progress: Progress, entry: Path | None
) -> EncodedSet:
    """entry: of the cache, which is read or else written. Raises OSError when it cannot be."""
    loaded = load_entry(entry, ALL_COLUMNS) if entry else None
    if loaded is None:
        merger = _Merger(entry.parent if entry else None)
        try:
            for chunk in _chunks(encoder, examples):
                merger.add(chunk)
                progress(merger.num_examples, merger.num_tokens)
            if entry is None:
                return encoded_set(merger.chunk(), examples)
            merger.save(entry)
        finally:
            merger.discard()
        prune(entry.parent, entry)
        loaded = load_entry(entry, ALL_COLUMNS)
        if loaded is None:
            raise OSError(f"{entry} cannot be read back")
    columns, facts = loaded
    names = facts["names"] | {"columns": [tuple(each) for each in facts["names"]["columns"]]}
    unusable = [Unusable(**row | {"origin": Origin(**row["origin"])}) for row in facts["unusable"]]
    chunk = EncodedChunk(columns, names, unusable, len(examples))
    return encoded_set(chunk, examples)


class _Merger:
    """Puts the columns of chunks together."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = ColumnWriter(ALL_COLUMNS, folder)
        self._names = {name: Names() for name in {*ALL_NAMES.values()}}
        self._unusable: list[Unusable] = []
        self.num_examples = self.num_tokens = 0

    def add(self, chunk: EncodedChunk) -> None:
        columns = dict(chunk.columns)
        for column, name in ALL_NAMES.items():
            numbers = [self._names[name].number(each) for each in chunk.names[name]]
            columns[column] = np.array(numbers, np.int32)[columns[column]]
        for column in EXAMPLE_INDICES:
            columns[column] = columns[column] + self.num_examples
        self._writer.append(columns)
        self._unusable += chunk.unusable
        self.num_examples += chunk.num_examples
        self.num_tokens += len(columns["tokens"])

    def chunk(self) -> EncodedChunk:
        names = {name: each.names for name, each in self._names.items()}
        return EncodedChunk(self._writer.columns(), names, self._unusable, self.num_examples)

    def save(self, entry: Path) -> None:
        names = {name: each.names for name, each in self._names.items()}
        self._writer.save(entry, {"names": names, "unusable": list(map(asdict, self._unusable))})

    def discard(self) -> None:
        self._writer.discard()


# Processes


def _chunks(encoder: Encoder, examples: ExampleStore) -> Iterator[EncodedChunk]:
    """The examples as columns, in order."""
    starts = range(0, len(examples), CHUNK)
    processes = min(_usable_cores(), len(starts), MOST_PROCESSES)
    done = 0
    if len(examples) >= MANY and processes > 1 and _may_fork():
        try:
            for chunk in _in_processes(encoder, examples, starts, processes):
                yield chunk
                done += 1
            return
        except BrokenProcessPool as error:
            warnings.warn(
                f"a process that tokenizes has ended ({error}); going on in this one", stacklevel=2
            )
    for start in starts[done:]:
        yield _encode_chunk(encoder, examples, start)


def _in_processes(
    encoder: Encoder, examples: ExampleStore, starts: Sequence[int], processes: int
) -> Iterator[EncodedChunk]:
    """Forked processes have the tokenizer and the examples without any of it being copied."""
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(encoder, examples, os.getpid()),
    )
    try:
        waiting: deque[Future[EncodedChunk]] = deque()
        rest = iter(starts)
        for start in islice(rest, 4 * processes):
            waiting.append(pool.submit(_encode_in_worker, start))
        while waiting:
            yield waiting.popleft().result()
            for start in islice(rest, 1):
                waiting.append(pool.submit(_encode_in_worker, start))
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Encoder, ExampleStore] | None = None


def _start_worker(encoder: Encoder, examples: ExampleStore, parent: int) -> None:
    """End with the parent, however that ends, and leave signals to it."""
    global _worker
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = encoder, examples


def _encode_in_worker(start: int) -> EncodedChunk:
    assert _worker is not None
    return _encode_chunk(*_worker, start)


def _encode_chunk(encoder: Encoder, examples: ExampleStore, start: int) -> EncodedChunk:
    span = slice(start, start + CHUNK)
    return encoder.encode_chunk(examples[span], examples.sources[span])


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _may_fork() -> bool:
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


# Cache


def _cache_folder() -> Path | None:
    chosen = os.environ.get("VALENCE_TOKEN_CACHE")
    if chosen == "0":
        return None
    if chosen:
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "valence" / "tokens"


def _key(encoder: Encoder, examples: ExampleStore) -> str | None:
    """A name for all that the tokens depend on: the examples, the tokenizer and its template, the
    settings, and the program. None if that cannot be said.
    """
    tokenizer: Any = encoder.tokenizer
    if examples.digest is None or not tokenizer.is_fast:
        return None
    is_dated = "strftime_now" in str(tokenizer.chat_template)
    parts = {
        "examples": examples.digest,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
        "day": date.today().isoformat() if is_dated else "",
        "settings": encoder.settings,
        "program": _program(),
    }
    content = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@cache
def _program() -> str:
    """A digest of the code that reads and tokenizes rows, and of the libraries that it uses."""
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
