"""A cost model of a distributed step: operations, transferred bytes, and seconds. Dense models
only.
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
"""Bytes of a trained weight in float32; its gradient has the same size."""
UPDATE = 28
"""Bytes of memory traffic per weight in an AdamW update: 4 numbers read (weight, gradient, two
moments), 3 written (not the gradient).
"""

COPIED = 2
"""Bytes of memory traffic per copied byte: one read, one write."""

NOT_SPLIT = Split()
"""Every process has all weights."""


@dataclass(frozen=True)
class Machine:
    """Rates and latencies of a machine.

    flops: operations per second and process that a step reaches. memory: bytes per second and
    process to and from memory. near, far: bytes per second and process of a collective within a
    host, and between hosts. start: latency of a collective (s). near_hop, far_hop: latency (s) per
    process of the ring, within a host and between hosts. host: processes per host. overlaps:
    collectives of sharded weights run while layers compute. scatters: rounds of a reduce-scatter
    (see ``seconds``).
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
        """Duration of a ring collective of ``size`` bytes.

        rounds: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce. within: all processes
        are on one host.
        """
        if processes == 1:
            return 0.0
        hosts = 1 if within else -(-processes // self.host)
        hops = (processes - hosts) * self.near_hop + (hosts - 1) * self.far_hop
        sent = size * (processes - 1) / processes / (self.far if hosts > 1 else self.near)
        return self.start + rounds * (hops + sent)


@dataclass(frozen=True)
class Layout:
    """The number of processes, and how weights are sharded over them."""

    processes: int
    split: Split = NOT_SPLIT

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks: processes, or groups of tensor-parallel ones."""
        return self.processes // self.split.tensor


def sharded(
    processes: int, *, tensor: int = 1, reshard: bool = True, sync_every_micro_batch: bool = True
) -> Layout:
    """The layout of ``parallel.shard: full``."""
    return Layout(processes, Split(processes // tensor, tensor, reshard, sync_every_micro_batch))


@dataclass(frozen=True)
class Job:
    """The work of a step.

    trained, measured: work of all processes with and without a backward pass. micro_batches: number
    per process, for each of these passes. balance: mean work of a process divided by that of the
    slowest. width: bytes per number in matrix multiplications.
    """

    shape: Shape
    trained: Work
    measured: tuple[Work, ...] = ()
    micro_batches: int = 1
    balance: float = 1.0
    width: int = 2
    checkpointing: Checkpointing = "off"

    @property
    def all_reduces_per_layer(self) -> int:
        """All-reduces per tensor-parallel layer and trained micro-batch: two in the forward pass,
        two in the backward pass, two in recomputation.
        """
        return 6 if self.checkpointing == "full" else 4


def gathered(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes of an all-gather of the weights in all layers, and of those outside the layers.

    Layers are gathered in the dtype of the computation, the others in that of the stored weights.
    """
    layers, outside = job.shape.layers * job.shape.largest, job.shape.outside
    stream = max(job.width, MASTER) if job.shape.full else job.width
    return layers * job.width / layout.split.tensor, outside * stream / layout.split.tensor


def volume(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes that each process receives in a step, by purpose. It sends the same number."""
    split, share = layout.split, (layout.data_parallel - 1) / layout.data_parallel
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
        * _all_reduced_bytes(job, layout),
    }


def _all_reduced_bytes(job: Job, layout: Layout) -> float:
    """Bytes per layer and step that tensor-parallel processes sum."""
    tokens = job.all_reduces_per_layer * job.trained.tokens + 2 * sum(
        work.tokens for work in job.measured
    )
    return tokens / layout.data_parallel * job.shape.hidden * job.width


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step: matrix products, all communication (overlapped or not), and in total."""

    products: float
    communication: float
    total: float


def seconds(job: Job, layout: Layout, machine: Machine) -> Seconds:
    """Predict the duration of a step.

    With ``overlaps``, a pass takes as long as the longer of its products and its collectives. Never
    overlapped: the first all-gather of a pass, its last reduce-scatter, all-reduces within layers,
    and the reduction of gradients after the last micro-batch.
    """
    master_bytes = MASTER * job.shape.trained / layout.split.tensor
    if layout.split.ways == 1:
        passes = [(product, 0.0, 0.0) for product in _products(job, layout, machine)]
        exposed = machine.seconds(master_bytes, layout.data_parallel, 2)
    else:
        passes = _sharded_passes(job, layout, machine)
        exposed = (
            0.0
            if layout.split.sync_every_micro_batch
            else job.shape.layers
            * machine.seconds(master_bytes / job.shape.layers, layout.data_parallel)
        )
    exposed += _layer_all_reduces(job, layout, machine)
    update = UPDATE * master_bytes / MASTER / layout.split.ways / machine.memory
    pass_seconds = sum(
        max(products, overlapped) + serial if machine.overlaps else products + overlapped + serial
        for products, overlapped, serial in passes
    )
    return Seconds(
        products=job.micro_batches * sum(products for products, *_ in passes),
        communication=job.micro_batches
        * sum(overlapped + serial for _, overlapped, serial in passes)
        + exposed,
        total=job.micro_batches * pass_seconds + exposed + update,
    )


def _products(job: Job, layout: Layout, machine: Machine) -> list[float]:
    """Seconds of the matrix products of each pass: forward, backward, passes without gradient."""
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
    """Seconds of each pass: products, collectives that may overlap with them, other collectives."""
    layers, outside = gathered(job, layout)
    count, split = job.shape.layers, layout.split

    def with_copy(size: float, rounds: int = 1) -> float:
        """Seconds of a collective and of FSDP2's copy into or out of its communication buffer."""
        return machine.seconds(size, layout.data_parallel, rounds) + COPIED * size / machine.memory

    gather, root = with_copy(layers / count), with_copy(outside)
    scatter = (
        with_copy(MASTER * job.shape.trained / split.tensor / count, machine.scatters)
        if split.sync_every_micro_batch
        else 0.0
    )
    forward, backward, *measured = _products(job, layout, machine)
    return [
        (forward, (count - 1) * gather, gather + root),
        (backward, split.reshard * count * gather + (count - 1) * scatter, scatter),
        *((timing, (count - 1) * gather, gather + root) for timing in measured),
    ]


def _layer_all_reduces(job: Job, layout: Layout, machine: Machine) -> float:
    """Seconds of all tensor-parallel all-reduces of a step."""
    calls = job.micro_batches * (job.all_reduces_per_layer + 2 * len(job.measured))
    return (
        job.shape.layers
        * calls
        * machine.seconds(
            _all_reduced_bytes(job, layout) / calls, layout.split.tensor, 2, within=True
        )
    )


def distribute_rows(lengths: Sequence[int], layout: Layout, budget: int) -> tuple[int, float]:
    """Distribute the rows of a step as the training step does. lengths, budget: in tokens.

    Returns the largest number of micro-batches of a process, and the balance.
    """
    bins = fill_bins(lengths, max(1, min(budget, -(-sum(lengths) // layout.data_parallel))))
    costs = [float(sum(lengths[i] for i in rows)) for rows in bins]
    ranks = (round_robin if layout.split.ways > 1 else balance_across_ranks)(
        costs, layout.data_parallel
    )
    return max(map(len, ranks)), balance([[costs[k] for k in indices] for indices in ranks], layout)


def balance(costs: Sequence[Sequence[float]], layout: Layout) -> float:
    """Mean work of a process divided by the work that all processes wait for.

    That is the largest sum of a process or, with sharded weights (where every layer synchronizes),
    the sum of the largest micro-batch of each round. costs: work of the micro-batches of each
    process.
    """
    longest = (
        sum(map(max, zip_longest(*costs, fillvalue=0.0)))
        if layout.split.ways > 1
        else max(map(sum, costs))
    )
    return sum(map(sum, costs)) / len(costs) / longest
