"""Shard weights, gradients and optimizer state over the processes of a group with FSDP2."""

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

from valence.distributed.process_group import ProcessGroup

# It warns that weights sharded over two axes need two messages to gather, as intended.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

FORWARD_METHODS = ("outputs", "with_gathered_weights")
"""Methods of a policy model that run its layers, in addition to its forward pass."""


def shard(
    policy: Any,
    layers: Iterable[nn.Module],
    group: ProcessGroup,
    *,
    size: int | None = None,
    compute: torch.dtype | None = None,
    reshard: bool = True,
    sum_every_backward: bool = False,
    offload: bool = False,
) -> None:
    """Leave each process its shard of the weights; a layer's weights are gathered while it runs.

    After that, all processes must run the policy model together, forward and backward
    (``policy.is_sharded``). Weights outside ``layers`` (embedding, head) stay gathered throughout a
    pass; weights with fewer than 2 axes stay on every process. Gradients are summed over the
    processes. Works on weights without memory (meta device).

    size: number of neighbours that shard one copy of the weights, if there are several copies
    (hybrid sharding, HSDP): the size for which ``group`` was split.
    compute: data type of the gathered layers, if their matrix multiplications are narrower than
    their weights. reshard: free a layer's gathered weights between its forward and backward pass.
    sum_every_backward: sum gradients within a replica in each backward pass, whatever
    ``sync_gradients`` sets.
    offload: keep the shards in host memory.
    """
    options: dict[str, Any] = {
        "mesh": group.shard_mesh(size or group.size),
        "ignored_params": {p for p in policy.parameters() if p.ndim < 2},
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    # Autocast would round the operands anyway: gathering them rounded takes half the bytes. Inputs
    # are not cast.
    precision = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=None if compute is None else torch.float32,
        cast_forward_inputs=False,
    )
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=precision, **options)
    # The other weights are needed again at the start of the backward pass. They stay in float32, as
    # the residual stream (dev/decisions/0054-the-root-group-of-fsdp-stays-in-float32.md).
    fully_shard(policy, reshard_after_forward=False, **options)
    for module in _fsdp_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    for name in FORWARD_METHODS:
        register_fsdp_forward_method(policy, name)
        setattr(policy, name, partial(_run_and_reshard, policy, getattr(policy, name)))
    # The head that it returns is read later, and so its weights stay gathered.
    register_fsdp_forward_method(policy, "distributions")
    policy.register_forward_hook(_reshard)
    policy.compute_device = group.device
    policy.is_sharded, policy.sum_every_backward = True, sum_every_backward
    policy.max_over_ranks = partial(_max_over_ranks, group)


def sync_gradients(policy: Any, on: bool) -> None:
    """Set whether the next backward pass sums the gradients of all processes, including those that
    have accumulated.
    """
    policy.set_requires_gradient_sync(on or policy.sum_every_backward)
    # replicas exchange their sums once per step: the network between hosts is slow
    policy.set_requires_all_reduce(on)


def _fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _reshard(policy: nn.Module, *_: Any) -> None:
    """Free the gathered weights after a forward pass that no backward pass follows."""
    for module in _fsdp_modules(policy) if not torch.is_grad_enabled() else ():
        module.reshard()


def _run_and_reshard(
    policy: nn.Module, method: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    outputs = method(*inputs, **options)
    _reshard(policy)
    return outputs


def _max_over_ranks(group: ProcessGroup, number: int) -> int:
    return int(group.gather(torch.tensor([number])).max())
