"""One run at a time in a folder, and no folder that a dead run keeps."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from valence.checkpoint import lock
from valence.checkpoint.lock import NAME, Lock, holder
from valence.errors import UserError

QUICK = {"beat": 0.05, "watch": 0.4, "patience": 0.2}
TAKE = """
import sys
from pathlib import Path
from valence.checkpoint.lock import Lock
from valence.errors import UserError
lock = Lock(Path(sys.argv[1]), beat=0.05, watch=0.4, patience=0.2)
print("ready", flush=True)
sys.stdin.readline()
try:
    print("taken:", lock.take(), flush=True)
except UserError as error:
    print("refused:", error.what, flush=True)
sys.stdin.readline()
"""


class Process:
    """A process that takes the lock of a folder when told to, and ends, releasing it, when told to or killed."""

    def __init__(self, folder: Path, code: str = TAKE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.pid = self.process.pid
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self) -> str:
        self.go()
        return self.line()

    def end(self) -> None:
        self.go()
        assert self.process.wait(10) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def started() -> Iterator[Any]:
    made: list[Process] = []

    def start(folder: Path, code: str = TAKE) -> Process:
        made.append(Process(folder, code))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    lock._at_exit()


def named(folder: Path, **other: Any) -> None:
    """A lock file as a process that was started a while ago has left it."""
    content = {"host": socket.gethostname(), "pid": 2**22 + 1, "pid_started": 1, "started": "2025-01-01T00:00:00+00:00"}
    (folder / NAME).write_text(json.dumps({**content, **other}) + "\n")
    os.utime(folder / NAME, (0, 0))


def without_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)


def test_a_folder_in_use_is_refused_with_the_name_of_its_holder(tmp_path: Path, started: Any) -> None:
    first = started(tmp_path)
    assert first.take() == "taken: None"
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        Lock(tmp_path, patience=30).take()
    assert time.monotonic() - began < 5
    assert f"pid {first.pid} on {socket.gethostname()}" in refused.value.what
    assert str(tmp_path / NAME) == refused.value.where
    assert refused.value.fix
    assert started(tmp_path).take().startswith(f"refused: another run is using this folder: pid {first.pid} on ")


def test_a_lock_that_was_released_or_whose_process_ended_is_free_without_a_word(tmp_path: Path, started: Any) -> None:
    first = started(tmp_path)
    first.take()
    first.end()
    assert (tmp_path / NAME).read_bytes() == b""
    with Lock(tmp_path):
        assert (tmp_path / NAME).read_bytes() != b""
    assert (tmp_path / NAME).read_bytes() == b""
    assert started(tmp_path).take() == "taken: None"


def test_a_killed_holder_is_told_of_and_keeps_nothing(tmp_path: Path, started: Any) -> None:
    first = started(tmp_path)
    first.take()
    first.kill()
    said = Lock(tmp_path).take()
    assert said is not None
    assert said.startswith(f"an earlier run (pid {first.pid} on {socket.gethostname()}, started 20")
    assert said.endswith(") did not end by itself")
    now = holder(tmp_path)
    assert now is not None
    assert now.pid == os.getpid()


def test_of_those_that_start_in_the_same_moment_one_gets_it(tmp_path: Path, started: Any) -> None:
    """Again and again, on folders that are new, that were released, and whose holder is dead."""
    loop = """
import sys
from pathlib import Path
from valence.checkpoint.lock import Lock
from valence.errors import UserError
print("ready", flush=True)
for line in sys.stdin:
    lock = Lock(Path(sys.argv[1]) / line.strip(), patience=0.2)
    try:
        lock.take()
        print("taken", flush=True)
    except UserError as error:
        print(error.what, flush=True)
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
        said = [one.line() for one in several]
        assert said.count("taken") == 1, said
        winner = several[said.index("taken")].pid
        assert all(s == "taken" or f"folder: pid {winner} on" in s for s in said)
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
    assert started(aside).take().startswith(f"refused: another run is using this folder: pid {os.getpid()} ")
    other = started(old)
    assert other.take() == "taken: None"
    first = (aside / NAME).stat().st_mtime_ns
    time.sleep(0.2)
    assert (aside / NAME).stat().st_mtime_ns > first
    ours.release()
    assert (aside / NAME).read_bytes() == b""
    assert started(aside).take() == "taken: None"
    found = holder(old)
    assert found is not None
    assert found.pid == other.pid


