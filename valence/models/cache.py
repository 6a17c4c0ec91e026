"""Reference log-probabilities kept in a folder, so that another run with the same reference and
rows computes none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from valence.errors import UserError
from valence.models.digest import Digests
from valence.models.log_prob_store import Array, LogProbStore, entries_of
from valence.models.reference import LazyReference, Reference
from valence.types import MicroBatch, TokenizedExample, sent
from valence.version import __version__

DRIFT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference (root mean square over tokens, nats) that another packing or machine explains,
by the type of the products. Packings of a 30-layer model were seen to differ by 3e-6 in float32 and
by 0.04 in bfloat16.
"""


class CachedReference:
    """A reference whose values are looked up first.

    Entries are per sequence and hold one number per measured token (nats).

    They are found by content alone: the digest of the reference (weights, configuration, how it is
    computed), and the tokens and mask of the sequence; never by a setting of the run. What a
    sequence was first found to be, it stays: a micro-batch of which a part is known is computed
    whole, so that the rest comes out as it would have, and the known part keeps its values.

    ``hits`` and ``misses`` count sequences. Values that another version or machine made are
    compared with computed ones first.
    """

    def __init__(
        self,
        inner: Reference,
        folder: Path,
        *,
        about: str = "",
        fills: bool = True,
        again: Callable[[], Reference] | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """about: the reference in a few words, for whoever looks into the folder.

        Without ``fills`` nothing is written. again: loads the reference anew, where that can be
        done. agree: whether any process computes, where none can without the others. The folder is
        opened when it is first needed.
        """
        self.inner, self.name, self.precision = inner, inner.name, inner.precision
        self.folder, self.about, self.fills, self.again, self.agree = (
            folder,
            about,
            fills,
            again,
            agree,
        )
        self.hits = self.misses = 0
        self._trusted = {made_by()}

    @cached_property
    def ledger(self) -> LogProbStore:
        """Raises UserError when the folder cannot be used, or has values of another reference in
        the place of this one's.
        """
        named = self._digests.model
        identity = {"holds": "reference log-probabilities", "format": 1, "reference": named}
        return LogProbStore(
            self.folder / named,
            identity,
            {"about": self.about[:200], "by": made_by()},
            adds=self.fills,
        )

    @cached_property
    def _digests(self) -> Digests:
        return self.inner.digests()

    def digests(self) -> Digests:
        return self._digests

    @property
    def note(self) -> str:
        """What to say when the folder has nothing for this reference, but something for others;
        else empty.
        """
        return "" if len(self.ledger) else _only_others(self.ledger.folder)

    @property
    def summary(self) -> str:
        damaged = (
            f", {self.ledger.damaged} of them because they were damaged"
            if self.ledger.damaged
            else ""
        )
        return f"reference cache: {self.hits:,} sequences reused, {self.misses:,} computed{damaged}"

    def sync(self) -> None:
        """Returns when what was kept so far would survive a loss of power. Raises OSError."""
        if "ledger" in self.__dict__:
            self.ledger.sync()

    def let_go(self) -> None:
        """Frees the memory of a reference that is not expected to be needed; it is loaded again if
        it is.
        """
        if self.again is not None:
            self.inner = LazyReference(self.inner, self._digests, self.again)

    def knows(self, units: Iterable[TokenizedExample]) -> bool:
        """Whether every sequence of these units is there."""
        return all(
            key_of(np.array(unit.prompt_ids + a.ids), np.array(unit.prompt_mask + a.mask))
            in self.ledger
            for unit in units
            for a in unit.answers
        )

    def __call__(self, batch: MicroBatch) -> Tensor:
        keys, rows = measured(batch)
        found = self._found(keys)
        self.hits += len(found)
        self.misses += len(keys) - len(found)
        doubted = {
            by for s in found if (by := self.ledger.head(keys[s])["by"]) not in self._trusted
        }
        if not self.agree(len(found) < len(keys) or bool(doubted)):
            logp = np.zeros(len(batch.tokens), found[0].dtype)
        else:
            logp = self.inner(batch).cpu().numpy()
            if doubted:
                self._compare([(values, logp[rows[s]]) for s, values in found.items()])
                self._trusted |= doubted
            new = {keys[s]: logp[own] for s, own in enumerate(rows) if s not in found}
            # A number that is not finite may be an accident of this moment; kept, it would be there
            # for good.
            self.ledger.add(
                {key: values for key, values in new.items() if np.isfinite(values).all()}
            )
        for s, values in found.items():
            logp[rows[s]] = values
        return sent(torch.from_numpy(logp), batch.tokens.device)

    def beside(self, batch: MicroBatch) -> Tensor:
        """Takes part in what other processes compute, if they do. What it gives means nothing."""
        # as those do that look something up: where weights are split, all put them together
        self.digests()
        wide = torch.promote_types(torch.float32, self.precision)
        return (
            self.inner(batch)
            if self.agree(False)
            else batch.tokens.new_zeros(len(batch.tokens), dtype=wide)
        )

    def check(self, batch: MicroBatch) -> tuple[int, float]:
        """Computes a micro-batch again.

        Returns how many of its sequences are known, and the difference (root mean square over their
        tokens, nats). Raises UserError when rounding does not explain it.
        """
        keys, rows = measured(batch)
        found = self._found(keys)
        self.agree(True)
        logp = self.inner(batch).cpu().numpy()
        return len(found), self._compare([(values, logp[rows[s]]) for s, values in found.items()])

    def _found(self, keys: Sequence[bytes]) -> dict[int, Array]:
        """The values that are there, by the number of the sequence."""
        if not all(key in self.ledger for key in keys):
            self.ledger.refresh()
        return {
            s: values for s, key in enumerate(keys) if (values := self.ledger.get(key)) is not None
        }

    def _compare(self, pairs: Sequence[tuple[Array, Array]]) -> float:
        if not pairs:
            return 0.0
        kept, live = (np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True))
        difference = float(np.sqrt(np.mean((kept - live) ** 2)))
        if not difference <= DRIFT[self.precision]:
            raise UserError(
                f"the reference's log-probabilities differ from the cached ones by "
                f"{difference:.2g} nats per token ({len(kept)} tokens of {len(pairs)} sequences), "
                f"more than rounding explains ({DRIFT[self.precision]:g})",
                code="reference-cache-stale",
                where=f"reference.cache: {self.ledger.folder}",
                fix="delete this folder or choose another one, to compute them again",
            )
        return difference


