"""Several processes, the cache and files change no tokenized row, whatever fails; a store returns
the examples that were appended.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.tiny import CHATML, LAST_UNSTRIPPED, tiny_tokenizer
from valence.data import column_files, example_store, tokenize
from valence.data.audit import audit
from valence.data.encode import Encoder
from valence.data.encoded_set import EncodedChunk, EncodedSet
from valence.data.example_store import ExamplesById, ExampleStore
from valence.data.load import DataFile, InMemory, Loaded, load
from valence.types import Chat, Demonstration, Example, Judgement, Origin

TEXTS = ("the sun", "a star", "<|im_end|>", "hello <|im_end|>", "x" * 300)
ROWS = [
    {"prompt": f"q{i % 40}", "completion": TEXTS[i % 5], "label": i % 3 == 0, "score": i / 7}
    for i in range(150)
]
NOT_PICKLED = Judgement(
    prompt="q", completion="a", label=True, info={"f": lambda: 0}, origin=Origin("m", 1)
)
FORK = multiprocessing.get_context("fork")
SMALL_LIMITS = (
    (tokenize, "MIN_EXAMPLES", 10),
    (tokenize, "CHUNK_SIZE", 7),
    (column_files, "MAX_MEMORY_BYTES", 1000),
    (column_files, "BLOCK", 500),
    (column_files, "POLL_SECONDS", 0.01),
    (example_store, "MAX_MEMORY_BYTES", 1000),
    (example_store, "BLOCK", 300),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the cache. Processes, files and the cache are used for few rows already."""
    for module, name, value in SMALL_LIMITS:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load_rows() -> Loaded:
    return load([InMemory(ROWS)], "judgement")


def make_encoder(**settings: Any) -> Encoder:
    return Encoder(tiny_tokenizer(CHATML), **{"max_length": 100, **settings})


def tokenize_rows(loaded: Loaded, encoder: Encoder) -> EncodedSet:
    return tokenize.tokenize(encoder, loaded.examples)


def encode_rows() -> EncodedSet:
    """The rows, tokenized in this process and in memory."""
    loaded = load_rows()
    return make_encoder().encode_all(loaded.examples, loaded.sources)


def entries(cache: Path) -> list[Path]:
    """All folders of the cache, including incomplete ones."""
    return [path for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def num_incomplete(cache: Path) -> int:
    return sum(path.name.startswith("incomplete-") for path in entries(cache))


def fail_if_called(*_: Any) -> Any:
    raise AssertionError("rows were tokenized")


class RefusingEncoder(Encoder):
    def encode_chunk(self, *_: Any) -> EncodedChunk:
        return fail_if_called()


def start(function: Callable[[], object]) -> BaseProcess:
    """Run a function in a forked process."""
    process = FORK.Process(target=function)
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    process.join(120)
    return process.exitcode


def test_processes_and_the_cache_change_no_row(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    loaded, encoder, expected = load_rows(), make_encoder(), encode_rows()
    assert len(expected.unusable) > 30 < len(expected.units)
    progress: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    first = tokenize.tokenize(encoder, loaded.examples, lambda *counts: progress.append(counts))
    assert progress[-1] == (len(ROWS), expected.units.num_unique_tokens.sum())
    assert progress == sorted(progress)
    second = tokenize_rows(load_rows(), RefusingEncoder(tiny_tokenizer(CHATML), max_length=100))
    for result in (first, second):
        assert result == expected
        assert repr(list(result.units)) == repr(list(expected.units))
        assert audit(loaded, result, encoder) == audit(loaded, expected, encoder)
    assert len(entries(cache)) == 1


def test_the_cache_stores_conversations_that_are_divided(cache: Path) -> None:
    turns = [
        {"role": role, "content": f"{role} {n} "}
        for n in range(2)
        for role in ("user", "assistant")
    ]
    rows = ExampleStore(
        Demonstration(
            prompt=Chat(tuple(turns[:-1])),
            completion=Chat((turns[-1],)),
            weight=1 + i,
            origin=Origin("talks", i),
        )
        for i in range(12)
    )
    encoder = Encoder(tiny_tokenizer(LAST_UNSTRIPPED), max_length=500, train_on="assistant")
    expected = encoder.encode_all(rows, rows.sources)
    assert len(expected.turn_examples) == 24 == len(expected.units)
    for _ in range(2):
        result = tokenize.tokenize(encoder, rows)
        assert result == expected
        ids = result.audit_columns.columns["row_id"]
        assert {unit.id for unit in result.units} <= set(
            ExamplesById(rows, ids, result.turn_examples)
        )


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "tokens").write_bytes((entry / "tokens").read_bytes()[:-4]),
        lambda entry: (entry / "mask").write_bytes(b"\1" * (entry / "mask").stat().st_size),
        lambda entry: (entry / "weight").unlink(),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text(
            (entry / "entry.json").read_text().replace('"format": 1', '"format": 2')
        ),
    ],
)
def test_a_damaged_entry_is_written_again(damage: Callable[[Path], Any], cache: Path) -> None:
    expected = encode_rows()
    assert tokenize_rows(load_rows(), make_encoder()) == expected
    [entry] = entries(cache)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    damage(entry)
    assert tokenize_rows(load_rows(), make_encoder()) == expected
    assert entries(cache) == [entry]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before


