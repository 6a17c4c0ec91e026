"""Assertions on the errors that users see: their code, their place, and the settings that the fix
names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from valence.errors import UserError


@dataclass
class Raised:
    """The error of a ``raises_error`` block, once the block has ended."""

    error: UserError = field(init=False)


@contextmanager
def raises_error(
    code: str, *, where: str | None = None, fix: str | None = None
) -> Iterator[Raised]:
    """Expect a UserError with this code.

    where: text that its place contains. fix: text that its fix contains, such as the setting to
    change.
    """
    raised = Raised()
    with pytest.raises(UserError) as info:
        yield raised
    raised.error = info.value
    check_error(info.value, code, where=where, fix=fix)


def check_error(
    error: UserError, code: str, *, where: str | None = None, fix: str | None = None
) -> None:
    assert error.code == code, error
    if where is not None:
        assert where in (error.where or ""), error
    if fix is not None:
        assert fix in (error.fix or ""), error
