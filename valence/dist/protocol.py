"""What a step asks of the processes it runs on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The processes that share a run."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on all processes."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """The first axes of all processes' tensors, one after another in the order of ranks, on all processes."""
        ...
