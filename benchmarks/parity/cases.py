"""What is compared: models, rows, and for every case the settings of both sides that mean the same step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from valence.config.load import load_recipe
from valence.training.methods import method_of
from valence.training.setup import prepare
from valence.types import Answer, Encoded, Kind, Origin

ROWS = 8
BOTH = ("loss", "grad_norm")
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")


@dataclass(frozen=True)
class Stage:
    """Two models that differ, saved where both sides load them, and rows as tokens."""

    name: str
    near: Path
    far: Path
    judgements: tuple[Encoded, ...]
    pairs: tuple[Encoded, ...]
    eos: int

    def rows(self, kind: Kind) -> tuple[Encoded, ...]:
        if kind == "demonstration":
            return tuple(replace(unit, kind=kind, label=None) for unit in self.judgements)
        return self.pairs if kind == "preference" else self.judgements


@dataclass(frozen=True)
class Case:
    """One step. ``batch``: rows of TRL's batch, over which it accumulates; ``swapped``: the two models change roles."""

    name: str
    method: str
    ours: Mapping[str, Any]
    trainer: str
    theirs: Mapping[str, Any]
    figures: tuple[str, ...]
    batch: int = ROWS
    swapped: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


def scope(batch: int) -> dict[str, Any]:
    """TRL's reference point: one for each of its batches, whose completions it rotates by one place."""
    return {"z0_scope": {"group": batch, "pairing": "previous"}}


WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
KTO = (*BOTH, "kl", *REWARDS)
DPO = (*BOTH, *REWARDS, "rewards/accuracies")
HALF = ROWS // 2

# fmt: off
CASES = (
    Case("kto",               "kto",               scope(ROWS),           "kto", {"loss_type": ["kto"][0]},               KTO),
    Case("kto weights clamp", "kto",               scope(ROWS) | WEIGHTS, "kto", {"loss_type": "kto"} | WEIGHTS,          KTO, swapped=True),
    Case("kto accumulated",   "kto",               scope(HALF),           "kto", {"loss_type": "kto"},                    KTO, batch=HALF),
    Case("apo_zero_unpaired", "apo_zero_unpaired", {},                    "kto", {"loss_type": "apo_zero_unpaired"},      (*BOTH, *REWARDS)),
    Case("dpo",               "dpo",               {},                    "dpo", {"loss_type": ["sigmoid"]},              DPO),
    Case("dpo smoothing 0.1", "dpo",               {"label_smoothing": 0.1}, "dpo", {"loss_type": ["aot"], "label_smoothing": 0.1}, DPO, batch=1),
    Case("sft",               "sft",               {},                    "sft", {},                                      BOTH),
)
# fmt: on
