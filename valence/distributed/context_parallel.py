"""Context parallelism: processes that share the tokens of each micro-batch (see
``valence.models.context``, which divides the tokens).

Each process computes the gradient of the whole loss through its own tokens. The gradient of a
weight is the sum over all processes that hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from valence.distributed.process_group import Group
from valence.distributed.tensor_parallel import SumOverGroup


class ContextParallel:
    """group: the processes that share the tokens of a micro-batch (the second of ``Group.split``).
    replicas: the processes whose gradients add up, with other tokens or other rows.
    """

    def __init__(self, group: Group, replicas: Group) -> None:
        self.group, self.replicas = group, replicas
        self.rank, self.size = group.rank, group.size

    def gather(self, values: Tensor) -> Tensor:
        """The values [n, ...] of all processes, concatenated in the order of ranks."""
        return GatherTokens.apply(values, self.group)  # type: ignore[return-value]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes, as a tensor that all of them use alike."""
        return SumOverGroup.apply(values, self.group)  # type: ignore[return-value]

    def max(self, number: int) -> int:
        """The maximum of a number over the processes."""
        return int(self.group.gather(torch.tensor([number])).max())


class GatherTokens(torch.autograd.Function):
    """The tokens of all processes. Each process uses all of them, so that its own tokens get the
    sum of the gradients of all processes, added in float32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather_equal(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        wide = torch.promote_types(torch.float32, grad.dtype)
        return ctx.group.sum_scatter(grad.to(wide)).to(grad.dtype), None


def context_parallel(policy: Any, group: Group, replicas: Group) -> None:
    """Let processes share the tokens of every micro-batch that a policy model runs. Call it before
    weights are sharded. See ``ContextParallel``.
    """
    if group.size == 1:
        return
    policy.context = ContextParallel(group, replicas)
    policy.max_over_ranks = policy.context.max
