"""Common parts of the tests of recipes: fictitious methods, a recipe, and assertions on errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from valence.config.describe import settings_table
from valence.config.learning_rates import LEARNING_RATES, LearningRates
from valence.config.load import load_recipe
from valence.config.schema import Section
from valence.errors import UserError
from valence.types import Kind


class KtoLoss(Section):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Sharpness."""
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    scope: Literal["step", "group"] = "step"
    window: tuple[int, int] = (1, 2)


class NoSettings(Section):
    pass


@dataclass(frozen=True)
class Facts:
    name: str
    kind: Kind
    needs_reference: bool
    settings: type[BaseModel]
    is_reward_model: bool = False
    online: bool = False
    is_on_policy: bool = False
    min_rollouts: int = 1
    rollout_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    learning_rates: LearningRates = LEARNING_RATES["preference"]

    def loss_reads_reference(self, settings: Mapping[str, Any]) -> bool:
        return self.needs_reference and not self.online

    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return {}

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return {}


METHODS = {
    "kto": Facts("kto", "judgement", True, KtoLoss),
    "dpo": Facts("dpo", "preference", True, KtoLoss),
    "sft": Facts("sft", "demonstration", False, NoSettings),
    "pointwise": Facts("pointwise", "scored", False, NoSettings),
    "grpo": Facts("grpo", "ranking", True, NoSettings),
}
ONLINE = {
    "grpo": Facts(
        "grpo", "prompt", True, NoSettings, online=True, is_on_policy=True, min_rollouts=2
    ),
    "rejection": Facts("rejection", "prompt", True, NoSettings, online=True),
}


def method_of(name: str, online: bool = False) -> Facts:
    if online and name in ONLINE:
        return ONLINE[name]
    if name not in METHODS:
        raise UserError(
            f"there is no method {name!r}",
            code="method-unknown",
            where="elsewhere",
            fix="methods: kto, dpo, sft",
        )
    return METHODS[name]


GOOD = """\
method: kto
model:
  name: some/model
data:
  train: feedback.jsonl
  eval: held_out.jsonl
"""

SETTINGS = {row.name: row for row in (*settings_table(), *settings_table(KtoLoss, "loss."))}
MEANING = "the meaning of the setting"
"""Stands for a fix that explains the setting as the table of settings does."""


def load_error(source: object, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(source, overrides, method_of=method_of)  # type: ignore[arg-type]
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
