"""Locks where flock does not work: on other hosts, and on file systems without it."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.runs.holders import QUICK, TAKE, named, nothing_is_left, started, wait_until
from valence import storage
from valence.storage import LOCK_FILE, Lock, holder

__all__ = ["nothing_is_left", "started"]


def without_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)


# Other hosts: flock is given, although somebody holds the folder


def test_a_holder_on_another_host_that_touches_its_file_is_refused(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=7)
    ended, message = threading.Event(), []

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LOCK_FILE, (time.time() - 86400,) * 2)  # its clock is a day behind

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with raises_error("run-locked", where=str(tmp_path / LOCK_FILE)) as refused:
            Lock(tmp_path, **QUICK).take(message.append)
    finally:
        ended.set()
        thread.join()
    assert "pid 7 on elsewhere" in refused.error.message
    assert len(message) == 1
    assert "pid 7 on elsewhere" in message[0]
    assert " 0.4 s" in message[0]
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == 7


def test_a_holder_on_another_host_that_is_silent_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(tmp_path, host="elsewhere", pid=os.getpid())
    os.utime(tmp_path / LOCK_FILE, (time.time() + 86400,) * 2)  # its clock was a day ahead
    slept: list[float] = []
    with monkeypatch.context() as patch:  # a clock that only sleep moves
        patch.setattr(time, "sleep", slept.append)
        patch.setattr(time, "monotonic", lambda: math.fsum(slept))
        notice = Lock(tmp_path, **QUICK).take()
    assert f"pid {os.getpid()} on elsewhere, started 2025-01-01T00:00:00+00:00" in (notice or "")
    assert math.fsum(slept) >= QUICK["watch"]
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == socket.gethostname()


def test_a_damaged_lock_file_is_replaced_after_a_waiting_time(tmp_path: Path) -> None:
    here = socket.gethostname().encode()
    for content in (
        b"\0" * 100,
        b'{"host": "a"',
        b"[]",
        b'{"host": "%s", "pid": "x"}' % here,
        b"\xff\n",
    ):
        (tmp_path / LOCK_FILE).write_bytes(content)
        result = holder(tmp_path)
        assert result is not None
        assert result.host == "an unknown host"
        with Lock(tmp_path, **(QUICK | {"watch": 0.1})) as ours:
            assert ours.path.read_bytes().startswith(b'{"host"')


def test_without_flock_the_last_writer_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(tmp_path, host="elsewhere")
    fsync = os.fsync

    def overtaken(fd: int) -> None:
        fsync(fd)
        named(tmp_path, host="a third one", pid=9)

    monkeypatch.setattr(os, "fsync", overtaken)
    for _ in range(2):  # what this process does not hold, it cannot take again
        with raises_error("run-locked", where=str(tmp_path / LOCK_FILE)) as refused:
            Lock(tmp_path, **QUICK).take()
        assert "pid 9 on a third one" in refused.error.message
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == 9


def test_a_lock_that_another_host_acquired_meanwhile_is_not_cleared(tmp_path: Path) -> None:
    with Lock(tmp_path, **QUICK):
        named(tmp_path, host="elsewhere")
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "elsewhere"


def test_locks_of_another_host_are_judged_by_their_modification_time(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere")
    result = holder(tmp_path)
    assert result is not None
    assert not result.alive
    os.utime(tmp_path / LOCK_FILE)
    result = holder(tmp_path)
    assert result is not None
    assert result.alive


# File systems without flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_flock_a_living_process_is_refused(
    tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without_flock(monkeypatch, number)
    other = started(tmp_path)
    named(tmp_path, pid=other.pid, pid_started=storage.start_ticks(other.pid))
    with raises_error("run-locked", where=str(tmp_path / LOCK_FILE)) as refused:
        Lock(tmp_path, **QUICK).take()
    assert f"pid {other.pid} on" in refused.error.message
    result = holder(tmp_path)
    assert result is not None
    assert result.alive
    os.kill(other.pid, signal.SIGKILL)
    # its parent has not asked how it ended
    wait_until(lambda: not getattr(holder(tmp_path), "alive", True))
    assert f"(pid {other.pid} on" in (Lock(tmp_path, **QUICK).take() or "")


def test_without_flock_simultaneous_holders_are_distinguished(tmp_path: Path, started: Any) -> None:
    refusing = (
        'import errno, fcntl\ndef no(*_): raise OSError(errno.ENOLCK, "")\nfcntl.flock = no\n'
    )
    code = refusing + TAKE
    several = [started(tmp_path, code.replace("patience=0.2", "patience=1")) for _ in range(3)]
    for one in several:
        one.go()
    printed = [one.line() for one in several]
    assert printed.count("taken: None") == 1, printed
    assert sum(line.startswith("refused: run-locked: ") for line in printed) == 2
    several[printed.index("taken: None")].end()
    assert (tmp_path / LOCK_FILE).read_bytes() == b""


def test_a_process_number_that_was_given_again_is_not_the_holder(
    tmp_path: Path, started: Any, monkeypatch: Any
) -> None:
    without_flock(monkeypatch)
    other = started(tmp_path)
    birth = storage.start_ticks(other.pid)
    if birth == 0:
        pytest.skip("the system does not say when a process was started")
    named(tmp_path, pid=other.pid, pid_started=birth - 1)
    result = holder(tmp_path)
    assert result is not None
    assert not result.alive
    assert f"(pid {other.pid} on" in (Lock(tmp_path, **QUICK).take() or "")


def test_without_flock_a_reused_process_id_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container every run may be process 1."""
    without_flock(monkeypatch)
    monkeypatch.setattr(storage, "start_ticks", lambda pid: 0)
    named(tmp_path, pid=os.getpid())
    assert Lock(tmp_path, **QUICK).take()
