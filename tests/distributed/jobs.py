"""Jobs of the processes in the tests, and their inputs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch
from torch import Tensor

from tests.distributed.process_groups import wait_for
from valence.distributed import process_group
from valence.distributed.process_group import Group, SingleProcess, gather_objects
from valence.distributed.watchdog import Collective, CollectiveWatchdog
from valence.errors import UserError

JSON = {
    "words": ["a", "ü", None, True],
    "number": 0.1 + 0.2,
    "large": 2**60,
    "long": "x" * 70_000,
    "empty": {},
}


def drawn(rank: int, *axes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(
        dtype
    )


def summands(rank: int) -> dict[str, Tensor]:
    return {
        "float64": drawn(rank, 5, dtype=torch.float64) * 1e9,
        "transposed": drawn(rank, 3, 4).T,
        "scalar": torch.tensor(0.1 + rank),
        "whole": torch.tensor([2**53 + rank, -rank]),
        "long": drawn(rank, 50_001),
        "nothing": torch.zeros(0),
    }


def parts(rank: int) -> dict[str, Tensor]:
    return {
        "as many as its rank": drawn(rank, rank, 3),
        "only the last but one": drawn(rank, 2 if rank == 1 else 0, dtype=torch.float64),
        "nobody any": torch.zeros(0, 2, dtype=torch.long),
        "flags": torch.arange(rank + 1) % 2 == 0,
        "equal": drawn(rank, 4, 2).T,
        "nan": torch.full((1,), float("nan") if rank else 1.0),
    }


def parameters(rank: int) -> list[Tensor]:
    """Their gradients: of several types and shapes, one that all but rank 0 lack, one that all
    lack.
    """
    results: list[Tensor] = []
    kinds = [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float32,
        torch.float32,
    ]
    for i, (axes, dtype) in enumerate(
        zip([(3, 4), (5,), (), (2, 2), (40,), (7,)], kinds, strict=True)
    ):
        parameter = torch.zeros(axes, dtype=dtype, requires_grad=True)
        if i < 4 or (i == 4 and rank == 0):
            parameter.grad = drawn(10 * rank + i, *axes, dtype=dtype)
        results.append(parameter)
    assert results[0].grad is not None
    results[0].grad = results[0].grad.T.contiguous().T  # whose memory is in another order
    return results


def members(group: Group) -> dict[str, Any]:
    """Call every operation of a group."""
    process_group.BUCKET = 64  # bytes: several buckets, one of a tensor that is larger
    inputs = summands(group.rank)
    results: dict[str, Any] = {f"sum {name}": group.sum(values) for name, values in inputs.items()}
    results["kept"] = all(
        bool((values == inputs[name]).all()) for name, values in summands(group.rank).items()
    )
    results |= {
        f"gather {name}": group.gather(values) for name, values in parts(group.rank).items()
    }
    results["gather_equal"] = group.gather_equal(drawn(group.rank, 4, 2).T)
    results["sum_scatter"] = group.sum_scatter(drawn(group.rank, 3 * group.size, 2))
    trained = parameters(group.rank)
    places = [p.grad.data_ptr() for p in trained if p.grad is not None]
    group.reduce_gradients(trained)
    group.reduce_gradients([])
    results |= {f"grad {i}": p.grad for i, p in enumerate(trained)}
    results["in place"] = (
        places == [p.grad.data_ptr() for p in trained if p.grad is not None][: len(places)]
    )
    results["broadcast"] = group.broadcast(
        JSON | {"pair": (1, 2)} if group.rank == 0 else {"not": "this"}
    )
    results["any"] = [group.any(group.rank == group.size - 1), group.any(False), group.any(True)]
    with TemporaryDirectory() as folder:  # rank 0 comes to the barrier last
        arrived = [Path(name, "0") for name in gather_objects(group, folder)]
        if group.rank == 0:
            for path in arrived:
                path.touch()
        group.barrier("here")
        results["barrier"] = arrived[group.rank].exists()
        group.barrier("looked")
    results["place"] = group.rank, group.size, group.local_rank
    return results


def twice(group: Group) -> list[float]:
    """A second group after the first was closed, as a program has that trains two recipes."""
    first = group.sum(torch.tensor(1.0))
    group.barrier("end")
    group.close()
    second = process_group.start(30.0, "cpu")
    assert not isinstance(second, SingleProcess)
    again = second.sum(torch.tensor(2.0))
    second.barrier("end")  # what the processes know of each other is with rank 0
    return [float(first), float(again)]


@contextmanager
def noted_end(folder: str, name: str) -> Iterator[None]:
    """A file of this name is in the folder once the block has ended, however it ends."""
    try:
        yield
    finally:
        Path(folder, name).touch()


def one_stays_away(group: Group, away: int, folder: str) -> None:
    """One process comes to a sum only when all others have given up."""
    group.barrier("audit")
    if group.rank == away:
        wait_for(*(Path(folder, str(rank)) for rank in range(group.size) if rank != away))
        return
    with noted_end(folder, str(group.rank)):
        group.sum(torch.ones(3))


def call_different_collectives(group: Group) -> None:
    group.any(False)
    if group.rank == 0:
        group.sum(torch.ones(3))
    else:
        group.gather(torch.ones(group.rank, 100))


def one_is_killed(group: Group, killed: int, before: bool) -> None:
    group.barrier("audit")
    parameter = torch.zeros(2_000_000, requires_grad=True)
    if group.rank == killed:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if before:
            signal.pause()
    for _ in range(10_000):
        group.reduce_gradients([parameter])


def works_long(group: Group, seconds: float, is_reported: bool) -> tuple[int, int]:
    """Rank 0 works for longer than the deadline, and has help from the others twice meanwhile.

    Returns how often this process helped, and a sum over all processes.
    """
    num_assists = 0

    def assist() -> None:
        nonlocal num_assists
        num_assists += 1
        group.barrier("assist")

    phase = group.long_phase("work", assist) if is_reported else nullcontext(lambda: None)
    with phase as call_assistants:
        if group.rank == 0:
            time.sleep(seconds)
            for _ in range(2 * is_reported):
                call_assistants()
                assist()
    return num_assists, int(group.sum(torch.tensor(1)))


def no_reports(group: Group, is_killed: bool) -> None:
    """Rank 0 never reaches the end of a phase."""
    if group.rank:
        with group.long_phase("work"):
            return
    if is_killed:
        with group.long_phase("work"):
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.5)


def never(group: Group) -> None:
    raise AssertionError("there is no group")


def watched(group: Group, ends: bool, printed: str) -> str:
    """A collective that a device has queued: it ends after a while, or never.

    printed: a folder for what the process prints.
    """
    os.dup2(os.open(f"{printed}/{group.rank}", os.O_WRONLY | os.O_CREAT), 2)
    done = Event()

    class DeviceEvent:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            if ended.is_set():
                done.set()
            return ended.is_set()

    torch.cuda.Event = DeviceEvent
    torch.cuda.set_device = lambda device: None
    ended, deadline = Event(), 0.8
    watch = CollectiveWatchdog(
        deadline,
        lambda place: UserError(f"late: {place}", code="rank-late"),
        torch.device("cuda", group.rank),
    )
    watch.add(Collective(1, "sum"))
    if not ends:
        ended.wait(60)  # it is never set: the watch ends the process
        return "went on"
    ended.set()
    assert done.wait(60)
    watch.add(Collective(2, "gather"))
    time.sleep(2 * deadline)  # a device with nothing queued may be idle for longer than that
    return "went on"


def wrong_type(group: Group) -> str:
    group.barrier("connected")  # the error is raised before anything is sent
    try:
        group.sum(torch.ones(2, dtype=torch.int16))
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"
