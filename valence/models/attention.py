"""Attention along the paths of a forest, plugged into unmodified Hugging Face models.

The layout travels as a keyword argument of the model's forward, so that recomputation under
activation checkpointing sees it too. On a CPU the blocks of ``layout.py`` run as plain products, in
an operator of its own with its own backward pass; on CUDA as FlexAttention over the same
visibility; elsewhere by PyTorch's scaled dot-product attention, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AttentionMaskInterface

from valence.models import native
from valence.models.flex import Visible
from valence.models.layout import Block, Table, blocks, hidden, runs, segments_of
from valence.models.products import bfloat16_operands

NAME = "valence_forest"
ELEMENTS = (
    1 << 21
    # scores that exist at once, unless one run of a head alone has more: they stay in a processor's
    # cache
)
# tensors that come along and do not change attention
HARMLESS = (
    "position_ids",
    "cache_position",
    "forest",
)


class CannotPackError(RuntimeError):
    """Packed attention cannot serve this model, for the reason that the message and the code
    name.
    """

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    forest: Tensor | None = None,
    visible: Visible | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of every token to its own path. query[1, H, T, D], key[1, H_kv, T, D], value[1,
    H_kv, T, D_v] -> [1, T, H, D_v].

    attention_mask: what ``window_of_mask`` returned for this layer. forest: the table of
    ``layout.py``. visible: the same for CUDA. Raises CannotPackError.
    """
    if not torch.compiler.is_compiling():
        _check_request(attention_mask, sliding_window, forest, others)
    assert forest is not None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    how = (
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
    )
    if visible is not None:
        return _by_flex(query, key, value, visible, *how), None
    if query.device.type == "cpu":
        return attend(query, key, value, forest, *how)[0], None
    return attend_by_sdpa(query, key, value, forest, *how), None


def window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """Stands for a layer's mask: none for a causal one, and for a local one its width, as a
    tensor[1, 1, 1, 1] on the CPU.
    """
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def _check_request(
    mask: Tensor | None, window: int | None, forest: Tensor | None, others: dict[str, Any]
) -> None:
    if forest is None:
        what = "its layers do not pass the sequence boundaries to their attention"
        raise CannotPackError(what, code="sequences-unmarked")
    local = None if mask is None else int(mask.flatten()[0])
    if local != window:
        what = f"its mask has a window of {local} tokens, and its attention gets one of {window}"
        raise CannotPackError(what, code="windows-differ")
    bending = [
        name for name, value in others.items() if isinstance(value, Tensor) and name not in HARMLESS
    ]
    if bending:
        what = f"its attention depends on {', '.join(bending)}, which packing does not support"
        raise CannotPackError(what, code="attention-input-unknown")


# ---------------------------------------------------------------- keys and values that a second
# pass reads


@dataclass
class KeyValueMemory:
    """Keys and values of the first ``rows`` tokens of one pass in every layer, in the order of the
    layers, for a second pass behind them.
    """

    rows: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    reading: bool = False
    read: int = 0

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps a layer's keys and values [1, H_kv, T, D]; in the second pass puts those kept
        before them.
        """
        if not self.reading:
            # Copies: what an operator was handed may be overwritten once it is done.
            self.layers.append(
                (key[:, :, : self.rows].detach().clone(), value[:, :, : self.rows].detach().clone())
            )
            return key, value
        first_key, first_value = self.layers[self.read]
        self.read += 1
        return torch.cat([first_key, key], 2), torch.cat([first_value, value], 2)


_MEMORY: ContextVar[KeyValueMemory | None] = ContextVar("memory", default=None)


@contextmanager
def remembering(memory: KeyValueMemory, *, reading: bool) -> Iterator[None]:
    """Layers that run inside the block keep their keys and values, or read those kept.

    Outside it, such as in a checkpointed layer that runs again in the backward pass, nothing is
    kept.
    """
    memory.reading, memory.read = reading, 0
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def _with_memory(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    memory = _MEMORY.get()
    return (key, value) if memory is None else memory(key, value)


# ---------------------------------------------------------------- by a kernel made for it, or block
# by block


@torch.compiler.disable()
def _by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """As ``attend``, on CUDA.

    A compiled layer ends before it and begins again behind it: its own programs are for any number
    of tokens, and those of attention for one each.
    """
    key, value = _with_memory(key, value)
    return visible(query, key, value, scale, window, softcap).transpose(1, 2)


def attend_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forest: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """As ``attend``, through PyTorch's own kernels and gradients."""
    key, value = _with_memory(key, value)
    parts: list[Tensor] = []
    order: list[Tensor] = []
    groups = query.shape[1] // key.shape[1]
    for block in blocks(segments_of(forest), query.device):
        q = query[0][:, block.queries].transpose(0, 1)
        k, v = (
            x[0][:, block.keys].transpose(0, 1).repeat_interleave(groups, 1) for x in (key, value)
        )
        unseen = hidden(block, window)
        if not window:
            unseen = torch.nn.functional.pad(unseen, (block.least, 0))
        if not softcap:
            out = scaled_dot_product_attention(q, k, v, attn_mask=~unseen, scale=scale)
        else:
            scores = softcap * torch.tanh(q @ k.transpose(2, 3) * scale / softcap)
            out = torch.softmax(scores.masked_fill(unseen, float("-inf")), -1) @ v
        real = slice(None) if block.real is None else block.real.flatten()
        parts.append(out.transpose(1, 2).flatten(0, 1)[real])
        order.append(block.queries.flatten()[real])
    return torch.cat(parts)[torch.cat(order).argsort()][None]


