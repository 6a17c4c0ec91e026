"""Rows that are tokenized in several processes, and found in the cache, are what they would be
without either; rows that are stored in a file are those that were appended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CHATML, LAST_UNSTRIPPED, tiny_tokenizer
from valence.data import column_files, example_store, tokenize
from valence.data.audit import audit
from valence.data.encode import Encoder
from valence.data.encoded_set import EncodedSet
from valence.data.example_store import ExamplesById, ExampleStore
from valence.data.load import InMemory, Loaded, load
from valence.types import Chat, Demonstration, Example, Judgement, Origin

TEXTS = ("the sun", "a star", "<|im_end|>", "hello <|im_end|>", "x" * 300)
ROWS = [
    {"prompt": f"q{i % 40}", "completion": TEXTS[i % 5], "label": i % 3 == 0, "score": i / 7}
    for i in range(150)
]
NOT_PICKLED = Judgement(
    prompt="q", completion="a", label=True, info={"f": lambda: 0}, origin=Origin("m", 1)
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Processes, files and the cache are used for few rows already."""
    for module, name, value in (
        (tokenize, "MANY", 10),
        (tokenize, "CHUNK", 7),
        (column_files, "MEMORY_BYTES", 1000),
        (column_files, "BLOCK", 500),
        (example_store, "MEMORY_BYTES", 1000),
        (example_store, "BLOCK", 300),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded() -> Loaded:
    return load([InMemory(ROWS)], "judgement")


def encoder(**how: Any) -> Encoder:
    return Encoder(tiny_tokenizer(CHATML), **{"max_length": 100, **how})


def tokenized(data: Loaded, reader: Encoder) -> EncodedSet:
    return tokenize.tokenize(reader, data.examples)


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def is_not_called(*_: Any) -> Any:
    raise AssertionError("rows were tokenized")


def test_several_processes_and_the_cache_change_nothing(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    data, reader = loaded(), encoder()
    alone = reader.encode_all(data.examples, data.sources)
    assert len(alone.unusable) > 30 < len(alone.units)
    progress: list[tuple[int, int]] = []
    monkeypatch.setattr(tokenize, "_usable_cores", lambda: 3)
    first = tokenize.tokenize(reader, data.examples, lambda *done: progress.append(done))
    assert progress[-1][0] == len(ROWS)
    assert progress == sorted(progress)
    monkeypatch.setattr(tokenize, "_chunks", is_not_called)
    again = tokenized(loaded(), encoder())
    for found in (first, again):
        assert found == alone
        assert repr(list(found.units)) == repr(list(alone.units))
        assert audit(data, found, reader) == audit(data, alone, reader)
    assert len(entries(small)) == 1


def test_conversations_that_are_split_come_out_of_the_cache(small: Path) -> None:
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
    reader = Encoder(tiny_tokenizer(LAST_UNSTRIPPED), max_length=500, train_on="assistant")
    alone = reader.encode_all(rows, rows.sources)
    assert len(alone.parts) == 24 == len(alone.units)
    for _ in range(2):
        found = tokenize.tokenize(reader, rows)
        assert found == alone
        by_id = ExamplesById(rows, found.facts.columns["row_id"], found.parts)
        assert {unit.id for unit in found.units} <= set(by_id)


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
def test_a_damaged_entry_is_written_again(damage: Callable[[Path], Any], small: Path) -> None:
    data, reader = loaded(), encoder()
    alone = reader.encode_all(data.examples, data.sources)
    assert tokenized(data, reader) == alone
    [entry] = entries(small)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    damage(entry)
    assert tokenized(loaded(), encoder()) == alone
    assert entries(small) == [entry]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before


def test_other_rows_and_other_settings_have_entries_of_their_own(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    data = loaded()
    tokenized(data, encoder())
    for reader in (
        encoder(max_length=99),
        encoder(long_rows="cut_completion"),
        encoder(as_chat=False),
        encoder(stop_ids=[7]),
        Encoder(tiny_tokenizer(CHATML + "{# another #}"), max_length=100),
        Encoder(tiny_tokenizer(CHATML, eos=False), max_length=100),
    ):
        tokenized(data, reader)
    tokenized(load([InMemory(ROWS[:-1])], "judgement"), encoder())
    tokenized(load([InMemory(ROWS, path="elsewhere")], "judgement"), encoder())
    tokenized(load([InMemory(ROWS, weight=2.0)], "judgement"), encoder())
    monkeypatch.setattr(tokenize, "_program", lambda: "another version")
    tokenized(data, encoder())
    assert len(entries(small)) == 11


def test_what_cannot_be_cached_is_tokenized_all_the_same(
    monkeypatch: pytest.MonkeyPatch, small: Path, tmp_path: Path
) -> None:
    data, reader = loaded(), encoder()
    alone = reader.encode_all(data.examples, data.sources)
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", "0")
    assert tokenized(data, reader) == alone
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cache"):
        assert tokenized(data, reader) == alone
    monkeypatch.setenv("VALENCE_TOKEN_CACHE", str(small))
    rows = [NOT_PICKLED] * 20
    assert len(tokenize.tokenize(reader, ExampleStore(rows)).units) == 20
    assert entries(small) == []


def test_a_process_that_ends_is_replaced_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data, reader, this = loaded(), encoder(), os.getpid()
    alone = reader.encode_all(data.examples, data.sources)
    encode = tokenize._encode_chunk

    def dies(encoder: Encoder, examples: ExampleStore, start: int) -> Any:
        if start > 30 and os.getpid() != this:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(encoder, examples, start)

    monkeypatch.setattr(tokenize, "_usable_cores", lambda: 2)
    monkeypatch.setattr(tokenize, "_encode_chunk", dies)
    with pytest.warns(UserWarning, match="ended"):
        assert tokenized(data, reader) == alone


KILLED = """
import os, signal
from tests.data import test_tokenize as rows
from valence.data import column_files, tokenize
tokenize.MANY, tokenize.CHUNK, column_files.MEMORY_BYTES = 10, 7, 1000
chunks = tokenize._chunks
def until_killed(encoder, examples):
    for number, chunk in enumerate(chunks(encoder, examples)):
        if number == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        yield chunk
tokenize._chunks = until_killed
rows.tokenized(rows.loaded(), rows.encoder())
"""


def test_a_process_that_is_killed_leaves_no_entry(small: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.startswith(column_files.PREFIX) for path in entries(small)] == [True]
    data, reader = loaded(), encoder()
    found = tokenized(data, reader)
    assert found == reader.encode_all(data.examples, data.sources)
    assert len(entries(small)) == 2
    for path in entries(small):
        if path.name.startswith(column_files.PREFIX):
            os.utime(path, (0, 0))
    tokenized(data, encoder(max_length=99))
    assert not any(path.name.startswith(column_files.PREFIX) for path in entries(small))


def test_entries_that_were_used_longest_ago_are_deleted(small: Path) -> None:
    for length in (90, 91, 92):
        tokenized(loaded(), encoder(max_length=length))
    oldest, *others = sorted(entries(small), key=lambda path: path.stat().st_mtime)
    os.utime(oldest, (1, 1))
    size = sum(each.stat().st_size for path in others for each in path.iterdir())
    column_files.prune(small, others[0], size)
    assert set(entries(small)) == set(others)


# The store of examples


def examples() -> list[Example]:
    found = list(loaded().examples)
    return [*found, NOT_PICKLED]


def test_a_store_gives_back_what_was_appended() -> None:
    rows = examples()
    store = ExampleStore()
    for number, row in enumerate(rows):
        store.append(row)
        assert store[number] == row  # also while others are still to come
    assert store == rows
    assert [store[i] for i in (149, 3, -1)] == [rows[i] for i in (149, 3, -1)]
    assert list(store.sources) == [row.origin.path for row in rows]


def test_the_last_of_equal_examples_is_found_by_its_id() -> None:
    rows = [
        Judgement(prompt="q", completion=f"a{i % 3}", label=True, origin=Origin("m", i))
        for i in range(9)
    ]
    facts = encoder().encode_all(rows).facts
    by_id = ExamplesById(rows, facts.columns["row_id"], ())
    assert {**by_id} == {row.id: row for row in rows}
    assert by_id.get("0" * 16) is by_id.get("no id") is None
    assert json.dumps(sorted(by_id)) == json.dumps(sorted({row.id for row in rows}))
