"""The one error that means: the user's recipe, data or request is at fault, and here is what to
do.
"""

from __future__ import annotations

from collections.abc import Sequence

DISTRIBUTION = "valence-align"
"""Name of the package on PyPI and for ``importlib.metadata``.

The name ``valence`` belongs to another project there.
"""


def install_command(extra: str) -> str:
    """The shell command that installs an optional dependency of Valence."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class UserError(Exception):
    """A mistake in a recipe, in data, or in a request.

    The command line prints it and exits with status 2.

    what: one sentence saying what is wrong.
    code: a short name of the mistake, such as ``setting-unknown``. Messages may change, codes stay.
    where: the place, such as ``feedback.jsonl:12`` or ``recipe.yaml:3 (train.batch_size)``.
    fix: one sentence saying how to fix it.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str,
        where: str | None = None,
        fix: str | None = None,
        problems: Sequence[UserError] = (),
    ) -> None:
        self.what, self.code, self.where, self.fix = what, code, where, fix
        self._problems = tuple(problems)
        place = f"{where}: ".replace("\n", "\N{SYMBOL FOR NEWLINE}") if where else ""
        # a line of the text cannot pass for a message of its own
        lines = [place + what.replace("\n", "\n  ")]
        if fix:
            lines.append(f"  to fix it: {fix}")
        super().__init__("\n".join(lines))

    @property
    def problems(self) -> tuple[UserError, ...]:
        """The single mistakes that this error lists; the error itself if it is one."""
        return self._problems or (self,)

    @property
    def facts(self) -> dict[str, str | None]:
        """The arguments that make the error again in another process; without ``problems``."""
        return {"what": self.what, "code": self.code, "where": self.where, "fix": self.fix}
