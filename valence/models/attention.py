"""Attention over a tree of shared prefixes, in unmodified Hugging Face models.

The layout is a keyword argument of the model's forward, so that recomputation under activation
checkpointing has it too. On a CPU, the operator ``attend`` computes attention, on CUDA one of
``AUTOMATIC_CUDA_BACKENDS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AttentionMaskInterface

from valence.errors import UserError
from valence.models import native
from valence.models.context import TokenShard
from valence.models.flex import Visible, visible
from valence.models.layout import (
    Block,
    PackedRuns,
    SegmentTable,
    hidden_keys,
    make_blocks,
    make_runs,
    packed_runs,
    segments_of,
)
from valence.models.products import bfloat16_operands

NAME = "valence_prefix_tree"
MAX_SCORES = 1 << 21
"""Scores that exist at once, so that they stay in the CPU's cache; more only if one run of a single
head has more.
"""
MAX_FLASH_HEAD = 256
"""Largest head that PyTorch's FlashAttention computes."""
HARMLESS_TENSORS = ("position_ids", "cache_position", "prefix_tree")
"""Keyword arguments that do not change attention."""


class CannotPackError(RuntimeError):
    """Packed attention cannot compute this model. The message and ``code`` give the reason."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def prefix_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    prefix_tree: Tensor | None = None,
    visible: Visible | None = None,
    runs: PackedRuns | None = None,
    shard: TokenShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of every token to the tokens on its path. query[1, H, T, D], key[1, H_kv, T, D],
    value[1, H_kv, T, D_v] -> [1, T, H, D_v].

    attention_mask: the return value of ``window_of_mask`` for this layer. prefix_tree: the segment
    table of ``layout.py``. visible, runs: the same for FlexAttention and for FlashAttention. shard:
    the rows of this process if others have the other rows, which are keys too. Raises
    CannotPackError.
    """
    if not torch.compiler.is_compiling():
        _check_request(attention_mask, sliding_window, prefix_tree, others)
    assert prefix_tree is not None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if shard is not None:
        key, value = shard.gather_keys(key, value)
    layout = Layout(
        prefix_tree,
        visible,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        runs,
    )
    if visible is not None:
        return attend_by_flex(query, key, value, layout), None
    if runs is not None:
        return attend_by_flash(query, key, value, layout), None
    if query.device.type == "cpu":
        return attend_on_cpu(query, key, value, layout), None
    return attend_by_sdpa(query, key, value, layout), None


def window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """Replaces the mask of a layer: None for causal attention, and for a sliding window its width,
    as a tensor[1, 1, 1, 1] on the CPU.
    """
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)


def _check_request(
    mask: Tensor | None, window: int | None, prefix_tree: Tensor | None, others: dict[str, Any]
) -> None:
    """Raise CannotPackError for arguments that packed attention does not implement."""
    if prefix_tree is None:
        raise CannotPackError(
            "its layers do not pass the boundaries of sequences to their attention",
            code="sequences-unmarked",
        )
    mask_window = None if mask is None else int(mask.flatten()[0])
    if mask_window != window:
        raise CannotPackError(
            f"its mask has a window of {mask_window} tokens, its attention one of {window}",
            code="windows-differ",
        )
    unknown = [
        name
        for name, value in others.items()
        if isinstance(value, Tensor) and name not in HARMLESS_TENSORS
    ]
    if unknown:
        raise CannotPackError(
            f"its attention depends on {', '.join(unknown)}, which packed attention does not "
            f"implement",
            code="attention-input-unknown",
        )


# ---------------------------------------------------------------- keys and values of a first pass