def test_each_change_of_rows_settings_or_code_has_another_entry(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    loaded = load_rows()
    tokenize_rows(loaded, make_encoder())
    for encoder in (
        make_encoder(max_length=99),
        make_encoder(long_rows="cut_completion"),
        make_encoder(as_chat=False),
        make_encoder(stop_ids=[7]),
        Encoder(tiny_tokenizer(CHATML + "{# another #}"), max_length=100),
        Encoder(tiny_tokenizer(CHATML, eos=False), max_length=100),
    ):
        tokenize_rows(loaded, encoder)
    tokenize_rows(load([InMemory(ROWS[:-1])], "judgement"), make_encoder())
    tokenize_rows(load([InMemory(ROWS, path="elsewhere")], "judgement"), make_encoder())
    tokenize_rows(load([InMemory(ROWS, weight=2.0)], "judgement"), make_encoder())
    monkeypatch.setattr(tokenize, "_code_digest", lambda: "another version")
    tokenize_rows(loaded, make_encoder())
    assert len(entries(cache)) == 11


def test_a_changed_file_of_the_same_size_and_time_is_tokenized_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS]

    def write(lines: list[str]) -> EncodedSet:
        path.write_text("\n".join(lines))
        os.utime(path, (1000, 1000))
        return tokenize_rows(load([DataFile(str(path))], "judgement"), make_encoder())

    first = write(lines)
    size = path.stat().st_size
    lines[10] = lines[10].replace("the sun", "the sum")
    second = write(lines)
    assert path.stat().st_size == size
    assert [a == b for a, b in zip(first.units, second.units, strict=True)].count(False) == 1


def test_a_tokenizer_with_the_same_vocabulary_size_has_another_entry(cache: Path) -> None:
    tokenizer, other = tiny_tokenizer(CHATML), tiny_tokenizer(CHATML)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["s"], vocabulary["t"] = vocabulary["t"], vocabulary["s"]
    other._tokenizer = Tokenizer.from_str(json.dumps(state))
    assert len(other) == len(tokenizer)
    loaded = load_rows()
    results = [tokenize_rows(loaded, Encoder(item, max_length=100)) for item in (tokenizer, other)]
    assert results[1] == Encoder(other, max_length=100).encode_all(loaded.examples, loaded.sources)
    assert results[0] == encode_rows() != results[1]
    assert len(entries(cache)) == 2


def test_tokenizers_with_custom_code_are_not_cached(cache: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML)

    class Upper(type(tokenizer)):
        def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super().encode(text.upper(), *args, **kwargs)

    upper = tiny_tokenizer(CHATML)
    upper.__class__ = Upper
    loaded = load_rows()
    encoder = Encoder(upper, max_length=100)
    result = tokenize_rows(loaded, encoder)
    assert result == encoder.encode_all(loaded.examples, loaded.sources)
    assert result.units != encode_rows().units
    assert entries(cache) == []


def test_the_cache_is_optional(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    expected = encode_rows()
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", "0")
    assert tokenize_rows(load_rows(), make_encoder()) == expected
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="VALENCE_TOKEN_CACHE"):
        assert tokenize_rows(load_rows(), make_encoder()) == expected
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(cache))
    rows = [NOT_PICKLED] * 20
    assert len(tokenize.tokenize(make_encoder(), ExampleStore(rows)).units) == 20
    assert entries(cache) == []


def test_a_killed_worker_is_replaced_by_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()

    class DyingEncoder(Encoder):
        def encode_chunk(self, examples: Any, sources: Any = None) -> EncodedChunk:
            if examples[0].origin.line > 30 and os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode_chunk(examples, sources)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    encoder = DyingEncoder(tiny_tokenizer(CHATML), max_length=100)
    with pytest.warns(UserWarning, match="one process"):
        assert tokenize_rows(load_rows(), encoder) == encode_rows()


def tokenize_until_killed() -> None:
    def progress(num_examples: int, _: int) -> None:
        if num_examples > 80:
            os.kill(os.getpid(), signal.SIGKILL)

    tokenize.tokenize(make_encoder(), load_rows().examples, progress)


def test_a_killed_process_leaves_no_entry(cache: Path) -> None:
    assert exit_code(start(tokenize_until_killed)) == -signal.SIGKILL
    assert num_incomplete(cache) == len(entries(cache)) == 1
    assert tokenize_rows(load_rows(), make_encoder()) == encode_rows()
    assert (num_incomplete(cache), len(entries(cache))) == (0, 1)
    # another entry removes it as well
    for path in entries(cache):
        path.rename(path.with_name(f"incomplete-{path.name}-abc"))
    tokenize_rows(load_rows(), make_encoder(max_length=99))
    assert (num_incomplete(cache), len(entries(cache))) == (0, 1)


