"""Weights to a vLLM server over NCCL, with both sides of the group played here: what is sent and
waited for, in which order.
"""

from __future__ import annotations

import ast
import base64
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.rollouts.vllm_server import HERE, UPDATE, WEIGHTS, Fake, generator, needs_vllm
from tests.simulated_cuda import CUDA, simulated_device
from valence.rollouts.transports import NcclTransfer

DEADLINE = 5.0


class Group:
    """NCCL between two: each call waits for that of the other side, as on devices.

    ``calls``: those of this side, in order.
    """

    def __init__(self) -> None:
        self.ticket = bytes(range(128))
        self.meet = threading.Barrier(2, timeout=DEADLINE)
        self.passed: list[torch.Tensor] = []
        self.calls: list[str] = []

    # As torch.cuda.nccl

    def unique_id(self) -> bytes:
        return self.ticket

    def init_rank(self, size: int, ticket: bytes, rank: int) -> str:
        self.calls.append(f"join {rank} of {size}")
        assert ticket == self.ticket
        self.meet.wait()
        return "this side"

    def all_reduce(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        comms: Sequence[str],
    ) -> None:
        self.calls.append(f"sum of {inputs[0].numel()}")
        assert list(comms) == ["this side"]
        self.meet.wait()

    def broadcast(self, inputs: Sequence[torch.Tensor], root: int, *, comms: Sequence[str]) -> None:
        assert (root, list(comms), len(inputs)) == (0, ["this side"], 1)
        self.calls.append("broadcast")
        self.passed.append(inputs[0].clone())
        self.meet.wait()

    # As vLLM's worker

    def enter(self, body: Any) -> None:
        info = body["init_info"]
        assert base64.b64decode(info["nccl_unique_id_b64"], validate=True) == self.ticket
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 2, False)
        self.meet.wait()
        self.meet.wait()  # adds up one number, which shows that all have joined

    def receive(self, info: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            self.meet.wait()
            value = self.passed.pop(0)
            assert (value.dtype, list(value.shape)) == (getattr(torch, dtype), shape)
            yield name, value


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    actual = Group()
    monkeypatch.setattr(torch.cuda, "nccl", actual)
    monkeypatch.setitem(sys.modules, "torch.cuda.nccl", actual)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: actual.calls.append("wait"))
    return actual


def test_every_tensor_arrives_as_it_is_and_nobody_waits_for_ever(fake: Fake, group: Group) -> None:
    got: dict[str, torch.Tensor] = {}
    fake.on["/init_weight_transfer_engine"] = group.enter
    fake.on["/update_weights"] = lambda body: got.update(group.receive(body["update_info"]))
    sampler = generator(fake.url, NcclTransfer(DEADLINE, torch.device("cpu")))
    live = {name: value.clone() for name, value in WEIGHTS.items()}
    sampler.sync(1, live.items)
    assert all(
        torch.equal(got[name], value) and got[name].dtype == value.dtype
        for name, value in WEIGHTS.items()
    )
    # One joins, then the sum that vLLM's side waits for; weights one by one; the device has read
    # them when the call is over.
    assert group.calls == ["join 0 of 2", "sum of 1", "wait", *["broadcast"] * 3, "wait"]
    assert [path for path in fake.paths() if path in UPDATE] == UPDATE

    live["a"].add_(1)
    sampler.sync(2, live.items)
    assert torch.equal(got["a"], WEIGHTS["a"] + 1)
    assert group.calls.count("join 0 of 2") == 1
    # Training goes on; a server that was started again joins anew, and is given the weights of its
    # version.
    live["a"].zero_()
    fake.version = "default"
    sampler.logps([((5, 6), (7,))])
    assert torch.equal(got["a"], WEIGHTS["a"] + 1)
    assert group.calls.count("join 0 of 2") == 2
    sampler.close()


def master_weights() -> dict[str, torch.Tensor]:
    """Float32 weights on the simulated device: a matrix, and a vector."""
    return {"matrix": torch.full((2, 3), 1 / 3), "vector": torch.full((4,), 1 / 3)}


def connect(fake: Fake, group: Group, received: dict[str, torch.Tensor]) -> None:
    fake.dtype = "bfloat16"
    fake.on["/init_weight_transfer_engine"] = group.enter
    fake.on["/update_weights"] = lambda body: received.update(group.receive(body["update_info"]))


def test_the_host_copies_of_weights_are_pinned_and_in_the_dtype_of_the_server(
    fake: Fake, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[str, torch.Tensor] = {}
    connect(fake, group, received)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with simulated_device():
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device=None: group.calls.append("wait")
        )

        def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            result = make_empty(*args, **options)
            pinned.extend([result] if pin_memory else [])
            return result

        make_empty = torch.empty
        monkeypatch.setattr(torch, "empty", empty)
        transport = NcclTransfer(DEADLINE, torch.device("cpu"))
        live = {name: tensor.to(CUDA) for name, tensor in master_weights().items()}
        generator(fake.url, transport).sync(1, live.items)
        assert [(copy.dtype, copy.shape) for copy in pinned] == [
            (torch.bfloat16, (2, 3)),
            (torch.float32, (4,)),
        ]
        assert group.calls[0] == "wait"  # before anybody reads the copies
    assert torch.equal(received["matrix"], torch.full((2, 3), 1 / 3).bfloat16())
    assert torch.equal(received["vector"], torch.full((4,), 1 / 3))


def test_without_copies_weights_do_not_leave_the_device(fake: Fake, group: Group) -> None:
    """They are cast there, and a server that was restarted receives them from there again."""
    received: dict[str, torch.Tensor] = {}
    connect(fake, group, received)
    with simulated_device() as waits:
        transport = NcclTransfer(DEADLINE, CUDA, copies=False)
        live = {name: tensor.to(CUDA) for name, tensor in master_weights().items()}
        sampler = generator(fake.url, transport)
        waits.clear()
        sampler.sync(1, live.items)
        first = dict(received)
        received.clear()
        fake.version = "default"
        sampler.logps([((5, 6), (7,))])
        assert [line for line in waits if "transports.py" in line] == []
        for tensors in (first, received):
            assert {name: (t.device, t.dtype) for name, t in tensors.items()} == {
                "matrix": (CUDA, torch.bfloat16),
                "vector": (CUDA, torch.float32),
            }


def test_a_server_that_never_joins_has_a_deadline(fake: Fake, group: Group) -> None:
    fake.on["/init_weight_transfer_engine"] = fake.hang
    sampler = generator(fake.url, NcclTransfer(0.5, torch.device("cpu")))
    with raises_error("rollout-server-slow", where="/init_weight_transfer_engine") as raised:
        sampler.sync(1, WEIGHTS.items)
    assert "0.5 s" in raised.error.message


@pytest.mark.vllm
@needs_vllm
def test_the_fields_are_those_that_vllm_knows() -> None:
    """Read from its source: without CUDA its module cannot be run."""
    source = next(
        HERE.parents[1].glob("lib/python*/site-packages/vllm/distributed/weight_transfer")
    )
    fields = {
        node.name: {
            ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)
        }
        for file in ("nccl_common.py", "nccl_engine.py")
        for node in ast.parse((source / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert {"rank_offset", "world_size", "nccl_unique_id_b64", "packed"} <= fields[
        "NCCLWeightTransferInitInfo"
    ]
    assert fields["NCCLWeightTransferUpdateInfo"] == {"names", "dtype_names", "shapes"}
