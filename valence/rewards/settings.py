"""Check the settings of a reward: their names, types and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from valence.errors import UserError, field_problem

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(
    model: type[Settings], settings: Mapping[str, Any], where: str, subject: str, page: str
) -> Settings:
    """The settings of an entry of the reward section.

    where: their place in the recipe. subject: the reward. page: of `valence docs`, which lists
    them. Raises UserError for a setting that is unknown, missing or wrong.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        names = list(model.model_fields)
        raise _setting_error(error.errors()[0], names, where, subject, page) from error


def _setting_error(
    error: ErrorDetails, names: Sequence[str], where: str, subject: str, page: str
) -> UserError:
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        code, problem = "reward-setting-unknown", f"{subject} has no setting {place!r}"
        fix = did_you_mean(place, names) or "remove it; "
    elif error["type"] == "missing":
        code, problem = "reward-setting-missing", f"{subject} needs the setting {place!r}"
        fix = "add it; "
    else:
        code, problem = "reward-setting-value", f"{field_problem(error)} ({subject})"
        fix = "correct it; "
    return UserError(
        problem,
        code=code,
        where=f"{where}.{place}",
        fix=f"{fix}its settings are {', '.join(names)} (`valence docs {page}`)",
    )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The beginning of a fix; empty if no name is similar."""
    close = get_close_matches(name, names, 1)
    return f"did you mean {close[0]}? " if close else ""
