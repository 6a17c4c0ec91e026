"""One run at a time in a folder: a lock that names its holder, and that a dead holder does not
keep.

The kernel's lock (flock) decides where there is one. The file's content says who holds it, and
decides where flock does not
reach: on file systems that have none, and on those whose locks end at the host.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from valence.errors import UserError

NAME = "run.lock"
BEAT, WATCH, PATIENCE = 15.0, 40.0, 1.0  # seconds
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Holder:
    """Who holds a run's folder, as its lock file says; ``started``: ISO time; ``alive``: whether
    that process still runs.
    """

    host: str
    pid: int
    started: str
    alive: bool

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, started {self.started}"


def holder(folder: Path) -> Holder | None:
    """Who holds a folder, found by reading alone; None when nobody does, or it cannot be read.

    A process of another host counts as alive when it has touched the file lately, by this host's
    clock.
    """
    try:
        with (folder / NAME).open("rb") as file:
            return _named(file.fileno())
    except OSError:
        return None


class Lock:
    """The right to write into a run's folder.

    Its file goes where the folder goes, and stays when the lock is released.

    beat: seconds between the touches that show other hosts that this process lives. watch: how long
    a taker looks out for them.
    patience: seconds for a holder to write its name. What this process holds already, another Lock
    neither takes nor releases.
    """

    def __init__(
        self, folder: Path, *, beat: float = BEAT, watch: float = WATCH, patience: float = PATIENCE
    ) -> None:
        self.path = folder / NAME
        self.beat, self.watch, self.patience = beat, watch, patience
        self._ended = threading.Event()

    def take(self, say: Callable[[str], None] = lambda _: None) -> str | None:
        """Holds the folder until ``release`` or the end of the process.

        Returns a sentence to print when an earlier holder did not release it. say: is told what is
        waited for.

        Raises UserError when another process has it, or the folder cannot be written.
        """
        until = time.monotonic() + self.patience
        try:
            while True:
                with ExitStack() as undo:
                    fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                    undo.callback(os.close, fd)
                    if _identity(os.fstat(fd)) in _held:
                        return None
                    locked = _flock(fd)
                    # The folder may have been moved since the file was opened: then this is the
                    # lock of another one.
                    moved = not self.path.exists() or _identity(os.fstat(fd)) != _identity(
                        self.path.stat()
                    )
                    found = _named(fd)
                    if locked is not False and not moved:
                        self._claim(fd, bool(locked), found, say)
                        undo.pop_all()
                        return f"an earlier run ({found}) did not end by itself" if found else None
                    if not moved and ((found and found.alive) or time.monotonic() >= until):
                        raise self._refusal(found)
                time.sleep(0.02)
        except OSError as error:
            what = (
                "the folder is read-only"
                if error.errno in READ_ONLY
                else "the folder cannot be locked"
            )
            fix = "choose another run.dir, or make this one writable"
            raise UserError(
                f"{what} ({error.strerror})",
                code="file-not-writable",
                where=str(self.path),
                fix=fix,
            ) from error

    def release(self) -> None:
        """Lets others have the folder. Does nothing when this lock does not hold it."""
        if self not in _held.values():
            return
        del _held[self._key]
        self._ended.set()
        self._thread.join()
        with suppress(OSError):  # then the next holder says that this one did not release it
            if os.pread(self._fd, len(self._content) + 1, 0) == self._content:
                os.ftruncate(self._fd, 0)
        with suppress(OSError):  # where there are no locks
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def __enter__(self) -> Lock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _claim(
        self, fd: int, locked: bool, found: Holder | None, say: Callable[[str], None]
    ) -> None:
        """Writes this process into the file, once whoever is named there is known to be dead."""
        here = found is None or found.host == socket.gethostname()
        if found and not here:
            say(
                f"{self.path} names {found}: watching for up to {self.watch:g} s whether that "
                f"run is alive"
            )
        # On this host its flock would have been in the way.
        if found and (
            (not locked and found.alive and found.pid != os.getpid()) if here else self._beats()
        ):
            raise self._refusal(found)
        self._content = _own_name()
        os.pwrite(fd, self._content, 0)
        os.ftruncate(fd, len(self._content))
        os.fsync(fd)
        # another one whom no flock stops may do the same now: the last to write has it
        if not (locked and here):
            time.sleep(self.patience)
            if self.path.read_bytes() != self._content:
                raise self._refusal(_named(fd))
        self._fd, self._key = fd, _identity(os.fstat(fd))
        self._ended.clear()
        self._thread = threading.Thread(target=self._touch, name=NAME, daemon=True)
        self._thread.start()
        _held[self._key] = self

    def _touch(self) -> None:
        while not self._ended.wait(self.beat):
            # the next one may pass; that a disk is gone is told by those who need it
            with suppress(OSError):
                os.utime(self._fd)

    def _beats(self) -> bool:
        """Whether the time of the file changes while it is watched.

        Only its own times are compared: clocks of hosts differ.
        """
        first, until = self.path.stat().st_mtime_ns, time.monotonic() + self.watch
        while time.monotonic() < until:
            time.sleep(min(1.0, self.watch / 20))
            with self.path.open("rb") as file:  # opening makes a network file system ask its server
                if os.fstat(file.fileno()).st_mtime_ns != first:
                    return True
        return False

    def _refusal(self, found: Holder | None) -> UserError:
        what = (
            f"another run is using this folder: "
            f"{found or 'a process that has not written its name yet'}"
        )
        return UserError(
            what,
            code="run-locked",
            where=str(self.path),
            fix="wait for it to end, stop it, or choose another run.dir",
        )


_held: dict[tuple[int, int], Lock] = {}
"""What this process holds, by device and inode."""


def _in_a_child() -> None:
    """A forked child must not keep the lock when its parent dies."""
    for lock in _held.values():
        os.close(lock._fd)
    _held.clear()


def release_all() -> None:
    """Release every lock that this process holds."""
    for lock in list(_held.values()):
        lock.release()


os.register_at_fork(after_in_child=_in_a_child)
atexit.register(release_all)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _flock(fd: int) -> bool | None:
    """Whether the kernel gave its lock; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def _own_name() -> bytes:
    pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
    return (
        json.dumps(
            {
                "host": socket.gethostname(),
                "pid": pid,
                "pid_started": start_ticks(pid),
                "started": now,
            }
        ).encode()
        + b"\n"
    )


def _named(fd: int) -> Holder | None:
    """Whom the file names; None when it is empty.

    A damaged one names an unknown host: only touches tell whether that lives.
    """
    raw = os.pread(fd, 4096, 0)
    if not raw:
        return None
    lately = time.time() - os.fstat(fd).st_mtime < 4 * BEAT
    try:
        found = json.loads(raw.partition(b"\n")[0])
        host, pid, started = str(found["host"]), int(found["pid"]), str(found["started"])
        if host == socket.gethostname():
            return Holder(host, pid, started, start_ticks(pid) in (0, found["pid_started"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return Holder("an unknown host", 0, "at an unknown time", lately)
    return Holder(host, pid, started, lately)


def start_ticks(pid: int) -> int:
    """Start time of a process of this host, in clock ticks since the boot; 0 if unknown, -1 if it
    does not run.
    """
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except ProcessLookupError:
        return -1
    except OSError:  # somebody else's process, or no /proc
        return 0
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
