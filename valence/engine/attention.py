"""Attention over sequences laid end to end, plugged into unmodified Hugging Face models.

Each sequence attends to itself alone. The bounds of the sequences travel as a keyword argument of the model's forward, so
that recomputation under activation checkpointing sees them too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "valence_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    bounds: tuple[int, ...] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence. query[1, H, T, D], key and value[1, H_kv, T, D] -> [1, T, H, D]."""
    del attention_mask
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = [
        _causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, sliding_window, softcap) for a, b in pairwise(bounds)
    ]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    length = query.shape[2]
    if softcap is None and (window is None or length <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance
    seen = (distance >= 0) & (distance < (window or length))
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    # A capped score has no fused kernel: dense, one sequence at a time.
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1, torch.promote_types(torch.float32, scores.dtype)).to(value.dtype) @ value


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