def test_a_folder_that_is_moved_between_opening_and_locking_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    flock, calls = lock._flock, []

    def moved_first(fd: int) -> bool | None:
        if not calls:
            run.rename(tmp_path / "aside")
            run.mkdir()
        calls.append(fd)
        return flock(fd)

    monkeypatch.setattr(lock, "_flock", moved_first)
    Lock(run, **QUICK).take()
    assert len(calls) == 2
    assert (run / NAME).stat().st_size > 0
    assert (tmp_path / "aside" / NAME).stat().st_size == 0


def test_taking_and_releasing_twice_is_the_same_as_once(tmp_path: Path, started: Any) -> None:
    ours = Lock(tmp_path, **QUICK)
    assert ours.take() is None
    assert ours.take() is None
    second = Lock(tmp_path, **QUICK)
    assert second.take() is None
    second.release()
    assert started(tmp_path).take().startswith("refused")
    ours.release()
    ours.release()
    other = started(tmp_path)
    assert other.take() == "taken: None"
    other.end()
    assert ours.take() is None
    assert started(tmp_path).take().startswith("refused")


def test_released_when_the_block_ends_badly(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Lock(tmp_path):
        raise ZeroDivisionError
    assert holder(tmp_path) is None


# Children


FORKS = TAKE.replace("sys.stdin.readline()\ntry", "import os, time\ntry").replace(
    "\nsys.stdin.readline()\n", "\nchild = CHILD\nprint(child, flush=True)\nsys.stdin.readline()\n"
)


@pytest.mark.parametrize("child", [
    "os.fork() or (time.sleep(30), os._exit(0))",
    "__import__('subprocess').Popen(['sleep', '30'], close_fds=False).pid",
    "__import__('subprocess').Popen(['sleep', '30']).pid",
])  # fmt: skip
def test_children_that_outlive_their_parent_do_not_keep_the_lock(tmp_path: Path, started: Any, child: str) -> None:
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
    assert started(tmp_path).take().startswith("refused")


# Other hosts: flock is given, although somebody holds the folder


def test_a_holder_on_another_host_that_touches_its_file_is_refused(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=7)
    ended, said = threading.Event(), []

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / NAME, (time.time() - 86400,) * 2)  # its clock is a day behind

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="pid 7 on elsewhere"):
            Lock(tmp_path, **QUICK).take(said.append)
    finally:
        ended.set()
        thread.join()
    assert len(said) == 1
    assert "pid 7 on elsewhere" in said[0]
    assert "watching for up to 0.4 s" in said[0]
    assert json.loads((tmp_path / NAME).read_text())["pid"] == 7


def test_a_holder_on_another_host_that_is_silent_is_dead(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=os.getpid())
    os.utime(tmp_path / NAME, (time.time() + 86400,) * 2)  # its clock was a day ahead
    began = time.monotonic()
    said = Lock(tmp_path, **QUICK).take()
    assert said == f"an earlier run (pid {os.getpid()} on elsewhere, started 2025-01-01T00:00:00+00:00) did not end by itself"
    assert time.monotonic() - began >= 0.4
    assert json.loads((tmp_path / NAME).read_text())["host"] == socket.gethostname()


def test_a_damaged_file_is_taken_after_it_was_watched(tmp_path: Path) -> None:
    here = socket.gethostname().encode()
    for content in (b"\0" * 100, b'{"host": "a"', b"[]", b'{"host": "%s", "pid": "x"}' % here, b"\xff\n"):
        (tmp_path / NAME).write_bytes(content)
        found = holder(tmp_path)
        assert found is not None
        assert found.host == "an unknown host"
        with Lock(tmp_path, **(QUICK | {"watch": 0.1})) as ours:
            assert ours.path.read_bytes().startswith(b'{"host"')


def test_the_one_who_wrote_last_has_it_where_no_flock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(tmp_path, host="elsewhere")
    fsync = os.fsync

    def overtaken(fd: int) -> None:
        fsync(fd)
        named(tmp_path, host="a third one", pid=9)

    monkeypatch.setattr(os, "fsync", overtaken)
    before = dict(lock._held)  # runs that other tests left to the end of the program
    with pytest.raises(UserError, match="pid 9 on a third one"):
        Lock(tmp_path, **QUICK).take()
    assert lock._held == before
    assert json.loads((tmp_path / NAME).read_text())["pid"] == 9


