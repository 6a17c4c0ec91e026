"""The processes of a run: how they connect, reduce, gather and agree.

``Group`` is the interface; ``SingleProcess`` and ``ProcessGroup`` (PyTorch's collectives with gloo
and NCCL) implement it. No collective blocks for ever.
"""

# pyright: reportPrivateImportUsage=false
# (PyTorch documents its stores as members of this package, but does not list them as exported)

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

# Its functions have the process group as a default argument. If transformers imports it later, they
# keep the group and its threads alive after it was destroyed, and a thread that outlives the
# interpreter can abort a finished process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from valence.distributed.launcher import LISTEN_FD_VARIABLE
from valence.distributed.watchdog import Collective, CollectiveTracker, CollectiveWatchdog
from valence.errors import UserError
from valence.terminal import write_line

DEADLINE = 600.0
"""Seconds."""
DEADLINE_VARIABLE = "VALENCE_DEADLINE"
"""Environment variable with another deadline, in seconds, the same for all processes."""
MAX_DEADLINE = 1e6
"""Seconds, 11 days: PyTorch counts milliseconds, with 32 bits in places."""
BUCKET = 64 << 20
"""Bytes of gradients per all-reduce: larger buckets are not faster, and need twice their memory."""
HEAD_START = 2.0
"""Seconds that a process waits before it raises the error of a collective, so that the error of a
process that ended before is shown first. Rank 0 waits twice as long, because it keeps the store.
"""
NOTICE_AFTER = 15.0
"""Seconds after which a process reports that it waits for the others to start."""
GLOO_ERRORS = ("gloo/transport", "pair closure")
"""Texts of gloo's errors, which have no class."""
STORE_TIMEOUT = 30.0
"""Seconds to wait for the store that tracks collectives, but at most half of the deadline."""
NCCL_EXTRA = timedelta(seconds=60)
"""How much later NCCL's own deadline is: it ends a process without naming the missing one."""
REPORT_INTERVAL = 10.0
"""Seconds after which rank 0 reports again that a long phase continues."""
CHUNK = 2**20
"""Numbers that are converted to float64 at once."""
SHARD_DIM = "shard"
"""Dimension of a device mesh over which FSDP2 shards weights."""
TENSOR = "__tensor__"
Neighbours = Literal["tensor", "context"]
"""What neighbouring processes share: the products of each layer, or the tokens of a row. Also the
setting under ``parallel`` with their number.
"""
# PyTorch 2.13 has new names for both, and deprecates the old ones.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_num_groups = itertools.count()
_stores: dict[tuple[str, int], tuple[dist.Store, dist.Store]] = {}
"""The stores of this process, open as long as it lives: others may still read from rank 0."""


def ignore() -> None:
    """Assist in nothing."""


