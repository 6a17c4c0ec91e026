"""Rewards written in Python, named by import path."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from valence.errors import UserError
from valence.rewards.calls import RewardError, describe, describe_error
from valence.rewards.threads import (
    Background,
    Raised,
    TimedOut,
    attempt,
    in_thread,
    restored_working_directory,
)
from valence.types import Completion, Message, Score

MOST_ABANDONED = 8
"""Calls that never came back, beyond which no others are begun: each holds a thread."""
SHOWN = 300
"""Letters of an error's text."""
OF_TRL = ("prompts", "completion_ids")
"""Parameters that tell TRL's signature from ours."""
Columns = dict[str, list[Any]]


@dataclass
class Function:
    """Calls a function with completions. ``seconds``: after which a call is given up.

    Three signatures: ``(completions, **settings)`` with ``Completion`` objects, the same as ``async
    def``, and TRL's ``(prompts, completions, **columns)``, which is known by its parameters:
    ``prompts``, or ones that no setting gives. What is blocking runs in a thread, one call at a
    time (Calls.concurrency is 1), asynchronous functions in a loop of their own.
    """

    fn: Callable[..., Any]
    target: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 60.0
    _abandoned: list[threading.Thread] = field(default_factory=list[threading.Thread], repr=False)
    _loop: Background | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_settings()

    @property
    def blocking(self) -> bool:
        return not (
            inspect.iscoroutinefunction(self.fn)
            or inspect.iscoroutinefunction(getattr(self.fn, "__call__", None))  # noqa: B004
        )

    @cached_property
    def place(self) -> str:
        """File and line of its definition."""
        code: Any = getattr(_plain(self.fn), "__code__", None)
        return self.target if code is None else f"{_shown(code.co_filename)}:{code.co_firstlineno}"

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """The whole file counts, as the function may use the rest of it.

        Files that it imports do not.
        """
        path = (
            inspect.getsourcefile(_plain(self.fn)) if hasattr(_plain(self.fn), "__code__") else None
        )
        if path is None or not Path(path).is_file():
            return None
        source = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return {"function": self.target, "settings": dict(self.settings), "source": source}

    async def close(self) -> None:
        """What it opened is its own."""

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        call = self._call(completions)
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MOST_ABANDONED:
            raise RewardError(
                f"{len(self._abandoned)} earlier calls never came back ({self.place}), so it is "
                f"not called any more"
            )
        try:
            given = await (self._in_thread(call) if self.blocking else self._in_loop(call))
        except TimedOut as late:
            what = "it blocks its event loop" if late.blocked else "the call was given up"
            hint = (
                ": wait with await in an async function, or write it without async"
                if late.blocked
                else ""
            )
            raise RewardError(
                f"no answer within {self.seconds:g} s ({self.place}); {what}{hint}",
                passes=not (self.blocking or late.blocked), late=True,
            ) from late  # fmt: skip
        if isinstance(given, Raised):
            raise self._failure(given.error) from given.error
        # what it gave may raise when looked at
        scores = attempt(partial(scores_of, given, len(completions), self.place))
        if isinstance(scores, Raised):
            raise (
                scores.error
                if isinstance(scores.error, RewardError)
                else self._failure(scores.error)
            )
        return scores

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        given = await in_thread(call, self.seconds, self._abandoned)
        return await self._in_loop(lambda: given) if inspect.isawaitable(given) else given

    async def _in_loop(self, call: Callable[[], Awaitable[Any]]) -> Any:
        loop = self._loop = self._loop or Background("valence async reward")
        try:
            return await loop.run(call, self.seconds)
        except TimedOut as late:
            if late.blocked:
                self._abandoned.append(loop.end())
                self._loop = None if self._loop is loop else self._loop
            raise

    def _failure(self, error: BaseException) -> RewardError:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f
            for f in frames
            if not f.filename.startswith(str(Path(__file__).parent))
            and f.filename != inspect.__file__
        ]
        code: Any = getattr(_plain(self.fn), "__code__", None)
        inside = [f for f in own if code is not None and f.filename == code.co_filename] or own
        place = f"{_shown(inside[-1].filename)}:{inside[-1].lineno}" if inside else self.place
        said = _cut(describe_error(error))
        hint = ""
        if isinstance(error, AttributeError | TypeError) and "Completion" in said and not self._trl:
            hint = (
                "; it is given Completion objects (.text, .prompt, .info); a parameter "
                "`prompts` asks for TRL's lists"
            )
        late = isinstance(error, TimeoutError)
        return RewardError(
            f"raised {said} ({place}){hint}",
            passes=late or isinstance(error, ConnectionError),
            late=late,
        )

    # Arguments

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.fn).parameters
        except (ValueError, TypeError):  # written in C
            rest = inspect.Parameter("rest", inspect.Parameter.VAR_KEYWORD)
            return {
                "completions": inspect.Parameter("completions", inspect.Parameter.POSITIONAL_ONLY),
                "rest": rest,
            }

    @cached_property
    def _named(self) -> list[inspect.Parameter]:
        return [
            p for p in self.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]

    @cached_property
    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @cached_property
    def _required(self) -> list[str]:
        return [p.name for p in self._named if p.default is p.empty and p.name not in self.settings]

    @cached_property
    def _trl(self) -> bool:
        names = [p.name for p in self._named]
        return any(name in names for name in OF_TRL) or (
            "completions" in names and len(self._required) > 1
        )

    def _check_settings(self) -> None:
        """Raises UserError for a setting that the function does not take, and for one that it
        lacks.
        """
        names = [p.name for p in self._named]
        unknown = [name for name in self.settings if name not in names and not self._takes_any]
        if unknown:
            raise UserError(
                f"{self.target} has no parameter {unknown[0]!r}",
                code="reward-setting-unknown",
                where="settings",
                fix=f"its parameters are {', '.join(names)}",
            )
        positional = any(
            p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in self.parameters.values()
        )
        if not self._trl and (not positional or len(self._required) > 1):
            wants = ", ".join(self._required[1:]) or "completions"
            raise UserError(
                f"{self.target} ({self.place}) cannot be called: nothing gives it {wants}",
                code="reward-signature",
                fix="write it as `def reward(completions, **context)`, or `def reward(prompts, "
                "completions, **columns)`",
            )

    def _call(self, completions: Sequence[Completion]) -> Callable[[], Any]:
        copies = attempt(partial(isolated, completions))
        if isinstance(copies, Raised):
            what = _cut(f"{type(copies.error).__name__}: {copies.error}")
            raise RewardError(
                f"a column of the rows cannot be copied for it ({what})"
            ) from copies.error
        completions, settings = copies, copy.deepcopy(dict(self.settings))
        if not self._trl:
            return partial(self.fn, completions, **settings)
        columns = columns_of(completions)
        lacking = [name for name in self._required if name not in columns]
        if lacking:
            has = (
                ", ".join(name for name in columns if name not in (*OF_TRL, "completions"))
                or "none"
            )
            raise RewardError(
                f"it reads the column {lacking[0]!r} ({self.place}), which the rows do not have "
                f"(others: {has})"
            )
        names = [p.name for p in self._named]
        taken = {
            name: values for name, values in columns.items() if self._takes_any or name in names
        }
        return partial(self.fn, **{**taken, **settings})