def test_what_another_host_has_taken_meanwhile_is_not_emptied(tmp_path: Path) -> None:
    with Lock(tmp_path, **QUICK):
        named(tmp_path, host="elsewhere")
    assert json.loads((tmp_path / NAME).read_text())["host"] == "elsewhere"


# File systems without flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_flock_a_living_process_is_refused(
    tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without_flock(monkeypatch, number)
    other = started(tmp_path)
    named(tmp_path, pid=other.pid, pid_started=lock._birth(other.pid))
    with pytest.raises(UserError, match=f"pid {other.pid} on"):
        Lock(tmp_path, **QUICK).take()
    found = holder(tmp_path)
    assert found is not None
    assert found.alive
    os.kill(other.pid, signal.SIGKILL)
    time.sleep(0.2)  # dead, but its parent has not asked how it ended
    assert f"(pid {other.pid} on" in (Lock(tmp_path, **QUICK).take() or "")


def test_without_flock_two_of_the_same_moment_are_told_apart(tmp_path: Path, started: Any) -> None:
    refusing = 'import errno, fcntl\ndef no(*_): raise OSError(errno.ENOLCK, "")\nfcntl.flock = no\n'
    code = refusing + TAKE
    several = [started(tmp_path, code.replace("patience=0.2", "patience=1")) for _ in range(3)]
    for one in several:
        one.go()
    said = [one.line() for one in several]
    assert said.count("taken: None") == 1, said
    assert sum(s.startswith("refused") for s in said) == 2
    several[said.index("taken: None")].end()
    assert (tmp_path / NAME).read_bytes() == b""


def test_a_process_number_that_was_given_again_is_not_the_holder(tmp_path: Path, started: Any, monkeypatch: Any) -> None:
    without_flock(monkeypatch)
    other = started(tmp_path)
    birth = lock._birth(other.pid)
    if birth == 0:
        pytest.skip("the system does not say when a process was started")
    named(tmp_path, pid=other.pid, pid_started=birth - 1)
    found = holder(tmp_path)
    assert found is not None
    assert not found.alive
    assert f"(pid {other.pid} on" in (Lock(tmp_path, **QUICK).take() or "")


def test_without_flock_the_own_number_is_one_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container every run may be process 1."""
    without_flock(monkeypatch)
    monkeypatch.setattr(lock, "_birth", lambda pid: 0)
    named(tmp_path, pid=os.getpid())
    assert Lock(tmp_path, **QUICK).take()


# What is in the way


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_is_read_only_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(UserError, match="the folder is read-only") as refused:
        Lock(tmp_path).take()
    assert str(tmp_path / NAME) == refused.value.where


def test_no_room_and_no_folder_are_no_lock(tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="cannot be locked .No space left"):
        Lock(tmp_path, **QUICK).take()
    assert started(tmp_path).take() == "taken: None"
    with pytest.raises(UserError, match="cannot be locked .No such file"):
        Lock(tmp_path / "nowhere").take()


def test_a_wait_that_is_broken_off_leaves_the_lock_to_others(tmp_path: Path, started: Any) -> None:
    named(tmp_path, host="elsewhere")

    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lock(tmp_path, **QUICK).take(stopped)
    assert started(tmp_path).take().startswith("taken: an earlier run (pid")


# Looking


def test_looking_says_who_holds_a_folder_and_changes_nothing(tmp_path: Path, started: Any) -> None:
    assert holder(tmp_path) is None
    other = started(tmp_path)
    other.take()
    before = (tmp_path / NAME).read_bytes()
    found = holder(tmp_path)
    assert found is not None
    assert (found.host, found.pid, found.alive) == (socket.gethostname(), other.pid, True)
    assert found.started == json.loads(before)["started"]
    other.kill()
    found = holder(tmp_path)
    assert found is not None
    assert not found.alive
    assert (tmp_path / NAME).read_bytes() == before


def test_looking_at_another_host_goes_by_its_touches(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere")
    found = holder(tmp_path)
    assert found is not None
    assert not found.alive
    os.utime(tmp_path / NAME)
    found = holder(tmp_path)
    assert found is not None
    assert found.alive
