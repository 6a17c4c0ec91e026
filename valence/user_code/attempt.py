"""Call code that is not part of Valence: it may raise anything, and change the folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


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


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Change back to the working directory if the block has left it."""
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
