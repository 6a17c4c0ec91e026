"""Call code that is not part of Valence: it may raise anything, and change the folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
CLONE_FS = 0x200
"""Linux: flag with which a thread stops sharing its working directory."""

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception of a call, as its result."""

    error: BaseException


def attempt(call: Callable[[], T]) -> T | Raised:
    """The result of the call, or its exception of any type."""
    try:
        return call()
    except BaseException as error:  # a reward may raise even SystemExit
        return Raised(error)


def separate_working_directory() -> bool:
    """Give this thread its own working directory if Linux allows it; otherwise ``os.chdir`` moves
    the whole process. The thread no longer follows the program's own ``os.chdir``. Returns whether
    it worked.
    """
    linux = sys.platform == "linux"
    _thread.is_separate = linux and attempt(lambda: ctypes.CDLL(None).unshare(CLONE_FS)) == 0
    return _thread.is_separate


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Change back to the working directory if the block has left it.

    Does nothing in a background thread that shares the directory of the process: it cannot know
    whether the block or the main thread has changed it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not getattr(_thread, "is_separate", False):
        yield
        return
    try:
        folder = os.getcwd()
    except OSError:  # the folder was deleted
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if attempt(os.getcwd) != folder:
                os.chdir(folder)


def describe(value: object) -> str:
    """``repr(value)``, or the type's name if that raises: objects of reward functions may raise
    anything.
    """
    return _text_or_type(repr, value)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, whatever its ``__str__`` does."""
    name = type(error).__name__
    message = _text_or_type(str, error)
    return f"{name}: {message}" if message else name


def _text_or_type(convert: Callable[[Any], str], value: object) -> str:
    # even SystemExit: formatting an error must not raise
    text = attempt(lambda: str(convert(value)))
    return f"<{type(value).__name__} without text>" if isinstance(text, Raised) else text
