"""Paths and hub ids in settings, and files below a folder with untrusted content: symbolic links in
it are refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from valence.errors import UserError

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Maximum bytes in file systems."""
HUB_ID = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
FIX = "replace the link by the file or folder that it points to, or remove it"


def check_path(path: str | Path, where: str | None = None) -> None:
    """Raise UserError for a path that file systems do not allow: with a NUL character, invalid
    Unicode, or a name or path that is too long. where: the setting or option of the path; default:
    the beginning of the path.
    """
    text = str(path)
    where = where or (repr(text) if len(text) <= 80 else f"{text[:60]!r}...")
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UserError(
            "the path contains an invalid Unicode character (a lone surrogate)",
            code="path-invalid",
            where=where,
            fix="type the path again",
        ) from error
    if b"\0" in raw:
        raise UserError(
            "the path contains a NUL character",
            code="path-invalid",
            where=where,
            fix="remove the NUL character",
        )
    longest = max(map(len, raw.split(b"/")))
    if longest > LONGEST_NAME:
        problem = f"a name in the path has {longest} bytes; the maximum is {LONGEST_NAME}"
        raise UserError(problem, code="path-too-long", where=where, fix="choose a shorter name")
    if len(raw) > LONGEST_PATH:
        problem = f"the path has {len(raw)} bytes; the maximum is {LONGEST_PATH}"
        raise UserError(problem, code="path-too-long", where=where, fix="choose a shorter path")


def expand_path(text: str, where: str | None = None) -> str:
    """A path with a leading ``~`` replaced by the home folder.

    Raises UserError like ``check_path``, and for an unknown user.
    """
    check_path(text, where)
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise UserError(
            f"the home folder of {text.split('/')[0]} is unknown",
            code="path-no-home",
            where=where or text,
            fix="write the absolute path, or ./~NAME for a file whose name starts with ~",
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: ``owner/name``, or the ``name`` alone."""
    return HUB_ID.fullmatch(name) is not None


def similar_folder(path: Path) -> Path | None:
    """The existing folder whose path is spelled most similarly; None if none is similar."""
    parent = path.parent if path.parent.is_dir() else similar_folder(path.parent)
    if parent is None or (parent / path.name).is_dir():
        return parent and parent / path.name
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return None
    near = get_close_matches(path.name, names, n=1)
    return parent / near[0] if near else None


def missing_run(path: Path, fix: str) -> UserError:
    """The error for the folder of a run that does not exist. fix: advice if none is similar."""
    near = similar_folder(path)
    return UserError(
        "the folder does not exist",
        code="run-not-found",
        where=str(path),
        fix=f"did you mean {near}?" if near else fix,
    )


def refuse_links(path: Path, root: Path) -> None:
    """Raise UserError for a symbolic link in ``path`` below ``root``.

    The root itself may be a link, for example to another disk.
    """
    below = path.relative_to(root)
    for number in range(1, len(below.parts) + 1):
        prefix = root.joinpath(*below.parts[:number])
        if prefix.is_symlink():
            raise _link_error(prefix)


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
            raise _link_error(path) from error
        raise
    return os.fdopen(handle, "ab" if append else "wb", buffering=0)


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


def _link_error(path: Path) -> UserError:
    return UserError(
        "the path is a symbolic link, which Valence does not follow when it writes",
        code="path-is-symlink",
        where=str(path),
        fix=FIX,
    )
