"""Weights to a vLLM server on the same CUDA device, which the tests replace by host memory."""

from __future__ import annotations

import ast
import base64
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tests.rollouts.vllm_server import HERE, UPDATE, WEIGHTS, Fake, generator, needs_vllm
from valence.rollouts.transports import IpcTransfer

DEVICE = torch.device("cpu")
UUID = "GPU-0"


class Device:
    """The memory that both processes can open.

    exports: the buffers that were exported. received: the weights that the server copied.
    """

    def __init__(self) -> None:
        self.exports: list[torch.Tensor] = []
        self.received: dict[str, torch.Tensor] = {}
        self.is_packed = False
        self.num_synchronized = 0

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, tuple[int]]:
        self.exports.append(tensor)
        return None, (len(self.exports) - 1,)

    def synchronize(self, device: torch.device) -> None:
        self.num_synchronized += 1

    # As vLLM's worker: vllm/distributed/weight_transfer/ipc_engine.py and packed_tensor.py

    def init(self, body: Any) -> None:
        assert body["init_info"].keys() == {"packed"}
        self.is_packed = body["init_info"]["packed"]

    def update(self, body: Any) -> None:
        assert self.is_packed
        info = body["update_info"]
        (number,) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))[UUID]
        content = self.exports[number][: sum(info["tensor_sizes"])]
        fields = (info["names"], info["dtype_names"], info["shapes"])
        for name, dtype, shape, part in zip(
            *fields, content.split(info["tensor_sizes"]), strict=True
        ):
            self.received[name] = part.contiguous().view(getattr(torch, dtype)).view(shape).clone()


@pytest.fixture
def device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Device:
    result = Device()
    fake.on["/init_weight_transfer_engine"] = result.init
    fake.on["/update_weights"] = result.update
    monkeypatch.setattr(reductions, "reduce_tensor", result.reduce_tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", result.synchronize)
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return result


def assert_received(device: Device, weights: dict[str, torch.Tensor]) -> None:
    assert device.received.keys() == weights.keys()
    for name, value in weights.items():
        assert device.received[name].dtype == value.dtype
        assert torch.equal(device.received[name], value)


def test_every_tensor_arrives_through_one_buffer(fake: Fake, device: Device) -> None:
    # the bfloat16 number would leave the int64 number behind it at an odd position
    sampler = generator(fake.url, IpcTransfer(5.0, DEVICE, copies=False, buffer_size=24))
    live = {name: value.clone() for name, value in WEIGHTS.items()}
    sampler.sync(1, live.items)
    assert_received(device, WEIGHTS)
    updates = [body["update_info"] for path, body in fake.requests if path == "/update_weights"]
    assert [info["names"] for info in updates] == [["a"], ["b"], ["c"]]
    assert device.num_synchronized == len(updates)
    assert [buffer.numel() for buffer in device.exports] == [24]
    assert [p for p in fake.paths() if p in UPDATE] == [*UPDATE[:2], *[UPDATE[2]] * 3, *UPDATE[3:]]
    assert fake.paths().count("/init_weight_transfer_engine") == 1

    live["a"].add_(1)
    sampler.sync(2, live.items)
    assert_received(device, WEIGHTS | {"a": WEIGHTS["a"] + 1})
    assert fake.paths().count("/init_weight_transfer_engine") == 1
    assert device.exports[0] is device.exports[1]  # the same memory, exported once per transfer
    assert len(device.exports) == 2


def test_a_server_that_was_restarted_receives_the_weights_again(fake: Fake, device: Device) -> None:
    sampler = generator(fake.url, IpcTransfer(5.0, DEVICE, copies=False))
    sampler.sync(1, WEIGHTS.items)
    device.received.clear()
    device.is_packed, fake.version = False, "default"
    sampler.logps([((5, 6), (7,))])
    assert_received(device, WEIGHTS)


def test_a_tensor_larger_than_the_buffer_has_a_larger_one(fake: Fake, device: Device) -> None:
    weights = {"small": torch.ones(2), "large": torch.arange(12.0), "last": torch.zeros(3)}
    transfer = IpcTransfer(5.0, DEVICE, copies=False, buffer_size=16)
    generator(fake.url, transfer).sync(1, weights.items)
    assert_received(device, weights)
    assert [buffer.numel() for buffer in device.exports] == [16, 48]


def test_the_buffer_is_not_in_an_expandable_segment(
    fake: Fake, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process needs permission to open one."""
    settings = "expandable_segments:True,max_split_size_mb:64"
    calls: list[str] = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    generator(fake.url, IpcTransfer(5.0, DEVICE, copies=False)).sync(1, WEIGHTS.items)
    assert calls == ["expandable_segments:False", settings]


@pytest.mark.vllm
@needs_vllm
def test_the_fields_are_those_that_vllm_knows() -> None:
    """Read from its source: without CUDA its module cannot be run."""
    (file,) = HERE.parents[1].glob(
        "lib/python*/site-packages/vllm/distributed/weight_transfer/ipc_engine.py"
    )
    fields = {
        node.name: {
            ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)
        }
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert fields["IPCWeightTransferInitInfo"] == {"packed"}
    sent = {"names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles_pickled"}
    assert sent <= fields["IPCWeightTransferUpdateInfo"]
