"""The balance of a distributed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from valence.batching.micro_batches import balance_across_ranks, fill_bins, round_robin
from valence.models.memory import Split

NOT_SPLIT = Split()
"""Every process has all weights."""


@dataclass(frozen=True)
class Layout:
    """The number of processes, and how weights are sharded over them."""

    processes: int
    split: Split = NOT_SPLIT


def sharded(processes: int, *, reshard: bool = True, sync_every_micro_batch: bool = True) -> Layout:
    """The layout of ``parallel.shard: full``."""
    return Layout(processes, Split(processes, 1, reshard, sync_every_micro_batch))


def distribute_rows(lengths: Sequence[int], layout: Layout, budget: int) -> tuple[int, float]:
    """Distribute the rows of a step as the training step does. lengths, budget: in tokens.

    Returns the largest number of micro-batches of a process, and the balance: the mean work of a
    process divided by the work that all processes wait for. That is the largest sum of a process
    or, with sharded weights (where every layer synchronizes), the sum of the largest micro-batch of
    each round.
    """
    bins = fill_bins(lengths, max(1, min(budget, -(-sum(lengths) // layout.processes))))
    costs = [float(sum(lengths[i] for i in rows)) for rows in bins]
    is_sharded = layout.split.ways > 1
    ranks = (round_robin if is_sharded else balance_across_ranks)(costs, layout.processes)
    local_costs = [[costs[k] for k in indices] for indices in ranks]
    longest = (
        sum(map(max, zip_longest(*local_costs, fillvalue=0.0)))
        if is_sharded
        else max(map(sum, local_costs))
    )
    return max(map(len, ranks)), sum(costs) / layout.processes / longest
