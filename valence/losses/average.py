"""How unreduced losses become one number. The count is that of the whole optimizer step over all processes, and divides once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from valence.types import Batch

Average = Literal["token_mean", "seq_mean", "pair_mean"]


def _tokens(batch: Batch) -> Tensor:
    return batch.mask.sum()


def _sequences(batch: Batch) -> Tensor:
    return batch.side.new_tensor(batch.sequences)


def _pairs(batch: Batch) -> Tensor:
    return (batch.side == 1).sum()


UNITS: dict[Average, Callable[[Batch], Tensor]] = {
    "token_mean": _tokens,
    "seq_mean": _sequences,
    "pair_mean": _pairs,
}


def count(average: Average, batches: Sequence[Batch]) -> Tensor:
    """The number of units (trained tokens, sequences or pairs) in these micro-batches, at least one: what the step's loss is
    divided by."""
    return torch.stack([UNITS[average](batch) for batch in batches]).sum()


def weighted_sum(loss: Tensor, weight: Tensor) -> Tensor:
    """sum(w * loss): the part of a micro-batch, to be divided by the step's count and never by sum(w)."""
    return (loss * weight).sum()
