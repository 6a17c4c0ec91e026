"""Averages of unreduced losses.

The divisor is counted over the whole optimizer step and all processes, and divides once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge

from valence.losses.lazy import Tensor, torch
from valence.losses.views import View
from valence.types import MicroBatch

Average = Literal[
    "token_mean",
    "seq_mean",
    "pair_mean",
    "seq_mean_token_mean",
    "constant",
    "chosen_token_mean",
    "class_mean",
]
Counter = Callable[[MicroBatch], Tensor]


def _tokens(batch: MicroBatch) -> Tensor:
    return batch.loss_mask.sum()


def _sequences(batch: MicroBatch) -> Tensor:
    return batch.side.new_full((), batch.sequences)


def _pairs(batch: MicroBatch) -> Tensor:
    return (batch.side == 1).sum()


def _chosen_tokens(batch: MicroBatch) -> Tensor:
    return (batch.side[batch.sequence_ids[batch.scored]] == 0).sum()


def _up(batch: MicroBatch) -> Tensor:
    assert batch.label is not None
    return batch.label.sum()


def _down(batch: MicroBatch) -> Tensor:
    assert batch.label is not None
    return (~batch.label).sum()


COUNTERS: dict[Average, tuple[Counter, ...]] = {
    "token_mean": (_tokens,),
    "seq_mean": (_sequences,),
    "pair_mean": (_pairs,),
    "seq_mean_token_mean": (_sequences,),  # after a mean inside each sequence
    "constant": (_sequences,),  # after a division by the same number of tokens for all of them
    "chosen_token_mean": (_chosen_tokens,),
    "class_mean": (_up, _down),  # over the smaller class
}
"""The units that each average counts; of several, the smallest number is the divisor."""


def counts(averages: Sequence[Average], batches: Sequence[MicroBatch]) -> Tensor:
    """Numbers of units of these averages in these micro-batches [k]; sum them over processes."""
    counters = [unit for name in averages for unit in COUNTERS[name]]
    if not batches:  # this process has no micro-batch of the step
        return torch.zeros(len(counters), dtype=torch.long)
    return torch.stack([torch.stack([unit(batch) for batch in batches]).sum() for unit in counters])


def divisors(averages: Sequence[Average], counted: Tensor) -> dict[Average, Tensor]:
    """The divisor of each average, at least 1. counted: the sum of ``counts`` over processes."""
    divisors: dict[Average, Tensor] = {}
    for name in averages:
        width = len(COUNTERS[name])
        divisors[name], counted = counted[:width].min().clamp(min=1), counted[width:]
    return divisors


def token_mean_inside(loss: Tensor, view: Mapping[str, Tensor]) -> Tensor:
    """Divide token losses [N] by the tokens of their sequence."""
    return loss / view["n_t"]


def constant(
    loss: Tensor, view: Mapping[str, Tensor], *, max_tokens: Annotated[int, Ge(1)] | None = None
) -> Tensor:
    """Divide token losses [N] by a constant, so that all tokens count alike.

    sum over tokens / (sequences * max_tokens). Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO).

    max_tokens: divisor of the sum over the tokens of a completion. null means
        rollout.max_new_tokens online, and 1 on stored completions, as in the paper.
    """
    del view
    return loss / (max_tokens or 1)


INSIDE: dict[Average, Callable[..., Tensor]] = {
    "seq_mean_token_mean": token_mean_inside,
    "constant": constant,
}
"""Applied to token losses before they are summed. Keyword-only parameters are settings."""
AVERAGE_OF: dict[View, Average] = {
    "token": "token_mean",
    "answer": "seq_mean",
    "seq": "seq_mean",
    "pair": "pair_mean",
    "score": "seq_mean",
    "score_pair": "pair_mean",
}
"""The average of losses of each view that choose no other."""
PER_TOKEN: frozenset[Average] = frozenset(("token_mean", "seq_mean_token_mean", "constant"))
"""The averages of token losses."""
OF_TOKENS: dict[Average, Average] = {"seq_mean": "seq_mean_token_mean"}
"""The average of a per-token term next to a loss of whole completions."""


def among(settings: Mapping[str, Any], fn: Callable[..., Any]) -> dict[str, Any]:
    """The settings that are keyword-only parameters of a function."""
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name: settings[p.name]
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name in settings
    }


def weighted_sum(
    average: Average, loss: Tensor, view: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Tensor:
    """sum(w * loss) of a micro-batch. Divide it by the count of the step, never by sum(w)."""
    inside = INSIDE.get(average)
    share = inside(loss, view, **among(settings, inside)) if inside else loss
    weight = view["weight_t" if average in PER_TOKEN else "weight"]
    if share.shape != weight.shape:  # multiplying would repeat the numbers
        raise ValueError(f"the loss has the shape {list(share.shape)}, not {list(weight.shape)}")
    return (share * weight).sum()
