"""Attention over sequences laid end to end, plugged into unmodified Hugging Face models.

Each sequence attends to itself alone. The bounds of the sequences travel as a keyword argument of the model's forward, so
that recomputation under activation checkpointing sees them too.

Sequences of similar length run together, padded on the right: a causal mask hides the padding from every real token, and
what the padding itself computes is dropped.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "valence_packed"
DENSE = 256  # tokens; up to this length plain products beat the fused kernel on a CPU, whose backward is slow on small blocks
SLACK = 0.8  # a sequence joins others if it is at least this share of the longest one
HARMLESS = ("position_ids", "cache_position")  # tensors that come along and do not change attention


class CannotPackError(RuntimeError):
    """The model wants of attention what is not done here, or does not say what is needed to do it. The message says which."""


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence. query[1, H, T, D], key[1, H_kv, T, D], value[1, H_kv, T, D_v] -> [1, T, H, D_v].

    attention_mask: what ``window_of_mask`` returned for this layer. Raises CannotPackError.
    """
    _check_request(attention_mask, sliding_window, bounds, others)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, D]
    buckets, order = layout(bounds, query.device)
    parts: list[Tensor] = []
    for rows, real in buckets:
        # [S, heads, L, D] of the bucket's sequences
        q, k, v = (x[rows.flatten()].unflatten(0, rows.shape).transpose(1, 2) for x in flat)
        out = _causal(q, k, v, scale, sliding_window, softcap)
        parts.append(out.transpose(1, 2).flatten(0, 1)[real])
    return torch.cat(parts)[order][None], None


def window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """Stands for a layer's mask: none for a causal one, and for a local one its width, as a tensor[1, 1, 1, 1] on the CPU."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def _check_request(mask: Tensor | None, window: int | None, bounds: tuple[int, ...], others: dict[str, Any]) -> None:
    if not bounds:
        raise CannotPackError("its layers do not tell their attention where the sequences begin")
    local = None if mask is None else int(mask.flatten()[0])
    if local != window:
        raise CannotPackError(f"its mask has a window of {local} tokens, and its attention is told of {window}")
    bending = [name for name, value in others.items() if isinstance(value, Tensor) and name not in HARMLESS]
    if bending:
        raise CannotPackError(f"its attention depends on {', '.join(bending)}, which packed attention does not know")


@lru_cache(maxsize=64)
def layout(bounds: tuple[int, ...], device: torch.device) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """How sequences run together. For each bucket: rows[S, L] of the pack (padding repeats a sequence's last row), and which
    of the S*L places are real; and the order that puts the real places of all buckets back into the pack's: [T]."""
    spans = sorted(pairwise(bounds), key=lambda span: span[0] - span[1])
    buckets: list[list[tuple[int, int]]] = []
    for span in spans:
        if not buckets or span[1] - span[0] < SLACK * (buckets[-1][0][1] - buckets[-1][0][0]):
            buckets.append([])
        buckets[-1].append(span)
    found: list[tuple[Tensor, Tensor]] = []
    seen: list[Tensor] = []
    for bucket in buckets:
        starts, ends = (torch.tensor(side)[:, None] for side in zip(*bucket, strict=True))
        places = starts + torch.arange(int((ends - starts).max()))
        rows = torch.minimum(places, ends - 1)
        real = torch.nonzero((places < ends).flatten()).squeeze(1)
        seen.append(rows.flatten()[real])
        found.append((rows.to(device), real.to(device)))
    return tuple(found), torch.cat(seen).argsort().to(device)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """q[S, H, L, D], k[S, H_kv, L, D], v[S, H_kv, L, D_v] -> [S, H, L, D_v]."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    windowed = window is not None and length > window
    if softcap is None and not (q.device.type == "cpu" and length <= DENSE):
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
        if windowed:
            return scaled_dot_product_attention(q, k, v, attn_mask=~_hidden(length, window, q.device), scale=scale)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    hidden = _hidden(length, window, q.device)
    grouped = q.reshape(q.shape[0], k.shape[1], groups * length, q.shape[3])  # heads that share keys, one after another
    out: Any = Dense.apply(grouped, k, v, scale, softcap, hidden.repeat(groups, 1))
    return out.view(*q.shape[:3], v.shape[3])


def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query (row) may not see a key (column): later ones, and those a window or more before it. [L, L]."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance < 0) | (distance >= (window or length))


class Dense(torch.autograd.Function):
    """Attention by plain products in float32 (float64 for a float64 model), which keeps no scores for the backward pass.

    q[S, H, L_q, D], k[S, H, L, D], v[S, H, L, D_v], hidden[L_q, L].
    With a soft-cap the scores are cap * tanh(scores / cap). Autocast does not reach the products.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, hidden)
        ctx.scale, ctx.softcap = scale, softcap
        wide = torch.promote_types(torch.float32, q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            weights, _ = _weights(q.to(wide), k.to(wide), scale, softcap, hidden)
            return (weights @ v.to(wide)).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, hidden = ctx.saved_tensors
        dtype = saved[0].dtype
        wide = torch.promote_types(torch.float32, dtype)
        q, k, v, grad = (x.to(wide) for x in (*saved, grad))
        with torch.autocast(q.device.type, enabled=False):
            weights, slope = _weights(q, k, ctx.scale, ctx.softcap, hidden)
            d_v = weights.transpose(2, 3) @ grad
            d_weights = grad @ v.transpose(2, 3)
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
            d_scores = (d_scores if slope is None else d_scores * slope) * ctx.scale
            d_q, d_k = d_scores @ k, d_scores.transpose(2, 3) @ q
        return d_q.to(dtype), d_k.to(dtype), d_v.to(dtype), None, None, None


def _weights(q: Tensor, k: Tensor, scale: float, softcap: float | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """softmax of the scores, and the soft-cap's slope if there is one."""
    scores = q @ k.transpose(2, 3) * scale
    slope = None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1), slope


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, window_of_mask)
