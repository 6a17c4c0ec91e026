"""A model of a step of several processes: operations, transferred bytes, and seconds.

For dense models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from valence.batching.micro_batches import balance_across_ranks, fill_bins, round_robin
from valence.models import speed
from valence.models.checkpointing import Checkpointing
from valence.models.memory import Split
from valence.models.shape import Shape
from valence.models.speed import Work

MASTER = 4
"""Bytes of a trained weight, and of its gradient."""
UPDATE = 28
"""Bytes that AdamW moves for a weight: it reads weight, gradient and two moments, and writes all
but the gradient.
"""

COPIED = 2
"""Bytes that a copy moves per copied byte."""

NOT_SPLIT = Split()
"""Each process holds all weights."""


@dataclass(frozen=True)
class Machine:
    """A kind of machine.

    ``flops``, ``memory``: operations, and bytes to and from memory, of a process per second in a
    step.

    A collective takes ``start`` seconds, ``near_hop`` or ``far_hop`` for each process that it
    passes within a host of ``host`` or between two, and the time of its bytes at ``near`` or
    ``far`` (over hosts) bytes per second through each process. ``overlaps``: collectives of sharded
    weights go on while layers run. ``scatters``: rounds of a reduce-scatter.
    """

    flops: float
    memory: float
    near: float
    far: float
    start: float = 0.0
    near_hop: float = 0.0
    far_hop: float = 0.0
    host: int = 8
    overlaps: bool = True
    scatters: int = 1

    def seconds(
        self, size: float, processes: int, rounds: int = 1, *, within: bool = False
    ) -> float:
        """Of a ring over ``size`` bytes: one round is an all-gather or a reduce-scatter, two are an
        all-reduce. within: all processes are on one host.
        """
        if processes == 1:
            return 0.0
        hosts = 1 if within else -(-processes // self.host)
        hops = (processes - hosts) * self.near_hop + (hosts - 1) * self.far_hop
        sent = size * (processes - 1) / processes / (self.far if hosts > 1 else self.near)
        return self.start + rounds * (hops + sent)


@dataclass(frozen=True)
class Layout:
    """The number of processes, and how they share the weights."""

    processes: int
    split: Split = NOT_SPLIT

    @property
    def dealt(self) -> int:
        """Number of data-parallel ranks: processes, or groups of tensor-parallel ones."""
        return self.processes // self.split.tensor


def sharded(
    processes: int, *, tensor: int = 1, reshard: bool = True, sync_every_micro_batch: bool = True
) -> Layout:
    """With ``parallel.shard: full``."""
    return Layout(processes, Split(processes // tensor, tensor, reshard, sync_every_micro_batch))


@dataclass(frozen=True)
class Job:
    """A step. trained, measured: work of all processes with and without a backward pass.
    micro_batches: of a process, in each of these passes. balance: mean work of a process over the
    largest. width: bytes per number in matrix multiplications.
    """

    shape: Shape
    trained: Work
    measured: tuple[Work, ...] = ()
    micro_batches: int = 1
    balance: float = 1.0
    width: int = 2
    checkpointing: Checkpointing = "off"

    @property
    def sums(self) -> int:
        """Of a layer in a micro-batch that trains, where its products are shared: two forward, two
        backward, two recomputed.
        """
        return 6 if self.checkpointing == "full" else 4


def gathered(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes of all layers' weights as they travel, and of those outside the layers, which stay as
    wide as they are kept.
    """
    layers, outside = job.shape.layers * job.shape.largest, job.shape.outside
    stream = max(job.width, MASTER) if job.shape.full else job.width
    return layers * job.width / layout.split.tensor, outside * stream / layout.split.tensor


