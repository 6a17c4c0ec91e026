"""Reference log-probabilities stored in a folder, so that another run with the same reference and
rows need not compute them.
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
from valence.models.divergence import Distributions, TopTokens
from valence.models.log_prob_store import Array, LogProbStore, count_entries
from valence.models.reference import LazyReference, Reference
from valence.types import MicroBatch, TokenizedExample, sent
from valence.version import __version__

DRIFT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference (root mean square over tokens, nats) that another packing or machine explains,
by the dtype of the products. Packings of a 30-layer model were measured to differ by 3e-6 in
float32 and by 0.04 in bfloat16.
"""


class CachedReference:
    """A reference with a cache of its log-probabilities.

    An entry has one number per token in the loss mask of a sequence (nats). Its key is the digest
    of the reference (weights, configuration, computation) and the tokens and mask of the sequence,
    never a setting of the run. Entries do not change: a micro-batch with some cached sequences is
    computed entirely, so that the others get the same values as without a cache, and the cached
    ones keep theirs.

    ``hits`` and ``misses`` count sequences. Values from another version or machine are compared
    with computed ones before their first use.
    """

    def __init__(
        self,
        inner: Reference,
        folder: Path,
        *,
        about: str = "",
        fills: bool = True,
        reload: Callable[[], Reference] | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """about: a description of the reference for readers of the folder. fills: whether to write.
        reload: loads the reference again, if that is possible. agree: whether any process computes,
        where processes have to compute together. The folder is opened on first use.
        """
        self.inner, self.name, self.precision = inner, inner.name, inner.precision
        self.folder, self.about, self.fills, self.reload, self.agree = (
            folder,
            about,
            fills,
            reload,
            agree,
        )
        self.hits = self.misses = 0
        self._trusted = {environment()}

    @cached_property
    def store(self) -> LogProbStore:
        """The entries. Raises UserError when the folder cannot be used, or contains values of
        another reference under the digest of this one.
        """
        digest = self._digests.model
        identity = {"holds": "reference log-probabilities", "format": 1, "reference": digest}
        return LogProbStore(
            self.folder / digest,
            identity,
            {"about": self.about[:200], "by": environment()},
            is_writable=self.fills,
        )

    @cached_property
    def _digests(self) -> Digests:
        return self.inner.digests()

    def digests(self) -> Digests:
        return self._digests

    @property
    def note(self) -> str:
        """A message if the folder has entries of other references only; otherwise empty."""
        return "" if len(self.store) else _only_others(self.store.folder)

    @property
    def summary(self) -> str:
        damaged = (
            f", {self.store.damaged} of them to replace damaged entries"
            if self.store.damaged
            else ""
        )
        return f"reference cache: {self.hits:,} sequences reused, {self.misses:,} computed{damaged}"

    def sync(self) -> None:
        """Block until all entries are on the disk. Raises OSError."""
        if "store" in self.__dict__:
            self.store.sync()

    def unload(self) -> None:
        """Free the memory of the reference, which is loaded again if it is needed."""
        if self.reload is not None:
            self.inner = LazyReference(self.inner, self._digests, self.reload)

    def has_all(self, units: Iterable[TokenizedExample]) -> bool:
        """Return whether all sequences of these examples are cached."""
        return all(
            key_of(np.array(unit.prompt_ids + a.ids), np.array(unit.prompt_mask + a.mask))
            in self.store
            for unit in units
            for a in unit.answers
        )

    def __call__(self, batch: MicroBatch) -> Tensor:
        keys, rows = keys_and_rows(batch)
        cached = self._cached(keys)
        self.hits += len(cached)
        self.misses += len(keys) - len(cached)
        unverified = {
            by for s in cached if (by := self.store.header(keys[s])["by"]) not in self._trusted
        }
        if not self.agree(len(cached) < len(keys) or bool(unverified)):
            logp = np.zeros(len(batch.tokens), cached[0].dtype)
        else:
            logp = self.inner(batch).cpu().numpy()
            if unverified:
                self._compare([(values, logp[rows[s]]) for s, values in cached.items()])
                self._trusted |= unverified
            new = {keys[s]: logp[r] for s, r in enumerate(rows) if s not in cached}
            # Values that are not finite may have a temporary cause; entries are permanent.
            self.store.add(
                {key: values for key, values in new.items() if np.isfinite(values).all()}
            )
        for s, values in cached.items():
            logp[rows[s]] = values
        return sent(torch.from_numpy(logp), batch.tokens.device)

    def distributions(
        self, batch: MicroBatch, rows: Tensor, top_k: int | None
    ) -> Distributions | TopTokens:
        """Those of the reference, which are not cached."""
        self.agree(True)
        return self.inner.distributions(batch, rows, top_k)

    def join_collectives(self, batch: MicroBatch) -> Tensor:
        """Take part in the computation of other processes, if there is one. The result has no
        meaning.
        """
        # Processes with a micro-batch compute the digests too, for which all gather the weights.
        self.digests()
        dtype = torch.promote_types(torch.float32, self.precision)
        return (
            self.inner(batch)
            if self.agree(False)
            else batch.tokens.new_zeros(len(batch.tokens), dtype=dtype)
        )

    def check(self, batch: MicroBatch) -> tuple[int, float]:
        """Compute a micro-batch again. Return the number of its sequences in the cache, and the
        difference (root mean square over their tokens, nats).

        Raises UserError when rounding does not explain the difference.
        """
        keys, rows = keys_and_rows(batch)
        cached = self._cached(keys)
        self.agree(True)
        logp = self.inner(batch).cpu().numpy()
        return len(cached), self._compare([(values, logp[rows[s]]) for s, values in cached.items()])

    def _cached(self, keys: Sequence[bytes]) -> dict[int, Array]:
        """Return the cached values by the index of the sequence."""
        if not all(key in self.store for key in keys):
            self.store.refresh()
        return {
            s: values for s, key in enumerate(keys) if (values := self.store.get(key)) is not None
        }

    def _compare(self, pairs: Sequence[tuple[Array, Array]]) -> float:
        if not pairs:
            return 0.0
        stored, computed = (
            np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True)
        )
        difference = float(np.sqrt(np.mean((stored - computed) ** 2)))
        if not difference <= DRIFT[self.precision]:
            raise UserError(
                f"the reference log-probabilities differ from the cached ones by {difference:.2g} "
                f"nats per token "
                f"({len(stored)} tokens of {len(pairs)} sequences), more than the "
                f"{DRIFT[self.precision]:g} that rounding can cause",
                code="reference-cache-stale",
                where=f"reference.cache: {self.store.folder}",
                fix="delete this folder or set another one to compute them again; the headers of "
                "its files name the versions and the machine that computed them",
            )
        return difference


