"""Files that survive a crash: checksums, atomic files and folders, and locks.

Symbolic links below a folder with untrusted content are refused.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from safetensors import SafetensorError

from valence.errors import UserError
from valence.files import link_error, refuse_links

KEY = "crc"
"""Key in a JSON object: the CRC-32 of its other entries, independent of formatting."""

LAST_LINE = re.compile(r"# crc of the lines above: ([0-9a-f]{8})\n?\Z")

UMASK = os.umask(0)

os.umask(UMASK)  # read once, at import: reading sets it for a moment, and saves use threads
LOCK_FILE = "run.lock"

BEAT, WATCH, PATIENCE = 15.0, 40.0, 1.0  # seconds

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


# Checksums


class ChecksumError(ValueError):
    """Content that has changed since it was written."""


def checksum(value: Any) -> int:
    """The CRC-32 of a value as JSON, with ``default=str`` for values that JSON does not support."""
    plain = json.loads(json.dumps(value, default=str))
    return crc32(json.dumps(plain, sort_keys=True).encode())


def add_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum as the last key."""
    entries = {name: item for name, item in value.items() if name != KEY}
    return {**entries, KEY: checksum(entries)}


def verify(value: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """The object without its checksum.

    Raises ChecksumError if it is wrong, or missing and ``required``.
    """
    entries = {name: item for name, item in value.items() if name != KEY}
    if KEY in value and value[KEY] != checksum(entries):
        raise ChecksumError("wrong checksum: it has changed since it was written")
    if required and KEY not in value:
        raise ChecksumError("it has no checksum")
    return entries


def add_checksum_line(text: str) -> str:
    """Add a comment as the last line with the checksum of the lines above."""
    return f"{text}# crc of the lines above: {crc32(text.encode()):08x}\n"


def verify_text(text: str) -> None:
    """Raise ChecksumError if the last line has a checksum that does not match the lines above."""
    match = LAST_LINE.search(text)
    if match and int(match[1], 16) != crc32(text[: match.start()].encode()):
        raise ChecksumError(
            "the checksum in the last line does not match: the file has changed since it was "
            "written"
        )


# Files


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError for another content."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def open_file(path: Path, root: Path, *, append: bool = False) -> BinaryIO:
    """Open a file below ``root`` unbuffered, to overwrite it or append to it.

    Raises UserError if the file or a folder in its path is a symbolic link, and OSError if it
    cannot be opened.
    """
    refuse_links(path.parent, root)
    flags = (
        os.O_WRONLY
        | os.O_CREAT
        | os.O_NOFOLLOW
        | os.O_CLOEXEC
        | (os.O_APPEND if append else os.O_TRUNC)
    )
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise link_error(path) from error
        raise
    return os.fdopen(handle, "ab" if append else "wb", buffering=0)


def make_folder(path: Path, root: Path) -> None:
    """Create a folder below ``root``, if it does not exist.

    Raises UserError like ``open_file``, and OSError.
    """
    refuse_links(path, root)
    path.mkdir(parents=True, exist_ok=True)


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of the content to an unbuffered file. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def write_atomically(target: Path, content: bytes, root: Path) -> None:
    """Write a file below ``root``; a crash leaves the old content or the new.

    Raises OSError, and UserError for a symbolic link on the way.
    """
    temporary = target.with_name(f".{target.name}.part")
    with open_file(temporary, root) as file:
        write_all(file, content)
        os.fsync(file.fileno())
    temporary.replace(target)
    fsync_path(target.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Folders


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``target`` if the block succeeds, replacing an older one.

    Raises UserError if it cannot be written or is reached through a symbolic link; nothing
    incomplete is left behind.
    """
    temporary = temporary_path(target)
    for path in (temporary, _old_path(target)):
        refuse_links(path, target.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _publish(temporary, target)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the folder cannot be written ({error})",
            code="file-not-writable",
            where=str(target),
            fix="free disk space, or choose another folder",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_path(target: Path) -> Path:
    """The name of a folder while it is written."""
    return target.with_name(f".{target.name}.part")


def _old_path(target: Path) -> Path:
    """The name of a folder while it is replaced."""
    return target.with_name(f".{target.name}.old")


def _publish(temporary: Path, target: Path) -> None:
    """Rename a complete folder, once all of it is on the disk."""
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            path.chmod(0o666 & ~UMASK)  # safetensors makes files readable for the owner only
        fsync_path(path)
    fsync_path(temporary)
    old = _old_path(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    fsync_path(target.parent)


# Locks


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Lock a file, which is created for that and removed at the end.

    Yields whether this process has the lock; otherwise another one has it. Raises OSError.
    """
    refuse_links(path, path.parent)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_locked = False
        try:
            yield is_locked
        finally:
            if is_locked:
                path.unlink(missing_ok=True)


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
        with (folder / LOCK_FILE).open("rb") as file:
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
        self.path = folder / LOCK_FILE
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
                "the run folder is read-only"
                if error.errno in READ_ONLY
                else "the run folder cannot be locked"
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
        self._thread = threading.Thread(target=self._touch, name=LOCK_FILE, daemon=True)
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
