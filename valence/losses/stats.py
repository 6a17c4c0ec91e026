"""Step statistics: numbers that a loss needs about the whole optimizer step before its first gradient."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from typing_extensions import TypedDict  # pydantic reads this one on Python 3.11


class GroupScope(TypedDict):
    """Reference points of published systems: one for each run of ``group`` examples in step order, paired cyclically."""

    group: Annotated[int, Ge(2)]  # of one, a row would be paired with itself
    pairing: Literal["next", "previous", "reversed"]


def mismatched_kl(
    logp: Tensor, ref: Tensor, group: Tensor, groups: int, *, z0_scope: Literal["step"] | GroupScope = "step"
) -> Tensor:
    """Sums and counts of logp - ref over mismatched completions: [2, groups], to be added up over micro-batches and processes.

    logp[S], ref[S]: summed log-probabilities of a completion behind a prompt that it does not answer (nats);
    group[S]: which reference point a sequence counts towards.

    z0_scope: step (one reference point for the whole optimizer step, over all processes), or {group: N, pairing: next |
        previous | reversed} to reproduce runs of other systems: one for each N examples in step order.
    """
    del z0_scope  # says how sequences were grouped and paired, which has happened by now
    sums = torch.zeros(2, groups, dtype=logp.dtype, device=logp.device)
    return sums.index_add(1, group, torch.stack([(logp - ref).detach(), torch.ones_like(logp)]))


def reference_point(sums: Tensor) -> tuple[Tensor, Tensor]:
    """z0 = max(0, sum/count) of each group, and the same without the clamp: both [groups], in nats.

    arXiv 2402.01306, Sec. 4.1. The clamp comes after the sums of all micro-batches and processes were added, never before:
    the mean of clamped means is biased upward.
    """
    raw = sums[0] / sums[1]
    return raw.clamp(min=0), raw