# ---------------------------------------------------------------- plain products


@torch.library.custom_op("valence::forest_attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, forest: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention on a CPU: by the compiled kernel in bfloat16, if there is one; else by plain
    products in float32 (float64 for a float64 model; operands in bfloat16 if the inputs are).

    q[1, H, T, D], k[1, H_kv, T, D], v[1, H_kv, T, D_v] -> [1, T, H, D_v]. window, softcap: 0 for
    none. Keeps no scores: the backward pass computes them again. The second result is for the
    kernel's backward pass: log sum exp(score) over what each query sees [H, T]; of plain products,
    which do without, minus infinity.
    """
    k, v = _with_memory(k, v)
    segments = segments_of(forest)
    if native.serves(q, v, softcap):
        found, lse = native.forward(q[0], k[0], v[0], _native_runs(segments), scale, window)
        return found.transpose(0, 1)[None], lse
    out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3]).transpose(0, 1)
    for block in blocks(segments, q.device):
        ours, theirs, values = _queries(q, block, k.shape[1]), _keys(k, block), _keys(v, block)
        found = torch.empty(*ours.shape[:2], v.shape[3], dtype=q.dtype)
        for part in _parts(ours, theirs, block):
            weights, _ = _softmax(ours[part], theirs[part], scale, softcap, window, block)
            torch.bmm(weights.to(q.dtype), values[part], out=found[part])
        _put(out, found, block)
    return out.transpose(0, 1)[None], q.new_full(q.shape[1:3], -torch.inf, dtype=torch.float32)


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, forest: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    # Of one shape whether there is a kernel or not: compiled programs are kept on disk, and outlive
    # the reason for it.
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]), q.new_empty(
        q.shape[1:3], dtype=torch.float32
    )


@torch.library.custom_op("valence::forest_attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forest: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. out and lse as of ``attend``, grad[1, T, H, D_v].

    Those of keys and values are summed in float32 over all who see them.
    """
    segments = segments_of(forest)
    if native.serves(q, v, softcap):
        given, found = grad[0].transpose(0, 1), out[0].transpose(0, 1)
        d_q, d_k, d_v = native.backward(
            q[0], k[0], v[0], found, lse, given, _native_runs(segments), scale, window
        )
        return d_q[None], d_k[None], d_v[None]
    wide = torch.promote_types(torch.float32, q.dtype)
    d_q = q.new_zeros(q.shape[2], q.shape[1], q.shape[3]).transpose(0, 1)
    d_k, d_v = (torch.zeros(x.shape[1:], dtype=wide) for x in (k, v))
    for block in blocks(segments, q.device):
        ours, theirs, values = _queries(q, block, k.shape[1]), _keys(k, block), _keys(v, block)
        slope = _queries(grad.transpose(1, 2), block, k.shape[1])
        if block.real is not None:
            _by_run(slope, block).mul_(block.real[:, None, :, None])
        inner = (slope.to(wide) * _queries(out.transpose(1, 2), block, k.shape[1])).sum(
            -1, keepdim=True
        )
        by_q = torch.empty_like(ours)
        by_k, by_v = (torch.empty(x.shape, dtype=x.dtype) for x in (theirs, values))
        for part in _parts(ours, theirs, block):
            weights, bend = _softmax(ours[part], theirs[part], scale, softcap, window, block)
            d_scores = _product(slope[part], values[part]).sub_(inner[part]).mul_(weights)
            if bend is not None:
                d_scores.mul_(bend)
            narrow, weights = d_scores.mul_(scale).to(q.dtype), weights.to(q.dtype)
            torch.bmm(narrow, theirs[part], out=by_q[part])
            torch.bmm(narrow.transpose(1, 2), ours[part], out=by_k[part])
            torch.bmm(weights.transpose(1, 2), slope[part], out=by_v[part])
        _put(d_q, by_q, block)
        _add(d_k, by_k, block)
        _add(d_v, by_v, block)
    return d_q[None], d_k.to(k.dtype)[None], d_v.to(v.dtype)[None]


@attend_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forest: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    d_q = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    return d_q, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, forest, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, k, v, forest)


