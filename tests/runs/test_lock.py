"""A folder has one run at a time, and a dead run does not keep its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.runs.holders import (
    QUICK,
    TAKE,
    named,
    nothing_is_left,
    refused_by,
    started,
    wait_until,
)
from valence.errors import UserError
from valence.storage import LOCK_FILE, Lock, holder

__all__ = ["nothing_is_left", "started"]


def test_a_folder_in_use_is_refused_with_the_name_of_its_holder(
    tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started(tmp_path)
    assert first.take() == "taken: None"
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits for a holder that is alive"))
    with raises_error("run-locked", where=str(tmp_path / LOCK_FILE), fix="run.dir") as refused:
        Lock(tmp_path, patience=30).take()
    assert f"pid {first.pid} on {socket.gethostname()}" in refused.error.message
    assert refused_by(started(tmp_path).take(), first.pid)


def test_a_released_lock_and_that_of_an_ended_process_are_free_without_a_message(
    tmp_path: Path, started: Any
) -> None:
    first = started(tmp_path)
    first.take()
    first.end()
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
    with Lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_bytes() != b""
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
    assert started(tmp_path).take() == "taken: None"


def test_a_killed_holder_is_reported_and_keeps_no_lock(tmp_path: Path, started: Any) -> None:
    first = started(tmp_path)
    first.take()
    first.kill()
    notice = Lock(tmp_path).take()
    assert notice is not None
    assert f"pid {first.pid} on {socket.gethostname()}, started 20" in notice
    now = holder(tmp_path)
    assert now is not None
    assert now.pid == os.getpid()


def test_of_those_that_start_in_the_same_moment_one_gets_it(tmp_path: Path, started: Any) -> None:
    """Again and again, on folders that are new, that were released, and whose holder is dead."""
    loop = """
import sys
from pathlib import Path
from valence.storage import Lock
from valence.errors import UserError
print("ready", flush=True)
for line in sys.stdin:
    lock = Lock(Path(sys.argv[1]) / line.strip(), patience=0.2)
    try:
        lock.take()
        print("taken", flush=True)
    except UserError as error:
        print(f"refused: {error.code}: {error.message}", flush=True)
    sys.stdin.readline()
    lock.release()
    print("released", flush=True)
