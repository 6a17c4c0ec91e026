"""Many processes: PyTorch's collectives, none of which waits for ever."""

# pyright: reportPrivateImportUsage=false
# (PyTorch documents its stores as members of this package, but does not list them as exported)

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the process group as a default argument. Imported later, as transformers does,
# they would keep the group and
# its threads alive after it was destroyed, and a thread that outlives the interpreter can abort a
# finished process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from valence.distributed.launch import LISTENS
from valence.distributed.posts import Place, Posts
from valence.distributed.protocol import Group
from valence.distributed.single import Single, total_norm
from valence.distributed.watch import CollectiveWatchdog
from valence.errors import UserError
from valence.terminal import write_line

DEADLINE = 600.0
"""Seconds."""
DEADLINE_IS = "VALENCE_DEADLINE"
"""Names another deadline than DEADLINE, in seconds, the same for all processes."""
LONGEST = 1e6
"""Seconds, 11 days: PyTorch counts them in milliseconds, with 32 bits in places."""
BUCKET = 64 << 20
"""Bytes of gradients that travel together: more gain nothing, and are held twice meanwhile."""
HEAD_START = 2.0
"""Seconds that a process lives on when a collective has failed: the error of one that ended before
is then seen first. Rank 0 does so twice as long, as with it ends what the others know of each
other.
"""
PATIENCE = 15.0
"""Seconds after which it is said that others are waited for."""
OF_GLOO = ("gloo/transport", "pair closure")
"""Words of errors that are RuntimeErrors like any other."""
ANSWERS = 30.0
"""Seconds within which the store answers a question of where the others are, but at most half of
the deadline.
"""
LATER = timedelta(seconds=60)
"""How much later nccl's own deadline is: it ends a process without a word of who is missing."""
_starts = itertools.count()
_connected: dict[tuple[str, int], tuple[dist.Store, dist.Store]] = {}
"""The stores of this process, kept for as long as it lives: another may still read what rank 0 has
closed.
"""


def start(deadline: float | None = None, device: str | None = None) -> Group:
    """The group that the environment tells of, as torchrun, `accelerate launch` and ``launch`` set
    it: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where it tells of no other
    process, one alone.

    deadline: seconds after which a process that waits for another gives up; default:
    VALENCE_DEADLINE of the environment, or
    600. device: cuda or cpu; default: cuda if there is any. Raises UserError when the environment
    is not whole, this host has fewer devices than processes, or a process does not come.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Single()
    rank, local_rank, size, port = (
        _number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        what = (
            f"there is no device for process {local_rank} of this host: it has "
            f"{torch.cuda.device_count()}"
        )
        raise UserError(
            what,
            code="device-missing",
            where="LOCAL_RANK",
            fix="start no more processes on a host than it has devices",
        )
    wait = _deadline() if deadline is None else deadline
    return Processes(_stores(rank, port, wait), rank, size, local_rank, wait, kind)


def _deadline() -> float:
    given = os.environ.get(DEADLINE_IS, str(DEADLINE))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        fix = f"leave it out ({DEADLINE:g}), or set it above 0, to at most {LONGEST:g}"
        raise UserError(
            f"{given!r} is no number of seconds",
            code="environment-variable-invalid",
            where=DEADLINE_IS,
            fix=fix,
        )
    return seconds


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        fix = "start with --nproc N, with torchrun or with accelerate launch, which set it"
        raise UserError(
            f"WORLD_SIZE names several processes, but {name} is no number",
            code="environment-variable-invalid",
            where=name,
            fix=fix,
        ) from None


def _stores(rank: int, port: int, deadline: float) -> tuple[dist.Store, dist.Store]:
    """Two connections to what the processes know of each other: PyTorch's and ours, which is to
    answer sooner.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if (host, port) not in _connected:
        _connected[host, port] = _connect(host, port, rank, deadline)
    count = next(_starts)  # a group that is started after another finds nothing of it
    first, second = _connected[host, port]
    return dist.PrefixStore(f"torch/{count}", first), dist.PrefixStore(f"valence/{count}", second)


def _connect(host: str, port: int, rank: int, deadline: float) -> tuple[dist.Store, dist.Store]:
    # else torchrun itself keeps it
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    opened = os.environ.pop(LISTENS, None)
    socket = int(opened) if keeps and opened is not None else None
    wait = timedelta(seconds=deadline)
    try:
        return (
            dist.TCPStore(
                host,
                port,
                is_master=keeps,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=socket,
            ),
            dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False),
        )
    except RuntimeError as error:
        what = (
            "the port cannot be opened"
            if keeps
            else f"rank 0 does not answer within {deadline:g} s"
        )
        fix = (
            "see whether rank 0 has started there, and whether the port is free and can be "
            "reached from this host"
        )
        raise UserError(
            f"{what} ({str(error).splitlines()[0]})",
            code="rank-connection",
            where=f"{host}:{port}",
            fix=fix,
        ) from error


