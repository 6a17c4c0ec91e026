"""Which examples make up which optimizer step: a function of the seed, the epoch and the examples'
content alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from valence.types import TokenizedExample


def canonical_order(units: Sequence[TokenizedExample], seed: int, epoch: int) -> list[int]:
    """Indices of the units sorted by a hash of (seed, epoch, content id): a shuffle that does not
    know how the units arrived.

    Units with the same content are interchangeable and keep their order of arrival.
    """
    keys = [
        hashlib.blake2b(f"{seed}/{epoch}/{unit.id}".encode(), digest_size=8).digest()
        for unit in units
    ]
    return sorted(range(len(units)), key=lambda i: keys[i])


@dataclass(frozen=True)
class Sampler:
    """The steps of every epoch.

    ``batch_size`` counts units per step; ``stratify`` gives each step the classes' overall share.
    """

    units: tuple[TokenizedExample, ...]
    batch_size: int
    seed: int = 0
    drop_last: bool = False
    stratify: bool = False
    _orders: dict[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]], init=False, repr=False, compare=False
    )

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.units), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int) -> tuple[int, ...]:
        """Indices of all units in the order of this epoch."""
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = tuple(self._order(epoch))
        return self._orders[epoch]

    def _order(self, epoch: int) -> list[int]:
        order = canonical_order(self.units, self.seed, epoch)
        if not self.stratify:
            return order
        # Spread each class evenly over the epoch: the k-th of n goes to (k + 1/2) / n of the way.
        place: dict[int, float] = {}
        for label in (True, False, None):
            rows = [i for i in order if self.units[i].label is label]
            place |= {i: (k + 0.5) / len(rows) for k, i in enumerate(rows)}
        return sorted(order, key=lambda i: place[i])

    def step(self, number: int) -> tuple[list[int], list[int]]:
        """The units of optimizer step ``number`` (from 0) in canonical order, and those that follow
        in its epoch, cyclically.
        """
        epoch, index = divmod(number, self.steps_per_epoch)
        order = self.epoch(epoch)
        start, end = index * self.batch_size, (index + 1) * self.batch_size
        ours = order[start:end]
        chosen = canonical_order([self.units[i] for i in ours], self.seed, epoch)
        return [ours[i] for i in chosen], [*order[end:], *order[:start]]
