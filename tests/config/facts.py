"""Made-up methods for the tests of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from valence.config.learning_rates import LEARNING_RATES, LearningRates
from valence.config.schema import Section
from valence.errors import UserError


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
    kind: str
    needs_reference: bool
    settings: type[BaseModel]
    of_scores: bool = False
    online: bool = False
    follows_policy: bool = False
    least_rollouts: int = 1
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
    "grpo": Facts("grpo", "prompt", True, NoSettings, online=True, follows_policy=True, least_rollouts=2),
    "rejection": Facts("rejection", "prompt", True, NoSettings, online=True),
}


def method_of(name: str, online: bool = False) -> Facts:
    if online and name in ONLINE:
        return ONLINE[name]
    if name not in METHODS:
        raise UserError(f"there is no method {name!r}", code="method-unknown", where="elsewhere", fix="methods: kto, dpo, sft")
    return METHODS[name]
