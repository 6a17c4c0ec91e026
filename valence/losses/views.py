"""What a loss may read: named tensors taken out of a micro-batch and the engine's log-probabilities.

A loss names its inputs by its positional parameters; ``view`` supplies exactly those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from valence.types import Batch

View = Literal["token", "seq", "pair"]


def seq_sum(values: Tensor, batch: Batch) -> Tensor:
    """Sums a token column [T] over the trained tokens of each sequence: [S]."""
    kept = torch.where(batch.mask, values, values.new_zeros(()))
    return values.new_zeros(batch.sequences).index_add(0, batch.seq, kept)


def token_view(batch: Batch, logp: Tensor, ref: Tensor | None) -> dict[str, Tensor]:
    """Trained tokens only, in batch order. logp_t[T'], ref_t[T'], weight[T'] (that of the token's row)."""
    rows = batch.scored
    named = {"logp_t": logp[rows], "weight": batch.weight.to(logp.dtype)[batch.seq[rows]]}
    return named if ref is None else named | {"ref_t": ref[rows]}


def seq_view(batch: Batch, logp: Tensor, ref: Tensor | None) -> dict[str, Tensor]:
    """One number per sequence. logp[S], ref[S] (sums over trained tokens, nats), n[S] (tokens), label[S], weight[S]."""
    named = {
        "logp": seq_sum(logp, batch),
        "n": seq_sum(torch.ones_like(logp), batch),
        "weight": batch.weight.to(logp.dtype),
        "group": batch.group,
    }
    if batch.label is not None:
        named["label"] = batch.label
    return named if ref is None else named | {"ref": seq_sum(ref, batch)}


def pair_view(batch: Batch, logp: Tensor, ref: Tensor | None) -> dict[str, Tensor]:
    """One number per pair and side: logp_w, logp_l, ref_w, ref_l, n_w, n_l, margin, weight, all [P], in unit order."""
    # All chosen sides come first, then as many rejected ones: no device has to be asked how many there are.
    order = (batch.side * (batch.unit.max() + 1) + batch.unit).argsort()
    chosen, rejected = order.chunk(2)
    sums = seq_view(batch, logp, ref)
    named = {"margin": batch.margin.to(logp.dtype)[chosen], "weight": sums["weight"][chosen]}
    for name in ("logp", "ref", "n"):
        if name in sums:
            named |= {f"{name}_w": sums[name][chosen], f"{name}_l": sums[name][rejected]}
    return named


VIEWS: dict[View, Callable[[Batch, Tensor, Tensor | None], dict[str, Tensor]]] = {
    "token": token_view,
    "seq": seq_view,
    "pair": pair_view,
}
