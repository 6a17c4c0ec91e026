"""The cases: each method with its rows, settings, and target metric on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from valence.methods import METHODS

Rows = Literal["thumbs", "pairs", "shown", "films", "stars"]


@dataclass(frozen=True)
class Case:
    """One run. number: the target metric. up: the metric should rise, not fall. rate: constant
    learning rate. steps: number of optimizer steps.
    """

    name: str
    method: str
    rows: Rows
    number: str
    up: bool = True
    rate: float = 2e-4
    steps: int = 12
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])


ROWS: dict[str, Rows] = {
    "judgement": "thumbs",
    "preference": "pairs",
    "demonstration": "shown",
    "ranking": "pairs",
}


OTHER_LOSS = ("slic", "cpo", "discopop")
"""Methods whose first steps change something other than the margin: the likelihood of the chosen
answer, or (discopop) both answers the other way. Their target metric is the loss.
"""


def _case(name: str) -> Case:
    loss, kind = METHODS[name].loss, METHODS[name].kind
    if loss.is_reward_model:
        rows: Rows = "pairs" if kind == "preference" else "stars" if name == "ordinal" else "films"
        sections = {"loss": {"levels": 2}} if name == "ordinal" else {}
        return Case(name, name, rows, "loss", up=False, rate=5e-4, steps=30, sections=sections)
    if kind == "ranking":
        return Case(
            name,
            name,
            "pairs",
            "advantages/logratio",
            sections={"data": {"convert": "pairs_to_rankings"}},
        )
    if kind == "demonstration":
        return Case(name, name, "shown", "probs/token" if name == "dft" else "logps/token")
    if name in OTHER_LOSS:
        return Case(name, name, "pairs", "loss", up=False)
    # its penalty, fifty times the other terms, first keeps chosen answers from becoming less likely
    if name == "dpop":
        return Case(name, name, "pairs", "logratio/chosen")
    return Case(name, name, ROWS[kind], "rewards/margins")


SMOOTHED = {"label_smoothing": 0.1, "nll_weight": 0.5, "ld_alpha": 0.5}
MIXED = {"method": "sft", "train": "shown", "batch_size": 4}
CASES = (
    *map(_case, METHODS),
    Case("kto + sft", "kto", "thumbs", "rewards/margins", sections={"mix": [MIXED]}),
    Case(
        "kto, humanline",
        "kto",
        "thumbs",
        "rewards/margins",
        sections={"loss": {"humanline": [-1.0, 1.5]}},
    ),
    Case("dpo, smoothed, nll, ld", "dpo", "pairs", "rewards/margins", sections={"loss": SMOOTHED}),
    Case(
        "dpo, js, wpo",
        "dpo",
        "pairs",
        "rewards/margins",
        sections={"loss": {"f_divergence": "js", "wpo": True}},
    ),
)
QUICK = ("kto", "dpo", "sft")
