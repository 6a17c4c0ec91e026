"""Which collective each process has come to, where all can read it: the one that waits in vain says
who is missing, and where.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

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

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    def part(self, name: str, ranks: Sequence[int]) -> Posts:
        """The places of some of these processes in a group of their own."""
        return Posts(PrefixStore(name, self.store), self.rank, ranks)

    def post(self, place: Place) -> None:
        """Says where this process is. It is sent, and nobody waits for it to arrive."""
        self.store.set(f"at/{self.rank}", f"{place.number} {place.name}")

    def absent(self) -> list[int]:
        """The ranks that have posted nothing yet."""
        return [rank for rank in self.ranks if not self.store.check([f"at/{rank}"])]

    def others(self) -> dict[int, Place] | None:
        """Where every other process was last, or None when the store does not answer."""
        ranks = [rank for rank in self.ranks if rank != self.rank]
        found: list[bytes] = []

        def ask() -> None:
            with suppress(RuntimeError):
                found.extend(self.store.multi_get([f"at/{rank}" for rank in ranks]))

        # In a thread that may be left behind: after its timeout the store tells rank 0's host that
        # it waits no more, and waits for the answer to that without end.
        asking = threading.Thread(target=ask, name="posts", daemon=True)
        asking.start()
        asking.join(self.store.timeout.total_seconds())  # pyright: ignore[reportAttributeAccessIssue]
        if len(found) < len(ranks):
            return None
        parts = [each.decode().partition(" ") for each in found]
        return {
            rank: Place(int(number), name)
            for rank, (number, _, name) in zip(ranks, parts, strict=True)
        }

    def missed(self, here: Place, waited: float | None) -> UserError:
        """What to say of a collective that failed. waited: seconds, when they were too many; None
        when a connection broke.
        """
        others = self.others()
        code = "rank-lost" if waited is None else "rank-late"
        ended = (
            f"within {waited:g} s"
            if waited is not None
            else "before a connection to another process broke"
        )
        if others is None:
            keeper = f"rank 0, or what started it, does not answer{_address(self.store)}"
            what = f"{here} did not end {ended}, and nobody can say who is missing: {keeper}"
        elif behind := {rank: at for rank, at in others.items() if at.number < here.number}:
            what = f"{_ranks(behind)} not come to {here} {ended} ({_places(behind)})"
        elif apart := {
            rank: at
            for rank, at in others.items()
            if at.number == here.number and at.name != here.name
        }:
            code = "ranks-parted"
            what = f"the processes have parted: this one is at {here}, {_places(apart)}"
        else:
            gone = f"rank {next(iter(others))}" if len(others) == 1 else "one of them"
            what = (
                f"{here} did not end {ended}: all processes had come to it, so {gone} has "
                f"ended or cannot be reached"
            )
        fix = "see what these processes said last, and whether their hosts can be reached"
        return UserError(what, code=code, where=f"rank {self.rank}", fix=fix)


def _address(store: Store) -> str:
    """Where it is kept."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""


def _ranks(ranks: Mapping[int, Place]) -> str:
    named = ", ".join(map(str, list(ranks)[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {named}{more} have" if len(ranks) > 1 else f"rank {named} has"


def _places(ranks: Mapping[int, Place]) -> str:
    found = [
        (f"rank {rank}" if len(ranks) > 1 else "it", at) for rank, at in list(ranks.items())[:SHOWN]
    ]
    return ", ".join(
        f"{who} was last at {at}" if at.number else f"{who} has joined, and no more"
        for who, at in found
    )
