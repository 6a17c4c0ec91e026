"""Paths and hub ids of settings, and files below a folder that other people may have filled:
symbolic links in it are refused, never followed.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import BinaryIO

from valence.errors import UserError

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes that file systems allow."""
HUB_ID = re.compile(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
FIX = "remove the link, or put the file or folder itself in its place"


def check_path(path: str | Path, where: str | None = None) -> None:
    """Raises UserError for a path that no file system can hold: a NUL character, bytes that are no
    text, or a name or path that is too long. where: the setting or option that names it; by default
    the beginning of the path.
    """
    text = str(path)
    where = where or (repr(text) if len(text) <= 80 else f"{text[:60]!r}...")
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError as error:
        message = "the path holds half a character, which no file name can"
        raise UserError(
            message, code="path-invalid", where=where, fix="write the name out again"
        ) from error
    if b"\0" in raw:
        raise UserError(
            "the path holds a NUL character, which no file name can",
            code="path-invalid",
            where=where,
            fix="remove it",
        )
    longest = max(map(len, raw.split(b"/")))
    if longest > LONGEST_NAME:
        message = f"a name in the path has {longest} bytes, and file systems allow {LONGEST_NAME}"
        raise UserError(message, code="path-too-long", where=where, fix="choose a shorter name")
    if len(raw) > LONGEST_PATH:
        message = f"the path has {len(raw)} bytes, and file systems allow {LONGEST_PATH}"
        raise UserError(message, code="path-too-long", where=where, fix="choose a shorter path")


def expand_path(text: str, where: str | None = None) -> str:
    """A path of a setting, with ``~`` at its beginning replaced by the home folder.

    Raises UserError as ``check_path`` does, and when there is no such home folder.
    """
    check_path(text, where)
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        message = f"there is no home folder for {text.split('/')[0]}"
        raise UserError(
            message,
            code="path-no-home",
            where=where or text,
            fix="write the path in full; ./~NAME is a file of that name",
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: ``owner/name``, or the ``name`` alone."""
    return HUB_ID.fullmatch(name) is not None


def refuse_links(path: Path, root: Path) -> None:
    """Raises UserError that names the first symbolic link among ``path`` and the folders between it
    and ``root``. The root itself may be reached through links: people keep runs on other disks.
    """
    below = path.relative_to(root)
    for number in range(1, len(below.parts) + 1):
        place = root.joinpath(*below.parts[:number])
        if place.is_symlink():
            raise _is_link(place)


def open_file(path: Path, root: Path, *, append: bool = False) -> BinaryIO:
    """A file below ``root``, opened unbuffered, to be overwritten or appended to.

    Raises UserError when it or a folder on the way to it is a symbolic link, and OSError when it
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
            raise _is_link(path) from error
        raise
    return os.fdopen(handle, "ab" if append else "wb", buffering=0)


def make_folder(path: Path, root: Path) -> None:
    """Makes a folder below ``root``, unless it is there.

    Raises UserError as ``open_file`` does, and OSError.
    """
    refuse_links(path, root)
    path.mkdir(parents=True, exist_ok=True)


def write_all(file: BinaryIO, content: bytes) -> None:
    """Writes all of the content into an unbuffered file. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _is_link(path: Path) -> UserError:
    return UserError(
        "this is a symbolic link, and is not written through",
        code="path-is-symlink",
        where=str(path),
        fix=FIX,
    )