def volume(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes that come to each process in a step (and as many that leave it)."""
    split, share = layout.split, (layout.dealt - 1) / layout.dealt
    layers, outside = gathered(job, layout)
    gathers = job.micro_batches * (
        (layers + outside) * (1 + len(job.measured)) + split.reshard * layers
    )
    rounds = (job.micro_batches if split.sync_every_micro_batch else 1) if split.ways > 1 else 2
    return {
        "weights": share * gathers if split.ways > 1 else 0.0,
        "gradients": share * rounds * MASTER * job.shape.trained / split.tensor,
        "within layers": 2
        * (split.tensor - 1)
        / split.tensor
        * job.shape.layers
        * _summed(job, layout),
    }


def _summed(job: Job, layout: Layout) -> float:
    """Bytes of a layer's products that the processes which share them sum in a step."""
    tokens = job.sums * job.trained.tokens + 2 * sum(work.tokens for work in job.measured)
    return tokens / layout.dealt * job.shape.hidden * job.width


@dataclass(frozen=True)
class Seconds:
    """Of a step: the products that are waited for; all communication, also what hides behind them;
    and all in all.
    """

    products: float
    communication: float
    total: float


def seconds(job: Job, layout: Layout, machine: Machine) -> Seconds:
    """How long a step takes.

    With ``overlaps`` a pass takes as long as the longer of its products and its collectives;
    nothing hides the first weights that it needs, its last gradients, sums within layers, and
    gradients that are summed at the end.
    """
    master_bytes = MASTER * job.shape.trained / layout.split.tensor
    if layout.split.ways == 1:
        passes = [(product, 0.0, 0.0) for product in _products(job, layout, machine)]
        after = machine.seconds(master_bytes, layout.dealt, 2)
    else:
        passes = _sharded_passes(job, layout, machine)
        after = (
            0.0
            if layout.split.sync_every_micro_batch
            else job.shape.layers * machine.seconds(master_bytes / job.shape.layers, layout.dealt)
        )
    after += _sums_within(job, layout, machine)
    update = UPDATE * master_bytes / MASTER / layout.split.ways / machine.memory
    ran = sum(max(a, b) + c if machine.overlaps else a + b + c for a, b, c in passes)
    return Seconds(
        products=job.micro_batches * sum(a for a, *_ in passes),
        communication=job.micro_batches * sum(b + c for _, b, c in passes) + after,
        total=job.micro_batches * ran + after + update,
    )


def _products(job: Job, layout: Layout, machine: Machine) -> list[float]:
    """Seconds of a micro-batch's passes: forward, backward, and those that only measure."""
    rate = machine.flops * layout.processes * job.balance * job.micro_batches
    forward = speed.forward(job.shape, job.trained)
    both = speed.step(job.shape, job.trained, checkpointing=job.checkpointing)
    return [
        work / rate
        for work in (
            forward,
            both - forward,
            *(speed.forward(job.shape, work) for work in job.measured),
        )
    ]


def _sharded_passes(job: Job, layout: Layout, machine: Machine) -> list[tuple[float, float, float]]:
    """Of each pass: seconds of its products, of the collectives that may hide behind them, and of
    those that cannot.
    """
    layers, outside = gathered(job, layout)
    count, split = job.shape.layers, layout.split

    def moved(size: float, rounds: int = 1) -> float:
        """FSDP2 copies what comes to where the layer looks for it, and what goes to where it is
        sent from.
        """
        return machine.seconds(size, layout.dealt, rounds) + COPIED * size / machine.memory

    gather, root = moved(layers / count), moved(outside)
    scatter = (
        moved(MASTER * job.shape.trained / split.tensor / count, machine.scatters)
        if split.sync_every_micro_batch
        else 0.0
    )
    forward, backward, *measured = _products(job, layout, machine)
    return [
        (forward, (count - 1) * gather, gather + root),
        (backward, split.reshard * count * gather + (count - 1) * scatter, scatter),
        *((timing, (count - 1) * gather, gather + root) for timing in measured),
    ]


def _sums_within(job: Job, layout: Layout, machine: Machine) -> float:
    """Seconds of all sums within layers, one of which is of a micro-batch's tokens."""
    calls = job.micro_batches * (job.sums + 2 * len(job.measured))
    return (
        job.shape.layers
        * calls
        * machine.seconds(_summed(job, layout) / calls, layout.split.tensor, 2, within=True)
    )


def dealt(lengths: Sequence[int], layout: Layout, budget: int) -> tuple[int, float]:
    """How a step's rows are dealt, as the step does it: micro-batches of a process, and their
    balance.
    """
    bins = fill_bins(lengths, max(1, min(budget, -(-sum(lengths) // layout.dealt))))
    costs = [float(sum(lengths[i] for i in rows)) for rows in bins]
    hands = (round_robin if layout.split.ways > 1 else balance_across_ranks)(costs, layout.dealt)
    return max(map(len, hands)), balance([[costs[k] for k in hand] for hand in hands], layout)


def balance(costs: Sequence[Sequence[float]], layout: Layout) -> float:
    """The mean work of a process by what is waited for: that of the one that has most, or, where
    processes wait for each other in every layer, the longest of each round. costs: of each
    process's micro-batches.
    """
    longest = (
        sum(map(max, zip_longest(*costs, fillvalue=0.0)))
        if layout.split.ways > 1
        else max(map(sum, costs))
    )
    return sum(map(sum, costs)) / len(costs) / longest
