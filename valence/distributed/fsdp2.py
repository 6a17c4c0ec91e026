"""Weights, gradients and moments split over the processes of a group, by PyTorch's FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from valence.distributed.processes import Processes

# It warns that weights split in two ways take two messages to put together, which is so.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

METHODS = ("outputs", "within")
"""What of an engine runs its layers, beside its forward pass."""


def shard(
    engine: Any,
    layers: Iterable[nn.Module],
    group: Processes,
    *,
    compute: torch.dtype | None = None,
    reshard: bool = True,
    each: bool = False,
    offload: bool = False,
) -> None:
    """Leave each process its part of the weights; those of a layer are gathered while it runs.

    From now on every run of the engine, forward and backward, is one of all processes
    (``engine.is_sharded``). All that is not in ``layers`` (embedding, head) is whole throughout a
    run; weights of fewer than 2 axes stay on every process. Gradients are summed over the
    processes. compute: the type that layers are gathered in, when that of their products is
    narrower than that of their weights. reshard: give a layer's weights back between its forward
    and its backward run. each: sum gradients in each backward run, whatever ``sync_gradients``
    says. offload: keep the parts in the host's memory. Works on weights that have no memory yet.
    """
    device = group.device
    more: dict[str, Any] = {
        "mesh": group.mesh,
        "ignored_params": {p for p in engine.parameters() if p.ndim < 2},
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    wide = None if compute is None else torch.float32
    # Autocast would round the operands anyway: it takes half the bytes to gather them rounded.
    # Inputs stay as they are.
    narrow = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=narrow, **more)
    # What is not in layers is needed again as soon as the backward run begins.
    fully_shard(engine, reshard_after_forward=False, **more)
    for module in _parts(engine):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    for name in METHODS:
        register_fsdp_forward_method(engine, name)
        setattr(engine, name, partial(_measured, engine, getattr(engine, name)))
    engine.register_forward_hook(_give_back)
    engine.home = device
    engine.is_sharded, engine.each = True, each
    engine.most = partial(_most, group)


def sync_gradients(engine: Any, on: bool) -> None:
    """Set whether the next backward run sums all processes' gradients, also those kept so far."""
    engine.set_requires_gradient_sync(on or engine.each)


def _parts(engine: nn.Module) -> list[FSDPModule]:
    return [module for module in engine.modules() if isinstance(module, FSDPModule)]


def _give_back(engine: nn.Module, *_: Any) -> None:
    """Free other processes' parts of the weights after a forward run without a backward run."""
    for module in _parts(engine) if not torch.is_grad_enabled() else ():
        module.reshard()


def _measured(engine: nn.Module, method: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    found = method(*inputs, **more)
    _give_back(engine)
    return found


def _most(group: Processes, own: int) -> int:
    """The largest number that any process gives."""
    return int(group.gather(torch.tensor([own])).max())
