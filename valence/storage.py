"""Files that survive a crash: checksums, atomic files and folders, locks, and append-only journals.

A killed process leaves a file or folder in its old or its new state, and a journal with all lines
that were confirmed. Symbolic links below a folder with untrusted content are refused.
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
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar, cast
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

T = TypeVar("T")
OnDamage = Callable[[int, Exception], Exception | None]
"""Called with the number of a damaged line, from 1, and what is wrong with it. Returns the error to
raise, or None to skip the line.
"""


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


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object without its checksum. Raises OSError, and ValueError for other content."""
    content: Any = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return verify(content)


def open_file(path: Path, root: Path, *, append: bool = False) -> BinaryIO:
    """Open a file below ``root`` unbuffered, to overwrite it or append to it.

    Raises UserError if the file or a folder in its path is a symbolic link, and OSError if it
    cannot be opened.
    """
    refuse_links(path.parent, root)
    flags = os.O_RDWR | os.O_APPEND if append else os.O_WRONLY | os.O_TRUNC
    return _open(path, flags, "a+b" if append else "wb")


def _open(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open a file, which is created if needed, unbuffered. Raises as ``open_file`` does."""
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise link_error(path) from error
        raise
    return cast("BinaryIO", os.fdopen(handle, mode, buffering=0))


def make_folder(path: Path, root: Path) -> None:
    """Create a folder below ``root``, if it does not exist.

    Raises UserError like ``open_file``, and OSError.
    """
    refuse_links(path, root)
    path.mkdir(parents=True, exist_ok=True)


def write_all(file: BinaryIO, content: bytes | bytearray) -> None:
    """Write all of the content to an unbuffered file. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def part_path(target: Path) -> Path:
    """The name of a file or folder while it is written."""
    return target.with_name(f".{target.name}.part")


def write_part(target: Path, content: bytes | str, root: Path | None = None) -> None:
    """Write the new content of a file below ``root`` to the disk, for ``publish``.

    root: default: the folder of the file. Raises OSError, and UserError for a symbolic link.
    """
    raw = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    with open_file(part_path(target), root or target.parent) as file:
        write_all(file, raw)
        os.fsync(file.fileno())


def publish(target: Path, part: Path | None = None) -> None:
    """Replace a file by its new content, which is in ``part``. Raises OSError."""
    (part or part_path(target)).replace(target)
    fsync_path(target.parent)


def atomic_write(target: Path, content: bytes | str, root: Path | None = None) -> None:
    """Write a file below ``root``; a crash leaves the old content or the new.

    Raises OSError, and UserError for a symbolic link on the way.
    """
    try:
        write_part(target, content, root)
        publish(target)
    except OSError:
        with suppress(OSError):
            part_path(target).unlink(missing_ok=True)
        raise


@contextmanager
def writing(
    path: Path, fix: str = "free disk space, or make the folder writable"
) -> Iterator[None]:
    """Raise an OSError of the block as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror or error})",
            code="file-not-writable",
            where=str(path),
            fix=fix,
        ) from error


def rename(path: Path, names: Iterable[Path]) -> Path:
    """Rename a file or folder to the first name that is free, and return that. Raises OSError."""
    for name in names:
        if not os.path.lexists(name):
            path.rename(name)
            return name
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


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
    temporary = part_path(target)
    for path in (temporary, _old_path(target)):
        refuse_links(path, target.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        publish_folder(temporary, target)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the folder cannot be written ({error})",
            code="file-not-writable",
            where=str(target),
            fix="free disk space, or choose another folder",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _old_path(target: Path) -> Path:
    """The name of a folder while it is replaced."""
    return target.with_name(f".{target.name}.old")


def publish_folder(temporary: Path, target: Path) -> None:
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


def open_locked(path: Path, *, append: bool = False) -> BinaryIO | None:
    """Open a file that one process at a time may use, until it is closed. None: another one has it,
    or has renamed it just now.

    Raises OSError.
    """
    with ExitStack() as stack:
        file = stack.enter_context(_open(path, os.O_RDWR | os.O_APPEND * append, "r+b"))
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()
                return file
    return None


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Lock a file, which is created for that and removed at the end.

    Yields whether this process has the lock; otherwise another one has it. Raises OSError.
    """
    file = open_locked(path)
    with file or nullcontext():
        try:
            yield file is not None
        finally:
            if file is not None:
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


# Journals


def json_line(value: Mapping[str, Any]) -> bytes:
    """An object as a line; values that JSON does not support are written as text.

    Raises ValueError for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # a lone surrogate
        return f"{json.dumps(value, allow_nan=False, default=str)}\n".encode()


class InUseError(Exception):
    """Another process has locked the file."""


class LineFile:
    """A file to whose end one process appends lines.

    An incomplete last line, which a killed process has left, counts as absent; the first write
    removes it. num_incomplete: its size in bytes. size: of the complete lines, in bytes.

    lock: keep other processes from opening the file, which raises InUseError there. create: create
    the file at once, and not with the first line. sync: lines are on the disk when ``write``
    returns. Raises OSError.
    """

    def __init__(
        self, path: Path, *, lock: bool = False, create: bool = True, sync: bool = True
    ) -> None:
        self.path, self.num_incomplete, self._sync = path, 0, sync
        self._mutex, self._is_closed = threading.Lock(), False
        self._ends = array("q")
        self._file: BinaryIO | None = None
        if lock:
            self._file = open_locked(path, append=True)
            if self._file is None:
                raise InUseError(str(path))
        elif create or path.exists():
            self._file = open_file(path, path.parent, append=True)
        if self._file is not None:
            with ExitStack() as failing:
                failing.callback(self._file.close)
                self._find_ends()
                failing.pop_all()

    def _find_ends(self) -> None:
        with self.path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self._ends.append(self.size + len(line))
                else:
                    self.num_incomplete = len(line)

    @property
    def size(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self._ends)

    def lines(self) -> Iterator[bytes]:
        """All lines, with their ends. Raises OSError."""
        if self._ends:
            with self.path.open("rb") as file:
                yield from islice(file, len(self))

    def line(self, number: int) -> bytes:
        """A line by its number, from 1. Raises OSError."""
        start = self._ends[number - 2] if number > 1 else 0
        assert self._file is not None
        return os.pread(self._file.fileno(), self._ends[number - 1] - start, start)

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines, with their ends. Raises OSError; the file is then as before."""
        with self._mutex:
            if self._is_closed:
                raise ValueError(f"{self.path} is closed")
            is_new = self._file is None
            file = self._file = self._file or open_file(self.path, self.path.parent, append=True)
            with ExitStack() as failing:
                failing.callback(file.truncate, self.size)
                if self.num_incomplete:
                    file.truncate(self.size)
                    self.num_incomplete = 0
                write_all(file, b"".join(lines))
                if self._sync:
                    os.fsync(file.fileno())
                failing.pop_all()
            for line in lines:
                self._ends.append(self.size + len(line))
        if is_new and self._sync:
            fsync_path(self.path.parent)

    def sync(self) -> None:
        """Block until all lines are on the disk. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def truncate(self, num_lines: int) -> None:
        """Remove all but the first lines. Raises OSError."""
        with self._mutex:
            del self._ends[num_lines:]
            if self._file is not None:
                self._file.truncate(self.size)
                self.num_incomplete = 0

    def remove(self) -> None:
        """Delete the file; the next line creates it again. Raises OSError."""
        with self._mutex:
            self._remove()

    def remove_first(self, num_lines: int) -> None:
        """Remove the first lines in one step. Raises OSError."""
        with self._mutex:
            remainder = [*islice(self.lines(), num_lines, None)]
            if not remainder:
                self._remove()
                return
            atomic_write(self.path, b"".join(remainder))
            self._close()
            del self._ends[:]
            self._file = open_file(self.path, self.path.parent, append=True)
            self._find_ends()

    def _remove(self) -> None:
        self._close()
        self.path.unlink(missing_ok=True)
        del self._ends[:]

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(
    path: Path, parse: Callable[[dict[str, Any]], T], on_damage: OnDamage
) -> Iterator[T]:
    """The complete lines of a journal that another process may be writing. Raises OSError."""
    with path.open("rb") as file:
        lines = (line for line in file if line.endswith(b"\n"))
        yield from parse_lines(lines, parse, on_damage)


def parse_lines(
    lines: Iterable[bytes],
    parse: Callable[[dict[str, Any]], T],
    on_damage: OnDamage,
    first: int = 1,
) -> Iterator[T]:
    """The objects of lines with checksums, parsed. first: number of the first line."""
    for number, line in enumerate(lines, first):
        try:
            item = parse(verify(json.loads(line), required=True))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if (problem := on_damage(number, error)) is not None:
                raise problem from error
        else:
            yield item


class Journal(LineFile, Generic[T]):
    """Objects as JSON lines, each with its checksum, to which one process appends.

    Iterating reads the file. parse: converts the object of a line; it may raise ValueError,
    TypeError, LookupError or AttributeError. options: of ``LineFile``.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[dict[str, Any]], T],
        on_damage: OnDamage,
        **options: bool,
    ) -> None:
        super().__init__(path, **options)
        self._parse, self._on_damage = parse, on_damage

    def __iter__(self) -> Iterator[T]:
        return parse_lines(self.lines(), self._parse, self._on_damage)

    def get(self, number: int) -> T:
        """The object of a line by its number, from 1."""
        [item] = parse_lines([self.line(number)], self._parse, self._on_damage, number)
        return item

    def append(self, *objects: Mapping[str, Any]) -> None:
        """Append objects. Raises OSError; the file is then as before."""
        self.write([json_line(add_checksum(item)) for item in objects])


class SharedJournal(Generic[T]):
    """A journal to which several processes append, without a lock.

    Every write starts with a line break, so that it does not continue an incomplete line of a
    killed process; such a line is skipped. parse, on_damage: as for ``Journal``.
    """

    def __init__(
        self, path: Path, parse: Callable[[dict[str, Any]], T], on_damage: OnDamage
    ) -> None:
        self.path, self._parse, self._on_damage = path, parse, on_damage
        self._position = self._num_lines = 0

    def append(self, *objects: Mapping[str, Any]) -> None:
        """Append objects in one write, so that lines of processes do not mix. Raises OSError."""
        lines = b"".join(json_line(add_checksum(item)) for item in objects)
        with open_file(self.path, self.path.parent, append=True) as file:
            write_all(file, b"\n" + lines)

    def read_new(self) -> Iterator[T]:
        """The objects that this process or another has appended since the last call. Raises
        OSError.
        """
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                self._num_lines += 1
                if line.rstrip().endswith(b"}"):  # neither empty nor incomplete
                    yield from parse_lines([line], self._parse, self._on_damage, self._num_lines)
