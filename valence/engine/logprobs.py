"""Log-probabilities of the tokens of a micro-batch under a model: the seam between systems work and algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from valence.engine.attention import NAME
from valence.engine.check import check, rotary_by_length
from valence.engine.head import Head, TargetLogProb
from valence.types import Batch, TokenOut


class Engine(nn.Module):
    """A causal language model that answers with log-probabilities of given tokens.

    The layout is packed (sequences end to end, each seeing itself alone) where a start-up check finds it equal to the model's
    own forward, else one sequence at a time, which is slower and always exact. ``compute``: the type of the products when
    it differs from that of the weights that train (bfloat16 over float32 masters).
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute = compute
        # A model may have been given to an engine before: its own attention is then on record.
        found: str = self.causal.config._attn_implementation
        self.stock_attention: str = found if found != NAME else self.causal.stock_attention
        self.causal.stock_attention = self.stock_attention
        self.lay_out(packed=True)

    @property
    def how(self) -> str:
        """What values depend on besides the weights: the type of the products, and the layout."""
        return f"{self.compute} {'packed' if self.packs else 'one by one'}"

    @property
    def causal(self) -> Any:
        """The Hugging Face model itself, inside an adapter's wrapper if there is one."""
        inner: Any = self.model
        return inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    def lay_out(self, *, packed: bool) -> None:
        """From now on packed, or one sequence at a time with the model's own attention."""
        self.packs = packed
        # For good, not around each forward: a checkpointed layer runs again in the backward pass.
        self.causal.set_attn_implementation(NAME if packed else self.stock_attention)

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

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """The type of the products inside the block."""
        if self.compute is None:
            yield
            return
        # An adapter's layers would first widen their input, which autocast narrows again.
        adapted = hasattr(self.model, "peft_config")
        with torch.autocast(self.device.type, self.compute), _as_it_comes(self.model) if adapted else nullcontext():
            yield

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
        rotary = rotary_by_length(self.causal)
        for start, end in pairwise(batch.bounds):
            ours = rows[(rows >= start) & (rows < end)] - start
            tokens = batch.tokens[start:end]
            for module in rotary:  # the lengths of earlier sequences must not stay in the frequencies
                module.inv_freq = module.original_inv_freq.to(module.inv_freq.device, copy=True)
                module.max_seq_len_cached = module.original_max_seq_len
            with self._autocast():
                logits = self.causal(input_ids=tokens[None], use_cache=False, logits_to_keep=ours - 1).logits[0]
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
            logps.append(TargetLogProb.apply(logits, tokens[ours]))
            if entropy:
                spread = torch.log_softmax(logits, -1)
                spreads.append(-(spread.exp() * spread).sum(-1))
        return _scatter(batch, rows, torch.cat(logps), torch.cat(spreads) if entropy else None)

    def check_layout(self) -> None:
        """Chooses the layout: packed where that is the same computation as the model's own forward, else (with a warning) not.

        Raises UserError when the model is not causal.
        """
        check(self)


def _as_it_comes(adapted: nn.Module) -> AbstractContextManager[None]:
    from peft.helpers import disable_input_dtype_casting

    return disable_input_dtype_casting(adapted)


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
