"""Starts a group of processes that share no memory, each forked from a server that has torch
loaded.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.programs import fork_server
from valence.distributed import process_group
from valence.distributed.launcher import LISTEN_FD_VARIABLE
from valence.errors import UserError


def full(tensor: Any) -> Tensor:
    """Gather a sharded tensor. All processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class RankResult:
    """Result of a process: the value or the error of its job, and its exit code."""

    value: Any = None
    mistake: UserError | None = None
    code: int | None = None

    @property
    def error(self) -> str:
        return str(self.mistake or "")


def run(
    job: Callable[..., Any],
    size: int,
    *args: Any,
    deadline: float = 30.0,
    started: Sequence[int] | None = None,
) -> list[RankResult]:
    """Calls job(group, *args) in each of ``size`` processes, or in those of them that are
    started.
    """
    started = range(size) if started is None else started
    with socket.create_server(("127.0.0.1", 0), backlog=size) as listening:
        port = listening.getsockname()[1]
        if 0 not in started:
            listening.close()
        server = fork_server()
        pairs = [server.Pipe(duplex=False) for _ in started]
        remaining = [listening if rank == 0 else None for rank in started]
        places = zip(started, remaining, pairs, strict=True)
        ready = server.Barrier(len(started))
        inputs = [
            (job, rank, size, port, keeps, deadline, ready, end, args)
            for rank, keeps, (_, end) in places
        ]
        ranks = [server.Process(target=_rank, args=item) for item in inputs]
        for process in ranks:
            process.start()
    for _, end in pairs:
        end.close()
    results = [_received(pipe) for pipe, _ in pairs]
    for process in ranks:
        process.join()
    return [
        RankResult(*item, process.exitcode) for item, process in zip(results, ranks, strict=True)
    ]


def wait_for(*paths: Path, seconds: float = 60.0) -> None:
    """Wait until all files exist. Raises TimeoutError."""
    ends = time.monotonic() + seconds
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > ends:
            raise TimeoutError(f"{missing} after {seconds:g} s")
        time.sleep(0.01)


def _received(pipe: Connection) -> tuple[Any, UserError | None]:
    try:
        value, mistake = pickle.loads(pipe.recv_bytes())
    except EOFError:  # it ended before it could say anything
        return None, None
    return value, UserError(mistake.pop("message"), **mistake) if mistake else None


def _rank(
    job: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    listening: socket.socket | None,
    deadline: float,
    ready: Barrier,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if listening is not None:
        os.environ[LISTEN_FD_VARIABLE] = str(listening.detach())
    process_group.HEAD_START = 0.3  # no launcher looks who failed first
    ready.wait(
        60
        # short deadlines are for what is looked at, not for a process that a busy machine starts
        # late
    )
    value, mistake = None, None
    try:
        group = process_group.start(deadline, "cpu")
        value = job(group, *args)
        group.close()
    except UserError as error:
        mistake = {
            "message": error.message,
            "code": error.code,
            "where": error.where,
            "fix": error.fix,
        }
    pipe.send_bytes(pickle.dumps((value, mistake)))  # not as memory that it would share