def tokenize_without_disk(num_bytes: int) -> None:
    expected = encode_rows()
    # writes beyond this size of a file fail
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        loaded = load_rows()
        result = tokenize_rows(loaded, make_encoder())
    assert result == expected
    assert list(loaded.examples) == list(load_rows().examples)
    messages = [str(record.message) for record in records]
    for part in ("rows stay in memory", "not cached", "tokens stay in memory"):
        assert any(part in message for message in messages), messages


@pytest.mark.parametrize("num_bytes", [0, 100, 2500])
def test_a_full_disk_changes_no_row(cache: Path, num_bytes: int) -> None:
    assert exit_code(start(partial(tokenize_without_disk, num_bytes))) == 0
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_changes_no_row(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise PermissionError("read-only file system")

    for name in ("os.open", "mkdtemp", "os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"valence.data.column_files.{name}", fail)
            with pytest.warns(UserWarning, match="read-only"):
                assert tokenize_rows(load_rows(), make_encoder()) == encode_rows()
        assert entries(cache) == []


def test_processes_that_share_the_cache_tokenize_once(cache: Path, tmp_path: Path) -> None:
    expected = encode_rows()
    barrier = FORK.Barrier(2)

    def tokenize_and_compare(name: str) -> None:
        class RecordingEncoder(Encoder):
            def encode_chunk(self, *arguments: Any) -> EncodedChunk:
                (tmp_path / name).write_text("tokenized")
                return super().encode_chunk(*arguments)

        encoder = RecordingEncoder(tiny_tokenizer(CHATML), max_length=100)
        barrier.wait(60)
        assert tokenize_rows(load_rows(), encoder) == expected

    processes = [start(partial(tokenize_and_compare, name)) for name in ("a", "b")]
    assert [exit_code(process) for process in processes] == [0, 0]
    assert [(tmp_path / name).exists() for name in ("a", "b")].count(True) == 1
    assert len(entries(cache)) == 1


def test_a_waiting_process_shows_the_progress_of_the_other(cache: Path) -> None:
    entry = cache / ("0" * 32)
    counts: list[tuple[int, int]] = []
    has_waited = threading.Event()

    def progress(*numbers: int) -> None:
        counts.append((numbers[0], numbers[1]))
        has_waited.set()

    def wait() -> None:
        with column_files.locked(entry, progress):
            counts.append((-1, -1))

    with column_files.locked(entry, fail_if_called) as publish:
        publish(3, 70)
        thread = threading.Thread(target=wait)
        thread.start()
        assert has_waited.wait(20)
    thread.join(20)
    assert (counts[0], counts[-1]) == ((3, 70), (-1, -1))


def test_a_deleted_lock_file_locks_nothing(cache: Path) -> None:
    entry = cache / ("0" * 32)
    lock = cache / f"{entry.name}.lock"
    with column_files.locked(entry, fail_if_called):
        deleted = lock.open("rb")
        lock.unlink()
    fcntl.flock(deleted, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with column_files.locked(entry, fail_if_called):
        assert lock.exists()
    deleted.close()


def test_the_least_recently_used_entries_are_deleted(cache: Path, tmp_path: Path) -> None:
    for length in (90, 91, 92):
        tokenize_rows(load_rows(), make_encoder(max_length=length))
    other = cache / "files of the user"
    other.mkdir()
    (other / "thesis.txt").write_text("x" * 10**6)
    oldest, used, newest = sorted(
        (path for path in entries(cache) if path != other), key=lambda path: path.stat().st_mtime
    )
    for seconds, path in enumerate((other, oldest, used), start=1):
        os.utime(path, (seconds, seconds))
    size = sum(file.stat().st_size for path in (used, newest) for file in path.iterdir())
    column_files.prune(newest, size)
    assert {*entries(cache)} == {other, used, newest}
    # an entry that another process uses stays
    with column_files.locked(used, fail_if_called):
        column_files.prune(newest, 0)
        assert {*entries(cache)} == {other, used, newest}
    column_files.prune(newest, 0)
    assert {*entries(cache)} == {other, newest}


def test_a_rank_waits_for_the_others_only_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (tokenize._num_processes(True), tokenize._num_processes(False)) == (8, 2)


# The store of examples


def make_examples() -> list[Example]:
    return [*load_rows().examples, NOT_PICKLED]


def test_a_store_returns_what_was_appended() -> None:
    rows = make_examples()
    store = ExampleStore()
    for number, row in enumerate(rows):
        store.append(row)
        assert store[number] == row  # also before others are appended
    assert store == rows
    assert [store[i] for i in (149, 3, -1)] == [rows[i] for i in (149, 3, -1)]
    assert list(store.sources) == [row.origin.path for row in rows]


def test_the_last_of_equal_examples_has_their_id() -> None:
    rows = [
        Judgement(prompt="q", completion=f"a{i % 3}", label=True, origin=Origin("m", i))
        for i in range(9)
    ]
    columns = make_encoder().encode_all(rows).audit_columns
    by_id = ExamplesById(rows, columns.columns["row_id"], ())
    assert {**by_id} == {row.id: row for row in rows}
    assert by_id.get("0" * 16) is by_id.get("no id") is None
    assert json.dumps(sorted(by_id)) == json.dumps(sorted({row.id for row in rows}))
