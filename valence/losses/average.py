"""How unreduced losses become one number.

The count is that of the whole optimizer step over all processes, and divides once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge

from valence.losses.lazy import Tensor, torch
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


UNITS: dict[Average, tuple[Counter, ...]] = {
    "token_mean": (_tokens,),
    "seq_mean": (_sequences,),
    "pair_mean": (_pairs,),
    "seq_mean_token_mean": (_sequences,),  # after a mean inside each sequence
    "constant": (_sequences,),  # after a division by the same number of tokens for all of them
    "chosen_token_mean": (_chosen_tokens,),
    "class_mean": (_up, _down),  # over the smaller class
}
"""What is counted for each average: of several numbers the smallest divides."""


def counts(averages: Sequence[Average], batches: Sequence[MicroBatch]) -> Tensor:
    """What these averages count in these micro-batches [k], to be added up over processes."""
    wanted = [unit for name in averages for unit in UNITS[name]]
    if not batches:  # this process has none of the step's
        return torch.zeros(len(wanted), dtype=torch.long)
    return torch.stack([torch.stack([unit(batch) for batch in batches]).sum() for unit in wanted])


def divisors(averages: Sequence[Average], counted: Tensor) -> dict[Average, Tensor]:
    """What each average divides the step's sum by: at least one.

    ``counted``: the sum of ``counts`` over processes.
    """
    found: dict[Average, Tensor] = {}
    for name in averages:
        width = len(UNITS[name])
        found[name], counted = counted[:width].min().clamp(min=1), counted[width:]
    return found


def token_mean_inside(loss: Tensor, view: Mapping[str, Tensor]) -> Tensor:
    """Tokens [N] by how many their sequence has."""
    return loss / view["n_t"]


def constant(
    loss: Tensor, view: Mapping[str, Tensor], *, max_tokens: Annotated[int, Ge(1)] | None = None
) -> Tensor:
    """Tokens [N] by one number for all sequences: neither short nor long ones count more for each
    of their tokens.

    sum over tokens / (sequences * max_tokens). Liu et al. 2025, arXiv 2503.20783 (Dr. GRPO).

    max_tokens: what the sum over an answer's tokens is divided by, of long and short ones alike.
        null is rollout.max_new_tokens where the policy answers itself; 1 on stored answers, which
        is the formula of the paper.
    """
    del view
    return loss / (max_tokens or 1)


INSIDE: dict[Average, Callable[..., Tensor]] = {
    "seq_mean_token_mean": token_mean_inside,
    "constant": constant,
}
"""What is done to the tokens of each sequence before they are added up.

Keyword-only parameters are settings.
"""
PER_TOKEN: frozenset[Average] = frozenset(("token_mean", "seq_mean_token_mean", "constant"))
"""Those of losses that have a number for every token."""
OF_TOKENS: dict[Average, Average] = {"seq_mean": "seq_mean_token_mean"}
"""How a term of tokens is averaged beside a loss of whole answers."""


def among(settings: Mapping[str, Any], fn: Callable[..., Any]) -> dict[str, Any]:
    """Those of the settings that are keyword-only parameters of a function."""
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name: settings[p.name]
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name in settings
    }


def weighted_sum(
    average: Average, loss: Tensor, view: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> Tensor:
    """sum(w * loss): the part of a micro-batch, to be divided by the step's count and never by
    sum(w).
    """
    inside = INSIDE.get(average)
    share = inside(loss, view, **among(settings, inside)) if inside else loss
    return (share * view["weight_t" if average in PER_TOKEN else "weight"]).sum()
