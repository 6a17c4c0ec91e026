"""What is compared: for every case, the settings of both sides that mean the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROWS = 8


@dataclass(frozen=True)
class Case:
    """One step of ROWS rows.

    ours, theirs: settings of Valence's loss and of TRL's configuration. figures: what both report. batch: rows of one batch of
    TRL, which accumulates over all. swapped: policy and reference change places.
    """

    name: str
    method: str
    ours: Mapping[str, Any]
    trainer: str
    theirs: Mapping[str, Any]
    figures: tuple[str, ...]
    batch: int = ROWS
    swapped: bool = False


def z0_of_trl(batch: int) -> dict[str, Any]:
    """One reference point for each batch of TRL, inside which it moves completions on by one row."""
    return {"z0_scope": {"group": batch, "pairing": "previous"}}


WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
STEP = ("loss", "grad_norm")
APO = (*STEP, "rewards/chosen", "rewards/rejected", "rewards/margins")
KTO = (*APO, "kl")
DPO = (*APO, "rewards/accuracies")

CASES = (
    Case("kto", "kto", z0_of_trl(ROWS), "kto", {}, KTO),
    Case("kto, models swapped, class weights", "kto", z0_of_trl(ROWS) | WEIGHTS, "kto", WEIGHTS, KTO, swapped=True),
    # Rewards are left out here: over several batches TRL logs the mean of their means, Valence the mean over all rows.
    Case("kto, two batches accumulated", "kto", z0_of_trl(ROWS // 2), "kto", {}, (*STEP, "kl"), batch=ROWS // 2),
    Case("apo_zero_unpaired", "apo_zero_unpaired", {}, "kto", {"loss_type": "apo_zero_unpaired"}, APO),
    Case("dpo", "dpo", {}, "dpo", {"loss_type": "sigmoid"}, DPO),
    # TRL's sigmoid loss does not read label_smoothing. Its aot loss does, and on a batch of one pair it is this one.
    Case(
        "dpo, label smoothing 0.1", "dpo", {"label_smoothing": 0.1}, "dpo", {"loss_type": "aot", "label_smoothing": 0.1}, DPO,
        batch=1,
    ),
    Case("sft", "sft", {}, "sft", {}, STEP),
)  # fmt: skip
