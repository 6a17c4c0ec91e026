"""One process: every sum over processes is the value itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from valence.distributed.protocol import Group
from valence.errors import UserError

CHUNK = 2**20
"""Numbers that are turned to float64 at once."""


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all of them together.

    On a CPU in float64, where PyTorch's own sum in float32 loses 4e-5 of millions.
    """
    if any(grad.device.type != "cpu" for grad in grads):
        return get_total_norm(grads)
    chunks = (chunk for grad in grads for chunk in grad.detach().flatten().split(CHUNK))
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
    return (
        torch.linalg.vector_norm(torch.stack(norms))
        if norms
        else torch.zeros((), dtype=torch.float64)
    )


class Single:
    """The group of one."""

    rank = 0
    size = 1
    local_rank = 0

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        pass

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return total_norm([p.grad for p in parameters if p.grad is not None])

    def broadcast(self, value: Any) -> Any:
        return json.loads(json.dumps(value))  # as it would arrive from another process

    def any(self, flag: bool) -> bool:
        return bool(flag)

    def barrier(self, name: str) -> None:
        pass

    def at(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def split(self, tensor: int) -> tuple[Group, Group]:
        if tensor != 1:
            fix = f"give --nproc a multiple of {tensor}, or set it to 1"
            raise UserError(
                f"one process cannot share its products among {tensor}",
                code="tensor-size-mismatch",
                where="parallel.tensor",
                fix=fix,
            )
        return self, Single()

    def close(self) -> None:
        pass


class Planned(Single):
    """Processes of one host that are only planned for: each would have what this one has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.size, *[1] * (values.ndim - 1))