def isolated(completions: Sequence[Completion]) -> list[Completion]:
    """Copies that share nothing mutable with the rows, or with each other: several completions of
    one prompt hold the same messages, tools and columns, and training goes on with these."""
    return [
        replace(
            each,
            prompt=copy.deepcopy(each.prompt),
            info=copy.deepcopy(dict(each.info)),
            tools=copy.deepcopy(each.tools),
        )
        for each in completions
    ]


def columns_of(completions: Sequence[Completion]) -> Columns:
    """Completions as TRL's functions get them: lists of equal length by name.

    Prompts and completions of chats are lists of messages; a row without a column that others have
    has None there.
    """
    names = dict.fromkeys(name for c in completions for name in c.info)
    return {
        **{name: [c.info.get(name) for c in completions] for name in names},
        "prompts": [
            c.prompt if isinstance(c.prompt, str) else [dict(message) for message in c.prompt]
            for c in completions
        ],
        "completions": [
            c.text if isinstance(c.prompt, str) else _turn(c.text) for c in completions
        ],
        "completion_ids": [list(c.tokens) for c in completions],
    }


def _turn(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


# What a function gives


def scores_of(given: Any, number: int, place: str) -> list[Score]:
    """A score for each of so many answers.

    Raises Failed when what was given is no list of that length.
    """
    if callable(getattr(given, "tolist", None)):  # of numpy or torch
        given = given.tolist()
    if given is None:
        raise RewardError(
            f"gave None ({place}): is there no `return`? A list with a number for each answer is "
            f"wanted"
        )
    if not isinstance(given, list | tuple):
        raise RewardError(
            f"gave a {type(given).__name__} ({place}); a list with a number for each answer is "
            f"wanted"
        )
    values = cast(Sequence[Any], given)
    if len(values) != number:
        raise RewardError(f"gave {len(values)} numbers for {number} answers ({place})")
    return [_score(value, place) for value in values]


def _score(value: Any, place: str) -> Score:
    """Whether its numbers are finite is asked later, of all scores alike."""
    if isinstance(value, Score):
        inner = value if value.value is None else _score(value.value, place)
        return inner if inner.value is None else replace(value, value=inner.value)
    if value is None:
        return Score(None, error=f"gave None ({place})")
    if callable(getattr(value, "item", None)):  # of numpy or torch
        value = attempt(value.item)
    if not isinstance(value, Real):  # truth values are numbers in Python
        return Score(
            None,
            error=_cut(
                f"gave {describe(value)}, a {type(value).__name__}, where a number is wanted "
                f"({place})"
            ),
        )
    found = attempt(partial(float, value))
    return (
        Score(None, error=f"gave a number that is no float ({place})")
        if isinstance(found, Raised)
        else Score(found)
    )


# Finding it


def load_function(target: str, where: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; modules of the current folder can be
    named. Raises UserError.
    """
    name, _, path = target.partition(":")
    found: Any = _import(name, target, where)
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 2, 0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            file = _shown(getattr(sys.modules[name], "__file__", None) or name)
            raise UserError(
                f"{file} has no {part!r}",
                code="reward-not-found",
                where=f"{where}: {target}",
                fix=f"{hint}name a function that is there",
            )
        found = getattr(found, part)
    if inspect.isclass(found) or not callable(found):
        kind = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise UserError(
            f"this is {kind}, not a function",
            code="reward-not-callable",
            where=f"{where}: {target}",
            fix="name a function, or an instance with __call__",
        )
    return cast(Callable[..., Any], found)


def function_of(target: str, settings: Mapping[str, Any], seconds: float, where: str) -> Function:
    """The function of an entry of the recipe's reward section. where: the entry (``reward.0``).
    Raises UserError for one that cannot be found or called, or that does not take a setting."""
    fn = load_function(target, f"{where}.reward")
    try:
        return Function(fn, target, settings, seconds)
    except UserError as error:
        place = f"{where}.{error.where or f'reward: {target}'}"
        raise UserError(error.what, code=error.code, where=place, fix=error.fix) from error


def _import(name: str, target: str, where: str) -> ModuleType:
    """In front of the path while it is imported, as for `python -m`, the current folder stays at
    its end for what is imported
    later: there it hides nothing.
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
        what = (
            f"there is no module {error.name!r}, neither in the current folder ({folder}) nor "
            f"installed"
        )
        raise UserError(
            what,
            code="reward-module-not-found",
            where=place,
            fix="name it as `package.module:function`, from the folder that the package is in",
        )
    said, at = _cut(describe_error(error)), _place_of(error)
    fix = (
        "install it in this environment"
        if isinstance(error, ModuleNotFoundError)
        else "correct the file"
    )
    raise UserError(
        f"importing {name} failed at {at}: {said}",
        code="reward-import-failed",
        where=place,
        fix=fix,
    ) from error


def _place_of(error: BaseException) -> str:
    """File and line where an import ended, machinery aside."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    machinery = ("<frozen", importlib.__file__, str(Path(__file__).parent))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)
    ]
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else "its first line"


def _plain(fn: Callable[..., Any]) -> Any:
    """The function below wrappers, partial arguments and objects."""
    found: Any = inspect.unwrap(fn)
    while isinstance(found, partial):
        found = inspect.unwrap(found.func)
    return found if hasattr(found, "__code__") else getattr(type(found), "__call__", found)  # noqa: B004


def _shown(path: str) -> str:
    """From the current folder where it is below it."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
