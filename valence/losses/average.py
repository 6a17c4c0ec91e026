"""How unreduced losses become one number. The count is that of the whole optimizer step over all processes, and divides once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from valence.types import Batch

Average = Literal["token_mean", "seq_mean", "pair_mean", "seq_mean_token_mean", "chosen_token_mean", "class_mean"]
Counter = Callable[[Batch], Tensor]


def _tokens(batch: Batch) -> Tensor:
    return batch.mask.sum()


def _sequences(batch: Batch) -> Tensor:
    return batch.side.new_tensor(batch.sequences)


def _pairs(batch: Batch) -> Tensor:
    return (batch.side == 1).sum()


def _chosen_tokens(batch: Batch) -> Tensor:
    return (batch.side[batch.seq[batch.scored]] == 0).sum()


def _up(batch: Batch) -> Tensor:
    assert batch.label is not None
    return batch.label.sum()


def _down(batch: Batch) -> Tensor:
    assert batch.label is not None
    return (~batch.label).sum()


UNITS: dict[Average, tuple[Counter, ...]] = {
    "token_mean": (_tokens,),
    "seq_mean": (_sequences,),
    "pair_mean": (_pairs,),
    "seq_mean_token_mean": (_sequences,),  # after a mean inside each sequence
    "chosen_token_mean": (_chosen_tokens,),
    "class_mean": (_up, _down),  # over the smaller class
}
"""What is counted for each average: of several numbers the smallest divides."""


def counts(averages: Sequence[Average], batches: Sequence[Batch]) -> Tensor:
    """What these averages count in these micro-batches [k], to be added up over processes."""
    wanted = [unit for name in averages for unit in UNITS[name]]
    if not batches:  # this process has none of the step's
        return torch.zeros(len(wanted), dtype=torch.long)
    return torch.stack([torch.stack([unit(batch) for batch in batches]).sum() for unit in wanted])


def divisors(averages: Sequence[Average], counted: Tensor) -> dict[Average, Tensor]:
    """What each average divides the step's sum by: at least one. ``counted``: the sum of ``counts`` over processes."""
    found: dict[Average, Tensor] = {}
    for name in averages:
        width = len(UNITS[name])
        found[name], counted = counted[:width].min().clamp(min=1), counted[width:]
    return found


def weighted_sum(average: Average, loss: Tensor, view: Mapping[str, Tensor]) -> Tensor:
    """sum(w * loss): the part of a micro-batch, to be divided by the step's count and never by sum(w)."""
    share = loss / view["n_t"] if average == "seq_mean_token_mean" else loss
    return (share * view["weight"]).sum()