def _slopes(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (
        *attend_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.softcap),
        None,
        None,
        None,
        None,
    )


attend.register_autograd(_slopes, setup_context=_keep)


@register_flop_formula(torch.ops.valence.forest_attention)
def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """As if all saw all: told to the compiler, which would think it free, and run it again in the
    backward pass.
    """
    return 2 * q[1] * q[2] * q[2] * (q[3] + v[3])


@lru_cache(maxsize=32)
def _native_runs(segments: Table) -> native.Runs:
    found = runs(segments)
    return native.Runs([run.own for run in found], [run.keys for run in found])


def _keys(x: Tensor, block: Block) -> Tensor:
    """x[1, H_kv, T, D] -> [H_kv*R, L, D]."""
    if block.span is not None:
        return x[0][:, slice(*block.span)]
    return x[0].index_select(1, block.keys.flatten()).view(-1, block.keys.shape[1], x.shape[3])


def _queries(x: Tensor, block: Block, shared: int) -> Tensor:
    """x[1, H, T, D] -> [H_kv*R, g*n, D], a copy; g heads that share keys one after another."""
    (runs, length), heads = block.queries.shape, x.shape[1]
    found = (
        x[0]
        .index_select(1, block.queries.flatten())
        .view(shared, heads // shared, runs, length, x.shape[3])
    )
    return found.transpose(1, 2).reshape(shared * runs, -1, x.shape[3])


def _by_run(x: Tensor, block: Block) -> Tensor:
    """[H_kv*R, g*n, D] -> [H_kv, R, g, n, D], a view."""
    runs, length = block.queries.shape
    return x.view(-1, runs, x.shape[1] // length, length, x.shape[2])


def _put(out: Tensor, found: Tensor, block: Block) -> None:
    """Puts [H_kv*R, g*n, D] where the queries stand in out[H, T, D], without the padding."""
    found, rows = (
        _by_run(found, block).transpose(1, 2).reshape(len(out), -1, found.shape[2]),
        block.queries.flatten(),
    )
    if block.real is not None:
        real = block.real.flatten()
        found, rows = found[:, real], rows[real]
    out.index_copy_(1, rows, found)


def _add(total: Tensor, found: Tensor, block: Block) -> None:
    """Adds [H_kv*R, L, D] where the keys stand in total[H_kv, T, D]; what padding found is zero."""
    if block.span is not None:
        total[:, slice(*block.span)] += found
    else:
        total.index_add_(
            1, block.keys.flatten(), found.view(len(total), -1, found.shape[2]).to(total.dtype)
        )


def _parts(queries: Tensor, keys: Tensor, block: Block) -> Iterator[slice]:
    """Slices of the first axis, of whole heads, with no more than ELEMENTS scores each."""
    runs = len(block.queries)
    size = runs * max(1, ELEMENTS // (runs * queries.shape[1] * keys.shape[1]))
    return (slice(start, start + size) for start in range(0, len(queries), size))


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * a @ b^T over the last axes, [B, n, D] and [B, L, D] -> [B, n, L]; float32 from
    bfloat16 operands, also where autocast would narrow the result.
    """
    wide = torch.promote_types(torch.float32, a.dtype)
    with bfloat16_operands(a.dtype == torch.bfloat16), torch.autocast("cpu", enabled=False):
        out = torch.zeros((), dtype=wide).expand(len(a), a.shape[1], b.shape[1])
        return torch.baddbmm(out, a.to(wide), b.to(wide).transpose(1, 2), beta=0, alpha=alpha)


def _softmax(
    q: Tensor, k: Tensor, scale: float, softcap: float, window: int, block: Block
) -> tuple[Tensor, Tensor | None]:
    """softmax of the scores [B, g*n, L] over visible keys, and the soft-cap's slope if there is
    one.
    """
    scores, bend = _product(q, k, scale), None
    if softcap:
        bent = torch.tanh(scores.div_(softcap))
        scores, bend = softcap * bent, 1 - bent * bent
    runs, length = block.queries.shape
    each = scores.view(-1, runs, scores.shape[1] // length, length, scores.shape[2])
    unseen = hidden(block, window)
    each[..., scores.shape[2] - unseen.shape[3] :].masked_fill_(unseen, float("-inf"))
    return torch.softmax(scores, -1), bend


AttentionInterface.register(NAME, forest_attention)
AttentionMaskInterface.register(NAME, window_of_mask)
