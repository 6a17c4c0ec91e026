"""Which examples make up which optimizer step: a function of the seed, the epoch and the examples'
content alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from valence.data.tokenized_dataset import LazySequence, TokenizedDataset
from valence.types import TokenizedExample


def canonical_order(units: Sequence[TokenizedExample], seed: int, epoch: int) -> list[int]:
    """Indices of the units sorted by a hash of (seed, epoch, content id): a shuffle that does not
    know how the units arrived.

    Units with the same content are interchangeable and keep their order of arrival.
    """
    return _order_of_ids(_ids(units), seed, epoch).tolist()


def _ids(units: Sequence[TokenizedExample]) -> Iterable[str]:
    return units.ids if isinstance(units, TokenizedDataset) else (unit.id for unit in units)


def _labels(units: Sequence[TokenizedExample]) -> NDArray[np.int8]:
    """1 for True, 0 for False, -1 for units without a label."""
    if isinstance(units, TokenizedDataset):
        return units.columns["label"]
    return np.array([-1 if unit.label is None else int(unit.label) for unit in units], np.int8)


def _order_of_ids(ids: Iterable[str], seed: int, epoch: int) -> NDArray[np.int64]:
    hashes = b"".join(
        hashlib.blake2b(f"{seed}/{epoch}/{id}".encode(), digest_size=8).digest() for id in ids
    )
    return np.argsort(np.frombuffer(hashes, ">u8"), kind="stable")


@dataclass(frozen=True)
class Sampler:
    """The steps of every epoch.

    ``batch_size`` counts units per step; ``stratify`` gives each step the classes' overall share.
    """

    units: Sequence[TokenizedExample]
    batch_size: int
    seed: int = 0
    drop_last: bool = False
    stratify: bool = False
    _orders: dict[int, NDArray[np.int64]] = field(
        default_factory=dict[int, "NDArray[np.int64]"], init=False, repr=False, compare=False
    )

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.units), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Indices of all units in the order of this epoch."""
        order = self._orders.get(epoch)
        if order is None:  # another thread may read the order of another epoch at the same time
            order = self._order(epoch)
            self._orders.clear()
            self._orders[epoch] = order
        return order

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = _order_of_ids(_ids(self.units), self.seed, epoch)
        if not self.stratify:
            return order
        # Spread each class evenly over the epoch: the k-th of n goes to (k + 1/2) / n of the way.
        labels = _labels(self.units)[order]
        positions = np.empty(len(order))
        for label in (1, 0, -1):
            rows = np.flatnonzero(labels == label)
            positions[rows] = (np.arange(len(rows)) + 0.5) / max(1, len(rows))
        return order[np.argsort(positions, kind="stable")]

    def step(self, number: int) -> tuple[list[int], Following]:
        """The units of optimizer step ``number`` (from 0) in canonical order, and those that follow
        in its epoch, cyclically.
        """
        epoch, index = divmod(number, self.steps_per_epoch)
        order = self.epoch(epoch)
        start, end = index * self.batch_size, (index + 1) * self.batch_size
        indices = order[start:end].tolist()
        step_order = canonical_order([self.units[i] for i in indices], self.seed, epoch)
        return [indices[i] for i in step_order], Following(order, start, end)


class Following(LazySequence[int]):
    """Indices of the units of an epoch that are not in a step: first those after it, then those
    before it.

    order: of the epoch. start, end: of the step in this order.
    """

    def __init__(self, order: NDArray[np.int64], start: int, end: int) -> None:
        self._order, self._start, self._end = order, start, min(end, len(order))

    def __len__(self) -> int:
        return len(self._order) - (self._end - self._start)

    def item(self, index: int) -> int:
        num_after = len(self._order) - self._end
        return int(self._order[self._end + index if index < num_after else index - num_after])
