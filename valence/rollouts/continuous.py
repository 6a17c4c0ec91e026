"""Sampling of completions that run together and may start at different times, as a server needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from valence.rollouts.hf import HFGenerator, draw, left_pad, uniforms
from valence.rollouts.kv import PreallocatedLayer, append_rows, remove_finished, select_rows
from valence.rollouts.protocol import Sampling, check_request
from valence.types import Completion


@dataclass(eq=False)
class RunningCompletion:
    """A completion that is being sampled. draws: a random number for each of its tokens.

    is_finished: no token follows. A caller that no longer needs the completion may set it.
    error: why the last token cannot be used.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    draws: Any
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
        self._width = 0
        """Tokens of the cache, which are padded on the left."""
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
        """Whether a prompt can be added now. A cache with sliding windows cannot be extended by
        rows: its next prompt waits until all rows are finished.
        """
        return not self.rows or all(
            isinstance(layer, PreallocatedLayer) for layer in self._cache.layers
        )

    def add(
        self, prompt: tuple[int, ...], samplings: Sequence[Sampling]
    ) -> list[RunningCompletion]:
        """Run a prompt, and start one completion for each of the sampling parameters.

        Raises UserError for an empty prompt.
        """
        check_request([prompt], len(samplings))
        device = self.generator.model.device
        tokens, mask = left_pad([prompt], self.generator.end_ids[0], device)
        logits, cache = self.generator.forward(tokens, mask, mask.cumsum(1) - 1, None)
        copies = torch.zeros(len(samplings), dtype=torch.long, device=device)
        select_rows(cache, copies)
        logits, mask = logits[copies, -1], mask[copies]
        positions = mask.sum(1, keepdim=True)
        if self.rows:
            self._drop_padding()
            append_rows(self._cache, cache)
            width = max(self._width, len(prompt))
            mask = torch.cat([pad(part, (width - part.shape[1], 0)) for part in (self._mask, mask)])
            logits = torch.cat([self._logits, logits])
            positions = torch.cat([self._positions, positions])
            cache = self._cache
        self._cache, self._mask, self._logits, self._positions = cache, mask, logits, positions
        self._width = mask.shape[1]
        added = [
            RunningCompletion(prompt, sampling, uniforms(sampling, 0, 0)) for sampling in samplings
        ]
        self.rows += added
        return added

    def draw(self) -> None:
        """Draw the next token of every row. A row whose logits are not finite gets an error."""
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
            drawn = draw(
                self._logits[indices], torch.tensor(uniform, device=device), rows[0].sampling
            )
            self._tokens[indices], logps[indices] = drawn
        for row, token, logp in zip(self.rows, self._tokens.tolist(), logps.tolist(), strict=True):
            row.tokens.append(token)
            row.logps.append(logp)
            is_end = token in self.generator.end_ids
            if not math.isfinite(logp):
                row.error = FloatingPointError("the model's logits are not finite")
            is_last = len(row.tokens) == row.sampling.max_new_tokens
            row.is_finished = is_end or is_last or row.error is not None

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

    def complete(self, row: RunningCompletion) -> Completion:
        """The completion with the tokens so far."""
        return self.generator.completion(row.prompt, 0, row.tokens, row.logps)

    def _drop_padding(self) -> None:
        """Drop the first tokens of the cache if they are padding in all rows."""
        padding = self._width - int(self._positions.max())
        if padding and self.can_add:
            for layer in self._cache.layers:
                layer.drop_first(padding)
            self._mask = self._mask[:, padding:]
            self._width -= padding
