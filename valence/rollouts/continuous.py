"""Sampling of completions that run together and may start at different times: requests to a server,
or turns of conversations whose tools have answered.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from valence.rollouts.hf import HFGenerator, draw, left_pad
from valence.rollouts.kv import PreallocatedLayer, append_rows, remove_finished, select_rows
from valence.rollouts.protocol import Sampling, check_request
from valence.types import Completion

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values [heads, tokens, width] of each layer."""


@dataclass(eq=False)
class RunningCompletion:
    """A completion that is being sampled.

    prompt: the tokens before it. draws: a random number for each token that it may have. saved:
    keys and values of the first tokens of the prompt, from ``ContinuousBatch.save``. is_finished:
    no token follows. A caller that no longer needs the completion may set it. error: why the last
    token cannot be used.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    draws: Any
    saved: KeysValues | None = field(default=None, repr=False)
    tokens: list[int] = field(default_factory=list[int])
    logps: list[float] = field(default_factory=list[float])
    is_finished: bool = False
    error: FloatingPointError | None = None


class ContinuousBatch:
    """Completions that are sampled together and may start at different times.

    A completion has the random numbers that it would have alone, so it has the same tokens, except
    for rounding. Call ``add`` at any time, then ``draw`` and ``advance`` in turn while there are
    ``rows``.
    """

    def __init__(self, generator: HFGenerator) -> None:
        self.generator = generator
        self.rows: list[RunningCompletion] = []
        self._cache: Any = None
        self._empty_cache: Any = None
        self._width = 0
        """Tokens of the cache. Rows are padded before their tokens, and before what was added to
        saved keys and values."""
        self._mask: Tensor
        """[rows, width]: 1 for tokens of the cache that are no padding."""
        self._logits: Tensor
        """[rows, vocabulary]: of the next tokens."""
        self._tokens: Tensor
        """[rows]: the new tokens, which are not in the cache yet."""
        self._positions: Tensor
        """[rows, 1]: of the next tokens."""

    @property
    def can_add(self) -> bool:
        """Whether completions can be added now. A cache with sliding windows cannot be extended by
        rows: its next prompts wait until all rows are finished.
        """
        return not self.rows or self._is_preallocated

    @property
    def _is_preallocated(self) -> bool:
        return all(isinstance(layer, PreallocatedLayer) for layer in self._cache.layers)

    def add(self, rows: Sequence[RunningCompletion]) -> None:
        """Run the prompts of completions, except for tokens whose keys and values are saved.

        Raises UserError for an empty prompt.
        """
        check_request([row.prompt for row in rows], n=1)
        known = [row for row in rows if row.saved is not None]
        new = [row for row in rows if row.saved is None]
        if known:
            self._append(known, *self._continue(known))
        if new:
            self._append(new, *self._begin(new))

    def _begin(self, rows: list[RunningCompletion]) -> tuple[Any, Tensor, Tensor]:
        """Run prompts from their first token. Equal ones run once."""
        device = self.generator.model.device
        prompts = list(dict.fromkeys(row.prompt for row in rows))
        places = {prompt: i for i, prompt in enumerate(prompts)}
        tokens, mask = left_pad(prompts, self.generator.end_ids[0], device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits, cache = self.generator.forward(tokens, mask, positions, None)
        sources = torch.tensor([places[row.prompt] for row in rows], device=device)
        select_rows(cache, sources)
        return cache, logits[sources, -1], mask[sources]

    def _continue(self, rows: list[RunningCompletion]) -> tuple[Any, Tensor, Tensor]:
        """Run what follows the tokens whose keys and values are saved."""
        device = self.generator.model.device
        saved = [row.saved or [] for row in rows]
        for row in rows:
            row.saved = None
        lengths = [layers[0][0].shape[1] for layers in saved]
        cache = copy.copy(self._empty_cache)
        cache.layers = [PreallocatedLayer.of_rows(layer) for layer in zip(*saved, strict=True)]
        before = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths], device=device)
        rest = [row.prompt[n:] for row, n in zip(rows, lengths, strict=True)]
        tokens, mask = left_pad(rest, self.generator.end_ids[0], device)
        start = torch.tensor(lengths, device=device)[:, None]
        positions = (mask.cumsum(1) - 1 + start).clamp(min=0)
        mask = torch.cat([before, mask], 1)
        logits, cache = self.generator.forward(tokens, mask, positions, cache)
        return cache, logits[:, -1], mask

    def _append(
        self, rows: Sequence[RunningCompletion], cache: Any, logits: Tensor, mask: Tensor
    ) -> None:
        positions = mask.sum(1, keepdim=True)
        if self.rows:
            self._drop_padding()
            append_rows(self._cache, cache)
            width = max(self._width, mask.shape[1])
            mask = torch.cat([pad(part, (width - part.shape[1], 0)) for part in (self._mask, mask)])
            logits = torch.cat([self._logits, logits])
            positions = torch.cat([self._positions, positions])
            cache = self._cache
        self.rows += rows
        self._cache, self._mask, self._logits, self._positions = cache, mask, logits, positions
        self._width = mask.shape[1]

    def draw(self) -> list[RunningCompletion]:
        """Draw the next token of every row, and return the rows that are finished. A row whose
        logits are not finite gets an error.
        """
        device = self._logits.device
        groups: dict[tuple[float, float], list[int]] = {}
        for index, row in enumerate(self.rows):
            key = (row.sampling.temperature, row.sampling.top_p)
            groups.setdefault(key, []).append(index)
        self._tokens = torch.empty(len(self.rows), dtype=torch.long, device=device)
        logps = torch.empty(len(self.rows), device=device)
        for indices in groups.values():
            rows = [self.rows[index] for index in indices]
            uniform = [float(row.draws[len(row.tokens)]) for row in rows]
            logits = self._logits if len(groups) == 1 else self._logits[indices]
            drawn = draw(logits, torch.tensor(uniform, device=device), rows[0].sampling)
            self._tokens[indices], logps[indices] = drawn
        for row, token, logp in zip(self.rows, self._tokens.tolist(), logps.tolist(), strict=True):
            row.tokens.append(token)
            row.logps.append(logp)
            is_end = token in self.generator.end_ids
            if not math.isfinite(logp):
                row.error = FloatingPointError("the model's logits are not finite")
            is_last = len(row.tokens) == len(row.draws)
            row.is_finished = is_end or is_last or row.error is not None
        return [row for row in self.rows if row.is_finished]

    def advance(self) -> None:
        """Remove finished rows, and run the new tokens of the others."""
        active = [index for index, row in enumerate(self.rows) if not row.is_finished]
        if not active:
            self.rows = []
            return
        if len(active) < len(self.rows):
            device = self._mask.device
            order = torch.arange(len(self.rows), device=device)
            order, self._mask, self._tokens, self._positions = remove_finished(
                self._cache,
                torch.tensor(active, device=device),
                (order, self._mask, self._tokens, self._positions),
            )
            self.rows = [self.rows[index] for index in order.tolist()]
            self._drop_padding()
        self._mask = pad(self._mask, (0, 1), value=1)
        logits, self._cache = self.generator.forward(
            self._tokens[:, None], self._mask, self._positions, self._cache
        )
        self._logits = logits[:, -1]
        self._positions = self._positions + 1
        self._width += 1

    def save(self, row: RunningCompletion) -> KeysValues | None:
        """A copy of the keys and values of a row, for a completion whose prompt continues it. Call
        it between ``draw`` and ``advance``: the last token has none yet.

        None if layers have sliding windows, whose earlier tokens are gone.
        """
        if not self._is_preallocated:
            return None
        if self._empty_cache is None:
            self._empty_cache = copy.copy(self._cache)
            self._empty_cache.layers = []
        index = self.rows.index(row)
        places = self._mask[index].nonzero().squeeze(1)
        return [
            tuple(part[index].index_select(1, places) for part in layer.parts)
            for layer in self._cache.layers
        ]

    def complete(self, row: RunningCompletion) -> Completion:
        """The completion with the tokens so far."""
        return self.generator.completion(row.prompt, 0, row.tokens, row.logps)

    def _drop_padding(self) -> None:
        """Drop the first tokens of the cache if they are padding in all rows."""
        padding = int(self._mask.amax(0).argmax())
        if padding and self._is_preallocated:
            for layer in self._cache.layers:
                layer.drop_first(padding)
            self._mask = self._mask[:, padding:]
            self._width -= padding
