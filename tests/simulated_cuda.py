"""A simulated CUDA device: its tensors claim to be on it, and the host computes what is
asked of them. What runs takes the ways that are for CUDA and may not mix devices; where the host
would have to wait for the device is noted.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import valence
from valence.models import attention as prefix_attention
from valence.models import head
from valence.models.flex import Visible
from valence.training import models, plan, scorers

CUDA, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
FROM_HOST = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""Make a tensor of numbers on the host, and copy it."""
ASKS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "bincount",
)
"""Operators whose result or its size is only available after a synchronization."""
STORED = (Tensor.data_ptr, Tensor.untyped_storage)
WIDE = (aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out)
"""Matrix products of bfloat16 with float32 results, which PyTorch lacks on CPUs."""
PICKS = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
NARROWED = (
    "linear",
    "matmul",
    "rmatmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "scaled_dot_product_attention",
    "conv1d",
)
WIDENED = (
    "pow",
    "rpow",
    "exp",
    "log",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sum",
    "prod",
    "cumsum",
    "norm",
    "softmax",
    "log_softmax",
    "softplus",
    "layer_norm",
    "cross_entropy",
    "nll_loss",
)
"""What autocast runs in its type on CUDA, and what in float32. A CPU has other lists."""
GIGABYTE = 2**30
PACKAGE_FOLDER = f"{Path(valence.__file__).parent}{os.sep}"
"""Folder of the package under test."""
Kwargs = Mapping[str, Any]


class There(Tensor):
    """A tensor on the device. ``host``: what stands for it, with its numbers."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> There:
        # On a device that all builds of PyTorch have; what that is called to others is told by
        # Named.
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            host.stride(),
            host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=META,
        )
        result.host = host
        return result

    def __init__(self, host: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Run an operator of the device on the host."""

    def on_host(value: Any) -> Any:
        if isinstance(value, There):
            return value.host
        return HOST if isinstance(value, torch.device) and value == META else value

    if func is aten.histc.default:  # of integers only CUDA knows it
        result = func(args[0].host.float(), *args[1:], **kwargs)
    elif func in WIDE:
        result = _wide_product(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    else:
        result = func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    if func is aten._to_copy.default and kwargs.get("device") == HOST:
        return result
    outcome = tree_map(lambda item: There(item) if isinstance(item, Tensor) else item, result)
    return return_and_correct_aliasing(func, args, kwargs, outcome)


def _wide_product(
    *args: Any, out: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    *added, one, other, dtype = args
    result = one.to(dtype) @ other.to(dtype)
    if added:
        # what is not read may be anything
        result = alpha * result if beta == 0 else beta * added[0] + alpha * result
    return result if out is None else out.copy_(result)


class Named(TorchFunctionMode):
    """Tensors of the device report it as their device and are created there. waits: the lines of
    Valence that synchronize with the device: reading a number, and copying from the host.
    """

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits
        self.without = False
        """Whether the call under way is about tensors without numbers, which transformers makes on
        purpose.
        """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA if isinstance(args[0], There) else func(*args)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return isinstance(args[0], There)
        if func == Tensor.data.__set__ and isinstance(args[0], There):  # type: ignore[attr-defined]
            args[0].host = args[1].host
        if func in STORED and isinstance(args[0], There):
            return func(args[0].host)
        if func is Tensor.tolist and isinstance(args[0], There):
            self.waits.append(_line())
            return args[0].host.tolist()
        if func in (torch.device, torch._C._nn._parse_to) or "autocast" in func.__name__:
            return func(*args, **(kwargs or {}))
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if torch.is_autocast_enabled(CUDA.type):
            args, kwargs = _autocast(func.__name__.strip("_"), (args, kwargs))
        there = _is(CUDA, kwargs.get("device")) or (
            func is Tensor.new_tensor and isinstance(args[0], There)
        )
        before, self.without = (
            self.without,
            any(_is(META, item) for item in (*args, *kwargs.values())),
        )
        args, kwargs = (
            tuple(map(_meant, args)),
            {name: _meant(value) for name, value in kwargs.items()},
        )
        try:
            return (
                self._copied(func, args, kwargs)
                if func in FROM_HOST and there
                else func(*args, **kwargs)
            )
        finally:
            self.without = before

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Kwargs) -> Tensor:
        if func is Tensor.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, "device": META} | kwargs
        if isinstance(args[0], There):
            return args[0]
        result = torch.as_tensor(*args, **kwargs | {"device": HOST})
        if kwargs["device"] != META:
            return result
        self.waits.append(_line())
        return There(result)


class DeviceMode(TorchDispatchMode):
    """Runs operators of the device, and records operations that block the host."""

    def __init__(self, device: Named) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [
            tree_leave
            for tree_leave in tree_leaves((args, kwargs))
            if isinstance(tree_leave, Tensor)
        ]
        there = [isinstance(tensor, There) for tensor in tensors]
        if self.device.without or (not any(there) and kwargs.get("device") != META):
            return func(*args, **kwargs)
        # A single number of the host goes along with a call, and what has no numbers is nowhere.
        here = any(
            not flag and item.ndim and item.device != META
            for item, flag in zip(tensors, there, strict=True)
        )
        if func in COPIES:
            to_host = not there[0] if func is aten.copy_.default else kwargs.get("device") == HOST
            waits = to_host or (here and not (kwargs.get("non_blocking") or args[2:] == (True,)))
        elif (
            func in PICKS and there[0]
        ):  # places on the host are copied, and of a mask is counted how many it picks
            waits = here or any(item is not None and item.dtype == torch.bool for item in args[1])
        else:
            assert not here, f"{func} of tensors on the device and on the host"
            waits = func._schema.name.removeprefix("aten::") in ASKS
        if waits:
            self.device.waits.append(_line())
        return _run(func, args, kwargs)


