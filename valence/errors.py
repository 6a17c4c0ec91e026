"""The exception for user errors: a mistake in a recipe, in data or in a request, with its fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DISTRIBUTION = "valence-align"
"""Name of the package on PyPI and for ``importlib.metadata``.

On PyPI, ``valence`` is another project.
"""


def install_command(extra: str) -> str:
    """The shell command that installs an optional dependency of Valence."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


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

    @property
    def problems(self) -> tuple[UserError, ...]:
        """The mistakes that this error lists, or else the error itself."""
        return self._problems or (self,)

    @property
    def facts(self) -> dict[str, str | None]:
        """The arguments to create the error in another process, without ``problems``."""
        return {"message": self.message, "code": self.code, "where": self.where, "fix": self.fix}


def _unpickle(facts: Mapping[str, Any], problems: Sequence[UserError]) -> UserError:
    return UserError(**facts, problems=problems)