class Processes:
    """The group of several processes: gloo between hosts' memories, nccl between CUDA devices.

    Tensors of either kind of memory are taken. A collective that some process does not come to
    raises UserError, which says who is missing and where.
    """

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
        self._number = 0
        self._splits: dict[int, tuple[Group, Group]] = {}
        self._members: Any = None  # PyTorch's group: all processes
        store, posted = stores
        self._posts = Posts(posted, rank, range(size))
        self._roll_call(posted)
        posted.set_timeout(timedelta(seconds=min(ANSWERS, deadline / 2)))
        wait = timedelta(seconds=deadline)
        self._host: Any = None  # PyTorch's group between the hosts' memories, where it is another
        self._watch: CollectiveWatchdog | None = None
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl",
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=wait + LATER,
                    device_id=self.device,
                )
                self._host = dist.new_group(backend="gloo", timeout=wait)
                self._watch = CollectiveWatchdog(
                    deadline, lambda place: self._posts.missed(place, deadline)
                )
            else:
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size, timeout=wait
                )
        except RuntimeError as error:
            fix = (
                "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for devices) to the network device "
                "by which hosts reach each other"
            )
            raise UserError(
                f"cannot connect ({str(error).splitlines()[0]})",
                code="rank-connection",
                where=f"rank {rank}",
                fix=fix,
            ) from error

    def _roll_call(self, store: dist.Store) -> None:
        """Returns once all processes are there."""
        self._posts.post(Place(0, "start"))
        all_of_them = [f"at/{rank}" for rank in range(self.size)]
        try:
            try:
                store.wait(all_of_them, timedelta(seconds=min(PATIENCE, self.deadline / 2)))
            except RuntimeError:
                write_line(
                    f"valence: rank {self.rank} of {self.size} waits for the other processes",
                    sys.stderr,
                )
                store.wait(all_of_them, timedelta(seconds=self.deadline))
        except RuntimeError as error:
            missing = self._posts.absent()
            said = (
                f"not all processes have started within {self.deadline:g} s; missing: rank "
                f"{', '.join(map(str, missing))}"
            )
            fix = "see what these say, and whether their hosts can reach rank 0's"
            raise UserError(
                said, code="rank-missing", where=f"rank {self.rank}", fix=fix
            ) from error

    def split(self, tensor: int) -> tuple[Group, Group]:
        if self.size % tensor:
            what = f"{self.size} processes are not a multiple of {tensor}"
            raise UserError(
                what,
                code="tensor-size-mismatch",
                where="parallel.tensor",
                fix=f"give --nproc a multiple of {tensor}, or set it to 1",
            )
        if tensor == 1:
            return self, Single()
        if tensor not in self._splits:
            self._splits[tensor] = self._split(tensor)
        return self._splits[tensor]

    def _split(self, tensor: int) -> tuple[Group, Group]:
        # neighbours share layers: they sit on one host
        grid = torch.arange(self.size).view(-1, tensor)
        data, layers = self._part("data", grid.T.tolist()), self._part("tensor", grid.tolist())
        members = [data._members, layers._members]
        mesh = DeviceMesh.from_group(
            members, self.device.type, grid, mesh_dim_names=("data", "tensor")
        )
        data.mesh, layers.mesh = mesh["data"], mesh["tensor"]
        return data, layers

    @cached_property
    def mesh(self) -> DeviceMesh:
        """This group, for what PyTorch distributes itself."""
        return DeviceMesh.from_group(self._all, self.device.type)

    @property
    def _all(self) -> Any:
        return self._members or dist.group.WORLD

    def _part(self, name: str, rows: Sequence[Sequence[int]]) -> Subgroup:
        """Makes a group of each row of ranks, and gives this process's."""
        wait = timedelta(seconds=self.deadline)
        own: Subgroup | None = None
        with self._at(f"split {name}"):
            for ranks in rows:  # all processes make all groups, in the same order
                if self.device.type == "cuda":
                    groups = (
                        dist.new_group(ranks, timeout=wait + LATER),
                        dist.new_group(ranks, timeout=wait, backend="gloo"),
                    )
                else:
                    groups = (dist.new_group(ranks, timeout=wait),) * 2
                if self.rank in ranks:
                    own = Subgroup(self, name, ranks, *groups)
        assert own is not None
        return own

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # copied modules speak to the same processes

    # ------------------------------------------------------------------ members

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        with self._at("sum"):
            dist.all_reduce(total, group=self._members)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        own = values.detach().to(self.device)
        with self._at("gather"):
            lengths = self._lengths(len(own))
            if not any(lengths):
                return values.detach()
            padded = own.new_zeros(max(lengths), *own.shape[1:])
            padded[: len(own)] = own
            parts = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(parts, padded, group=self._members)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).to(
            values.device
        )

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        for bucket in _buckets([p for p in parameters if self._all not in _split_over(p)]):
            self._reduce(bucket)

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        parts: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:  # not of the gradients, which a process may lack
            parts.setdefault(_split_over(p), []).extend([] if p.grad is None else [_own(p.grad)])
        if list(parts) == [()]:
            return total_norm(parts[()])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for groups, grads in parts.items():
            square = total_norm(grads).to(total).square()
            for group in groups:
                with self._at("norm"):
                    dist.all_reduce(square, group=group)
            total += square
        return total.sqrt()

    def broadcast(self, value: Any) -> Any:
        given = json.dumps(value).encode() if self.rank == 0 else b""
        with self._at("broadcast"):
            sent = torch.empty(self._lengths(len(given))[0], dtype=torch.uint8)
            if self.rank == 0:
                sent.copy_(torch.frombuffer(bytearray(given), dtype=torch.uint8))
            dist.broadcast(sent, group=self._host, group_src=0)
        return json.loads(sent.numpy().tobytes())

    def any(self, flag: bool) -> bool:
        return self._said("any", flag)

    def barrier(self, name: str) -> None:
        self._said(f"barrier {name}", False)

    def at(self, name: str) -> AbstractContextManager[None]:
        return self._at(name)

    def close(self) -> None:
        if self._watch:
            self._watch.close()
        dist.destroy_process_group()

    # ------------------------------------------------------------------ how

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        """Around a collective: says where this process is, and turns the failure of communication
        into who is missing.
        """
        self._number += 1
        place, began = Place(self._number, name), time.monotonic()
        try:
            self._posts.post(place)
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not any(
                words in str(error) for words in OF_GLOO
            ):
                raise
            late = time.monotonic() - began >= 0.9 * self.deadline
            missed = self._posts.missed(place, self.deadline if late else None)
            time.sleep(HEAD_START if self.rank else 2 * HEAD_START)
            raise missed from error
        if self._watch:
            self._watch.add(place)

    def _said(self, name: str, flag: bool) -> bool:
        """Between hosts' memories, so that no device is waited for."""
        flags = torch.tensor([int(flag)])
        with self._at(name):
            dist.all_reduce(flags, group=self._host)
        return bool(flags)

    def _lengths(self, own: int) -> list[int]:
        found = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([own]), group=self._host)
        return [int(length) for length in found]

    def _reduce(self, bucket: Sequence[Tensor]) -> None:
        """Gradients travel in one piece, behind them which of them there are: one that is nowhere
        stays absent, as its parameter would otherwise decay.
        """
        given = torch.tensor(
            [float(p.grad is not None) for p in bucket],
            dtype=bucket[0].dtype,
            device=bucket[0].device,
        )
        grads = [
            _own(p).new_zeros(_own(p).numel()) if p.grad is None else _own(p.grad).flatten()
            for p in bucket
        ]
        flat = torch.cat([*grads, given]).to(self.device)
        del grads
        with self._at("reduce_gradients"):
            dist.all_reduce(flat, group=self._members)
        *sums, counts = flat.to(bucket[0].device).split(
            [*(_own(p).numel() for p in bucket), len(bucket)]
        )
        for p, total, count in zip(bucket, sums, counts, strict=True):
            if p.grad is None and count:
                p.grad = torch.zeros_like(p)
            if p.grad is not None:
                _own(p.grad).copy_(total.view_as(_own(p.grad)))


