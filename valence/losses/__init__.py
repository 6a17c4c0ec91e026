"""The table of losses. A loss is a pure function of named tensors; its row says how it is fed and averaged.

Positional parameters name the tensors that ``views.py`` supplies; keyword-only parameters are the settings of a
recipe's ``loss`` section. Whether a reference model is needed follows from whether a ``ref`` is among the former.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from valence.losses import metrics, stats
from valence.losses.average import Average
from valence.losses.imitation import sft
from valence.losses.preference import dpo
from valence.losses.unpaired import apo_zero_unpaired, kto
from valence.losses.views import View
from valence.types import Kind

__all__ = ["LOSSES", "Loss", "apo_zero_unpaired", "dpo", "kto", "sft"]

Direction = Literal[-1, 0, 1]


@dataclass(frozen=True, slots=True)
class Loss:
    """One row. ``direction`` declares where a descent step moves each kind of log-probability at r = 0 (1 up, -1 down)."""

    fn: Callable[..., Tensor]
    view: View
    average: Average
    data: Kind
    metrics: Callable[..., metrics.Metrics]
    direction: Mapping[str, Direction]
    reward: metrics.Reward | None = None
    statistic: Callable[..., Tensor] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors that the function takes."""
        return tuple(p.name for p in inspect.signature(self.fn).parameters.values() if p.kind is not p.KEYWORD_ONLY)

    @property
    def needs_reference(self) -> bool:
        return any(name.startswith("ref") for name in self.reads)

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of the function and of its step statistic: what a recipe may set."""
        functions = [self.fn] + ([self.statistic] if self.statistic else [])
        parameters = [p for fn in functions for p in inspect.signature(fn, eval_str=True).parameters.values()]
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __call__(self, view: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
        """The unreduced loss of a view, under a recipe's settings."""
        own = {p.name for p in inspect.signature(self.fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
        return self.fn(*(view[name] for name in self.reads), **{k: v for k, v in settings.items() if k in own})


_UP_DOWN: Mapping[str, Direction] = {"chosen": 1, "rejected": -1}
_REWARD = metrics.log_ratio_reward

# fmt: off
LOSSES: dict[str, Loss] = {
    #                         function           view     average       data             metrics           direction      reward   statistic
    "kto":               Loss(kto,               "seq",   "seq_mean",   "judgement",     metrics.unpaired, _UP_DOWN,      _REWARD, stats.mismatched_kl),
    "apo_zero_unpaired": Loss(apo_zero_unpaired, "seq",   "seq_mean",   "judgement",     metrics.unpaired, _UP_DOWN,      _REWARD),
    "dpo":               Loss(dpo,               "pair",  "pair_mean",  "preference",    metrics.paired,   _UP_DOWN,      _REWARD),
    "sft":               Loss(sft,               "token", "token_mean", "demonstration", metrics.imitation, {"chosen": 1}),
}
# fmt: on
