"""From hidden states to log-probabilities: the linear head and its log-softmax, a range of the
vocabulary at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from valence.models import gradients, native
from valence.models.adapters import active_module
from valence.models.products import bfloat16_operands

CHUNK = 8192
"""Columns of [N, V] logits that exist at once; fewer, down to a sixteenth, where there are many
rows.
"""
AREA = {"cpu": 2**21, "cuda": 2**26}
"""Logits that exist at once: on a CPU they should stay in its cache (8 MB), on a CUDA device be a
large product (256 MB).
"""
LEAST = -3.4e38
"""Stands for the largest of a range of logits that is all minus infinity."""
GRAIN = 64
"""Columns that a range is a multiple of: rows of another length would be copied before each
product.
"""
ROWS = 512
"""Rows of logits that exist at once where the head is not a plain linear layer."""
KEEP = 128 * 2**20
"""Bytes of probabilities that a forward pass keeps, so that its backward pass need not compute
their logits again.
"""
KEEP_CUDA = 1 / 32
"""The same on a CUDA device, as a part of its memory (of all of it: no number may depend on how
much is free).
"""
LOG2E = 1 / math.log(2)
TINY = 1e-30
"""A part of the probability that is nothing beside the rest, and whose inverse bfloat16 can
hold.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of a causal model with the quirks of its family: a final soft-cap (Gemma 2)
    or a scale (Cohere, Granite).

    ``temperature``: divides the logits after these. ``half``: the operands of the products are
    rounded to bfloat16; logits are accumulated and used in float32 all the same. A layer with a
    ``group`` (see ``dist.tensor``) has the logits of some tokens alone, from ``first``; the other
    processes of the group have the others.
    """

    layer: nn.Module
    softcap: float | None = None
    scale: float = 1.0
    half: bool = False
    temperature: float = 1.0

    @classmethod
    def of(cls, model: Any, *, half: bool, temperature: float = 1.0) -> Head:
        """The head of an unmodified Hugging Face causal model."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None)
        layer = active_module(model.get_output_embeddings())
        return cls(layer, softcap, scale, half, temperature)

    @property
    def steepness(self) -> float:
        """The slope of the logits in the layer's product, where no soft-cap bends it."""
        return self.scale / self.temperature

    @property
    def highest(self) -> float | None:
        """Below which a soft-cap keeps the logits."""
        return None if self.softcap is None else self.softcap / self.temperature

    @property
    def group(self) -> Any:
        return getattr(self.layer, "group", None)

    def __call__(
        self, hidden: Tensor, target: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each target under softmax(logits): hidden[N, h], target[N] -> [N]
        (nats), and the entropy [N].

        Both are float32 (float64 for a float64 model). At no time are there logits of all rows for
        the whole vocabulary.
        """
        # Autocast would turn the products back into bfloat16.
        with torch.autocast(hidden.device.type, enabled=False):
            if type(self.layer) is not nn.Linear and not self.group:
                # An adapter on the head: only the layer itself knows its product.
                return self._by_layer(hidden, target, entropy)
            weight, bias = self._own
            grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
            found: Any = LinearLogProb.apply(hidden, weight, bias, target, self, entropy, grad)
            return found

    @torch.no_grad()
    def sum_sq(self, hidden: Tensor) -> Tensor:
        """sum_v p_v^2 under softmax(logits) [N], without a gradient."""
        found: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in hidden.split(ROWS // 8):
                rows = rows.to(next(self.layer.parameters()).dtype)
                logits = linear(rows, *self._own) if self.group else self.layer(rows)
                logits = self.finish(logits.to(torch.promote_types(torch.float32, logits.dtype)))
                top = logits.amax(-1)
                e = (
                    logits - top[:, None]
                ).exp_()  # a softmax's own rounding would all be in one direction
                tops, totals, squares = everyones(
                    torch.stack([top, e.sum(-1), e.square_().sum(-1)]), self.group
                ).unbind(1)
                share = torch.exp(tops - tops.amax(0))
                found.append((squares * share.square()).sum(0) / (totals * share).sum(0).square())
        return torch.cat(found)

    @property
    def _own(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a linear layer, or this process's part of them."""
        weight, bias = cast(Any, self.layer).weight, cast(Any, self.layer).bias
        return (
            (weight.to_local(), None if bias is None else bias.to_local())
            if self.group
            else (weight, bias)
        )

    def finish(self, logits: Tensor) -> Tensor:
        """The layer's product, scaled, capped, and divided by the temperature."""
        if self.softcap is None:
            return logits if self.steepness == 1.0 else logits * self.steepness
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return self.softcap / self.temperature * torch.tanh(scaled / self.softcap)

    def _by_layer(
        self, hidden: Tensor, target: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        parts: list[tuple[Tensor, Tensor]] = []
        for rows in zip(hidden.split(ROWS), target.split(ROWS), strict=True):
            again = torch.is_grad_enabled()
            parts.append(
                checkpoint(self._rows, *rows, entropy, use_reentrant=False)
                if again
                else self._rows(*rows, entropy)
            )
        logp, spread = (torch.cat(column) for column in zip(*parts, strict=True))
        return logp, spread if entropy else None

    def _rows(self, hidden: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits = self.layer(hidden)
        logits = self.finish(logits.to(torch.promote_types(torch.float32, logits.dtype)))
        logp: Any = TargetLogProb.apply(logits, target)
        if not entropy:
            return logp, logp.new_empty(0)
        logps = torch.log_softmax(logits, -1)
        return logp, -(logps.exp() * logps).sum(-1)


@torch.no_grad()
def wide_product(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """What the layer makes of hidden[..., h]: [..., V] in float32, accumulated from operands in
    bfloat16, as where it trains.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.flatten(0, -2)
        tiles = _Tiles(Head(layer, half=True), rows, layer.weight, layer.bias)
        found = rows.new_empty(len(rows), len(layer.weight), dtype=tiles.memory.dtype)
        for start, stop in tiles.ranges:
            found[:, start:stop] = tiles.logits(start, stop)
    return found.unflatten(0, hidden.shape[:-1])


class TargetLogProb(torch.autograd.Function):
    """log softmax(logits)[target]: logits[N, V], target[N] -> [N] (nats).

    In float32 and at a 49k vocabulary ``log_softmax`` was measured to be off by 8e-6 nats per token
    of a real model on a CPU, always in the same direction, so that the errors of an answer add up;
    this by 1e-7, in no direction, in the same time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        spread = (logits - top).exp_().sum(-1, keepdim=True).log()
        ctx.save_for_backward(logits, target, top, spread)
        return (logits.gather(1, target[:, None]) - top - spread).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, target, top, spread = ctx.saved_tensors
        slope = (logits - (top + spread)).exp_().mul_(-grad[:, None])
        return slope.scatter_add_(1, target[:, None], grad[:, None]), None


class LinearLogProb(torch.autograd.Function):
    """log softmax(finish(hidden @ weight^T + bias))[target] and its entropy: hidden[N, h],
    weight[V, h], target[N] -> [N], [N].

    The slope of the logits is g (onehot - p), with p the probabilities and g the slope of the
    log-probability. A forward pass keeps p, rounded like every operand, as far as there is room; a
    backward pass computes the other logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: Head,
        entropy: bool,
        grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _Tiles(head, hidden, weight, bias)
        if head.group:
            target = target - cast(Any, head.layer).first
        found = tiles.memory.new_empty(len(tiles.ranges), 4, hidden.shape[0])
        kept: list[Tensor] = []
        for k, (start, stop) in enumerate(tiles.ranges):
            keep = tiles.hidden.dtype if grad and k < tiles.room else None
            exponentials = tiles.measure(start, stop, target - start, found[k], entropy, keep)
            if exponentials is not None:
                kept.append(exponentials)
        whole = _merged(found)
        peak, total, mean, hit = (
            _merged(everyones(whole, head.group)) if head.group else whole
        ).unbind()
        share = _share(found[:, 0], peak)
        logp = hit - peak - total.log()
        spread = total.log() - mean / total if entropy else None
        for k, exponentials in enumerate(kept):
            _put(exponentials, target - tiles.ranges[k][0], torch.expm1(logp) * total / share[k])
        ctx.head, ctx.dtype = head, hidden.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            tiles.hidden, weight, bias, target, logp, spread, peak, total, share, *kept
        )
        return logp, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, *saved = ctx.saved_tensors
        want_hidden, want_weight, want_bias, *_ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _Tiles(ctx.head, hidden, weight, bias)
            slopes = _Slopes(tiles, _Saved._make([*saved[:6], saved[6:]]), *grads)
            wide = tiles.memory.dtype
            to_hidden = torch.zeros_like(hidden, dtype=wide) if want_hidden else None
            placed = (
                gradients.to_write(ctx.next_functions[1][0], weight, wide) if want_weight else None
            )
            to_weight, adds = placed or (
                torch.empty_like(weight, dtype=wide) if want_weight else None,
                False,
            )
            to_bias = torch.zeros_like(bias, dtype=wide) if want_bias else None
            for k, (start, stop) in enumerate(tiles.ranges):
                slope, factor = slopes(k, start, stop)
                if to_hidden is not None:
                    to_hidden.addcmul_(_product(slope, tiles.operand(start, stop), wide), factor)
                if to_weight is not None:
                    other = (tiles.exact * factor).to(slope.dtype)
                    _put_product(to_weight[start:stop], slope.t(), other, add=adds)
                if to_bias is not None:
                    to_bias[start:stop] = (slope * factor).sum(0)
        if ctx.head.group and to_hidden is not None:
            to_hidden = ctx.head.group.sum(to_hidden)  # of each process, through its own logits
        return (
            None if to_hidden is None else to_hidden.to(ctx.dtype),
            None if to_weight is None or placed else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 4,
        )


def everyones(values: Tensor, group: Any) -> Tensor:
    """The values of all processes of a group [size, ...]; of this one if there is none."""
    if group is None:
        return values[None]
    found = values.new_zeros(group.size, *values.shape)
    found[group.rank] = values
    return group.sum(found)


def _merged(found: Tensor) -> Tensor:
    """What ``measure_logits`` found of several ranges [ranges, 4, N] as that of them all [4, N]."""
    tops, sums, means, hits = found.unbind(1)
    peak = tops.amax(0)
    share = _share(tops, peak)
    return torch.stack(
        [peak, (sums * share).sum(0), ((means + sums * (tops - peak)) * share).sum(0), hits.sum(0)]
    )


def _share(tops: Tensor, peak: Tensor) -> Tensor:
    """What is known of a range is relative to its own largest logit: its factor [ranges, N]
    relative to the largest of all.
    """
    return torch.exp(tops - peak).clamp_min_(TINY)


class _Saved(NamedTuple):
    """What a backward pass knows of the forward pass."""

    target: Tensor
    logp: Tensor
    entropy: Tensor | None
    peak: Tensor
    """The largest logit of each row [N]."""
    total: Tensor
    """The sum of exp(logit - peak) [N]."""
    share: Tensor
    """exp(largest logit of a range - peak) [ranges, N]."""
    kept: list[Tensor]
    """Of the first ranges exp(logit - its largest) [N, w], but for the target what stands for p -
    1.
    """


class _Tiles:
    """Logits of all rows for one range of the vocabulary after the other, in memory that each range
    uses again.
    """

    def __init__(self, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.head, self.weight, self.bias = head, weight, bias
        wide = torch.promote_types(torch.float32, weight.dtype)
        self.hidden = hidden.to(torch.bfloat16 if head.half else wide)
        # A CPU has no product of bfloat16 with float32 results, only one of float32 that rounds.
        self.exact = self.hidden if hidden.is_cuda else self.hidden.to(wide)
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        area = AREA["cuda" if hidden.is_cuda else "cpu"]
        width = max(area // max(rows, 1) // GRAIN * GRAIN, CHUNK // 16)
        width = min(vocabulary, width, CHUNK)
        self.ranges = [
            (start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)
        ]
        self.memory = hidden.new_empty(rows * width, dtype=wide)

    @property
    def room(self) -> int:
        """Of how many ranges the probabilities may be kept.

        A soft-cap's slope asks for the logits themselves.
        """
        device = self.memory.device
        room = (
            KEEP_CUDA * torch.cuda.get_device_properties(device).total_memory
            if device.type == "cuda"
            else KEEP
        )
        tile = max(self.memory.numel(), 1) * self.hidden.element_size()
        return int(room // tile) if self.head.softcap is None else 0

    @property
    def measured(self) -> bool:
        """Whether a compiled kernel does it in one go."""
        return (
            self.bias is None
            and self.head.softcap is None
            and native.measures(self.hidden, self.weight)
        )

    def measure(
        self,
        start: int,
        stop: int,
        column: Tensor,
        found: Tensor,
        entropy: bool,
        keep: torch.dtype | None,
    ) -> Tensor | None:
        """``measure_logits`` of these logits."""
        if self.measured:
            return native.measure(
                self.hidden,
                self.weight[start:stop],
                column,
                found,
                self.head.steepness,
                keep is not None,
            )
        return measure_logits(self.logits(start, stop), column, found, entropy, keep)

    def operand(self, start: int, stop: int) -> Tensor:
        """These rows of the weight, rounded."""
        return self.weight[start:stop].to(self.hidden.dtype)

    def logits(self, start: int, stop: int) -> Tensor:
        """[N, stop - start], float32 or float64. They may be overwritten."""
        rows = self.hidden.shape[0]
        out = self.memory[: rows * (stop - start)].view(rows, stop - start)
        other = self.operand(start, stop).to(self.exact.dtype).t()
        if self.exact.dtype != out.dtype:
            torch.mm(self.exact, other, out_dtype=out.dtype, out=out)
        else:
            with bfloat16_operands(self.head.half):
                torch.mm(self.exact, other, out=out)
        return self.head.finish(out if self.bias is None else out.add_(self.bias[start:stop]))


class _Slopes:
    """The slope of the logits in one range after the other: an operand of products [N, w], and a
    factor of its rows [N, 1].
    """

    def __init__(
        self, tiles: _Tiles, saved: _Saved, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> None:
        self.tiles, self.saved = tiles, saved
        scale = -tiles.head.steepness / saved.total
        self.grad = torch.zeros_like(scale) if grad is None else scale * grad
        self.grad_entropy = None if grad_entropy is None else scale * grad_entropy
        # At the target p - 1 is rounded, not p: nothing is lost where p is nearly 1.
        self.at_target = torch.expm1(saved.logp) * saved.total

    def __call__(self, k: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        saved, tiles = self.saved, self.tiles
        dtype = tiles.hidden.dtype
        column, factor = saved.target - start, self.grad[:, None]
        if self.grad_entropy is None and k < len(saved.kept):
            return saved.kept[k], factor * saved.share[k][:, None]
        if self.grad_entropy is None and tiles.measured:
            found = tiles.memory.new_empty(4, len(column))
            again = tiles.measure(start, stop, column, found, entropy=False, keep=dtype)
            assert again is not None
            _put(again, column, self.at_target / saved.share[k])
            return again, factor * saved.share[k][:, None]
        logits = tiles.logits(start, stop)
        if self.grad_entropy is None and tiles.head.softcap is None:
            return softmax_exponentials(logits, column, saved.peak, self.at_target, dtype), factor
        bend = 1.0 if tiles.head.highest is None else 1 - (logits / tiles.head.highest).square_()
        slope = factor * softmax_exponentials(
            logits.clone(), column, saved.peak, self.at_target, logits.dtype
        )
        if self.grad_entropy is not None:
            assert saved.entropy is not None
            log_p = logits - (saved.peak + saved.total.log())[:, None]
            slope += (
                self.grad_entropy[:, None]
                * (log_p.exp() * saved.total[:, None])
                * (log_p + saved.entropy[:, None])
            )
        return (slope * bend).to(dtype), torch.ones_like(factor)


def measure_logits(
    logits: Tensor, column: Tensor, found: Tensor, entropy: bool, keep: torch.dtype | None
) -> Tensor | None:
    """Fills found[4, N] with what a softmax needs to know of logits[N, w]: the largest of each row;
    relative to that the sum of exp(logit), and of logit * exp(logit) (for the entropy); and the
    logit at ``column``[N], 0 if that is not in this range.

    Returns exp(logit - largest) [N, w] in the type ``keep``, if one is given. The logits are
    overwritten.
    """
    if _fused(logits):
        from valence.models import head_triton

        return head_triton.measure(logits, column, found, keep)
    inside, place = _inside(column, logits.shape[1])
    found[3] = torch.where(inside, logits.gather(1, place), 0).squeeze(1)
    top = logits.amax(-1, keepdim=True).clamp_min_(LEAST)
    found[0] = top.squeeze(1)
    logits.sub_(top)
    distance = logits.clone() if entropy else None
    exponentials = logits.mul_(LOG2E).exp2_()  # on a CPU several times as fast as exp, and as exact
    found[1] = exponentials.sum(-1)
    found[2] = 0 if distance is None else distance.mul_(exponentials).sum(-1)
    return None if keep is None else exponentials.to(keep, copy=True)


def softmax_exponentials(
    logits: Tensor, column: Tensor, reference: Tensor, value: Tensor, dtype: torch.dtype
) -> Tensor:
    """exp(logits[N, w] - reference[N]) as ``dtype``, with value[N] at column[N] in this range.

    The logits are overwritten.
    """
    if _fused(logits):
        from valence.models import head_triton

        return head_triton.exponentials(logits, column, reference, value, dtype)
    exponentials = logits.sub_(reference[:, None]).mul_(LOG2E).exp2_()
    _put(exponentials, column, value)
    return exponentials.to(dtype)


def _fused(logits: Tensor) -> bool:
    """Whether a kernel does in one pass what otherwise takes ten."""
    return logits.is_cuda and logits.dtype == torch.float32 and has_triton()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _inside(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which of column[N] are in [0, width), and places [N, 1] that all are."""
    return ((column >= 0) & (column < width))[:, None], column.clamp(0, width - 1)[:, None]


def _put(values: Tensor, column: Tensor, value: Tensor) -> None:
    """values[i, column[i]] = value[i] where there is such a column."""
    inside, place = _inside(column, values.shape[1])
    found = torch.where(inside, value[:, None].to(values.dtype), values.gather(1, place))
    # Not by ``scatter_``, which on a CPU copies all values first.
    values[torch.arange(len(values), device=values.device), place[:, 0]] = found[:, 0]


def _product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """one @ other, accumulated in float32; on a CPU the result of bfloat16 is then rounded to
    it.
    """
    return (
        torch.mm(one, other, out_dtype=dtype) if one.is_cuda and one.dtype != dtype else one @ other
    )


def _put_product(out: Tensor, one: Tensor, other: Tensor, *, add: bool) -> None:
    """out = one @ other, or out += it, as in ``_product``."""
    if one.dtype == out.dtype:
        out.addmm_(one, other, beta=int(add))
    elif one.is_cuda:
        torch.addmm(out, one, other, beta=int(add), out_dtype=out.dtype, out=out)
    elif add:
        out.add_(one @ other)
    else:
        out.copy_(one @ other)
