"""Files of lines and journals survive kills, damage and full disks; so does everything that uses
them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.disk import full_disk
from tests.errors import raises_error
from valence import storage
from valence.apps.feedback.import_store import ImportStore
from valence.apps.feedback.review_labels import DecisionLog
from valence.apps.serve.chat import Answer
from valence.apps.serve.experiment import Experiment, ServedRun
from valence.apps.serve.feedback import AnswerFile
from valence.data.importers.records import Vote
from valence.errors import UserError
from valence.files import FIX
from valence.jobs.row_job import OutputFile
from valence.jobs.sample_rows import PendingAnswers
from valence.reports.sinks import JsonlSink
from valence.rewards.cache import ScoreCache, digest
from valence.rollouts.protocol import Sampling
from valence.storage import InUseError, Journal, LineFile, SharedJournal
from valence.types import Completion, Ids, Origin, Score, content_id

# Lines


def test_lines_are_read_by_number_and_cut_to_the_first_ones(tmp_path: Path) -> None:
    with LineFile(tmp_path / "lines") as file:
        file.write([b"one\n", b"three\n"])
        file.write([b"2\n"])
        assert [file.line(n) for n in (1, 2, 3)] == [b"one\n", b"three\n", b"2\n"]
        assert (len(file), file.size) == (3, 12)
        file.truncate(2)
        file.write([b"4\n"])
        assert list(file.lines()) == [b"one\n", b"three\n", b"4\n"]
    with LineFile(tmp_path / "lines") as file:
        assert list(file.lines()) == [b"one\n", b"three\n", b"4\n"]


def test_an_incomplete_line_counts_as_absent_and_stays_until_a_write(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo")
    with LineFile(path) as file:
        assert (len(file), file.num_incomplete) == (1, 3)
        assert path.read_bytes() == b"one\ntwo"
        file.write([b"three\n"])
        assert file.num_incomplete == 0
    assert path.read_bytes() == b"one\nthree\n"


def test_the_first_lines_are_removed_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineFile(path, create=False) as file:
        assert not path.exists()
        file.write([b"one\n", b"two\n"])
        file.remove_first(1)
        file.write([b"three\n"])
        assert path.read_bytes() == b"two\nthree\n"
        file.remove_first(2)
        assert (len(file), path.exists()) == (0, False)
        file.write([b"four\n"])
        assert path.read_bytes() == b"four\n"
    with pytest.raises(ValueError, match="closed"):  # another process may have it now
        file.write([b"five\n"])


def test_a_locked_file_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    with LineFile(tmp_path / "lines", lock=True), pytest.raises(InUseError):
        LineFile(tmp_path / "lines", lock=True)
    LineFile(tmp_path / "lines", lock=True).close()


def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x\n")
    (tmp_path / "lines").symlink_to(tmp_path / "target")
    for options in ({}, {"lock": True}):
        with raises_error("path-is-symlink", where="lines", fix=FIX):
            LineFile(tmp_path / "lines", **options).write([b"y\n"])
    assert (tmp_path / "target").read_bytes() == b"x\n"


def test_text_that_is_no_unicode_is_a_line(tmp_path: Path) -> None:
    with Journal(tmp_path / "lines", dict, refuse) as journal:
        journal.append({"text": "a\ud800b", "number": 1.5})
        assert list(journal) == [{"text": "a\ud800b", "number": 1.5}]
        with pytest.raises(ValueError, match="JSON"):
            journal.append({"number": float("nan")})
        assert len(journal) == 1


def test_several_writers_share_a_journal(tmp_path: Path) -> None:
    path, damaged = tmp_path / "lines", list[int]()
    ours, theirs = (
        SharedJournal(path, dict, lambda number, _: damaged.append(number)) for _ in range(2)
    )
    ours.append({"a": 1})
    theirs.append({"a": 2}, {"a": 3})
    assert [item["a"] for item in ours.read_new()] == [1, 2, 3]
    with path.open("ab") as file:
        file.write(b'\n{"a": 4, "cr')  # killed
    theirs.append({"a": 5})
    assert [item["a"] for item in ours.read_new()] == [5]
    path.write_bytes(path.read_bytes().replace(b'"a": 2', b'"a": 7'))
    assert [item["a"] for item in theirs.read_new()] == [1, 3, 5]
    assert damaged == [4]


def refuse(number: int, error: Exception) -> UserError:
    return UserError(str(error), code="line-damaged", where=f":{number}")


# Everything that is stored as lines


def completion(n: int, prompt_id: str = "") -> Completion:
    return Completion(prompt_id, (1, 2), (-0.5, -0.25), f"text {n}", "eos")


@dataclass(frozen=True)
class Lines:
    """A file of lines as its user sees it.

    open: a context with the store. file: its name. add: adds item n, counted from 0. read: the
    numbers of the items that the store had when it was opened. damage: the code of the error for a
    line that was changed; empty if it is skipped. header: lines before the items. Empty lines do
    not count.
    """

    file: str
    open: Callable[[Path], AbstractContextManager[Any]]
    add: Callable[[Any, int], object]
    read: Callable[[Any], list[int]]
    damage: str = ""
    header: int = 0


def answers() -> Lines:
    def add(store: AnswerFile, n: int) -> None:
        store.add(Answer(str(n), "m", "k", "v", (), (), (3,), completion(n), Sampling()))

    def read(store: AnswerFile) -> list[int]:
        items: list[int] = []
        for n in range(20):
            with suppress(KeyError):
                items.append(int(store.get(str(n)).id))
        return items

    return Lines(
        "a.jsonl",
        lambda folder: closing(AnswerFile(folder / "a.jsonl")),
        add,
        read,
        "output-line-foreign",
    )


def decisions() -> Lines:
    def add(store: DecisionLog, n: int) -> None:
        store.append({"choice": "keep", "row": str(n), "rater": "r", "time": ""})

    return Lines(
        "d.jsonl",
        lambda folder: closing(DecisionLog(folder / "d.jsonl")),
        add,
        lambda store: [int(line["row"]) for line in store.lines],
        "output-line-damaged",
    )


def ab_test() -> Lines:
    def add(store: Experiment, n: int) -> None:
        store.vote(store.plan.assign(str(n)), str(n), "", True)

    runs = ServedRun("a", 1), ServedRun("b", 1)
    return Lines(
        "ab.jsonl",
        lambda folder: closing(Experiment(folder / "ab.jsonl", runs, 0.5)),
        add,
        lambda store: [*range(store.result.a.thumbs_up + store.result.b.thumbs_up)],
        "output-line-foreign",
        header=1,
    )


def pending_votes() -> Lines:
    def add(store: ImportStore, n: int) -> None:
        turn = {"role": "assistant", "content": "Yes."}
        origin = Origin("a", 1)
        vote = Vote(
            source="valence", id=str(n), prompt=(), completion=turn, label=True, origin=origin
        )
        store.append(vote)

    return Lines(
        "out.pending.jsonl",
        lambda folder: ImportStore(folder / "out.jsonl").locked(),
        add,
        lambda store: [int(vote.id) for vote in store.votes],
        "output-line-damaged",
    )


def pending_answers() -> Lines:
    def prompt_id(n: int) -> str:
        return content_id("prompt", Ids((n,)))

    def read(store: PendingAnswers) -> list[int]:
        items: Any = [SimpleNamespace(position=n, ids=(n,)) for n in range(20)]
        return sorted(store.of(items, 1))

    return Lines(
        ".out.jsonl.pending",
        lambda folder: nullcontext(PendingAnswers(folder / "out.jsonl", "request")),
        lambda store, n: store.add(n, completion(n, prompt_id(n))),
        read,
    )


def scores() -> Lines:
    name = ScoreCache(None, {}).identity
    return Lines(
        f"{digest(name)}.jsonl",
        lambda folder: nullcontext(ScoreCache(folder / "cache", {})),
        lambda store, n: store.add({str(n): Score(float(n), {})}),
        lambda store: [n for n in range(20) if store.get(str(n))],
        header=1,
    )


def rows() -> Lines:
    @contextmanager
    def opened(folder: Path) -> Iterator[tuple[OutputFile, list[int]]]:
        output = OutputFile(folder / "rows.jsonl", 1)
        output.check_facts({"model": "m"})
        with output.open(20):
            items = [line["n"] for line in output.read()]
            output.truncate({})
            yield output, items

    return Lines(
        "rows.jsonl",
        opened,
        lambda store, n: store[0].write([json.dumps({"n": n})]),
        lambda store: store[1],
        "output-line-damaged",
    )


def log() -> Lines:
    def read(store: JsonlSink) -> list[int]:
        return [json.loads(line)["step"] for line in store.path.read_text().splitlines()]

    return Lines(
        "metrics.jsonl",
        lambda folder: closing(JsonlSink(folder / "metrics.jsonl", lambda _: None)),
        lambda store, n: store.log({"step": n}),
        read,
    )


ALL = [answers, decisions, ab_test, pending_votes, pending_answers, scores, rows, log]


def stores(*factories: Callable[[], Lines]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "lines", [make() for make in factories], ids=[make.__name__ for make in factories]
    )


all_stores = stores(*ALL)


def fill(lines: Lines, folder: Path, *numbers: int) -> list[int]:
    """Open the store, add items, and return the numbers of the earlier ones."""
    with lines.open(folder) as store:
        items = lines.read(store)
        for n in numbers:
            lines.add(store, n)
    return items


def path_of(lines: Lines, folder: Path) -> Path:
    [path] = folder.rglob(lines.file)
    return path


@all_stores
def test_items_are_there_when_the_file_is_opened_again(lines: Lines, tmp_path: Path) -> None:
    assert fill(lines, tmp_path, 0, 1) == []
    assert fill(lines, tmp_path, 2) == [0, 1]
    assert fill(lines, tmp_path) == [0, 1, 2]


@all_stores
@pytest.mark.filterwarnings("ignore:.*damaged")
def test_a_file_cut_at_any_byte_has_its_complete_lines(lines: Lines, tmp_path: Path) -> None:
    fill(lines, tmp_path / "", 0, 1, 2)
    path = path_of(lines, tmp_path)
    content = path.read_bytes()
    ends = [match.end() for match in re.finditer(rb"[^\n]\n", content)]
    start, *ends = ends[lines.header - 1 :] if lines.header else [0, *ends]
    step = max(1, (len(content) - start) // 40)
    for size in (*range(start, len(content), step), len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        complete = sum(end <= size for end in ends)
        items = fill(lines, tmp_path)
        assert items == [*range(len(items))]
        assert len(items) == complete, size
        fill(lines, tmp_path, *range(len(items), 4))
        assert fill(lines, tmp_path) == [0, 1, 2, 3], size


@stores(*(make for make in ALL if make is not log))  # the checkpoint has the checksum of the log
def test_a_changed_line_is_an_error_or_is_skipped(lines: Lines, tmp_path: Path) -> None:
    fill(lines, tmp_path, 0, 1, 2)
    path = path_of(lines, tmp_path)
    content = path.read_bytes().splitlines(keepends=True)
    number = [n for n, line in enumerate(content, 1) if line.strip()][lines.header + 1]  # of item 1
    line = content[number - 1]
    place = max(i for i, byte in enumerate(line) if chr(byte).isalpha() and byte != ord("c"))
    changed = line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]
    path.write_bytes(b"".join([*content[: number - 1], changed, *content[number:]]))
    if lines.damage:
        before = path.read_bytes()
        with raises_error(lines.damage, where=f"{path.name}:{number}"):
            fill(lines, tmp_path)
        assert path.read_bytes() == before
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert fill(lines, tmp_path, 1) == [0, 2]
        damaged = [str(w.message) for w in caught if "damaged" in str(w.message)]
        assert all(f":{number}:" in message for message in damaged)
        assert fill_quietly(lines, tmp_path) == [0, 1, 2]


def fill_quietly(lines: Lines, folder: Path) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fill(lines, folder)


@all_stores
def test_a_full_disk_loses_no_item(lines: Lines, tmp_path: Path) -> None:
    fill(lines, tmp_path, 0)
    size = path_of(lines, tmp_path).stat().st_size
    with lines.open(tmp_path) as store:
        with warnings.catch_warnings(record=True), suppress(UserError), full_disk(size + 5):
            lines.add(store, 1)
        if isinstance(store, ScoreCache):  # scores that could not be written stay in memory
            assert os.strerror(errno.EFBIG) in store.trouble
        elif not isinstance(store, JsonlSink):
            lines.add(store, 1)
        lines.add(store, 2)
    assert fill(lines, tmp_path) == ([0, 2] if isinstance(store, ScoreCache) else [0, 1, 2])


@all_stores
def test_a_killed_process_leaves_all_confirmed_items(lines: Lines, tmp_path: Path) -> None:
    """It is killed in the middle of writing item 3."""
    if (child := os.fork()) == 0:
        try:
            with lines.open(tmp_path) as store:
                for n in range(3):
                    lines.add(store, n)
                storage.write_all = lambda file, content: (
                    file.write(content[: len(content) // 2]),
                    os.kill(os.getpid(), signal.SIGKILL),
                )
                lines.add(store, 3)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert fill(lines, tmp_path, 3, 4) == [0, 1, 2]
    assert fill(lines, tmp_path) == [0, 1, 2, 3, 4]
