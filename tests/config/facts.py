"""Common parts of the tests of recipes: a recipe, and assertions on errors."""

from __future__ import annotations

import re

import pytest

from valence.config.describe import settings_table
from valence.config.load import load_recipe
from valence.errors import UserError
from valence.methods import method_of

GOOD = """\
method: kto
model:
  name: some/model
data:
  train: feedback.jsonl
  eval: held_out.jsonl
"""

SETTINGS = {
    row.name: row
    for row in (*settings_table(), *settings_table(method_of("kto").settings, "loss."))
}
MEANING = "the meaning of the setting"
"""Stands for a fix that explains the setting as the table of settings does."""


def load_error(source: object, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(source, overrides)  # type: ignore[arg-type]
    for problem in caught.value.problems:
        assert problem.fix
        assert problem.where
    return caught.value


def check_recipe_error(error: UserError, where: str, code: str, value: str, fix: str) -> None:
    """value: what the error quotes. fix: the setting or value that the remedy names, or MEANING."""
    assert (error.code, error.where) == (code, where), error
    assert value in error.message, error
    assert error.problems == (error,)
    setting = SETTINGS.get(re.sub(r"\.\d+\b", ".N", where.rpartition("(")[2].rstrip(")")))
    if code == "setting-type" and setting is not None:
        assert re.sub(r"a section \([^()]*\)", "a section", setting.type) in error.message, error
    if fix == MEANING:
        assert setting is not None
        fix = setting.meaning
    assert fix in (error.fix or ""), error