class Group(Protocol):
    """The processes that share a run.

    All of them call the same members in the same order, and get results with the same bits. A
    process without data takes part with zeros or an empty tensor.
    """

    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process on its host, from 0, and of its device."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, with the type, device and shape of ``values``."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """All processes' tensors, concatenated along the first axis in the order of ranks.

        First axes may differ, and be 0; the type and the other axes may not.
        """
        ...

    def gather_equal(self, values: Tensor) -> Tensor:
        """As ``gather``, without asking for the lengths of first axes, which must be equal."""
        ...

    def sum_scatter(self, values: Tensor) -> Tensor:
        """This process's part of the sum over all processes: the first axis is divided into
        ``size`` equal parts in the order of ranks.
        """
        ...

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over all processes.

        A missing gradient counts as 0; one that is missing in all processes stays missing. Skips
        gradients of sharded weights, which are sums already.
        """
        ...

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients after they were summed; sharded gradients count in full, others
        once.
        """
        ...

    def broadcast(self, value: Any) -> Any:
        """The JSON value of rank 0 (a tuple arrives as a list); other ranks' values are ignored."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        ...

    def barrier(self, name: str) -> None:
        """Block until all processes reach it. name: for the error message of a missing process."""
        ...

    def collective(self, name: str) -> AbstractContextManager[None]:
        """Around collectives that do not use this group's methods: errors name the ranks that did
        not reach them.
        """
        ...

    def long_phase(
        self, name: str, assist: Callable[[], object] = ignore
    ) -> AbstractContextManager[Callable[[], None]]:
        """Around work of rank 0 that may take longer than the deadline.

        Rank 0 works inside the block, where it reports that it continues; each wait of that work
        has its own time limit. The others wait at the end of their block, as long as rank 0
        reports. When rank 0 calls the value of the block, each of them calls ``assist`` once, so
        that both can run collectives there.
        """
        ...

    def split(
        self, neighbours: int, name: Neighbours = "tensor", shard_size: int | None = None
    ) -> tuple[Group, Group]:
        """The group of processes with other rows, and the group of this process's neighbours, which
        have the same rows.

        neighbours: size of the second group. name: what its processes share. shard_size: the first
        group also gets ``shard_mesh`` of this size, which divides it. Raises UserError if the
        number of processes is not a multiple of ``neighbours``.
        """
        ...

    @property
    def background(self) -> Group:
        """The same processes, for the collectives of one other thread, between host memories. All
        processes create it together, when they use it first.
        """
        ...

    def close(self) -> None:
        """End the group, without waiting for other processes. It cannot be used afterwards."""
        ...


class SingleProcess:
    """A group of one process."""

    rank = 0
    size = 1
    local_rank = 0

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values

    def gather_equal(self, values: Tensor) -> Tensor:
        return values

    def sum_scatter(self, values: Tensor) -> Tensor:
        return values

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        pass

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return total_norm([p.grad for p in parameters if p.grad is not None])

    def broadcast(self, value: Any) -> Any:
        return json.loads(json.dumps(value))  # as it would arrive in another process

    def any(self, flag: bool) -> bool:
        return bool(flag)

    def barrier(self, name: str) -> None:
        pass

    def collective(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def long_phase(
        self, name: str, assist: Callable[[], object] = ignore
    ) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(ignore)

    def split(
        self, neighbours: int, name: Neighbours = "tensor", shard_size: int | None = None
    ) -> tuple[Group, Group]:
        check_split(1, neighbours, name)
        return self, SingleProcess()

    @property
    def background(self) -> Group:
        return self

    def close(self) -> None:
        pass


class PlannedGroup(SingleProcess):
    """A group for estimates: processes of one host, each with the data of this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.size, *[1] * (values.ndim - 1))


