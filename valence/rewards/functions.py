"""Rewards that are Python functions, named by import path."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any, cast

from valence.errors import UserError, field_problem
from valence.rewards.calls import RewardError
from valence.rewards.settings import did_you_mean
from valence.rewards.threads import Background, TimedOut, in_thread
from valence.types import Completion, Message, Score
from valence.user_code.attempt import Raised, attempt, describe, describe_error
from valence.user_code.load import (
    definition_place,
    frames_of,
    load_function,
    place_of,
    truncate,
    unwrap,
)
from valence.user_code.settings import annotation_error
from valence.user_code.sources import function_sources

MAX_ABANDONED = 8
"""Maximum number of calls that have not returned: each occupies a thread."""
TRL_PARAMETERS = ("prompts", "completion_ids")
"""Parameters that identify TRL's signature."""
Columns = dict[str, list[Any]]


@dataclass
class Function:
    """Calls a function with completions. seconds: time limit of a call.

    Three signatures: ``(completions, **settings)`` with ``Completion`` objects, the same as ``async
    def``, and TRL's ``(prompts, completions, **columns)``, which is detected by its parameters:
    ``prompts``, or parameters that no setting provides. Blocking functions run in a thread, one
    call at a time (Calls.concurrency is 1), asynchronous ones in a separate event loop.
    """

    fn: Callable[..., Any]
    target: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 60.0
    _abandoned: list[threading.Thread] = field(default_factory=list[threading.Thread], repr=False)
    _loop: Background | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_settings()
        self._identity = self._read_identity()  # while the files are those that were imported

    @property
    def blocking(self) -> bool:
        return not (
            inspect.iscoroutinefunction(self.fn)
            or inspect.iscoroutinefunction(getattr(self.fn, "__call__", None))  # noqa: B004
        )

    @cached_property
    def place(self) -> str:
        """File and line of the definition."""
        return definition_place(self.fn) or self.target

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """Includes the file of the function and, under ``imports``, all files outside of installed
        libraries that it imports, directly or through others; not data files or the network. The
        file of a callable without one, such as a partial of a C function, is that of the entry's
        module. None if that has no file either.
        """
        return self._identity

    def _read_identity(self) -> Mapping[str, Any] | None:
        sources = function_sources(self.fn, self.target)
        if sources is None:
            return None
        return {"function": self.target, "settings": dict(self.settings), **sources}

    async def close(self) -> None:
        """Nothing to close."""

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        call = self._call(completions)
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise RewardError(
                f"not called, because {len(self._abandoned)} earlier calls have not returned "
                f"({self.place})"
            )
        try:
            result = await (self._in_thread(call) if self.blocking else self._in_loop(call))
        except TimedOut as late:
            reason = "it blocks the event loop" if late.blocked else "the call was abandoned"
            hint = (
                ": use await in the async function, or define it without async"
                if late.blocked
                else ""
            )
            raise RewardError(
                f"no result within {self.seconds:g} s ({self.place}); {reason}{hint}",
                passes=not (self.blocking or late.blocked), late=True,
            ) from late  # fmt: skip
        if isinstance(result, Raised):
            raise self._failure(result.error) from result.error
        # objects in the result may raise
        scores = attempt(partial(parse_scores, result, len(completions), self.place))
        if not isinstance(scores, Raised):
            return scores
        if isinstance(scores.error, RewardError):
            raise scores.error
        raise self._failure(scores.error)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        result = await in_thread(call, self.seconds, self._abandoned)
        return await self._in_loop(lambda: result) if inspect.isawaitable(result) else result

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
        ignored = (str(Path(__file__).parent), inspect.__file__)
        frames = frames_of(error, ignored)
        code: Any = getattr(unwrap(self.fn), "__code__", None)
        fn_frames = [f for f in frames if code is not None and f.filename == code.co_filename]
        place = place_of(fn_frames or frames) or self.place
        message = truncate(describe_error(error))
        hint = ""
        is_type_error = isinstance(error, AttributeError | TypeError) and "Completion" in message
        if is_type_error and not self._is_trl:
            hint = (
                "; the function receives Completion objects (.text, .prompt, .info); add a "
                "parameter `prompts` to receive lists as in TRL"
            )
        late = isinstance(error, TimeoutError)
        return RewardError(
            f"raised {message} ({place}){hint}",
            passes=late or isinstance(error, ConnectionError),
            late=late,
        )

    # Arguments

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.fn).parameters
        except (ValueError, TypeError):  # written in C
            kwargs = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
            return {
                "completions": inspect.Parameter("completions", inspect.Parameter.POSITIONAL_ONLY),
                "kwargs": kwargs,
            }

    @cached_property
    def _named_parameters(self) -> list[inspect.Parameter]:
        return [
            p for p in self.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]

    @cached_property
    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @cached_property
    def _required(self) -> list[str]:
        return [
            p.name
            for p in self._named_parameters
            if p.default is p.empty and p.name not in self.settings
        ]

    @cached_property
    def _is_trl(self) -> bool:
        names = [p.name for p in self._named_parameters]
        return any(name in names for name in TRL_PARAMETERS) or (
            "completions" in names and len(self._required) > 1
        )

    def _check_settings(self) -> None:
        """Raise UserError for an unknown or missing setting, or an excluded value."""
        names = [p.name for p in self._named_parameters]
        unknown = [name for name in self.settings if name not in names and not self._takes_any]
        if unknown:
            raise UserError(
                f"{self.target} has no parameter {unknown[0]!r}",
                code="reward-setting-unknown",
                where=f"settings.{unknown[0]}",
                fix=f"{did_you_mean(unknown[0], names[1:])}its settings are {', '.join(names[1:])}"
                if names[1:]
                else "remove it: the function has no settings",
            )
        positional = any(
            p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in self.parameters.values()
        )
        if not self._is_trl and (not positional or len(self._required) > 1):
            missing = ", ".join(self._required[1:]) or "completions"
            raise UserError(
                f"{self.target} ({self.place}) cannot be called: no setting provides {missing}",
                code="reward-signature",
                fix="add it to the settings, or define the function as `def reward(completions, "
                "**settings)` or `def reward(prompts, completions, **columns)`",
            )
        for p in self._named_parameters:
            if p.name in self.settings:
                self._check_value(p, self.settings[p.name])

    def _check_value(self, parameter: inspect.Parameter, value: object) -> None:
        error = annotation_error(self.fn, parameter, value)
        if error is not None:
            raise UserError(
                f"{field_problem(error)} (reward {self.target})",
                code="reward-setting-value",
                where=".".join(map(str, ("settings", *error["loc"]))),
                fix=f"change it, or the parameter `{parameter}` of the function ({self.place})",
            )

    def _call(self, completions: Sequence[Completion]) -> Callable[[], Any]:
        copies = attempt(partial(isolate, completions))
        if isinstance(copies, Raised):
            reason = truncate(f"{type(copies.error).__name__}: {copies.error}")
            raise RewardError(
                f"a column of the rows cannot be copied ({reason}); use only text, numbers, lists "
                "and dictionaries in the columns that the reward receives"
            ) from copies.error
        completions, settings = copies, copy.deepcopy(dict(self.settings))
        if not self._is_trl:
            return partial(self.fn, completions, **settings)
        columns = trl_columns(completions)
        missing = [name for name in self._required if name not in columns]
        if missing:
            available = [n for n in columns if n not in (*TRL_PARAMETERS, "completions")]
            raise RewardError(
                f"the function reads the column {missing[0]!r} ({self.place}), which the rows do "
                f"not have (columns: {', '.join(available) or 'none'})"
            )
        names = [p.name for p in self._named_parameters]
        arguments = {
            name: values for name, values in columns.items() if self._takes_any or name in names
        }
        return partial(self.fn, **{**arguments, **settings})


