"""The exception for user errors: a mistake in a recipe, in data or in a request, with its fix."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

DISTRIBUTION = "valence-align"
"""Name of the package on PyPI and for ``importlib.metadata``.

On PyPI, ``valence`` is another project.
"""


def install_command(extra: str) -> str:
    """The shell command that installs an optional dependency of Valence."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "_STATUS_ALLOC_FAILED",
    "failed to map segment from shared object",
)
"""Parts of messages: of PyTorch; of its allocator for host memory; of the system; of cuBLAS, cuDNN
and cuSOLVER, which allocate their workspaces themselves; and of the loader of libraries.
"""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host has no memory left."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(
        part in str(error) for part in OUT_OF_MEMORY_MESSAGES
    )


EXPECTED = {
    "bool": "true or false",
    "dict": "an object (names with values)",
    "finite_number": "a finite number",
    "float": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int": "a whole number",
    "int_from_float": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list": "a list",
    "literal_error": "one of {expected}",
    "mapping": "an object (names with values)",
    "model": "an object (names with values)",
    "model_attributes": "an object (names with values)",
    "string": "text",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} characters",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of at least {min_length} items",
    "tuple": "a list",
}
"""Type of an error of pydantic, or its first part -> the values that are allowed."""
MAX_VALUE = 60
"""Characters of a value in a message."""


def field_problem(error: Mapping[str, Any]) -> str:
    """An error of pydantic in plain words, without the name of the field."""
    kind = str(error["type"])
    if kind == "missing":
        return "it is missing"
    if kind == "extra_forbidden":
        return "there is no such name"
    for ending in ("", "_type", "_parsing"):
        if kind.endswith(ending) and (expected := EXPECTED.get(kind.removesuffix(ending))):
            value = json.dumps(error.get("input"), ensure_ascii=False, default=str)
            value = value.encode(errors="backslashreplace").decode()
            value = value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 3]}..."
            return f"{value} is not {expected.format(**error.get('ctx', {}))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


class UserError(Exception):
    """A mistake in a recipe, in data, or in a request.

    The command line prints it and exits with status 2.

    message: the problem, in one sentence.
    code: a short name of the mistake, such as ``setting-unknown``. Messages may change, codes do
    not. where: the place, such as ``feedback.jsonl:12`` or ``recipe.yaml:3 (train.batch_size)``.
    fix: how to fix it, in one sentence.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        where: str | None = None,
        fix: str | None = None,
        problems: Sequence[UserError] = (),
    ) -> None:
        self.message, self.code, self.where, self.fix = message, code, where, fix
        self._problems = tuple(problems)
        place = f"{where}: ".replace("\n", "\N{SYMBOL FOR NEWLINE}") if where else ""
        # indented, so that no line of the text looks like a separate message
        lines = [place + message.replace("\n", "\n  ")]
        if fix:
            lines.append(f"  to fix it: {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # pickled for another process; exceptions are created from their text alone by default
        return _unpickle, (self.facts, self._problems)

    def name_arguments(self) -> None:
        """Name arguments of ``valence.train`` in place of options of the command."""
        for problem in self._problems:
            problem.name_arguments()
        UserError.__init__(
            self,
            _with_arguments(self.message),
            code=self.code,
            where=self.where and _with_arguments(self.where),
            fix=self.fix and _with_arguments(self.fix),
            problems=self._problems,
        )

    @property
    def problems(self) -> tuple[UserError, ...]:
        """The mistakes that this error lists, or else the error itself."""
        return self._problems or (self,)

    @property
    def facts(self) -> dict[str, str | None]:
        """The arguments to create the error in another process, without ``problems``."""
        return {"message": self.message, "code": self.code, "where": self.where, "fix": self.fix}


def refuse_unused(options: Sequence[str], reason: str, fix: str = "") -> None:
    """Raise UserError if there is an option without effect.

    options: flags. reason: completes "OPTION has no effect". fix: instead of removing the option.
    """
    if options:
        option = options[0]
        raise UserError(
            f"{option} has no effect {reason}",
            code="option-unused",
            where=option,
            fix=f"remove {option}" + (f", or {fix}" if fix else ""),
        )


_names_arguments: ContextVar[bool] = ContextVar("names_arguments", default=False)


@contextmanager
def naming_arguments(active: bool = True) -> Generator[None]:
    """Errors raised in the block, and texts that it passes through ``for_interface``, name
    arguments of ``valence.train`` in place of options of `valence train`.

    active: False changes nothing.
    """
    before = _names_arguments.set(active or are_arguments_named())
    try:
        yield
    except UserError as error:
        if active:
            error.name_arguments()
        raise
    finally:
        _names_arguments.reset(before)


def are_arguments_named() -> bool:
    """Whether this is inside a block of ``naming_arguments``."""
    return _names_arguments.get()


def for_interface(text: str) -> str:
    """A message as the interface names things: options, or in Python arguments."""
    return _with_arguments(text) if are_arguments_named() else text


def _with_arguments(text: str) -> str:
    text = re.sub(r"`valence train RECIPE --fresh`|--fresh", "fresh=True", text)
    text = re.sub(r"--nproc(?!-)", "torchrun --nproc-per-node", text)
    text = re.sub(r"(?:--allow [\w.]*\w ?)*--allow [\w.]*\w", _allow_argument, text)
    return re.sub(r"^--allow$", "allow", text).replace(
        "the same command", "the same call, with run.dir set to the folder of this run,"
    )


def _allow_argument(options: re.Match[str]) -> str:
    return f"allow={json.dumps(options[0].replace('--allow', '').split())}"


def _unpickle(facts: Mapping[str, Any], problems: Sequence[UserError]) -> UserError:
    return UserError(**facts, problems=problems)
