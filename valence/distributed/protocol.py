"""What a run asks of the processes it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class Group(Protocol):
    """The processes that share a run.

    All of them call the same members in the same order; what a call gives has the same bits on all
    of them. A process that has nothing to give takes part with zeros, or with an empty tensor.
    """

    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process among those of its host, from 0: which of the host's devices it
    has.
    """

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in the type and on the device of ``values``, whose axes are
        the same on all processes.
        """
        ...

    def gather(self, values: Tensor) -> Tensor:
        """The first axes of all processes' tensors, one after another in the order of ranks.

        Their lengths may differ, and be 0; the type and the other axes may not.
        """
        ...

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replaces each gradient by its sum over all processes.

        One that a process lacks counts as 0 there; one that all processes lack stays absent. Those
        of weights that are split over the processes are sums already.
        """
        ...

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of all gradients together, after they were summed: of those that are split over
        processes all parts count, of the others each once.
        """
        ...

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gives, as JSON carries it: a tuple arrives as a list.

        What others give is not looked at.
        """
        ...

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        ...

    def barrier(self, name: str) -> None:
        """Returns once all processes have come to it. name: of the place, for the error of who
        waits in vain.
        """
        ...

    def at(self, name: str) -> AbstractContextManager[None]:
        """Around what all processes do together by other means than this group's: errors say who
        did not come to it.
        """
        ...

    def split(self, tensor: int) -> tuple[Group, Group]:
        """Of this process, the group of those that have other rows, and the group of those
        (``tensor`` neighbours) with which it shares each layer's products. Raises UserError when
        the processes are not a multiple of that.
        """
        ...

    def close(self) -> None:
        """Ends the group, without waiting for anybody. It takes part in nothing afterwards."""
        ...