@dataclass
class KeyValueMemory:
    """Keys and values of the first ``rows`` tokens of a pass in every layer, in the order of the
    layers, for a second pass that attends to them.
    """

    rows: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    is_reading: bool = False
    next_layer: int = 0

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values [1, H_kv, T, D] of a layer; in the second pass prepend the
        stored ones.
        """
        if not self.is_reading:
            # Copies, because the caller may overwrite an operator's inputs when it has returned.
            self.layers.append(
                (key[:, :, : self.rows].detach().clone(), value[:, :, : self.rows].detach().clone())
            )
            return key, value
        first_key, first_value = self.layers[self.next_layer]
        self.next_layer += 1
        return torch.cat([first_key, key], 2), torch.cat([first_value, value], 2)


_MEMORY: ContextVar[KeyValueMemory | None] = ContextVar("memory", default=None)


@contextmanager
def key_value_memory(memory: KeyValueMemory, *, is_reading: bool) -> Iterator[None]:
    """Layers that run inside the block store their keys and values, or read the stored ones.

    A checkpointed layer that runs again in the backward pass, outside the block, stores nothing.
    """
    memory.is_reading, memory.next_layer = is_reading, 0
    token = _MEMORY.set(memory)
    try:
        yield
    finally:
        _MEMORY.reset(token)


def _with_memory(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    memory = _MEMORY.get()
    return (key, value) if memory is None else memory(key, value)


# ---------------------------------------------------------------- backends


class Layout(NamedTuple):
    """Settings of attention besides its inputs."""

    prefix_tree: Tensor
    """The segment table of ``layout.py``."""
    visible: Visible | None
    """The same as block masks, which FlexAttention needs."""
    scale: float
    window: int = 0
    """Width of the sliding window; 0 without one."""
    softcap: float = 0.0
    """Bound of the scores; 0 without one."""
    runs: PackedRuns | None = None
    """The segment table as FlashAttention needs it."""


def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attention by the operator ``attend``."""
    settings = layout.scale, layout.window, layout.softcap
    return attend(query, key, value, layout.prefix_tree, *settings)[0]


# Compiled layers are split here: their programs take any number of tokens, FlexAttention's one.
@torch.compiler.disable()
def attend_by_flex(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attention by FlexAttention."""
    assert layout.visible is not None
    key, value = _with_memory(key, value)
    out = layout.visible(query, key, value, layout.scale, layout.window, layout.softcap)
    return out.transpose(1, 2)


def attend_by_sdpa(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attention by PyTorch's scaled dot-product attention, block by block."""
    key, value = _with_memory(key, value)
    parts: list[Tensor] = []
    order: list[Tensor] = []
    groups = query.shape[1] // key.shape[1]
    for block in make_blocks(segments_of(layout.prefix_tree), query.device):
        q = query[0][:, block.queries].transpose(0, 1)
        k, v = (
            x[0][:, block.keys].transpose(0, 1).repeat_interleave(groups, 1) for x in (key, value)
        )
        is_hidden = hidden_keys(block, layout.window)
        if not layout.window:
            is_hidden = torch.nn.functional.pad(is_hidden, (block.num_common_keys, 0))
        if not layout.softcap:
            out = scaled_dot_product_attention(q, k, v, attn_mask=~is_hidden, scale=layout.scale)
        else:
            scores = layout.softcap * torch.tanh(
                q @ k.transpose(2, 3) * layout.scale / layout.softcap
            )
            out = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), -1) @ v
        rows = slice(None) if block.is_query is None else block.is_query.flatten()
        parts.append(out.transpose(1, 2).flatten(0, 1)[rows])
        order.append(block.queries.flatten()[rows])
    return torch.cat(parts)[torch.cat(order).argsort()][None]