def isolate(completions: Sequence[Completion]) -> list[Completion]:
    """Copies without shared mutable objects: completions of one prompt share its messages, tools
    and columns, which are used again in training.
    """
    return [
        replace(
            c,
            prompt=copy.deepcopy(c.prompt),
            info=copy.deepcopy(dict(c.info)),
            tools=copy.deepcopy(c.tools),
            episode=copy.deepcopy(c.episode),
        )
        for c in completions
    ]


def turns_of(completion: Completion) -> Sequence[Message]:
    """The turns of a completion of a chat."""
    if completion.episode is not None:
        return completion.episode.messages
    return [{"role": "assistant", "content": completion.text}]


def trl_columns(completions: Sequence[Completion]) -> Columns:
    """The arguments of TRL's functions: lists of equal length by name.

    Prompts and completions of chats are lists of messages. A row without a column of other rows has
    None there.
    """
    names = dict.fromkeys(name for c in completions for name in c.info)
    return {
        **{name: [c.info.get(name) for c in completions] for name in names},
        "prompts": [
            c.prompt if isinstance(c.prompt, str) else [dict(message) for message in c.prompt]
            for c in completions
        ],
        "completions": [
            c.text
            if isinstance(c.prompt, str) and c.episode is None
            else [dict(message) for message in turns_of(c)]
            for c in completions
        ],
        "completion_ids": [list(c.tokens) for c in completions],
    }


