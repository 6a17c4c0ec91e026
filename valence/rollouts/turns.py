"""Sampling of conversations in this process, turn by turn.

Between turns the keys and values of a conversation are kept, so that only the tokens that follow a
turn, such as the result of a tool, are run before its next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from valence.rollouts.hf import HFGenerator, draw, left_pad
from valence.rollouts.kv import PreallocatedLayer, append_rows, remove_finished, select_rows
from valence.rollouts.protocol import Sampling

Saved = list[tuple[Tensor, Tensor]]
"""Keys and values [heads, tokens, width] of each layer."""


@dataclass(eq=False)
class Conversation:
    """A conversation that is sampled turn by turn.

    tokens: of the prompt and of everything after it. start: number of tokens of the prompt. draws:
    a random number for each token after the prompt. saved: keys and values of the first tokens;
    None: of none.
    """

    tokens: list[int]
    draws: Any
    start: int = 0
    saved: Saved | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.start = len(self.tokens)

    @property
    def num_saved(self) -> int:
        return 0 if self.saved is None else self.saved[0][0].shape[1]


OnTurn = Callable[[Conversation, list[int], list[float]], None]
"""Receives a conversation, and the tokens and log-probabilities of its new turn."""


@dataclass
class _Rows:
    """Conversations that are sampled together.

    logits[R, V]: of the next tokens. mask[R, W]: 1 for tokens of the cache that are no padding.
    positions[R, 1]: of the next tokens.
    """

    conversations: list[Conversation]
    cache: Any
    logits: Tensor
    mask: Tensor
    positions: Tensor


class TurnSampler:
    """Samples the next turn of several conversations at once."""

    def __init__(self, generator: HFGenerator, sampling: Sampling) -> None:
        self.generator, self.sampling = generator, sampling
        self._empty_cache: Any = None

    def sample(
        self,
        conversations: Sequence[Conversation],
        on_turn: OnTurn,
        progress: Callable[[], None],
    ) -> None:
        """Sample the next turn of each conversation, which ends with an end token, or with the last
        of its random numbers.

        on_turn: called as soon as a turn has ended, whose tokens the conversation then has.
        progress: called before each token. Raises FloatingPointError if logits are not finite.
        """
        rows = self._started(conversations)
        ends = torch.tensor(self.generator.end_ids, device=rows.logits.device)
        turns: list[tuple[list[int], list[float]]] = [([], []) for _ in rows.conversations]
        while True:
            progress()
            draws = [float(c.draws[len(c.tokens) - c.start]) for c in rows.conversations]
            token, logp = draw(
                rows.logits, torch.tensor(draws, device=rows.logits.device), self.sampling
            )
            is_end = torch.isin(token, ends).tolist()
            unfinished: list[int] = []
            for i, (conversation, t, p) in enumerate(
                zip(rows.conversations, token.tolist(), logp.tolist(), strict=True)
            ):
                tokens, logps = turns[i]
                tokens.append(t)
                logps.append(p)
                conversation.tokens.append(t)
                has_room = len(conversation.tokens) - conversation.start < len(conversation.draws)
                if has_room and not is_end[i]:
                    unfinished.append(i)
                    continue
                if not torch.tensor(logps).isfinite().all():
                    raise FloatingPointError("the model's logits are not finite")
                conversation.saved = _saved(rows, i) if has_room else None
                on_turn(conversation, tokens, logps)
            if not unfinished:
                return
            if len(unfinished) < len(rows.conversations):
                order = torch.arange(len(rows.conversations), device=token.device)
                active = torch.tensor(unfinished, device=token.device)
                tensors = (order, rows.mask, token, rows.positions)
                order, rows.mask, token, rows.positions = remove_finished(
                    rows.cache, active, tensors
                )
                places = order.tolist()
                rows.conversations = [rows.conversations[i] for i in places]
                turns = [turns[i] for i in places]
            rows.mask = pad(rows.mask, (0, 1), value=1)
            logits, rows.cache = self.generator.forward(
                token[:, None], rows.mask, rows.positions, rows.cache
            )
            rows.logits, rows.positions = logits[:, -1], rows.positions + 1

    def _started(self, conversations: Sequence[Conversation]) -> _Rows:
        """Run the tokens of which no keys and values are known."""
        known = [c for c in conversations if c.saved is not None]
        new = [c for c in conversations if c.saved is None]
        parts = [self._continue(known)] if known else []
        parts += [self._begin(new)] if new else []
        first, *others = parts
        if not others:
            return first
        [second] = others
        width = max(first.mask.shape[1], second.mask.shape[1])
        append_rows(first.cache, second.cache)
        return _Rows(
            first.conversations + second.conversations,
            first.cache,
            torch.cat([first.logits, second.logits]),
            torch.cat(
                [pad(part.mask, (width - part.mask.shape[1], 0)) for part in (first, second)]
            ),
            torch.cat([first.positions, second.positions]),
        )

    def _begin(self, conversations: list[Conversation]) -> _Rows:
        """Run conversations from their first token. Equal ones run once."""
        device = self.generator.model.device
        contexts = list(dict.fromkeys(tuple(c.tokens) for c in conversations))
        places = {context: i for i, context in enumerate(contexts)}
        tokens, mask = left_pad(contexts, self.generator.end_ids[0], device)
        logits, cache = self.generator.forward(
            tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), None
        )
        rows = torch.tensor([places[tuple(c.tokens)] for c in conversations], device=device)
        select_rows(cache, rows)
        if self._empty_cache is None:
            self._empty_cache = copy.copy(cache)
            self._empty_cache.layers = []
        return _Rows(
            list(conversations), cache, logits[rows, -1], mask[rows], mask.sum(1, True)[rows]
        )

    def _continue(self, conversations: list[Conversation]) -> _Rows:
        """Run what conversations have after the tokens whose keys and values were saved."""
        device = self.generator.model.device
        lengths = [c.num_saved for c in conversations]
        saved = [c.saved or [] for c in conversations]
        cache = copy.copy(self._empty_cache)
        cache.layers = [PreallocatedLayer.of_rows(layer) for layer in zip(*saved, strict=True)]
        for conversation in conversations:
            conversation.saved = None
        before = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths], device=device)
        rest = [tuple(c.tokens[n:]) for c, n in zip(conversations, lengths, strict=True)]
        tokens, mask = left_pad(rest, self.generator.end_ids[0], device)
        start = torch.tensor(lengths, device=device)[:, None]
        positions = (mask.cumsum(1) - 1 + start).clamp(min=0)
        full_mask = torch.cat([before, mask], 1)
        logits, cache = self.generator.forward(tokens, full_mask, positions, cache)
        return _Rows(
            list(conversations), cache, logits[:, -1], full_mask, full_mask.sum(1, keepdim=True)
        )


def _saved(rows: _Rows, row: int) -> Saved | None:
    """A copy of the keys and values of a row; None if layers have sliding windows, whose earlier
    tokens are gone."""
    layers = rows.cache.layers
    if not all(isinstance(layer, PreallocatedLayer) for layer in layers):
        return None
    places = rows.mask[row].nonzero().squeeze(1)
    return [tuple(part[row].index_select(1, places) for part in layer.parts) for layer in layers]