# Compiled layers are split here: the sizes and the numbers of runs differ from pass to pass.
@torch.compiler.disable()
def attend_by_flash(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attention by FlashAttention for sequences of different lengths.

    A prefix that several runs share is copied for each of them, and its gradients are summed in the
    type of the keys. Raises CannotPackError for inputs that FlashAttention cannot compute.
    """
    if reason := flash_unsupported(query, value, layout.softcap):
        raise CannotPackError(reason, code="packing-fails")
    assert layout.runs is not None
    key, value = _with_memory(key, value)
    runs = layout.runs
    q, k, v = (
        x[0].transpose(0, 1)[rows]
        for x, rows in ((query, runs.queries), (key, runs.keys), (value, runs.keys))
    )
    grouped_heads: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and _groups_heads(varlen_attn):
        grouped_heads = {"enable_gqa": True}
    elif q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = varlen_attn(
        q,
        k,
        v,
        runs.cu_seqlens_q,
        runs.cu_seqlens_k,
        runs.max_seqlen_q,
        runs.max_seqlen_k,
        scale=layout.scale,
        # With a right side of 0, the last query attends to all keys, and the others causally.
        window_size=(layout.window - 1 if layout.window else -1, 0),
        **grouped_heads,
    )
    assert isinstance(out, Tensor)
    return out[runs.order][None]


@cache
def _groups_heads(varlen: Callable[..., Any]) -> bool:
    """Whether several query heads may share a key head, which PyTorch 2.11 does not support."""
    return "enable_gqa" in signature(varlen).parameters


def flash_unsupported(query: Tensor, value: Tensor, softcap: float) -> str | None:
    """Return the reason why FlashAttention cannot compute these inputs, or None."""
    if not query.is_cuda:
        return "FlashAttention runs only on CUDA"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention supports only bfloat16 and float16"
    if query.shape[3] != value.shape[3]:
        return "FlashAttention needs keys and values of the same size"
    if query.shape[3] > MAX_FLASH_HEAD:
        return f"FlashAttention supports a head size of at most {MAX_FLASH_HEAD}"
    return "FlashAttention does not support a soft-cap here" if softcap else None


AUTOMATIC_CUDA_BACKENDS = ("flex", "flash", "sdpa")
"""The first one that computes what the model's own attention does is used."""
REQUESTABLE = (*AUTOMATIC_CUDA_BACKENDS, "one_by_one")
"""Values of VALENCE_ATTENTION. one_by_one: each sequence separately, by the model's own attention.
"""


def layout_inputs(
    prefix_tree: Tensor, windows: tuple[int, ...], device: torch.device, backend: str
) -> dict[str, Any]:
    """Return the arguments of the model's forward that a backend needs besides the segment table,
    to be shared by all layers. windows: those of the layers, 0 for none.
    """
    if backend == "flex":
        return {"visible": visible(prefix_tree, windows, device)}
    if backend == "flash":
        return {"runs": packed_runs(segments_of(prefix_tree), device)}
    return {}


def attention_candidates(device: torch.device) -> tuple[str, ...]:
    """Return the names of the attention backends to try on a device, the best first; "auto" stands
    for the choice that each call makes, "one_by_one" for packing nothing.

    The environment variable VALENCE_ATTENTION requests one by name. Raises UserError when there is
    no such backend, or it does not run on the device.
    """
    name = os.environ.get("VALENCE_ATTENTION") or "auto"
    if name == "auto":
        return AUTOMATIC_CUDA_BACKENDS if device.type == "cuda" else ("auto",)
    if name not in REQUESTABLE:
        raise UserError(
            f"there is no attention backend {name!r}",
            code="environment-variable-invalid",
            where="VALENCE_ATTENTION",
            fix=f"set it to auto, {', '.join(REQUESTABLE[:-1])} or {REQUESTABLE[-1]}, or unset it",
        )
    if name != "one_by_one" and device.type != "cuda":
        raise UserError(
            f"the attention backend {name} runs on CUDA devices only",
            code="attention-backend-unsupported",
            where="VALENCE_ATTENTION",
            fix="unset it",
        )
    return (name,)


# ---------------------------------------------------------------- the operator for CPUs


@torch.library.custom_op("valence::prefix_tree_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_tree: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention on a CPU by the compiled kernel or, for inputs that it does not support, by plain
    products in float32 (float64 for float64 inputs; with bfloat16 operands for bfloat16 inputs).
    The operator chooses when it runs, because compiled programs are stored on disk and may run
    where the kernel cannot.

    q[1, H, T, D], k[1, H_kv, T, D], v[1, H_kv, T, D_v] -> [1, T, H, D_v], and log sum exp(score)
    over the visible keys of each query [H, T], minus infinity from plain products, which do not
    need it. window, softcap: 0 for none. The scores are not kept: the backward pass computes them
    again.
    """
    k, v = _with_memory(k, v)
    segments = segments_of(prefix_tree)
    if not native.attention_unsupported(q, v, softcap):
        out, lse = native.forward(q[0], k[0], v[0], _native_runs(segments), scale, window)
        return out.transpose(0, 1)[None], lse
    out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3]).transpose(0, 1)
    for block in make_blocks(segments, q.device):
        block_q = _gather_queries(q, block, k.shape[1])
        block_k, block_v = _gather_keys(k, block), _gather_keys(v, block)
        block_out = torch.empty(*block_q.shape[:2], v.shape[3], dtype=q.dtype)
        for part in _parts(block_q, block_k, block):
            weights, _ = _softmax(block_q[part], block_k[part], scale, softcap, window, block)
            torch.bmm(weights.to(q.dtype), block_v[part], out=block_out[part])
        _scatter_queries(out, block_out, block)
    return out.transpose(0, 1)[None], q.new_full(q.shape[1:3], -torch.inf, dtype=torch.float32)


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_tree: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]), q.new_empty(
        q.shape[1:3], dtype=torch.float32
    )


@torch.library.custom_op("valence::prefix_tree_attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_tree: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. out, lse: results of ``attend``; grad[1, T, H, D_v].

    The gradients of keys and values are summed in float32 over all queries.
    """
    segments = segments_of(prefix_tree)
    if not native.attention_unsupported(q, v, softcap):
        d_q, d_k, d_v = native.backward(
            q[0],
            k[0],
            v[0],
            out[0].transpose(0, 1),
            lse,
            grad[0].transpose(0, 1),
            _native_runs(segments),
            scale,
            window,
        )
        return d_q[None], d_k[None], d_v[None]
    float32 = torch.promote_types(torch.float32, q.dtype)
    d_q = q.new_zeros(q.shape[2], q.shape[1], q.shape[3]).transpose(0, 1)
    d_k, d_v = (torch.zeros(x.shape[1:], dtype=float32) for x in (k, v))
    for block in make_blocks(segments, q.device):
        block_q = _gather_queries(q, block, k.shape[1])
        block_k, block_v = _gather_keys(k, block), _gather_keys(v, block)
        block_grad = _gather_queries(grad.transpose(1, 2), block, k.shape[1])
        if block.is_query is not None:
            _by_run(block_grad, block).mul_(block.is_query[:, None, :, None])
        block_out = _gather_queries(out.transpose(1, 2), block, k.shape[1])
        inner = (block_grad.to(float32) * block_out).sum(-1, keepdim=True)
        block_dq = torch.empty_like(block_q)
        block_dk, block_dv = (torch.empty(x.shape, dtype=x.dtype) for x in (block_k, block_v))
        for part in _parts(block_q, block_k, block):
            weights, softcap_slope = _softmax(
                block_q[part], block_k[part], scale, softcap, window, block
            )
            d_scores = _product(block_grad[part], block_v[part]).sub_(inner[part]).mul_(weights)
            if softcap_slope is not None:
                d_scores.mul_(softcap_slope)
            operand, weights = d_scores.mul_(scale).to(q.dtype), weights.to(q.dtype)
            torch.bmm(operand, block_k[part], out=block_dq[part])
            torch.bmm(operand.transpose(1, 2), block_q[part], out=block_dk[part])
            torch.bmm(weights.transpose(1, 2), block_grad[part], out=block_dv[part])
        _scatter_queries(d_q, block_dq, block)
        _add_keys(d_k, block_dk, block)
        _add_keys(d_v, block_dv, block)
    return d_q[None], d_k.to(k.dtype)[None], d_v.to(v.dtype)[None]


@attend_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_tree: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    d_q = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    return d_q, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))  # type: ignore[return-value]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, prefix_tree, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, k, v, prefix_tree)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 4


