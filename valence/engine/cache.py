"""Reference log-probabilities kept in a folder, so that another run with the same reference and rows need not compute them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from valence.engine.reference import Reference
from valence.errors import UserError
from valence.types import Batch


class Cached:
    """A reference whose values are looked up first. Entries are per sequence and hold one float per trained token (nats).

    They are found by content alone: the digest of the reference (weights and configuration), and the tokens and mask of the
    sequence; never by a setting of the run. A micro-batch that is partly known is computed whole, and committed whole in a
    file of its own.
    """

    def __init__(self, inner: Reference, folder: Path) -> None:
        """Reads what the folder has for this reference. Raises UserError when a file of it is damaged."""
        self.inner, self.name = inner, inner.name
        self.folder = folder / inner.digest()
        self.hits = self.misses = 0
        self.entries: dict[str, Tensor] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.glob("*.safetensors")):
                self.entries |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"the reference cache cannot be read ({error})", where=f"reference.cache: {self.folder}",
                            fix="delete the file named, or choose another folder") from error  # fmt: skip

    def digest(self) -> str:
        return self.inner.digest()

    def __call__(self, batch: Batch) -> Tensor:
        keys = sequence_keys(batch)
        known = [key for key in keys if key in self.entries]
        self.hits += len(known)
        self.misses += len(keys) - len(known)
        if len(known) < len(keys):
            logp = self.inner(batch)
            self._commit(keys, batch, logp)
            return logp
        values = torch.cat([self.entries[key] for key in keys]).to(batch.tokens.device)
        return values.new_zeros(len(batch.tokens)).index_put((torch.nonzero(batch.mask).squeeze(1),), values)

    def _commit(self, keys: list[str], batch: Batch, logp: Tensor) -> None:
        owner = batch.seq[batch.mask]
        found = {key: logp[batch.mask][owner == s].cpu().contiguous() for s, key in enumerate(keys)}
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:32]
        aside = self.folder / f".{name}.{os.getpid()}"
        save_file(found, aside)
        aside.replace(self.folder / f"{name}.safetensors")
        self.entries |= found


def sequence_keys(batch: Batch) -> list[str]:
    """A name for each sequence: the sha256 of its tokens and of which of them are measured."""
    tokens, mask = batch.tokens.cpu(), batch.mask.cpu()
    keys: list[str] = []
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        row = torch.stack([tokens[start:end], mask[start:end].long()])
        keys.append(hashlib.sha256(row.numpy().tobytes()).hexdigest())
    return keys