def measured(batch: MicroBatch) -> tuple[list[bytes], list[NDArray[np.int64]]]:
    """Of each sequence: its key, and the rows whose log-probabilities are its own."""
    tokens, (read, owner) = batch.cpu_tokens.numpy(), batch.cpu_scored.numpy()
    seq = np.full(len(tokens), -1)
    seq[read] = owner
    keys: list[bytes] = []
    rows: list[NDArray[np.int64]] = []
    for s, leaf in enumerate(batch.leaves):
        path = np.concatenate([np.arange(*batch.segments[k][:2]) for k in batch.path(leaf)])
        own = seq[path] == s
        keys.append(key_of(tokens[path], own))
        rows.append(path[own])
    return keys, rows


def key_of(ids: NDArray[np.int64], own: NDArray[np.bool_]) -> bytes:
    """16 bytes that stand for a sequence: a hash of its token ids and of which of them are
    measured.
    """
    return hashlib.blake2b(ids.astype("<i4").tobytes() + own.tobytes(), digest_size=16).digest()


def made_by() -> str:
    """What the last digits of a value depend on besides the reference."""
    chip = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else torch.backends.cpu.get_cpu_capability()
    )
    return (
        f"valence {__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {chip}"
    )


def _only_others(folder: Path) -> str:
    """What the folders beside this one hold, in words."""
    beside = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
    others = {path.name: entries_of(path) for path in beside if path.is_dir() and path != folder}
    listed = [
        f"{count} sequences of {head.get('about') or name}"
        for name, (count, head) in others.items()
        if count
    ]
    if not listed:
        return ""
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return (
        f"the reference cache {folder.parent} has no values of this reference, only "
        f"{', '.join(listed[:4])}{more}"
    )
