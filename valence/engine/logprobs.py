"""Log-probabilities of the tokens of a micro-batch under a model: the seam between systems work and algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from valence.engine.attention import NAME
from valence.engine.head import Head
from valence.types import Batch, TokenOut

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference (nats per token) at the start-up check that rounding explains. A leak between sequences shows as more."""


class Engine(nn.Module):
    """A causal language model that answers with log-probabilities of given tokens.

    The layout is packed (sequences end to end, each seeing itself alone) where a start-up check finds it equal to the model's
    own forward, else one sequence at a time, which is slower and always exact. ``compute``: the type of the products when
    it differs from that of the weights (bfloat16 over float32 masters).
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute = compute
        self.packs = True
        # A model may have been given to an engine before: its own attention is then on record.
        found: str = self.causal.config._attn_implementation
        self.stock_attention: str = found if found != NAME else self.causal.stock_attention
        self.causal.stock_attention = self.stock_attention
        # For good, not around each forward: a checkpointed layer runs again in the backward pass.
        self.causal.set_attn_implementation(NAME)

    @property
    def how(self) -> str:
        """What values depend on besides the weights: the type of the products, and the layout."""
        return f"{self.compute} {'packed' if self.packs else 'one by one'}"

    @property
    def causal(self) -> Any:
        """The Hugging Face model itself, inside an adapter's wrapper if there is one."""
        inner: Any = self.model
        return inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    @contextmanager
    def stock(self) -> Iterator[None]:
        """The model with its own attention inside the block: for sampling, and all else that is not a packed micro-batch."""
        self.causal.set_attn_implementation(self.stock_attention)
        try:
            yield
        finally:
            if self.packs:
                self.causal.set_attn_implementation(NAME)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, batch: Batch, entropy: bool = False) -> TokenOut:
        """Log-probability of every token that ``batch.mask`` marks, given what stands before it in its own sequence.

        Raises ValueError when the first token of a sequence is marked: nothing predicts it.
        """
        return self._packed(batch, entropy) if self.packs else self._one_by_one(batch, entropy)

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        return torch.autocast(self.device.type, self.compute) if self.compute else nullcontext()

    def _packed(self, batch: Batch, entropy: bool) -> TokenOut:
        rows = _predicted(batch)
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        with self._autocast():
            hidden = decoder(
                input_ids=batch.tokens[None], position_ids=batch.pos[None], use_cache=False, bounds=batch.bounds
            ).last_hidden_state[0]
            half = (self.compute or hidden.dtype) == torch.bfloat16
            found = Head.of(self.causal, half=half)(hidden[rows - 1], batch.tokens[rows], entropy)
        return _scatter(batch, rows, *found)

    def _one_by_one(self, batch: Batch, entropy: bool) -> TokenOut:
        logps, spreads = [], []
        rows = _predicted(batch)
        for start, end in pairwise(batch.bounds):
            ours = rows[(rows >= start) & (rows < end)] - start
            tokens = batch.tokens[start:end]
            with self._autocast():
                logits = self.causal(input_ids=tokens[None], use_cache=False, logits_to_keep=ours - 1).logits[0]
            spread = torch.log_softmax(logits.to(torch.promote_types(torch.float32, logits.dtype)), -1)
            logps.append(spread.gather(1, tokens[ours][:, None]).squeeze(1))
            spreads.append(-(spread.exp() * spread).sum(-1))
        return _scatter(batch, rows, torch.cat(logps), torch.cat(spreads) if entropy else None)

    @torch.no_grad()
    def check_layout(self) -> None:
        """Compares the packed layout with the model's own forward on two short sequences, and leaves it when they differ.

        Some architectures never call the registered attention, or keep state besides it; they would be silently wrong.
        """
        size = int(self.causal.get_input_embeddings().weight.shape[0])
        made = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, size, (24,), generator=made).to(self.device)
        batch = plain_batch([drawn[:14], drawn[14:]])
        try:
            packed = self._packed(batch, False).logp
            with self.stock():
                difference = (packed - self._one_by_one(batch, False).logp).abs().max().item()
        except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError) as error:
            difference, why = float("inf"), f"it fails with {type(error).__name__}: {error}"
        else:
            why = f"log-probabilities differ by {difference:.2g} nats"
        dtype = self.compute or next(self.model.parameters()).dtype
        if not difference <= TOLERANCE[dtype]:
            self.packs = False
            self.causal.set_attn_implementation(self.stock_attention)
            warnings.warn(
                f"{type(self.causal).__name__} does not run with packed sequences ({why}): "
                "each sequence runs by itself, which is exact and slower",
                stacklevel=2,
            )


def plain_batch(sequences: list[Tensor]) -> Batch:
    """A micro-batch of token sequences, each marked from its second token on, without anything else to know about them."""
    lengths = torch.tensor([len(s) for s in sequences], device=sequences[0].device)
    ends = lengths.cumsum(0).tolist()
    seq = torch.repeat_interleave(torch.arange(len(sequences), device=lengths.device), lengths)
    pos = torch.cat([torch.arange(len(s), device=lengths.device) for s in sequences])
    each = torch.zeros_like(lengths)
    return Batch(
        tokens=torch.cat(sequences), pos=pos, seq=seq, mask=pos > 0, bounds=(0, *ends), unit=each, side=each, label=None,
        weight=torch.ones(len(sequences)), margin=torch.zeros(len(sequences)), group=each, ids=("",) * len(sequences),
    )  # fmt: skip


def _predicted(batch: Batch) -> Tensor:
    """Indices [T'] of the tokens to be predicted. The token before each is the one that predicts it."""
    rows = torch.nonzero(batch.mask).squeeze(1)
    if bool((batch.pos[rows] == 0).any()):
        raise ValueError("the first token of a sequence has nothing before it that could predict it")
    return rows


def _scatter(batch: Batch, rows: Tensor, logp: Tensor, entropy: Tensor | None) -> TokenOut:
    blank = torch.zeros(batch.tokens.shape[0], dtype=logp.dtype, device=logp.device)
    out = TokenOut(blank.index_put((rows,), logp))
    return out if entropy is None else replace(out, entropy=blank.index_put((rows,), entropy))