def _autocast(name: str, input_value: Any) -> Any:
    """The arguments of a function of this name, as autocast gives them to it."""
    if name not in NARROWED + WIDENED:
        return input_value
    dtype = torch.get_autocast_dtype(CUDA.type) if name in NARROWED else torch.float32

    def cast(value: Any) -> Any:
        narrow = (
            isinstance(value, There) and value.is_floating_point() and value.dtype != torch.float64
        )
        return value.to(dtype) if narrow else value

    return tree_map(cast, input_value)


def _meant(value: Any) -> Any:
    """Replace the simulated device by the meta device in an argument."""
    return META if _is(CUDA, value) else value


def _is(device: torch.device, value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith(device.type)


def _line() -> str:
    """The current line of Valence: file, function, number and text."""
    stack = traceback.extract_stack()
    frame = next(
        (frame for frame in reversed(stack) if frame.filename.startswith(PACKAGE_FOLDER)), stack[-3]
    )
    return f"{Path(frame.filename).name}:{frame.name}:{frame.lineno} {frame.line}"


def attention(
    self: Visible, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """Stands for FlexAttention: all scores at once, by what the mask says of each pair."""
    sees = self.masks[window].mask_mod
    query, key = (
        torch.arange(q.shape[2], device=q.device),
        torch.arange(k.shape[2], device=q.device),
    )
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = ~sees(query, query, query[:, None], key)
    return torch.softmax(scores.masked_fill(unseen, float("-inf")), -1) @ v


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Stands for PyTorch's ``varlen_attn``: each sequence separately, with all scores at once.

    The last query of a sequence is at the position of its last key. A query attends to at most
    window_size[0] keys before its position, and window_size[1] after; -1: to all.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    before, after = window_size
    ends_q, ends_k = cu_seq_q.cpu().tolist(), cu_seq_k.cpu().tolist()
    assert (ends_q[-1], ends_k[-1]) == (len(query), len(key))
    lengths = [list(map(int.__sub__, ends[1:], ends)) for ends in (ends_q, ends_k)]
    assert [max_q, max_k] == [max(item) for item in lengths]
    parts: list[Tensor] = []
    for q, k, v in zip(
        query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True
    ):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        positions = torch.arange(len(k), device=q.device)
        distance = positions[len(k) - len(q) :, None] - positions
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if before >= 0:
            is_hidden |= distance > before
        if after >= 0:
            is_hidden |= distance < -after
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), -1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


@contextmanager
def _in_backward(device: Named) -> Iterator[None]:
    """Python that runs in a backward pass, which PyTorch does outside of such modes: gradients, and
    layers that run again.
    """
    apply, hooks = BackwardCFunction.apply, saved_tensors_hooks.__init__

    def named(action: Any) -> Any:
        def run(*args: Any) -> Any:
            with nullcontext() if device in _get_current_function_mode_stack() else device:
                return action(*args)

        return run

    with (
        mock.patch.object(BackwardCFunction, "apply", named(apply)),
        mock.patch.object(
            saved_tensors_hooks,
            "__init__",
            lambda self, pack, unpack: hooks(self, named(pack), named(unpack)),
        ),
    ):
        yield


@contextmanager
def _in_threads(waits: list[str]) -> Iterator[None]:
    """Threads that start inside the block. Modes of the main thread do not apply there."""
    run = threading.Thread.run

    def there(self: threading.Thread) -> None:
        device = Named(waits)
        with device, DeviceMode(device):
            run(self)

    with mock.patch.object(threading.Thread, "run", there):
        yield


@contextmanager
def simulated_device(flex: Callable[..., Tensor] = attention) -> Iterator[list[str]]:
    """Inside the block there is such a device, of 80 GB. Gives the lines that made the host wait
    for it, each as ``file:function:number text``. flex: stands for FlexAttention."""
    device = Named([])
    facts = {
        "get_device_properties": SimpleNamespace(total_memory=80 * GIGABYTE, major=9, minor=0),
        "mem_get_info": (70 * GIGABYTE, 80 * GIGABYTE),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "is_bf16_supported": True,
    }
    with ExitStack() as stack:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        # else weights that are moved would no longer be tied
        torch.__future__.set_swap_module_params_on_conversion(True)
        for name, value in facts.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(
            mock.patch.object(
                torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
            )
        )
        for module in (models, scorers, plan):
            stack.enter_context(mock.patch.object(module, "best_device", return_value=CUDA))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
        stack.enter_context(mock.patch.object(head, "has_triton", return_value=False))
        stack.enter_context(mock.patch.object(Visible, "__call__", flex))
        stack.enter_context(mock.patch.object(prefix_attention, "varlen_attn", varlen_attention))
        stack.enter_context(_in_backward(device))
        stack.enter_context(_in_threads(device.waits))
        stack.enter_context(device)
        stack.enter_context(DeviceMode(device))
        yield device.waits
