"""Load Python objects by import path (``package.module:name``)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from valence.errors import UserError
from valence.user_code.attempt import (
    Raised,
    attempt,
    describe_error,
    restored_working_directory,
)
from valence.user_code.sources import PROGRAM, unwrap

MAX_ERROR_LENGTH = 300
"""In characters."""


REGISTERED = "python"
"""The module in the paths of objects that no import finds."""
IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
PYTHON_FILE = re.compile(r"\.py(:|$)")

_objects: dict[str, Any] = {}


def is_import_path(text: str) -> bool:
    """Whether a text is an import path (``package.module:name``)."""
    return bool(IMPORT_PATH.fullmatch(text)) and not PYTHON_FILE.search(text)


def target_of(value: Any, used: Collection[str] = ()) -> str:
    """The import path of an object (``package.module:name``).

    An object that no import finds, such as a function of a notebook, gets the path
    ``python:name``, which ``load_object`` knows until this process ends. used: paths of other
    objects.
    """
    named = unwrap(value) if callable(value) else value
    module = str(getattr(named, "__module__", ""))
    name = str(getattr(named, "__qualname__", "") or type(value).__qualname__)
    name = re.sub(r"[^\w.]", "_", name.replace("<locals>.", ""))
    loaded = sys.modules.get(module)
    if module not in PROGRAM and loaded is not None:
        with contextlib.suppress(AttributeError):
            if attrgetter(name)(loaded) is value:
                return f"{module}:{name}"
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    target = next(path for n in names if (path := f"{REGISTERED}:{n}") not in used)
    _objects[target] = value
    return target


def load_object(target: str, where: str, subject: str) -> Any:
    """The object ``package.module:name``; the current folder is searched for modules.

    subject: what it is, as codes of errors begin: ``reward`` or ``method``. Raises UserError.
    """
    if target in _objects:
        return _objects[target]
    name, _, path = target.partition(":")
    if name == REGISTERED:
        raise UserError(
            f"the {subject} {path} is an object that was passed from Python",
            code=f"{subject}-not-found",
            where=f"{where}: {target}",
            fix="pass it again to `valence.train`, or write it in a file and name it `module:name`",
        )
    value: Any = sys.modules.get(name) or _import(name, target, where, subject)
    for part in path.split("."):
        if not hasattr(value, part):
            close = get_close_matches(part, dir(value), 2, 0.5)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            file = relative(getattr(sys.modules[name], "__file__", None) or name)
            raise UserError(
                f"{file} has no {part!r}",
                code=f"{subject}-not-found",
                where=f"{where}: {target}",
                fix=f"{hint}use the name of a function in this file",
            )
        value = getattr(value, part)
    return value


def load_function(target: str, where: str, subject: str) -> Callable[..., Any]:
    """``load_object``, which must be a function or another object that can be called."""
    value = load_object(target, where, subject)
    if inspect.isclass(value) or not callable(value):
        kind = "a class" if inspect.isclass(value) else f"of type {type(value).__name__}"
        raise UserError(
            f"{target} is {kind}, not a function",
            code=f"{subject}-not-callable",
            where=f"{where}: {target}",
            fix="use a function, or an object with __call__",
        )
    return cast(Callable[..., Any], value)


def _import(name: str, target: str, where: str, subject: str) -> ModuleType:
    """Import a module with the current folder first on the path, as `python -m` does.

    Afterwards the folder stays at the end of the path for later imports, where it hides nothing.
    """
    folder, place = os.getcwd(), f"{where}: {target}"
    sys.path.insert(0, folder)
    try:
        with restored_working_directory():
            module = attempt(partial(importlib.import_module, name))
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    if not isinstance(module, Raised):
        return module
    error = module.error
    if isinstance(error, KeyboardInterrupt):
        raise error
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and (name == error.name or name.startswith(f"{error.name}."))
    ):
        raise UserError(
            f"no module named {error.name!r}, neither in the current folder ({folder}) nor in the "
            f"environment",
            code=f"{subject}-module-not-found",
            where=place,
            fix="check the name (`package.module:function`), and run the command in the folder "
            "that contains the package",
        )
    is_missing = isinstance(error, ModuleNotFoundError)
    raise UserError(
        f"importing {name} failed at {_import_place(error)}: {truncate(describe_error(error))}",
        code=f"{subject}-import-failed",
        where=place,
        fix="install the missing module" if is_missing else "fix the error in this file",
    ) from error


def _import_place(error: BaseException) -> str:
    """File and line where an import failed, ignoring the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative(error.filename)}:{error.lineno}"
    ignored = ("<frozen", importlib.__file__, str(Path(__file__).parent))
    return place_of(frames_of(error, ignored)) or "its first line"


def frames_of(error: BaseException, ignored: tuple[str, ...]) -> list[traceback.FrameSummary]:
    """The frames of an exception outside of files whose paths start with ``ignored``."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(ignored)]


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """File and line of the last frame; empty without frames."""
    return f"{relative(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def describe_raised(error: BaseException, *ignored: str) -> str:
    """What a user's code raised, with the file and line in it: ``raised KeyError: 'x' (my.py:3)``.

    ignored: starts of the paths of files that called it. Raises a KeyboardInterrupt again.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    place = place_of(frames_of(error, (attempt.__code__.co_filename, *ignored)))
    return f"raised {describe_error(error)}{f' ({place})' if place else ''}"


def definition_place(fn: Callable[..., Any]) -> str:
    """File and line of a function's definition; empty if it has none."""
    code: Any = getattr(unwrap(fn), "__code__", None)
    return "" if code is None else f"{relative(code.co_filename)}:{code.co_firstlineno}"


def relative(path: str) -> str:
    """A path below the current folder relative to it; another path unchanged."""
    return path.removeprefix(os.getcwd() + os.sep)


def truncate(text: str) -> str:
    limit = MAX_ERROR_LENGTH
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