# The result of a function


def parse_scores(result: Any, number: int, place: str) -> list[Score]:
    """The scores of ``number`` completions in the result of a function.

    Raises RewardError unless it is a list of this length.
    """
    if callable(getattr(result, "tolist", None)):  # numpy or torch
        result = result.tolist()
    if result is None:
        raise RewardError(
            f"returned None ({place}) instead of a list of numbers: is `return` missing?"
        )
    if not isinstance(result, list | tuple):
        kind = type(result).__name__
        raise RewardError(
            f"returned a value of type {kind} ({place}) instead of a list with one number per "
            "completion"
        )
    values = cast(Sequence[Any], result)
    if len(values) != number:
        raise RewardError(f"returned {len(values)} numbers for {number} completions ({place})")
    return [_score(value, place) for value in values]


def _score(value: Any, place: str) -> Score:
    """The score that a function has returned for a completion: a number, a number with a text, a
    list with a number for each turn, or a Score. Whether its numbers are finite is checked later,
    for all rewards.
    """
    if _has_text(value):
        value = Score(value[0], feedback=value[1])
    if isinstance(value, Score):
        inner = value if value.value is None else _score(value.value, place)
        return inner if inner.value is None else replace(value, value=inner.value)
    if value is None:
        return Score(None, error=f"returned None ({place})")
    if _has_turns(value):
        turns = [_score(turn, place) for turn in value]
        failed = [turn for turn in turns if turn.value is None]
        numbers = tuple(turn.value or 0.0 for turn in turns)
        return failed[0] if failed else Score(sum(numbers), turn_rewards=numbers)
    if callable(getattr(value, "item", None)):  # numpy or torch
        value = attempt(value.item)
    if not isinstance(value, Real):  # booleans are numbers in Python
        kind = type(value).__name__
        error = f"returned {describe(value)}, a {kind} instead of a number ({place})"
        return Score(None, error=truncate(error))
    number = attempt(partial(float, value))
    if isinstance(number, Raised):
        return Score(None, error=f"returned a number that cannot be converted to a float ({place})")
    return Score(number)


def _has_text(value: object) -> bool:
    """Whether a value is a number with a text."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)


def _has_turns(value: Any) -> bool:
    """Whether a value may be a list with a number for each turn."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and not any(isinstance(turn, list) for turn in value)


def function_of(target: str, settings: Mapping[str, Any], seconds: float, where: str) -> Function:
    """The function of an entry of the recipe's reward section. where: the entry (``reward.0``).

    Raises UserError if it does not exist, cannot be called, or has no parameter for a setting.
    """
    fn = load_function(target, f"{where}.reward", "reward")
    try:
        return Function(fn, target, settings, seconds)
    except UserError as error:
        place = f"{where}.{error.where or f'reward: {target}'}"
        raise UserError(error.message, code=error.code, where=place, fix=error.fix) from error