class Subgroup(Processes):
    """Some processes of a group as a group of their own, which lasts as long as that.

    Errors name the ranks of the whole.
    """

    def __init__(
        self, whole: Processes, name: str, ranks: Sequence[int], members: Any, host: Any
    ) -> None:
        self.rank, self.size, self.local_rank = (
            ranks.index(whole.rank),
            len(ranks),
            whole.local_rank,
        )
        self.deadline, self.device = whole.deadline, whole.device
        self._number, self._members, self._host = 0, members, host
        self._posts = whole._posts.part(f"{name}/{ranks[0]}", ranks)
        self._posts.post(Place(0, "start"))
        self._watch = whole._watch and CollectiveWatchdog(
            self.deadline, lambda place: self._posts.missed(place, self.deadline)
        )

    def split(self, tensor: int) -> tuple[Group, Group]:
        raise NotImplementedError("a part is not split again")

    def close(self) -> None:
        if self._watch:
            self._watch.close()


def _split_over(tensor: Tensor) -> tuple[Any, ...]:
    """PyTorch's groups of which each process has another part of this tensor."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ()
    axes = zip(mesh.get_all_groups(), tensor.placements, strict=True)  # type: ignore[attr-defined]
    return tuple(group for group, placement in axes if not placement.is_replicate())


def _own(tensor: Tensor) -> Tensor:
    """This process's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()  # type: ignore[operator]


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one type and device, in their order, as many as fit a bucket; a larger one is
    alone.
    """
    found: list[list[Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket, filled = open_.get(kind, ([], BUCKET))
        if filled + parameter.nbytes > BUCKET:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(parameter)
        open_[kind] = bucket, filled + parameter.nbytes
    return found
