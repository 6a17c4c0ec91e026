"""Paths and hub ids in settings."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

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
            raise link_error(prefix)


def link_error(path: Path) -> UserError:
    """The error for a symbolic link where Valence would write."""
    return UserError(
        "the path is a symbolic link, which Valence does not follow when it writes",
        code="path-is-symlink",
        where=str(path),
        fix=FIX,
    )