attend.register_autograd(_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.valence.prefix_tree_attention)
def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Operations as if every token attended to every token. Without a formula the compiler assumes
    that attention is free, and computes it again in the backward pass.
    """
    return 2 * q[1] * q[2] * q[2] * (q[3] + v[3])


@lru_cache(maxsize=32)
def _native_runs(segments: SegmentTable) -> native.Runs:
    runs = make_runs(segments)
    return native.Runs([run.queries for run in runs], [run.keys for run in runs])


def _gather_keys(x: Tensor, block: Block) -> Tensor:
    """x[1, H_kv, T, D] -> [H_kv*R, L, D]."""
    if block.key_range is not None:
        return x[0][:, slice(*block.key_range)]
    return x[0].index_select(1, block.keys.flatten()).view(-1, block.keys.shape[1], x.shape[3])


def _gather_queries(x: Tensor, block: Block, num_key_heads: int) -> Tensor:
    """x[1, H, T, D] -> [H_kv*R, g*n, D], a copy; the g heads that share keys follow one another."""
    (runs, length), heads = block.queries.shape, x.shape[1]
    rows = (
        x[0]
        .index_select(1, block.queries.flatten())
        .view(num_key_heads, heads // num_key_heads, runs, length, x.shape[3])
    )
    return rows.transpose(1, 2).reshape(num_key_heads * runs, -1, x.shape[3])


def _by_run(x: Tensor, block: Block) -> Tensor:
    """[H_kv*R, g*n, D] -> [H_kv, R, g, n, D], a view."""
    runs, length = block.queries.shape
    return x.view(-1, runs, x.shape[1] // length, length, x.shape[2])


def _scatter_queries(out: Tensor, values: Tensor, block: Block) -> None:
    """Write values[H_kv*R, g*n, D] to the rows of the queries in out[H, T, D], without padding."""
    values = _by_run(values, block).transpose(1, 2).reshape(len(out), -1, values.shape[2])
    rows = block.queries.flatten()
    if block.is_query is not None:
        is_query = block.is_query.flatten()
        values, rows = values[:, is_query], rows[is_query]
    out.index_copy_(1, rows, values)


def _add_keys(total: Tensor, values: Tensor, block: Block) -> None:
    """Add values[H_kv*R, L, D] to the rows of the keys in total[H_kv, T, D]; those of padding are
    zero.
    """
    if block.key_range is not None:
        total[:, slice(*block.key_range)] += values
    else:
        total.index_add_(
            1, block.keys.flatten(), values.view(len(total), -1, values.shape[2]).to(total.dtype)
        )


def _parts(queries: Tensor, keys: Tensor, block: Block) -> Iterator[slice]:
    """Slices of the first axis, of entire heads, with at most MAX_SCORES scores each."""
    runs = len(block.queries)
    size = runs * max(1, MAX_SCORES // (runs * queries.shape[1] * keys.shape[1]))
    return (slice(start, start + size) for start in range(0, len(queries), size))


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Return alpha * a @ b^T of a[B, n, D] and b[B, L, D]: [B, n, L], in float32 from bfloat16
    operands, also where autocast would round the result.
    """
    dtype = torch.promote_types(torch.float32, a.dtype)
    with bfloat16_operands(a.dtype == torch.bfloat16), torch.autocast("cpu", enabled=False):
        out = torch.zeros((), dtype=dtype).expand(len(a), a.shape[1], b.shape[1])
        return torch.baddbmm(out, a.to(dtype), b.to(dtype).transpose(1, 2), beta=0, alpha=alpha)


def _softmax(
    q: Tensor, k: Tensor, scale: float, softcap: float, window: int, block: Block
) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of the scores [B, g*n, L] over the visible keys, and the derivative of the
    soft-cap if there is one.
    """
    scores, slope = _product(q, k, scale), None
    if softcap:
        tanh = torch.tanh(scores.div_(softcap))
        scores, slope = softcap * tanh, 1 - tanh * tanh
    runs, length = block.queries.shape
    by_run = scores.view(-1, runs, scores.shape[1] // length, length, scores.shape[2])
    is_hidden = hidden_keys(block, window)
    by_run[..., scores.shape[2] - is_hidden.shape[3] :].masked_fill_(is_hidden, float("-inf"))
    return torch.softmax(scores, -1), slope


AttentionInterface.register(NAME, prefix_tree_attention)
AttentionMaskInterface.register(NAME, window_of_mask)