class ProcessGroup:
    """A group of several processes: gloo between host memories, NCCL between CUDA devices.

    Takes tensors on either. A collective that some process does not reach raises UserError, which
    names the missing ranks and their last collective.
    """

    _background: Group | None = None

    def __init__(
        self,
        stores: tuple[dist.Store, dist.Store],
        rank: int,
        size: int,
        local_rank: int,
        deadline: float,
        device: str,
    ) -> None:
        self.rank, self.size, self.local_rank, self.deadline = rank, size, local_rank, deadline
        self.device = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
        self._num_collectives = 0
        self._splits: dict[tuple[int, str], tuple[ProcessGroup, Group]] = {}
        self._hybrid_meshes: dict[int, DeviceMesh] = {}
        self._group: Any = None  # PyTorch's group; None: all processes
        store, tracked = stores
        self._tracker = CollectiveTracker(tracked, rank, range(size))
        self._wait_for_start()
        tracked.set_timeout(timedelta(seconds=min(STORE_TIMEOUT, deadline / 2)))
        timeout = timedelta(seconds=deadline)
        self._cpu_group: Any = None  # PyTorch's group for host memory; None: that of all tensors
        self._watchdog: CollectiveWatchdog | None = None
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl",
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timeout + NCCL_EXTRA,
                    device_id=self.device,
                )
                self._cpu_group = dist.new_group(backend="gloo", timeout=timeout)
                self._watchdog = self._new_watchdog()
            else:
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size, timeout=timeout
                )
        except RuntimeError as error:
            raise UserError(
                f"cannot connect to the other processes ({str(error).splitlines()[0]})",
                code="rank-connection",
                where=f"rank {rank}",
                fix="set GLOO_SOCKET_IFNAME (for GPUs, also NCCL_SOCKET_IFNAME) to the network "
                "interface that connects the hosts",
            ) from error

    def _new_watchdog(self) -> CollectiveWatchdog:
        return CollectiveWatchdog(
            self.deadline,
            lambda collective: self._tracker.error(collective, self.deadline),
            self.device,
        )

    def _wait_for_start(self) -> None:
        """Block until all processes have started."""
        self._tracker.record(Collective(0, "start"))
        try:
            try:
                self._tracker.wait_for_all(min(NOTICE_AFTER, self.deadline / 2))
            except RuntimeError:
                write_line(
                    f"valence: rank {self.rank} of {self.size} waits for the other processes",
                    sys.stderr,
                )
                self._tracker.wait_for_all(self.deadline)
        except RuntimeError as error:
            missing = ", ".join(map(str, self._tracker.missing_ranks()))
            raise UserError(
                f"not all processes started within {self.deadline:g} s; missing ranks: {missing}",
                code="rank-missing",
                where=f"rank {self.rank}",
                fix="read the output of the missing processes, and check whether their hosts can "
                "reach the host of rank 0",
            ) from error

    def split(
        self, neighbours: int, name: Neighbours = "tensor", shard_size: int | None = None
    ) -> tuple[Group, Group]:
        check_split(self.size, neighbours, name)
        if (neighbours, name) not in self._splits:
            self._splits[neighbours, name] = self._split(neighbours, name)
        data, shared = self._splits[neighbours, name]
        if shard_size not in (None, data.size, *data._hybrid_meshes):
            data._hybrid_meshes[shard_size] = self._hybrid_mesh(shard_size, neighbours)
        return data, shared

    def _split(self, neighbours: int, name: Neighbours) -> tuple[ProcessGroup, Group]:
        if neighbours == 1:
            return self, SingleProcess()
        # neighbours communicate in each layer, because they are on one host
        grid = torch.arange(self.size).view(-1, neighbours)
        data = self._subgroup("data", grid.T.tolist())
        shared = self._subgroup(name, grid.tolist())
        mesh = DeviceMesh.from_group(
            [data._group, shared._group],
            self.device.type,
            grid,
            mesh_dim_names=(SHARD_DIM, name),
        )
        data.mesh, shared.mesh = mesh[SHARD_DIM], mesh[name]
        return data, shared

    def _hybrid_mesh(self, shard_size: int, tensor: int) -> DeviceMesh:
        """The data-parallel group of this process as a mesh of replicas and shards."""
        # neighbours share a replica, because they are on one host
        grid = torch.arange(self.size).view(-1, shard_size, tensor)
        groups: list[Any] = []
        with self.collective("split shards"):
            for dim in (0, 1):
                rows = grid.movedim(dim, -1).flatten(0, 1).tolist()
                _, (group, _) = self._new_groups(rows, on_host=False)
                groups.append(group)
        names = ("replicate", SHARD_DIM)
        if tensor == 1:
            return DeviceMesh.from_group(
                groups, self.device.type, grid.squeeze(2), mesh_dim_names=names
            )
        _, layers = self._splits[tensor, "tensor"]
        assert isinstance(layers, ProcessGroup)
        mesh = DeviceMesh.from_group(
            [*groups, layers._group], self.device.type, grid, mesh_dim_names=(*names, "tensor")
        )
        return mesh[names]

    @cached_property
    def mesh(self) -> DeviceMesh:
        """This group as PyTorch's device mesh."""
        return DeviceMesh.from_group(
            self.torch_group, self.device.type, mesh_dim_names=(SHARD_DIM,)
        )

    def shard_mesh(self, size: int) -> DeviceMesh:
        """The mesh over which FSDP2 shards weights: all processes of this group, or replicas of
        ``size`` neighbours, which ``split`` has created.
        """
        return self.mesh if size == self.size else self._hybrid_meshes[size]

    @property
    def torch_group(self) -> Any:
        """PyTorch's group."""
        return self._group or dist.group.WORLD

    @property
    def background(self) -> Group:
        if self._background is None:
            with self.collective("split background"):
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline))
            ranks, device = range(self.size), torch.device("cpu")
            self._background = Subgroup(self, "background", ranks, group, group, device=device)
        return self._background

    def _subgroup(self, name: str, rows: Sequence[Sequence[int]]) -> Subgroup:
        """Create a group for each row of ranks. Returns that of this process."""
        with self.collective(f"split {name}"):
            ranks, groups = self._new_groups(rows)
            return Subgroup(self, name, ranks, *groups)

    def _new_groups(
        self, rows: Sequence[Sequence[int]], *, on_host: bool = True
    ) -> tuple[Sequence[int], tuple[Any, Any]]:
        """Create PyTorch's groups for each row of ranks: for tensors, and for host memory (the
        former without ``on_host``). Returns the row of this process and its groups.
        """
        timeout = timedelta(seconds=self.deadline)
        is_cuda = self.device.type == "cuda"
        created: dict[int, tuple[Sequence[int], tuple[Any, Any]]] = {}
        for ranks in rows:  # all processes create all groups, in the same order
            group = dist.new_group(ranks, timeout=timeout + NCCL_EXTRA * is_cuda)
            needs_gloo = is_cuda and on_host
            cpu_group = (
                dist.new_group(ranks, timeout=timeout, backend="gloo") if needs_gloo else group
            )
            created |= dict.fromkeys(ranks, (ranks, (group, cpu_group)))
        return created[self.rank]

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self  # copied modules use the same processes

    # Collectives

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        with self.collective("sum"):
            dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        local = values.detach().to(self.device)
        with self.collective("gather"):
            lengths = self._lengths(len(local))
            if not any(lengths):
                return values.detach()
            padded = local.new_zeros(max(lengths), *local.shape[1:])
            padded[: len(local)] = local
            parts = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).to(
            values.device
        )

    def gather_equal(self, values: Tensor) -> Tensor:
        local = values.detach().to(self.device).contiguous()
        gathered = local.new_empty(self.size * len(local), *local.shape[1:])
        with self.collective("gather_equal"):
            _all_gather_single(gathered, local, group=self._group)
        return gathered.to(values.device)

    def sum_scatter(self, values: Tensor) -> Tensor:
        local = values.detach().to(self.device).contiguous()
        part = local.new_empty(len(local) // self.size, *local.shape[1:])
        with self.collective("sum_scatter"):
            _reduce_scatter_single(part, local, group=self._group)
        return part.to(values.device)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        replicated = [p for p in parameters if not _is_reduced_by_fsdp(p)]
        for bucket in _buckets(replicated):
            self._reduce(bucket)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        grads_by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:  # groups of the weights, because a process may lack a gradient
            grads = [] if p.grad is None else [_local(p.grad)]
            grads_by_groups.setdefault(_shard_groups(p), []).extend(grads)
        if list(grads_by_groups) == [()]:
            return total_norm(grads_by_groups[()])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for groups, grads in grads_by_groups.items():
            square = total_norm(grads).to(total).square()
            for group in groups:
                with self.collective("norm"):
                    dist.all_reduce(square, group=group)
            total += square
        return total.sqrt()

    def broadcast(self, value: Any) -> Any:
        data = json.dumps(value).encode() if self.rank == 0 else b""
        with self.collective("broadcast"):
            buffer = torch.empty(self._lengths(len(data))[0], dtype=torch.uint8)
            if self.rank == 0:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(buffer, group=self._cpu_group, group_src=0)
        return json.loads(buffer.numpy().tobytes())

    def any(self, flag: bool) -> bool:
        return self._any("any", flag)

    def barrier(self, name: str) -> None:
        self._any(f"barrier {name}", False)

    def close(self) -> None:
        if self._watchdog:
            self._watchdog.close()
        dist.destroy_process_group()

    def collective(self, name: str) -> AbstractContextManager[None]:
        return self._track(name)

    def long_phase(
        self, name: str, assist: Callable[[], object] = ignore
    ) -> AbstractContextManager[Callable[[], None]]:
        return self._long_phase(name, assist)

    @contextmanager
    def _long_phase(self, name: str, assist: Callable[[], object]) -> Iterator[Callable[[], None]]:
        self._num_collectives += 1
        current = Collective(self._num_collectives, name)
        with self._convert_errors(current):
            self._tracker.record(current)
        phase = f"phase/{current.number}"
        if self.rank == 0:
            interval = min(REPORT_INTERVAL, self.deadline / 4)
            with self._tracker.reporting(phase, interval) as call_assistants:
                yield call_assistants
            return
        yield ignore
        with self._convert_errors(current):
            has_ended = self._tracker.wait_for_end(phase, assist, self.deadline)
        if not has_ended:
            raise self._tracker.error(current, self.deadline)

    @contextmanager
    def _track(self, name: str) -> Iterator[None]:
        """Record a collective, and convert its errors."""
        self._num_collectives += 1
        current = Collective(self._num_collectives, name)
        with self._convert_errors(current):
            self._tracker.record(current)
            yield
        if self._watchdog:
            self._watchdog.add(current)

    @contextmanager
    def _convert_errors(self, current: Collective) -> Iterator[None]:
        """Turn a failure of communication into an error that names the missing ranks."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_connection = isinstance(error, dist.DistError) or any(
                text in str(error) for text in GLOO_ERRORS
            )
            if not is_connection:
                raise
            is_late = time.monotonic() - start >= 0.9 * self.deadline
            failure = self._tracker.error(current, self.deadline if is_late else None)
            time.sleep(HEAD_START if self.rank else 2 * HEAD_START)
            raise failure from error

    def _any(self, name: str, flag: bool) -> bool:
        """Between host memories, which does not block on a device."""
        flags = torch.tensor([int(flag)])
        with self.collective(name):
            dist.all_reduce(flags, group=self._cpu_group)
        return bool(flags)

    def _lengths(self, length: int) -> list[int]:
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([length]), group=self._cpu_group)
        return [int(length) for length in lengths]

    def _reduce(self, bucket: Sequence[Tensor]) -> None:
        """All-reduce gradients as one tensor, followed by flags of which exist: a gradient that no
        process has must stay missing, otherwise its parameter would decay.
        """
        exists = torch.tensor(
            [float(p.grad is not None) for p in bucket],
            dtype=bucket[0].dtype,
            device=bucket[0].device,
        )
        grads = [
            _local(p).new_zeros(_local(p).numel()) if p.grad is None else _local(p.grad).flatten()
            for p in bucket
        ]
        flat = torch.cat([*grads, exists]).to(self.device)
        del grads
        with self.collective("reduce_gradients"):
            dist.all_reduce(flat, group=self._group)
        *sums, counts = flat.to(bucket[0].device).split(
            [*(_local(p).numel() for p in bucket), len(bucket)]
        )
        for p, total, count in zip(bucket, sums, counts, strict=True):
            if p.grad is None and count:
                p.grad = torch.zeros_like(p)
            if p.grad is not None:
                _local(p.grad).copy_(total.view_as(_local(p.grad)))


class Subgroup(ProcessGroup):
    """Some processes of a group, which must stay open. Errors name the ranks of that group."""

    def __init__(
        self,
        parent: ProcessGroup,
        name: str,
        ranks: Sequence[int],
        group: Any,
        cpu_group: Any,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank = (
            ranks.index(parent.rank),
            len(ranks),
            parent.local_rank,
        )
        self.deadline, self.device = parent.deadline, device or parent.device
        self._num_collectives, self._group, self._cpu_group = 0, group, cpu_group
        self._hybrid_meshes = {}
        self._tracker = parent._tracker.subgroup(f"{name}/{ranks[0]}", ranks)
        self._tracker.record(Collective(0, "start"))
        is_watched = parent._watchdog is not None and self.device.type == "cuda"
        self._watchdog = self._new_watchdog() if is_watched else None

    def split(
        self, neighbours: int, name: Neighbours = "tensor", shard_size: int | None = None
    ) -> tuple[Group, Group]:
        raise NotImplementedError("a subgroup cannot be split")

    def close(self) -> None:
        if self._watchdog:
            self._watchdog.close()


def check_split(size: int, neighbours: int, name: Neighbours) -> None:
    """Raise UserError unless ``size`` processes can be divided into groups of ``neighbours``."""
    if size % neighbours:
        raise UserError(
            f"the number of processes ({size}) is not a multiple of {neighbours}",
            code=f"{name}-size-mismatch",
            where=f"parallel.{name}",
            fix=f"set --nproc to a multiple of {neighbours}, or parallel.{name} to 1",
        )


def _is_reduced_by_fsdp(tensor: Tensor) -> bool:
    """Whether FSDP sums the gradient of this weight over all data-parallel processes."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    return mesh is not None and SHARD_DIM in (mesh.mesh_dim_names or ())


def _shard_groups(tensor: Tensor) -> tuple[Any, ...]:
    """PyTorch's groups over which this tensor is sharded."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    axes = zip(mesh.get_all_groups(), tensor.placements, strict=True)  # type: ignore[attr-defined]
    return tuple(group for group, placement in axes if not placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()  # type: ignore[operator]


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into buckets of one type and device, in their order; a parameter that is
    larger than a bucket is alone.
    """
    buckets: list[list[Tensor]] = []
    latest: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket, num_bytes = latest.get(kind, ([], BUCKET))
        if num_bytes + parameter.nbytes > BUCKET:
            bucket, num_bytes = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        latest[kind] = bucket, num_bytes + parameter.nbytes
    return buckets


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together.

    On a CPU in float64, because PyTorch's sum in float32 loses 4e-5 for millions of numbers.
    """
    if any(grad.device.type != "cpu" for grad in grads):
        return get_total_norm(grads)
    chunks = (chunk for grad in grads for chunk in grad.detach().flatten().split(CHUNK))
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
    return (
        torch.linalg.vector_norm(torch.stack(norms))
        if norms
        else torch.zeros((), dtype=torch.float64)
    )


# Connecting


def available_backends() -> dict[str, bool]:
    """Whether PyTorch has gloo (between host memories) and NCCL (between CUDA devices)."""
    is_available = dist.is_available()
    return {
        "gloo": is_available and dist.is_gloo_available(),
        "nccl": is_available and dist.is_nccl_available(),
    }


def start(deadline: float | None = None, device: str | None = None) -> Group:
    """The group that the environment describes, as torchrun, `accelerate launch` and ``launch`` set
    it: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without it, a single process.

    deadline: seconds after which a collective fails; default: VALENCE_DEADLINE of the environment,
    or 600. device: cuda or cpu; default: cuda if available. Raises UserError if the environment is
    incomplete, this host has fewer devices than processes, or a process does not start.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return SingleProcess()
    rank, local_rank, size, port = (
        _read_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} (counted from 0) has no GPU: the number of GPUs on this "
            f"host is {torch.cuda.device_count()}",
            code="device-missing",
            where="LOCAL_RANK",
            fix="start at most one process per GPU: lower --nproc, or --nproc-per-node of torchrun",
        )
    seconds = _read_deadline() if deadline is None else deadline
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if (host, port) not in _stores:
        _stores[host, port] = _connect(host, port, rank, seconds)
    count = next(_num_groups)  # a second group must not read the keys of the first
    first, second = _stores[host, port]
    stores = dist.PrefixStore(f"torch/{count}", first), dist.PrefixStore(f"valence/{count}", second)
    return ProcessGroup(stores, rank, size, local_rank, seconds, kind)


