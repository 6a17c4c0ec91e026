"""The rounds in which processes run their micro-batches, and what they do when one of them runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from valence.dist.protocol import Group
from valence.engine.memory import out_of_memory
from valence.errors import UserError
from valence.types import Batch

Found = TypeVar("Found")


@dataclass(frozen=True)
class Hand:
    """What a process is dealt. ``own``: its micro-batches; ``rounds``: the largest number of them that any process has;
    ``ghost``: rows of another process, to take part with where this one has none (None: it need not)."""

    own: list[Batch]
    rounds: int
    ghost: Batch | None = None

    @property
    def never_empty(self) -> Hand:
        """With the ghost in the place of micro-batches where there are none."""
        return self if self.own or self.ghost is None else replace(self, own=[self.ghost])


def in_turn(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Deals things of these costs, the dearest first, to each hand in turn: what the hands have in the same place costs about
    the same, which processes that wait for each other in every layer are to run at the same time."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    return [order[first::hands] for first in range(hands)]


def in_rounds(
    hand: Hand,
    group: Group,
    run: Callable[[Batch], Found],
    lockstep: Callable[[Batch], object] | None = None,
    progress: Callable[[Batch | None], None] = lambda _: None,
    shared: bool = False,
) -> list[Found]:
    """What each of this process's micro-batches gives. ``progress`` is told of each, and of None in a round without.

    lockstep: what a process does in a round in which it has none, where no process can run anything without the others. There,
    a process that runs out of memory raises UserError, and the others wait in vain. Otherwise all processes raise together, in
    the end: an error that says so (see ``out_of_memory``).
    """
    found: list[Found] = []
    failed: BaseException | None = None
    for k in range(hand.rounds):
        batch = hand.own[k] if k < len(hand.own) and failed is None else None
        try:
            with no_way_back(shared or lockstep is not None), nullcontext() if lockstep is None else group.at("a micro-batch"):
                if batch is not None:
                    found.append(run(batch))
                elif lockstep is not None and hand.ghost is not None:
                    lockstep(hand.ghost)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            failed, batch = error, None
        progress(batch)
    if lockstep is None and group.any(failed is not None):
        raise failed or torch.OutOfMemoryError("another process ran out of memory")
    return found


@contextmanager
def no_way_back(several: bool) -> Iterator[None]:
    """Around what several processes do together, which one of them that has no memory left cannot try again by itself: raises
    UserError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not several or not out_of_memory(error):
            raise
        raise UserError(
            "out of memory where the processes wait for each other",
            code="out-of-memory",
            where="train.micro_batch_tokens",
            fix="set it to half as many, or train.checkpointing: full, and give the same command again",
        ) from error
