"""From hidden states to log-probabilities: the linear head, its log-softmax, and the backends that
compute them.

Logits never exist for all rows and the entire vocabulary at once, and are always float32 (float64
for a float64 model). ``HEAD_BACKENDS`` lists the implementations, which are interchangeable.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from valence.errors import UserError
from valence.models import gradients, native
from valence.models.adapters import active_module
from valence.models.products import bfloat16_operands

MAX_COLUMNS = 8192
"""Columns of the logits [N, V] that exist at once; fewer for many rows, down to a sixteenth."""
MAX_LOGITS = {"cpu": 2**21, "cuda": 2**26}
"""Logits that exist at once: on a CPU they fit into its cache (8 MB), on a CUDA device they make a
large product (256 MB).
"""
LOWEST_LOGIT = -3.4e38
"""Replaces the maximum of logits that are all minus infinity."""
COLUMN_MULTIPLE = 64
"""The number of columns is a multiple of this: PyTorch copies rows of other lengths before each
product.
"""
LAYER_ROWS = 512
"""Rows of logits that exist at once where the head is not a plain linear layer."""
CACHE_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Bytes of probabilities that a forward pass keeps. The backward pass computes the others again,
which rounds differently: a share of a device's memory would let results depend on the device.
"""
LOG2E = 1 / math.log(2)
MIN_FACTOR = 1e-30
"""Lower bound of exp(maximum of a range - maximum of the row). It is negligible, and bfloat16 can
represent its inverse.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a causal model, with the final soft-cap (Gemma 2) or logit scale (Cohere,
    Granite) of its family.

    logits = finish(hidden @ weight^T + bias). temperature: divides the logits after soft-cap and
    scale. rounds_to_bfloat16: the operands of the products are rounded to bfloat16; logits are
    still accumulated and used in float32. backend: a name in ``HEAD_BACKENDS``, or "auto".
    max_columns: see ``MAX_COLUMNS``. cache_bytes: instead of ``CACHE_BYTES``. A layer with a
    ``group`` (tensor parallelism) has the logits of the tokens from ``first`` on; the other
    processes of the group have the other tokens.
    """

    layer: nn.Module
    softcap: float | None = None
    scale: float = 1.0
    rounds_to_bfloat16: bool = False
    temperature: float = 1.0
    backend: str = "auto"
    max_columns: int = MAX_COLUMNS
    cache_bytes: int | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        rounds_to_bfloat16: bool,
        temperature: float = 1.0,
        backend: str = "auto",
        max_columns: int = MAX_COLUMNS,
    ) -> Head:
        """Return the head of an unmodified Hugging Face causal model."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None)
        layer = active_module(model.get_output_embeddings())
        return cls(layer, softcap, scale, rounds_to_bfloat16, temperature, backend, max_columns)

    @property
    def slope(self) -> float:
        """Derivative of the logits with respect to the layer's output, without a soft-cap."""
        return self.scale / self.temperature

    @property
    def max_logit(self) -> float | None:
        """Upper bound of the logits under a soft-cap; None without one."""
        return None if self.softcap is None else self.softcap / self.temperature

    @property
    def group(self) -> Any:
        """The processes that share the vocabulary under tensor parallelism, or None."""
        return getattr(self.layer, "group", None)

    @property
    def is_linear(self) -> bool:
        """Whether the layer is its weight and bias alone, without an adapter."""
        return type(self.layer) is nn.Linear or bool(self.group)

    def __call__(
        self, hidden: Tensor, target: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each target under softmax(logits), and the entropy.

        hidden[N, h], target[N] -> log-probabilities [N] (nats), entropy [N] (nats; None unless
        ``entropy``), both float32 (float64 for a float64 model). Raises UserError when the backend
        that was requested by name cannot compute them.
        """
        backend = HEAD_BACKENDS[choose_head_backend(self, hidden)]
        # Autocast would round the products to bfloat16.
        with torch.autocast(hidden.device.type, enabled=False):
            return backend.log_probs(self, hidden, target, entropy)

    @torch.no_grad()
    def sum_sq(self, hidden: Tensor) -> Tensor:
        """Return sum_v p_v^2 under softmax(logits) [N], without a gradient."""
        parts: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in hidden.split(LAYER_ROWS // 8):
                rows = rows.to(next(self.layer.parameters()).dtype)
                logits = linear(rows, *self.local_weights) if self.group else self.layer(rows)
                logits = self.finish(logits.to(torch.promote_types(torch.float32, logits.dtype)))
                top = logits.amax(-1)
                # The rounding errors of torch.softmax would all have the same sign.
                exponentials = (logits - top[:, None]).exp_()
                tops, totals, squares = gather_across_group(
                    torch.stack([top, exponentials.sum(-1), exponentials.square_().sum(-1)]),
                    self.group,
                ).unbind(1)
                factor = torch.exp(tops - tops.amax(0))
                parts.append((squares * factor.square()).sum(0) / (totals * factor).sum(0).square())
        return torch.cat(parts)

    @property
    def local_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, h] and bias [V] of a linear layer; under tensor parallelism those of this
        process.
        """
        weight, bias = cast(Any, self.layer).weight, cast(Any, self.layer).bias
        if not self.group:
            return weight, bias
        return weight.to_local(), None if bias is None else bias.to_local()

    def finish(self, logits: Tensor) -> Tensor:
        """Return the output of the layer after scale, soft-cap and temperature."""
        if self.softcap is None:
            return logits if self.slope == 1.0 else logits * self.slope
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return self.softcap / self.temperature * torch.tanh(scaled / self.softcap)


# ---------------------------------------------------------------- backends


class HeadBackend(Protocol):
    """An implementation of log softmax(logits)[target] and of the entropy, with gradients."""

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        """Return the reason why this backend cannot compute the head of hidden[N, h] here, or None
        if it can.

        The reason depends on dtypes, devices, widths and settings alone.
        """
        ...

    def log_probs(
        self, head: Head, hidden: Tensor, target: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """hidden[N, h], target[N] -> log-probabilities [N], entropy [N] or None (see ``Head``)."""
        ...


class TorchKernels:
    """The elementwise part of the tiled computation as PyTorch operations, for any device."""

    fuses_product = False
    """Whether ``statistics`` computes the product of a range too, faster than ``Tiles.logits``."""

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        return None

    def statistics(
        self,
        tiles: Tiles,
        start: int,
        stop: int,
        column: Tensor,
        stats: Tensor,
        entropy: bool,
        keep: torch.dtype | None,
    ) -> Tensor | None:
        """Call ``logit_statistics`` for the logits of tokens ``start`` to ``stop``."""
        return self.logit_statistics(tiles.logits(start, stop), column, stats, entropy, keep)

    def logit_statistics(
        self,
        logits: Tensor,
        column: Tensor,
        stats: Tensor,
        entropy: bool,
        keep: torch.dtype | None,
    ) -> Tensor | None:
        """Fill stats[4, N] with the statistics of logits[N, w] that a softmax needs: the maximum of
        each row; relative to it, the sum of exp(logit) and of logit * exp(logit) (for the entropy);
        and the logit at column[N], 0 if the column is outside this range.

        Return exp(logit - maximum) [N, w] with dtype ``keep``, None without one. The logits are
        overwritten.
        """
        is_inside, place = _clamp_column(column, logits.shape[1])
        stats[3] = torch.where(is_inside, logits.gather(1, place), 0).squeeze(1)
        top = logits.amax(-1, keepdim=True).clamp_min_(LOWEST_LOGIT)
        stats[0] = top.squeeze(1)
        logits.sub_(top)
        distance = logits.clone() if entropy else None
        # On a CPU exp2 is several times faster than exp, and as accurate.
        exponentials = logits.mul_(LOG2E).exp2_()
        stats[1] = exponentials.sum(-1)
        stats[2] = 0 if distance is None else distance.mul_(exponentials).sum(-1)
        return None if keep is None else exponentials.to(keep, copy=True)

    def exponentials(
        self, logits: Tensor, column: Tensor, reference: Tensor, value: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return exp(logits[N, w] - reference[N]) as ``dtype``, with value[N] at column[N] where
        that is inside this range. The logits are overwritten.
        """
        exponentials = logits.sub_(reference[:, None]).mul_(LOG2E).exp2_()
        _set_column(exponentials, column, value)
        return exponentials.to(dtype)


class TritonKernels(TorchKernels):
    """One pass over the logits in a Triton kernel instead of ten."""

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        if not has_triton():
            return "triton is not installed"
        if not hidden.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return "its kernels need a CUDA device"
        if torch.promote_types(torch.float32, head.local_weights[0].dtype) != torch.float32:
            return "its kernels support float32, not float64"
        return None

    def logit_statistics(
        self,
        logits: Tensor,
        column: Tensor,
        stats: Tensor,
        entropy: bool,
        keep: torch.dtype | None,
    ) -> Tensor | None:
        from valence.models import head_triton

        return head_triton.logit_statistics(logits, column, stats, keep)

    def exponentials(
        self, logits: Tensor, column: Tensor, reference: Tensor, value: Tensor, dtype: torch.dtype
    ) -> Tensor:
        from valence.models import head_triton

        return head_triton.exponentials(logits, column, reference, value, dtype)


class NativeKernels(TorchKernels):
    """Product and statistics in one compiled kernel, for bfloat16 on a CPU."""

    fuses_product = True

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        weight, bias = head.local_weights
        if bias is not None or head.softcap is not None:
            return "its kernel supports neither a bias nor a soft-cap"
        if not head.rounds_to_bfloat16:
            return "its kernel rounds its inputs to bfloat16, which this model does not"
        return native.head_unsupported(hidden, weight)

    def statistics(
        self,
        tiles: Tiles,
        start: int,
        stop: int,
        column: Tensor,
        stats: Tensor,
        entropy: bool,
        keep: torch.dtype | None,
    ) -> Tensor | None:
        weight = tiles.weight[start:stop]
        return native.head_statistics(
            tiles.hidden, weight, column, stats, tiles.head.slope, keep=keep is not None
        )


@dataclass(frozen=True, slots=True)
class TiledBackend:
    """``LinearLogProb``: one range of the vocabulary at a time, over all rows."""

    kernels: TorchKernels

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        if not head.is_linear:
            return "the head has an adapter"
        return self.kernels.unsupported(head, hidden)

    def log_probs(
        self, head: Head, hidden: Tensor, target: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = head.local_weights
        if not len(hidden) and not head.group:
            logps = _logps_of_no_rows(hidden, weight, bias)
            return logps, logps if entropy else None
        requires_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        result: Any = LinearLogProb.apply(
            hidden, weight, bias, target, head, self.kernels, entropy, requires_grad
        )
        return result


class LayerBackend:
    """Calls the layer itself, a few rows at a time, and computes their logits again in the backward
    pass: for adapters on the head.
    """

    def unsupported(self, head: Head, hidden: Tensor) -> str | None:
        return "the vocabulary is split over processes" if head.group else None

    def log_probs(
        self, head: Head, hidden: Tensor, target: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        def of_rows(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            logits = head.layer(hidden)
            logits = head.finish(logits.to(torch.promote_types(torch.float32, logits.dtype)))
            logps: Any = TargetLogProb.apply(logits, target)
            if not entropy:
                return logps, logps.new_empty(0)
            all_logps = torch.log_softmax(logits, -1)
            return logps, -(all_logps.exp() * all_logps).sum(-1)

        parts: list[tuple[Tensor, Tensor]] = []
        for rows in zip(hidden.split(LAYER_ROWS), target.split(LAYER_ROWS), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(of_rows, *rows, use_reentrant=False))
            else:
                parts.append(of_rows(*rows))
        logps, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        return logps, entropies if entropy else None


def _logps_of_no_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return an empty tensor with zero gradients: where processes share the tokens of a row, every
    process must run backward through the head and the layers.
    """
    dtype = torch.promote_types(torch.float32, weight.dtype)
    return linear(
        hidden.to(dtype), weight[:1].to(dtype), None if bias is None else bias[:1].to(dtype)
    ).squeeze(1)


HEAD_BACKENDS: dict[str, HeadBackend] = {
    "cpu": TiledBackend(NativeKernels()),
    "triton": TiledBackend(TritonKernels()),
    "torch": TiledBackend(TorchKernels()),
    "layer": LayerBackend(),
}
AUTOMATIC_BACKENDS = {"cpu": ("cpu", "torch", "layer"), "cuda": ("triton", "torch", "layer")}
"""The first one that supports a call computes it."""


def choose_head_backend(head: Head, hidden: Tensor) -> str:
    """Return the name of the backend that computes the head of hidden[N, h].

    Raises UserError when the head requests a backend by name which cannot compute it.
    """
    if head.backend == "auto":
        names = AUTOMATIC_BACKENDS.get(hidden.device.type, ("torch", "layer"))
        return next(name for name in names if not HEAD_BACKENDS[name].unsupported(head, hidden))
    if reason := HEAD_BACKENDS[head.backend].unsupported(head, hidden):
        raise UserError(
            f"the backend {head.backend} cannot compute this head: {reason}",
            code="head-backend-unsupported",
            where="VALENCE_HEAD",
            fix="unset it, or set it to another backend",
        )
    return head.backend


def requested_head_backend() -> str:
    """Return the backend that the environment variable VALENCE_HEAD requests, by default "auto".

    Raises UserError when there is no such backend.
    """
    name = os.environ.get("VALENCE_HEAD") or "auto"
    if name != "auto" and name not in HEAD_BACKENDS:
        raise UserError(
            f"there is no head backend {name!r}",
            code="environment-variable-invalid",
            where="VALENCE_HEAD",
            fix=f"set it to auto or one of {', '.join(HEAD_BACKENDS)}, or unset it",
        )
    return name


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


# ---------------------------------------------------------------- computation in tiles


@torch.no_grad()
def float32_logits(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the layer's output for hidden[..., h]: [..., V] in float32, accumulated from bfloat16
    operands as in training.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.flatten(0, -2)
        tiles = Tiles(Head(layer, rounds_to_bfloat16=True), rows, layer.weight, layer.bias)
        logits = rows.new_empty(len(rows), len(layer.weight), dtype=tiles.buffer.dtype)
        for start, stop in tiles.ranges:
            logits[:, start:stop] = tiles.logits(start, stop)
    return logits.unflatten(0, hidden.shape[:-1])


class TargetLogProb(torch.autograd.Function):
    """log softmax(logits)[target]: logits[N, V], target[N] -> [N] (nats).

    In float32 on a CPU, with a vocabulary of 49,000 tokens, ``log_softmax`` was measured to be off
    by 8e-6 nats per token of a real model, always in the same direction, so that the errors of a
    completion add up. This function is off by 1e-7 in either direction, and takes the same time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        log_total = (logits - top).exp_().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logits, target, top, log_total)
        return (logits.gather(1, target[:, None]) - top - log_total).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, target, top, log_total = ctx.saved_tensors
        grad_logits = (logits - (top + log_total)).exp_().mul_(-grad[:, None])
        return grad_logits.scatter_add_(1, target[:, None], grad[:, None]), None


class LinearLogProb(torch.autograd.Function):
    """log softmax(finish(hidden @ weight^T + bias))[target] and its entropy: hidden[N, h],
    weight[V, h], target[N] -> [N], [N].

    The gradient of the logits is g (onehot - p), with the probabilities p and the gradient g of the
    log-probability. The forward pass keeps p of as many ranges as fit into the cache, rounded like
    every operand; the backward pass computes the other logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: Head,
        kernels: TorchKernels,
        entropy: bool,
        requires_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tiles = Tiles(head, hidden, weight, bias)
        if head.group:
            target = target - cast(Any, head.layer).first
        stats = tiles.buffer.new_empty(len(tiles.ranges), 4, hidden.shape[0])
        cache: list[Tensor] = []
        for k, (start, stop) in enumerate(tiles.ranges):
            keep = tiles.hidden.dtype if requires_grad and k < tiles.num_cached_ranges else None
            exponentials = kernels.statistics(
                tiles, start, stop, target - start, stats[k], entropy, keep
            )
            if exponentials is not None:
                cache.append(exponentials)
        local = merge_ranges(stats)
        if head.group:
            local = merge_ranges(gather_across_group(local, head.group))
        peak, total, weighted_total, target_logit = local.unbind()
        factors = _range_factors(stats[:, 0], peak)
        logps = target_logit - peak - total.log()
        entropies = total.log() - weighted_total / total if entropy else None
        for k, exponentials in enumerate(cache):
            at_target = torch.expm1(logps) * total / factors[k]
            _set_column(exponentials, target - tiles.ranges[k][0], at_target)
        ctx.head, ctx.kernels, ctx.dtype = head, kernels, hidden.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            tiles.hidden, weight, bias, target, logps, entropies, peak, total, factors, *cache
        )
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, *saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = Tiles(ctx.head, hidden, weight, bias)
            forward = _Saved._make([*saved[:6], saved[6:]])
            logit_gradients = _LogitGradients(tiles, ctx.kernels, forward, *grads)
            dtype = tiles.buffer.dtype
            grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
            in_place = (
                gradients.to_write(ctx.next_functions[1][0], weight, dtype)
                if needs_weight
                else None
            )
            grad_weight, accumulates = in_place or (
                torch.empty_like(weight, dtype=dtype) if needs_weight else None,
                False,
            )
            grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
            for k, (start, stop) in enumerate(tiles.ranges):
                grad, factor = logit_gradients(k, start, stop)
                if grad_hidden is not None:
                    part = product(grad, tiles.weight_operand(start, stop), dtype)
                    grad_hidden.addcmul_(part, factor)
                if grad_weight is not None:
                    other = (tiles.product_operand * factor).to(grad.dtype)
                    write_product(grad_weight[start:stop], grad.t(), other, add=accumulates)
                if grad_bias is not None:
                    grad_bias[start:stop] = (grad * factor).sum(0)
        if ctx.head.group and grad_hidden is not None:
            # Each process has the gradient through its part of the logits.
            grad_hidden = ctx.head.group.sum(grad_hidden)
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.dtype),
            None if grad_weight is None or in_place else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def gather_across_group(values: Tensor, group: Any) -> Tensor:
    """Return the values of all processes of a group [size, ...]; without a group, of this one."""
    if group is None:
        return values[None]
    gathered = values.new_zeros(group.size, *values.shape)
    gathered[group.rank] = values
    return group.sum(gathered)


def merge_ranges(stats: Tensor) -> Tensor:
    """Merge the statistics (``TorchKernels.logit_statistics``) of several ranges [ranges, 4, N]
    into those of all their logits [4, N].
    """
    tops, totals, weighted, target_logits = stats.unbind(1)
    peak = tops.amax(0)
    factors = _range_factors(tops, peak)
    return torch.stack(
        [
            peak,
            (totals * factors).sum(0),
            ((weighted + totals * (tops - peak)) * factors).sum(0),
            target_logits.sum(0),
        ]
    )


def _range_factors(tops: Tensor, peak: Tensor) -> Tensor:
    """Return exp(maximum of each range - maximum of the row) [ranges, N]: sums of a range are
    relative to its own maximum.
    """
    return torch.exp(tops - peak).clamp_min_(MIN_FACTOR)


class _Saved(NamedTuple):
    """Tensors of the forward pass that the backward pass needs."""

    target: Tensor
    logps: Tensor
    entropies: Tensor | None
    peak: Tensor
    """The largest logit of each row [N]."""
    total: Tensor
    """The sum of exp(logit - peak) [N]."""
    factors: Tensor
    """exp(largest logit of a range - peak) [ranges, N]."""
    cache: list[Tensor]
    """exp(logit - largest of its range) [N, w] of the first ranges; at the target the value that
    represents p - 1.
    """


class Tiles:
    """Logits of all rows for one range of the vocabulary after another, in one buffer.

    vocabulary: the first tokens that have logits; None: all.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocabulary: int | None = None,
    ) -> None:
        self.head, self.weight, self.bias = head, weight, bias
        dtype = torch.promote_types(torch.float32, weight.dtype)
        self.hidden = hidden.to(torch.bfloat16 if head.rounds_to_bfloat16 else dtype)
        # A CPU has no product of bfloat16 with float32 results, only one of float32 that rounds its
        # operands.
        self.product_operand = self.hidden if hidden.is_cuda else self.hidden.to(dtype)
        rows, vocabulary = hidden.shape[0], vocabulary or weight.shape[0]
        max_logits = MAX_LOGITS["cuda" if hidden.is_cuda else "cpu"]
        width = max_logits // max(rows, 1) // COLUMN_MULTIPLE * COLUMN_MULTIPLE
        width = min(vocabulary, max(width, head.max_columns // 16), head.max_columns)
        self.ranges = [
            (start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)
        ]
        self.buffer = hidden.new_empty(rows * width, dtype=dtype)

    @property
    def num_cached_ranges(self) -> int:
        """The number of ranges that the cache has room for.

        None under a soft-cap, where the gradient depends on the logits themselves.
        """
        if self.head.softcap is not None:
            return 0
        room = self.head.cache_bytes
        if room is None:
            room = CACHE_BYTES["cuda" if self.hidden.is_cuda else "cpu"]
        return room // (max(self.buffer.numel(), 1) * self.hidden.element_size())

    def weight_operand(self, start: int, stop: int) -> Tensor:
        """Return these rows of the weight [w, h], rounded like all operands."""
        return self.weight[start:stop].to(self.hidden.dtype)

    def logits(self, start: int, stop: int) -> Tensor:
        """Return logits [N, stop - start] in float32 or float64, which the caller may overwrite."""
        rows = self.hidden.shape[0]
        out = self.buffer[: rows * (stop - start)].view(rows, stop - start)
        other = self.weight_operand(start, stop).to(self.product_operand.dtype).t()
        if self.product_operand.dtype != out.dtype:
            torch.mm(self.product_operand, other, out_dtype=out.dtype, out=out)
        else:
            with bfloat16_operands(self.head.rounds_to_bfloat16):
                torch.mm(self.product_operand, other, out=out)
        return self.head.finish(out if self.bias is None else out.add_(self.bias[start:stop]))


class _LogitGradients:
    """The gradient of the logits for one range after another: an operand of products [N, w], and a
    factor for each of its rows [N, 1].
    """

    def __init__(
        self,
        tiles: Tiles,
        kernels: TorchKernels,
        saved: _Saved,
        grad: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        self.tiles, self.kernels, self.saved = tiles, kernels, saved
        scale = -tiles.head.slope / saved.total
        self.grad = torch.zeros_like(scale) if grad is None else scale * grad
        self.grad_entropy = None if grad_entropy is None else scale * grad_entropy
        # At the target p - 1 is rounded instead of p: accurate where p is nearly 1.
        self.at_target = torch.expm1(saved.logps) * saved.total

    def __call__(self, k: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        saved, tiles, kernels = self.saved, self.tiles, self.kernels
        dtype = tiles.hidden.dtype
        column, factor = saved.target - start, self.grad[:, None]
        if self.grad_entropy is None and k < len(saved.cache):
            return saved.cache[k], factor * saved.factors[k][:, None]
        if self.grad_entropy is None and kernels.fuses_product:
            stats = tiles.buffer.new_empty(4, len(column))
            exponentials = kernels.statistics(
                tiles, start, stop, column, stats, entropy=False, keep=dtype
            )
            assert exponentials is not None
            _set_column(exponentials, column, self.at_target / saved.factors[k])
            return exponentials, factor * saved.factors[k][:, None]
        logits = tiles.logits(start, stop)
        if self.grad_entropy is None and tiles.head.softcap is None:
            exponentials = kernels.exponentials(logits, column, saved.peak, self.at_target, dtype)
            return exponentials, factor
        max_logit = tiles.head.max_logit
        softcap_slope = 1.0 if max_logit is None else 1 - (logits / max_logit).square_()
        grad_logits = factor * kernels.exponentials(
            logits.clone(), column, saved.peak, self.at_target, logits.dtype
        )
        if self.grad_entropy is not None:
            assert saved.entropies is not None
            log_p = logits - (saved.peak + saved.total.log())[:, None]
            grad_logits += (
                self.grad_entropy[:, None]
                * (log_p.exp() * saved.total[:, None])
                * (log_p + saved.entropies[:, None])
            )
        return (grad_logits * softcap_slope).to(dtype), torch.ones_like(factor)


def _clamp_column(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return whether column[N] is in [0, width), and the column clamped to that range, [N, 1]
    each.
    """
    return ((column >= 0) & (column < width))[:, None], column.clamp(0, width - 1)[:, None]


def _set_column(values: Tensor, column: Tensor, value: Tensor) -> None:
    """values[i, column[i]] = value[i] where there is such a column."""
    is_inside, place = _clamp_column(column, values.shape[1])
    replaced = torch.where(is_inside, value[:, None].to(values.dtype), values.gather(1, place))
    # On a CPU ``scatter_`` copies all values first.
    values[torch.arange(len(values), device=values.device), place[:, 0]] = replaced[:, 0]


def product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one @ other, accumulated in float32; on a CPU a bfloat16 result is rounded to
    bfloat16.
    """
    return (
        torch.mm(one, other, out_dtype=dtype) if one.is_cuda and one.dtype != dtype else one @ other
    )


def write_product(out: Tensor, one: Tensor, other: Tensor, *, add: bool) -> None:
    """out = one @ other, or out += one @ other, accumulated as in ``product``."""
    if one.dtype == out.dtype:
        out.addmm_(one, other, beta=int(add))
    elif one.is_cuda:
        torch.addmm(out, one, other, beta=int(add), out_dtype=out.dtype, out=out)
    elif add:
        out.add_(one @ other)
    else:
        out.copy_(one @ other)
