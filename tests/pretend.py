"""A CUDA device that is not there: its tensors have a type and a shape but no numbers. What runs on it takes the ways that are
for CUDA, and may not mix devices; what makes the host wait is noted."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from valence.engine import head
from valence.engine.flex import Visible

CUDA, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
FROM_HOST = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""Make a tensor of numbers on the host, and copy it."""
READS = (
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
)  # fmt: skip
Given = Mapping[str, Any]


class Named(TorchFunctionMode):
    """Tensors without numbers say that they are on the device, and that each number is 0. waits: the lines of Valence that made
    the host wait for all that the device was given before: whoever asks for a number does, and a copy from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Given | None = None) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA if args[0].is_meta else func(*args)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        if (
            args
            and isinstance(args[0], Tensor)
            and args[0].is_meta
            and (func in READS or (func is Tensor.to and HOST in args[1:]))
        ):
            self.waits.append(_line())
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])
        if func is torch.device or "autocast" in func.__name__:
            return func(*args, **(kwargs or {}))
        found = func(*map(_meant, args), **{name: _meant(value) for name, value in (kwargs or {}).items()})
        if func in FROM_HOST and found.is_meta:
            self.waits.append(_line())
        return found


class Kept(TorchDispatchMode):
    """Looks at what runs: copies to the device that the host waits for, and devices that are mixed."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Given | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = [each for each in tensors if not each.is_meta and each.ndim]  # a single number goes along with a call
        to_device = kwargs.get("device") == META or any(each.is_meta for each in tensors)
        if here and to_device:
            assert func in COPIES, f"{func} of tensors on the device and on the host"
            if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.waits.append(_line())
        return func(*args, **kwargs)


def _meant(value: Any) -> Any:
    """The device where tensors have no numbers, in place of the one that is asked for."""
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        return META
    return value


def _line() -> str:
    """The line of Valence that runs."""
    stack = traceback.extract_stack()
    frame = next((each for each in reversed(stack) if "/valence/" in each.filename), stack[-3])
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def attention(self: Visible, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Stands for FlexAttention, which would compile a program."""
    assert self.masks[window].kv_indices.device == q.device == CUDA
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


@contextmanager
def _in_backward(device: Named) -> Iterator[None]:
    """Python that runs in a backward pass, which PyTorch does outside of such modes: gradients, and layers that run again."""
    apply, hooks = BackwardCFunction.apply, saved_tensors_hooks.__init__

    def named(action: Any) -> Any:
        def run(*args: Any) -> Any:
            with device:
                return action(*args)

        return run

    with (
        mock.patch.object(BackwardCFunction, "apply", named(apply)),
        mock.patch.object(saved_tensors_hooks, "__init__", lambda self, pack, unpack: hooks(self, named(pack), named(unpack))),
    ):
        yield


@contextmanager
def pretended() -> Iterator[list[str]]:
    """Inside the block there is such a device, of 80 GB. Gives the lines that made the host wait for it."""
    device = Named()
    with (
        _in_backward(device),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(total_memory=80 * 2**30)),
        mock.patch.object(head, "_has_triton", return_value=False),
        mock.patch.object(Visible, "__call__", attention),
        device,
        Kept(device.waits),
    ):
        yield device.waits