"""
    several = [started(tmp_path, loop) for _ in range(3)]
    for i in range(40):
        folder = tmp_path / str(i % 20)
        folder.mkdir(exist_ok=True)
        if i % 4 == 1:
            named(folder)
        for one in several:
            one.process.stdin.write(f"{folder.name}\n")
            one.process.stdin.flush()
        printed = [one.line() for one in several]
        assert printed.count("taken") == 1, printed
        winner = several[printed.index("taken")].pid
        assert all(line == "taken" or refused_by(line, winner) for line in printed)
        for one in several:
            one.go()
        assert {one.line() for one in several} == {"released"}


def test_the_folder_may_be_moved_while_it_is_held(tmp_path: Path, started: Any) -> None:
    old, aside = tmp_path / "run", tmp_path / "aside"
    old.mkdir()
    ours = Lock(old, **QUICK)
    ours.take()
    old.rename(aside)
    old.mkdir()
    assert refused_by(started(aside).take(), os.getpid())
    other = started(old)
    assert other.take() == "taken: None"
    first = (aside / LOCK_FILE).stat().st_mtime_ns
    wait_until(lambda: (aside / LOCK_FILE).stat().st_mtime_ns > first)
    ours.release()
    assert (aside / LOCK_FILE).read_bytes() == b""
    assert started(aside).take() == "taken: None"
    result = holder(old)
    assert result is not None
    assert result.pid == other.pid


def test_a_folder_moved_between_opening_and_locking_is_not_confused_with_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    flock, calls = fcntl.flock, []

    def moved_first(fd: int, operation: int) -> None:
        if not calls:
            run.rename(tmp_path / "aside")
            run.mkdir()
        calls.append(fd)
        flock(fd, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", moved_first)
        Lock(run, **QUICK).take()
    assert len(calls) == 2
    assert (run / LOCK_FILE).stat().st_size > 0
    assert (tmp_path / "aside" / LOCK_FILE).stat().st_size == 0


def test_taking_and_releasing_twice_is_the_same_as_once(tmp_path: Path, started: Any) -> None:
    ours = Lock(tmp_path, **QUICK)
    assert ours.take() is None
    assert ours.take() is None
    second = Lock(tmp_path, **QUICK)
    assert second.take() is None
    second.release()
    assert started(tmp_path).take().startswith("refused: run-locked: ")
    ours.release()
    ours.release()
    other = started(tmp_path)
    assert other.take() == "taken: None"
    other.end()
    assert ours.take() is None
    assert started(tmp_path).take().startswith("refused: run-locked: ")


def test_released_when_the_block_ends_badly(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Lock(tmp_path):
        raise ZeroDivisionError
    assert holder(tmp_path) is None


# Children


FORKS = TAKE.replace("sys.stdin.readline()\ntry", "import os, signal\ntry").replace(
    "\nsys.stdin.readline()\n", "\nchild = CHILD\nprint(child, flush=True)\nsys.stdin.readline()\n"
)


@pytest.mark.parametrize("child", [
    "os.fork() or (signal.pause(), os._exit(0))",
    "__import__('subprocess').Popen(['sleep', '30'], close_fds=False).pid",
    "__import__('subprocess').Popen(['sleep', '30']).pid",
])  # fmt: skip
def test_children_that_outlive_their_parent_do_not_keep_the_lock(
    tmp_path: Path, started: Any, child: str
) -> None:
    first = started(tmp_path, FORKS.replace("CHILD", child))
    assert first.line() == "taken: None"
    pid = int(first.line())
    try:
        first.kill()
        os.kill(pid, 0)
        assert f"(pid {first.pid} on" in (Lock(tmp_path, **QUICK).take() or "")
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_forked_child_neither_has_the_lock_nor_releases_it(tmp_path: Path, started: Any) -> None:
    ours = Lock(tmp_path, **QUICK)
    ours.take()
    child = os.fork()
    if not child:
        ours.release()
        try:
            ours.take()
            os._exit(1)
        except UserError:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert started(tmp_path).take().startswith("refused: run-locked: ")


# What is in the way


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuses)
    with raises_error(
        "file-not-writable", where=str(tmp_path / LOCK_FILE), fix="run.dir"
    ) as refused:
        Lock(tmp_path).take()
    assert os.strerror(number) in refused.error.message


def test_no_room_and_no_folder_are_no_lock(
    tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with raises_error("file-not-writable", where=str(tmp_path / LOCK_FILE)) as no_room:
        Lock(tmp_path, **QUICK).take()
    assert os.strerror(errno.ENOSPC) in no_room.error.message
    assert started(tmp_path).take() == "taken: None"
    with raises_error(
        "file-not-writable", where=str(tmp_path / "nowhere" / LOCK_FILE)
    ) as no_folder:
        Lock(tmp_path / "nowhere").take()
    assert os.strerror(errno.ENOENT) in no_folder.error.message


def test_a_wait_that_is_broken_off_leaves_the_lock_to_others(tmp_path: Path, started: Any) -> None:
    named(tmp_path, host="elsewhere")

    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lock(tmp_path, **QUICK).take(stopped)
    assert started(tmp_path).take().startswith("taken: ")


# Looking


def test_inspecting_a_lock_names_its_holder_and_changes_nothing(
    tmp_path: Path, started: Any
) -> None:
    assert holder(tmp_path) is None
    other = started(tmp_path)
    other.take()
    before = (tmp_path / LOCK_FILE).read_bytes()
    result = holder(tmp_path)
    assert result is not None
    assert (result.host, result.pid, result.alive) == (socket.gethostname(), other.pid, True)
    assert result.started == json.loads(before)["started"]
    other.kill()
    result = holder(tmp_path)
    assert result is not None
    assert not result.alive
    assert (tmp_path / LOCK_FILE).read_bytes() == before
