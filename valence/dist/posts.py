"""Which collective each process has come to, where all can read it: the one that waits in vain says who is missing, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from valence.errors import UserError

SHOWN = 8
"""Ranks that a message names at most."""


@dataclass(frozen=True)
class Place:
    """A collective: its number on this process, from 1, and its name."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"`{self.name}` #{self.number}"


class Posts:
    """The places of all processes, in a store that rank 0 or its launcher keeps."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def post(self, place: Place) -> None:
        """Says where this process is. It is sent, and nobody waits for it to arrive."""
        self.store.set(f"at/{self.rank}", f"{place.number} {place.name}")

    def absent(self) -> list[int]:
        """The ranks that have posted nothing yet."""
        return [rank for rank in range(self.size) if not self.store.check([f"at/{rank}"])]

    def others(self) -> dict[int, Place] | None:
        """Where every other process was last, or None when the store does not answer."""
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        try:
            found = self.store.multi_get([f"at/{rank}" for rank in ranks])
        except RuntimeError:
            return None
        parts = [each.decode().partition(" ") for each in found]
        return {rank: Place(int(number), name) for rank, (number, _, name) in zip(ranks, parts, strict=True)}

    def missed(self, here: Place, waited: float | None) -> UserError:
        """What to say of a collective that failed. waited: seconds, when they were too many; None when a connection broke."""
        others = self.others()
        ended = f"within {waited:g} s" if waited is not None else "before a connection to another process broke"
        if others is None:
            what = f"{here} did not end {ended}, and nobody can say who is missing: rank 0, or what started it, does not answer"
        elif behind := {rank: at for rank, at in others.items() if at.number < here.number}:
            what = f"{_ranks(behind)} not come to {here} {ended} ({_places(behind)})"
        elif apart := {rank: at for rank, at in others.items() if at.number == here.number and at.name != here.name}:
            what = f"the processes have parted: this one is at {here}, {_places(apart)}"
        else:
            what = f"{here} did not end {ended}: all processes had come to it, so one of them has ended or cannot be reached"
        fix = "see what these processes said last, and whether their hosts can be reached"
        return UserError(what, where=f"rank {self.rank}", fix=fix)


def _ranks(ranks: Mapping[int, Place]) -> str:
    named = ", ".join(map(str, list(ranks)[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {named}{more} have" if len(ranks) > 1 else f"rank {named} has"


def _places(ranks: Mapping[int, Place]) -> str:
    found = [(f"rank {rank}" if len(ranks) > 1 else "it", at) for rank, at in list(ranks.items())[:SHOWN]]
    return ", ".join(f"{who} was last at {at}" if at.number else f"{who} has joined, and no more" for who, at in found)
