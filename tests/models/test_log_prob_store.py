"""Entries in a folder are readable after any end of the writing process, and never wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.disk import full_disk
from tests.errors import raises_error
from valence.models import log_prob_store as module
from valence.models.log_prob_store import HEADER_SIZE, ROW, LogProbStore, count_entries

ROOT = Path(__file__).parents[2]
IDENTITY = {"of": "tests"}
DESCRIPTORS = Path("/proc/self/fd")
"""Folder with links to the open files of this process, on systems that have one."""

WRITER = """
import sys
from pathlib import Path
from tests.models.test_log_prob_store import key, opened, values
store = opened(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    store.add({key(4 * i + k): values(4 * i + k) for k in range(4)})
    print(i, flush=True)
"""
"""A process that adds four entries at a time, and says so after each time."""


def opened(folder: Path, identity: dict[str, str] = IDENTITY) -> LogProbStore:
    return LogProbStore(folder, identity, {"about": "numbers"})


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def values(i: int) -> np.ndarray:
    return np.arange(i, i + i % 7 + 1, dtype=np.float32)


def filled(folder: Path, count: int = 3) -> LogProbStore:
    result = opened(folder)
    result.add({key(i): values(i) for i in range(count)})
    return result


def read(folder: Path, count: int = 3) -> dict[int, list[float]]:
    """The entries that a new process reads."""
    results = {i: opened(folder).get(key(i)) for i in range(count)}
    return {i: entry.tolist() for i, entry in results.items() if entry is not None}


RIGHT = {i: values(i).tolist() for i in range(3)}


def writer(folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(last)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert pipe(process.stdout).readline() == "ready\n"
    return process


def pipe(result: IO[str] | None) -> IO[str]:
    assert result is not None
    return result


def go(process: subprocess.Popen[str]) -> None:
    pipe(process.stdin).write("\n")
    pipe(process.stdin).flush()


def test_another_process_reads_added_values(tmp_path: Path) -> None:
    first = filled(tmp_path)
    assert len(first) == 3
    assert read(tmp_path) == RIGHT
    assert opened(tmp_path).get(key(9)) is None


def test_a_stored_value_does_not_change(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.add({key(1): np.zeros(2, np.float32)})
    opened(tmp_path).add({key(1): np.zeros(2, np.float32)})
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path) == RIGHT


def test_an_open_store_reads_entries_that_others_add(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    one.add({key(0): values(0)})
    two.add({key(1): values(1)})
    two.refresh()
    one.add({key(2): values(2)})
    two.refresh()
    assert [i for i in range(3) if key(i) in two] == [0, 1, 2]


def test_a_file_that_ends_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    """A killed process leaves any prefix of an index, which is read without a warning."""
    filled(tmp_path / "whole")
    (path,) = (tmp_path / "whole").glob("*.index")
    raw = path.read_bytes()
    warnings.simplefilter("error", UserWarning)
    for length in (*range(0, HEADER_SIZE, 97), *range(HEADER_SIZE, len(raw) + 1)):
        path.write_bytes(raw[:length])
        remaining = max(0, length - HEADER_SIZE) // ROW.itemsize
        assert read(tmp_path / "whole") == {i: RIGHT[i] for i in range(remaining)}


def test_a_flipped_byte_anywhere_is_seen_and_named(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in tmp_path.iterdir():
        raw = path.read_bytes()
        for at in (*range(0, min(HEADER_SIZE, len(raw)), 41), *range(HEADER_SIZE, len(raw))):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            with pytest.warns(UserWarning, match=path.name):
                result = read(tmp_path)
            assert result.items() < RIGHT.items()
        path.write_bytes(raw)


def test_numbers_that_are_missing_are_seen(tmp_path: Path) -> None:
    """After a power cut the rows may be there, and the numbers not."""
    filled(tmp_path)
    (path,) = tmp_path.glob("*.values")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=path.name):
        assert read(tmp_path) == {0: RIGHT[0], 1: RIGHT[1]}
    path.unlink()
    with pytest.warns(UserWarning, match=path.name):
        assert read(tmp_path) == {}


def test_damaged_entries_can_be_added_again(tmp_path: Path) -> None:
    filled(tmp_path)
    (path,) = tmp_path.glob("*.values")
    path.write_bytes(b"\xff" * path.stat().st_size)
    store = opened(tmp_path)
    with pytest.warns(UserWarning, match=path.name):
        assert store.get(key(1)) is None
    assert store.damaged == 1
    store.add({key(1): values(1)})
    assert opened(tmp_path).get(key(1)).tolist() == RIGHT[1]  # type: ignore[union-attr]


@pytest.mark.slow
def test_killed_again_and_again_while_it_fills(tmp_path: Path) -> None:
    """Everything that a process had added before it was killed is found, and right."""
    sure = 0
    for entries in (1, 20, 45, 70):
        process = writer(tmp_path, sure, 10**6)
        go(process)
        lines = [pipe(process.stdout).readline() for _ in range(entries)]
        process.send_signal(signal.SIGKILL)
        lines += pipe(process.stdout).readlines()
        process.wait()
        sure = 1 + int([line for line in lines if line.endswith("\n")][-1])
        store = opened(tmp_path)
        assert len(store) >= 4 * sure
        assert all(np.array_equal(store.get(key(i)), values(i)) for i in range(len(store)))  # type: ignore[arg-type]
        assert store.damaged == 0


@pytest.mark.slow
def test_two_processes_fill_at_once(tmp_path: Path) -> None:
    both = [writer(tmp_path, 0, 200), writer(tmp_path, 100, 300)]
    for process in both:
        go(process)
    for process in both:
        process.communicate(timeout=60)
    assert len(list(tmp_path.glob("*.index"))) == 2
    store = opened(tmp_path)
    assert len(store) == 1200
    assert all(np.array_equal(store.get(key(i)), values(i)) for i in range(1200))  # type: ignore[arg-type]


def test_many_entries_open_at_once_without_reading_their_numbers(tmp_path: Path) -> None:
    count = 20_000
    store = opened(tmp_path)
    store.add({key(i): values(i) for i in range(count)})
    (path,) = tmp_path.glob("*.values")
    os.truncate(path, 4)  # only the first number is left
    result = opened(tmp_path)
    assert len(result) == count
    assert result.get(key(0)).tolist() == [0.0]  # type: ignore[union-attr]


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    for i in range(module.OPEN_FILES + 6):
        opened(tmp_path).add({key(i): values(i)})
    store = opened(tmp_path)
    for _ in range(2):
        assert all(np.array_equal(store.get(key(i)), values(i)) for i in range(len(store)))  # type: ignore[arg-type]
        if DESCRIPTORS.is_dir():
            paths = [os.readlink(item) for item in DESCRIPTORS.iterdir() if os.path.islink(item)]
            assert sum(path.startswith(str(tmp_path)) for path in paths) == module.OPEN_FILES


@pytest.mark.parametrize("suffix", [".values", ".index"])
def test_a_full_disk_is_reported_once_and_loses_no_entry(suffix: str, tmp_path: Path) -> None:
    """Neither while the numbers are written, nor after them: a part of the next ones still fits the
    file.
    """
    store = filled(tmp_path, 2)
    (path,) = tmp_path.glob(f"*{suffix}")
    with (
        pytest.warns(UserWarning, match=re.escape(str(tmp_path))) as warned,
        full_disk(path.stat().st_size + 5),
    ):
        store.add({key(2): values(2)})
    assert [item.category for item in warned if item.category is not ResourceWarning] == [
        UserWarning
    ]
    warnings.simplefilter("error", UserWarning)
    store.add({key(2): values(2), key(1): values(9)})
    remaining = store.get(key(2))
    assert remaining is not None
    assert remaining.tolist() == RIGHT[2]
    assert read(tmp_path) == {i: RIGHT[i] for i in range(2)}
    store.sync()  # there is room again
    store.add({key(3): values(3)})
    assert read(tmp_path, 4) == {i: values(i).tolist() for i in range(4)}


def test_files_of_another_identity_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "here")
    other = {"of": "others"}
    opened(tmp_path / "there", other).add({key(0): values(5)})
    (path,) = (tmp_path / "there").glob("*.index")
    shutil.copy(path, tmp_path / "here")
    with raises_error("reference-cache-foreign", where=path.name):
        opened(tmp_path / "here")


def test_a_folder_that_cannot_be_created_is_reported_immediately(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_error("reference-cache-unusable", where=str(tmp_path / "file")):
        opened(tmp_path / "file" / "inside")


def test_reading_alone_leaves_no_trace(tmp_path: Path) -> None:
    store = LogProbStore(tmp_path / "nowhere", IDENTITY, {}, is_writable=False)
    store.add({key(0): values(0)})
    assert len(store) == 0
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_is_counted_without_being_opened(tmp_path: Path) -> None:
    filled(tmp_path)
    opened(tmp_path).add({key(7): values(7)})
    count, header = count_entries(tmp_path)
    assert (count, header["about"], header["of"]) == (4, "numbers", "tests")
