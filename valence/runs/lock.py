"""A lock that allows one run at a time in a folder, and that a dead process does not keep.

The kernel's lock (flock) decides where the file system has one. The file's content names the
holder, and decides on file systems without locks or whose locks are not visible to other hosts.
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
    """The process that has locked a run's folder. started: ISO time. alive: whether it still
    runs.
    """

    host: str
    pid: int
    started: str
    alive: bool

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, started {self.started}"


def holder(folder: Path) -> Holder | None:
    """The process that has locked a folder; None if there is none, or the file cannot be read.

    A process on another host counts as alive if it has touched the file recently, by this host's
    clock.
    """
    try:
        with (folder / NAME).open("rb") as file:
            return _read_holder(file.fileno())
    except OSError:
        return None


class Lock:
    """The right to write into a run's folder.

    The file moves with the folder, and stays when the lock is released.

    beat: seconds between touches of the file that show other hosts that this process is alive.
    watch: seconds to watch for touches of another holder. patience: seconds for a holder to write
    its name. A second Lock of the same process neither takes nor releases the folder.
    """

    def __init__(
        self, folder: Path, *, beat: float = BEAT, watch: float = WATCH, patience: float = PATIENCE
    ) -> None:
        self.path = folder / NAME
        self.beat, self.watch, self.patience = beat, watch, patience
        self._ended = threading.Event()

    def take(self, say: Callable[[str], None] = lambda _: None) -> str | None:
        """Lock the folder until ``release`` or the end of the process.

        Returns a message to print if an earlier holder did not release it. say: prints what this
        call waits for.

        Raises UserError if another process has locked it, or the folder is not writable.
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
                    # lock of another folder.
                    moved = not self.path.exists() or _identity(os.fstat(fd)) != _identity(
                        self.path.stat()
                    )
                    owner = _read_holder(fd)
                    if locked is not False and not moved:
                        self._claim(fd, bool(locked), owner, say)
                        undo.pop_all()
                        return f"the earlier run ({owner}) did not end normally" if owner else None
                    if not moved and ((owner and owner.alive) or time.monotonic() >= until):
                        raise self._refusal(owner)
                time.sleep(0.02)
        except OSError as error:
            problem = (
                "the folder is read-only"
                if error.errno in READ_ONLY
                else "the folder cannot be locked"
            )
            raise UserError(
                f"{problem} ({error.strerror})",
                code="file-not-writable",
                where=str(self.path),
                fix="make the folder writable, or choose another run.dir",
            ) from error

    def release(self) -> None:
        """Release the folder, if this lock has locked it."""
        if self not in _held.values():
            return
        del _held[self._key]
        self._ended.set()
        self._thread.join()
        with suppress(OSError):  # the next holder then reports that this one did not release it
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
        self, fd: int, locked: bool, owner: Holder | None, say: Callable[[str], None]
    ) -> None:
        """Write this process into the file, unless the owner in it is alive."""
        is_local = owner is None or owner.host == socket.gethostname()
        if owner and not is_local:
            say(
                f"the lock file {self.path} belongs to {owner}; checking for up to {self.watch:g} "
                f"s whether that run is alive"
            )
        # A live process on this host would have kept its flock.
        if owner and (
            (not locked and owner.alive and owner.pid != os.getpid())
            if is_local
            else self._is_touched()
        ):
            raise self._refusal(owner)
        self._content = _describe_process()
        os.pwrite(fd, self._content, 0)
        os.ftruncate(fd, len(self._content))
        os.fsync(fd)
        # Without flock, another process may do the same now: the last one to write has the lock.
        if not (locked and is_local):
            time.sleep(self.patience)
            if self.path.read_bytes() != self._content:
                raise self._refusal(_read_holder(fd))
        self._fd, self._key = fd, _identity(os.fstat(fd))
        self._ended.clear()
        self._thread = threading.Thread(target=self._touch, name=NAME, daemon=True)
        self._thread.start()
        _held[self._key] = self

    def _touch(self) -> None:
        while not self._ended.wait(self.beat):
            # The next touch may succeed; writers report a disk that is gone.
            with suppress(OSError):
                os.utime(self._fd)

    def _is_touched(self) -> bool:
        """Whether the file's time changes while it is watched.

        Compares only times of the file, because the clocks of hosts differ.
        """
        first, until = self.path.stat().st_mtime_ns, time.monotonic() + self.watch
        while time.monotonic() < until:
            time.sleep(min(1.0, self.watch / 20))
            with self.path.open("rb") as file:  # opening makes a network file system ask its server
                if os.fstat(file.fileno()).st_mtime_ns != first:
                    return True
        return False

    def _refusal(self, owner: Holder | None) -> UserError:
        return UserError(
            f"another run is using this folder: {owner or 'a process that has just started'}",
            code="run-locked",
            where=str(self.path),
            fix="wait until it ends, stop it, or choose another run.dir",
        )


_held: dict[tuple[int, int], Lock] = {}
"""The locks of this process, by device and inode."""


def _close_in_child() -> None:
    """Close the locks in a forked child, which must not keep them when its parent dies."""
    for lock in _held.values():
        os.close(lock._fd)
    _held.clear()


def release_all() -> None:
    """Release all locks of this process."""
    for lock in list(_held.values()):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)
atexit.register(release_all)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _flock(fd: int) -> bool | None:
    """Whether the kernel granted its lock; None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def _describe_process() -> bytes:
    """The content of the lock file for this process."""
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


def _read_holder(fd: int) -> Holder | None:
    """The process that the file names; None if it is empty.

    A damaged file names an unknown host; only touches show whether that process is alive.
    """
    raw = os.pread(fd, 4096, 0)
    if not raw:
        return None
    is_recent = time.time() - os.fstat(fd).st_mtime < 4 * BEAT
    try:
        content = json.loads(raw.partition(b"\n")[0])
        host, pid, started = str(content["host"]), int(content["pid"]), str(content["started"])
        if host == socket.gethostname():
            return Holder(host, pid, started, start_ticks(pid) in (0, content["pid_started"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return Holder("an unknown host", 0, "at an unknown time", is_recent)
    return Holder(host, pid, started, is_recent)


def start_ticks(pid: int) -> int:
    """Start time of a local process in clock ticks since boot; 0 if unknown, -1 if it has ended."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except ProcessLookupError:
        return -1
    except OSError:  # another user's process, or no /proc
        return 0
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
