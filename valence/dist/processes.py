"""Many processes: PyTorch's collectives, none of which waits for ever."""

# pyright: reportPrivateImportUsage=false
# (PyTorch documents its stores as members of this package, but does not list them as exported)

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from valence.dist.launch import LISTENS
from valence.dist.posts import Place, Posts
from valence.dist.protocol import Group
from valence.dist.single import Single
from valence.dist.watch import Watch
from valence.errors import UserError

DEADLINE = 600.0
"""Seconds."""
BUCKET = 64 << 20
"""Bytes of gradients that travel together: more gain nothing, and are held twice meanwhile."""
HEAD_START = 2.0
"""Seconds that a process lives on when a collective has failed: the error of one that ended before is then seen first. Rank 0
does so twice as long, as with it ends what the others know of each other."""
ANSWERS = 30.0
"""Seconds within which the store answers a question of where the others are."""
_starts = itertools.count()
_connected: dict[tuple[str, int], tuple[dist.Store, dist.Store]] = {}
"""The stores of this process, kept for as long as it lives: another may still read what rank 0 has closed."""


def start(deadline: float = DEADLINE, device: str | None = None) -> Group:
    """The group that the environment tells of, as torchrun, `accelerate launch` and ``launch`` set it: RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where it tells of no other process, one alone.

    deadline: seconds after which a process that waits for another gives up. device: cuda or cpu; default: cuda if there is any.
    Raises UserError when the environment is not whole, this host has fewer devices than processes, or a process does not come.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Single()
    rank, local_rank, size, port = (_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        what = f"there is no device for process {local_rank} of this host: it has {torch.cuda.device_count()}"
        raise UserError(what, where="LOCAL_RANK", fix="start no more processes on a host than it has devices")
    return Processes(_stores(rank, port, deadline), rank, size, local_rank, deadline, kind)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        fix = "start with --nproc N, with torchrun or with accelerate launch, which set it"
        raise UserError(f"WORLD_SIZE names several processes, but {name} is no number", where=name, fix=fix) from None


def _stores(rank: int, port: int, deadline: float) -> tuple[dist.Store, dist.Store]:
    """Two connections to what the processes know of each other: PyTorch's and ours, which is to answer sooner."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if (host, port) not in _connected:
        _connected[host, port] = _connect(host, port, rank, deadline)
    count = next(_starts)  # a group that is started after another finds nothing of it
    first, second = _connected[host, port]
    return dist.PrefixStore(f"torch/{count}", first), dist.PrefixStore(f"valence/{count}", second)


def _connect(host: str, port: int, rank: int, deadline: float) -> tuple[dist.Store, dist.Store]:
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun itself keeps it
    opened = os.environ.pop(LISTENS, None)
    socket = int(opened) if keeps and opened is not None else None
    wait = timedelta(seconds=deadline)
    try:
        return (
            dist.TCPStore(host, port, is_master=keeps, timeout=wait, wait_for_workers=False, master_listen_fd=socket),
            dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False),
        )
    except RuntimeError as error:
        what = "the port cannot be opened" if keeps else f"rank 0 does not answer within {deadline:g} s"
        fix = "see whether rank 0 has started there, and whether the port is free and can be reached from this host"
        raise UserError(f"{what} ({str(error).splitlines()[0]})", where=f"{host}:{port}", fix=fix) from error


class Processes:
    """The group of several processes: gloo between hosts' memories, nccl between CUDA devices. Tensors of either kind of memory
    are taken. A collective that some process does not come to raises UserError, which says who is missing and where."""

    def __init__(
        self, stores: tuple[dist.Store, dist.Store], rank: int, size: int, local_rank: int, deadline: float, device: str
    ) -> None:
        self.rank, self.size, self.local_rank, self.deadline = rank, size, local_rank, deadline
        self.device = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
        self._number = 0
        store, posted = stores
        self._posts = Posts(posted, rank, size)
        self._roll_call(posted)
        posted.set_timeout(timedelta(seconds=ANSWERS))
        wait = timedelta(seconds=deadline)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            later = wait + timedelta(seconds=60)  # nccl's own deadline ends a process without a word of who is missing
            dist.init_process_group(
                "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=later, device_id=self.device
            )
            self._host: Any = dist.new_group(backend="gloo", timeout=wait)
            self._watch = Watch(deadline, lambda place: self._posts.missed(place, deadline))
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
            self._host, self._watch = None, None  # the same

    def _roll_call(self, store: dist.Store) -> None:
        """Returns once all processes are there."""
        self._posts.post(Place(0, "start"))
        try:
            store.wait([f"at/{rank}" for rank in range(self.size)], timedelta(seconds=self.deadline))
        except RuntimeError as error:
            missing = self._posts.absent()
            said = f"not all processes have started within {self.deadline:g} s; missing: rank {', '.join(map(str, missing))}"
            fix = "see what these say, and whether their hosts can reach rank 0's"
            raise UserError(said, where=f"rank {self.rank}", fix=fix) from error

    # ------------------------------------------------------------------ members

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        with self._at("sum"):
            dist.all_reduce(total)
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
            dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).to(values.device)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        for bucket in _buckets(parameters):
            self._reduce(bucket)

    def broadcast(self, value: Any) -> Any:
        given = json.dumps(value).encode() if self.rank == 0 else b""
        with self._at("broadcast"):
            sent = torch.empty(self._lengths(len(given))[0], dtype=torch.uint8)
            if self.rank == 0:
                sent.copy_(torch.frombuffer(bytearray(given), dtype=torch.uint8))
            dist.broadcast(sent, 0, group=self._host)
        return json.loads(sent.numpy().tobytes())

    def any(self, flag: bool) -> bool:
        return self._said("any", flag)

    def barrier(self, name: str) -> None:
        self._said(f"barrier {name}", False)

    def close(self) -> None:
        if self._watch:
            self._watch.close()
        dist.destroy_process_group()

    # ------------------------------------------------------------------ how

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        """Around a collective: says where this process is, and turns the failure of communication into who is missing."""
        self._number += 1
        place, began = Place(self._number, name), time.monotonic()
        try:
            self._posts.post(place)
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
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
        """Gradients travel in one piece, behind them which of them there are: one that is nowhere stays absent, as its parameter
        would otherwise decay."""
        given = torch.tensor([float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype, device=bucket[0].device)
        grads = [p.new_zeros(p.numel()) if p.grad is None else p.grad.detach().flatten() for p in bucket]
        flat = torch.cat([*grads, given]).to(self.device)
        del grads
        with self._at("reduce_gradients"):
            dist.all_reduce(flat)
        *sums, counts = flat.to(bucket[0].device).split([*(p.numel() for p in bucket), len(bucket)])
        for p, total, count in zip(bucket, sums, counts, strict=True):
            if p.grad is not None:
                p.grad.copy_(total.view_as(p.grad))
            elif count:
                p.grad = total.view_as(p).clone()


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one type and device, in their order, as many as fit a bucket; a larger one is alone."""
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