def _read_deadline() -> float:
    text = os.environ.get(DEADLINE_VARIABLE, str(DEADLINE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_DEADLINE:
        raise UserError(
            f"{text!r} is not a valid number of seconds",
            code="environment-variable-invalid",
            where=DEADLINE_VARIABLE,
            fix=f"unset it ({DEADLINE:g}), or set it above 0, to at most {MAX_DEADLINE:g}",
        )
    return seconds


def _read_number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise UserError(
            f"WORLD_SIZE names several processes, but {name} is not a number",
            code="environment-variable-invalid",
            where=name,
            fix="start with --nproc N, with torchrun or with accelerate launch, which set it",
        ) from None


def _connect(host: str, port: int, rank: int, deadline: float) -> tuple[dist.Store, dist.Store]:
    """Two connections to the store: PyTorch's, and one with a shorter timeout for the tracker."""
    # otherwise torchrun keeps the store
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    descriptor = os.environ.pop(LISTEN_FD_VARIABLE, None)
    listen_fd = int(descriptor) if is_server and descriptor is not None else None
    timeout = timedelta(seconds=deadline)
    try:
        return (
            dist.TCPStore(
                host,
                port,
                is_master=is_server,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listen_fd,
            ),
            dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False),
        )
    except RuntimeError as error:
        problem = (
            "the port cannot be opened"
            if is_server
            else f"rank 0 does not answer within {deadline:g} s"
        )
        raise UserError(
            f"{problem} ({str(error).splitlines()[0]})",
            code="rank-connection",
            where=f"{host}:{port}",
            fix="check whether rank 0 has started there, and whether the port is free and "
            "reachable from this host",
        ) from error


# Objects


def run_on_first_rank(group: Group, action: Callable[[], Any]) -> Any:
    """Run an action in rank 0 alone. Returns its JSON result, or raises its UserError, in all."""
    if group.size == 1:
        return action()
    outcome: dict[str, Any] = {}
    if group.rank == 0:
        try:
            outcome = {"result": action()}
        except UserError as error:
            group.broadcast({"error": error.facts})
            raise
    outcome = group.broadcast(outcome)
    if "error" in outcome:
        raise UserError(**outcome["error"])
    return outcome["result"]


def gather_objects(group: Group, value: Any) -> list[Any]:
    """The values of all processes, in the order of ranks: JSON and tensors, which arrive on the
    CPU. As JSON, because PyTorch's ``all_gather_object`` unpickles what arrives.
    """
    if group.size == 1:
        return [value]
    line = json.dumps(value, default=_encode_tensor).encode() + b"\n"
    lines = group.gather(torch.frombuffer(bytearray(line), dtype=torch.uint8)).numpy().tobytes()
    return [json.loads(line, object_hook=_decode_tensor) for line in lines.splitlines()]


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as JSON, bit for bit."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {
        TENSOR: str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": content.hex(),
    }


def _decode_tensor(value: dict[str, Any]) -> Any:
    if TENSOR not in value:
        return value
    content = torch.frombuffer(
        bytearray.fromhex(value["bytes"]) or bytearray(1), dtype=torch.uint8
    )[: len(value["bytes"]) // 2]
    return content.view(getattr(torch, value[TENSOR])).view(value["shape"])


def check_ranks_agree(group: Group, facts: Callable[[], Mapping[str, Any]], fix: str) -> None:
    """Raise UserError, with the names that differ, if a process has other facts than rank 0."""
    if group.size == 1:
        return
    lines = {
        name: json.dumps(value, sort_keys=True, default=str) for name, value in facts().items()
    }
    digests = {name: hashlib.sha256(line.encode()).hexdigest() for name, line in lines.items()}
    first, *others = gather_objects(group, digests)
    for rank, other in enumerate(others, 1):
        names = [
            name
            for name in sorted(first.keys() | other.keys())
            if first.get(name) != other.get(name)
        ]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise UserError(
                f"rank {rank} has a different {', '.join(names[:4])}{more} than rank 0",
                code="ranks-differ",
                where=f"rank {rank}",
                fix=fix,
            )