def keys_and_rows(batch: MicroBatch) -> tuple[list[bytes], list[NDArray[np.int64]]]:
    """Return for each sequence its key and the rows of its log-probabilities."""
    tokens = batch.cpu_tokens.numpy()
    paths = sequence_paths(batch)
    keys = [key_of(tokens[path], mask) for path, mask in paths]
    return keys, [path[mask] for path, mask in paths]


def sequence_paths(batch: MicroBatch) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Return for each sequence the rows of its tokens, and which of these a loss reads."""
    read, owner = batch.cpu_scored.numpy()
    seq = np.full(len(batch.cpu_tokens), -1)
    seq[read] = owner
    paths = [
        np.concatenate([np.arange(*batch.segments[k][:2]) for k in batch.path(leaf)])
        for leaf in batch.leaves
    ]
    return [(path, seq[path] == s) for s, path in enumerate(paths)]


def key_of(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> bytes:
    """Return 16 bytes that identify a sequence: a hash of its token ids and loss mask."""
    return hashlib.blake2b(ids.astype("<i4").tobytes() + mask.tobytes(), digest_size=16).digest()


def environment() -> str:
    """Return the versions and the processor, on which the last digits of values depend."""
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
    """Describe the entries of the other folders of the cache; empty without any."""
    siblings = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
    entries = {
        path.name: count_entries(path) for path in siblings if path.is_dir() and path != folder
    }
    listed = [
        f"{count} sequences of {header.get('about') or name}"
        for name, (count, header) in entries.items()
        if count
    ]
    if not listed:
        return ""
    rest = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return (
        f"the reference cache {folder.parent} has no entries of this reference, only "
        f"{', '.join(listed[:4])}{rest}"
    )
