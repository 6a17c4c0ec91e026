"""The divergence between the distributions of two models at each token, and its gradient.

The logits of a model never exist for all tokens and the entire vocabulary at once: both heads are
computed for one range of the vocabulary after another, or for a few tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from valence.models import gradients
from valence.models.head import (
    LAYER_ROWS,
    LOG2E,
    LOWEST_LOGIT,
    Head,
    Tiles,
    product,
    write_product,
)


class Divergence(NamedTuple):
    """Values of N tokens, in nats. All but the first have no gradient.

    divergence: that of teacher and policy. logp, teacher: log-probability of the token under policy
    and teacher. entropy: that of the policy.
    """

    divergence: Tensor
    logp: Tensor
    teacher: Tensor
    entropy: Tensor


class Distributions(NamedTuple):
    """The distributions of a model at N tokens: softmax(head(states[N, h])).

    vocabulary: number of tokens that the model has.
    """

    head: Head
    states: Tensor
    vocabulary: int


class TopTokens(NamedTuple):
    """The most likely tokens of a model at N tokens: ids[N, k], their log-probabilities logps[N, k]
    (nats), and those of the N tokens themselves, of_tokens[N].
    """

    ids: Tensor
    logps: Tensor
    of_tokens: Tensor


@dataclass(frozen=True)
class TeacherDistributions:
    """The distributions of a teacher at N tokens, and how a policy is compared with them.

    beta: see ``distribution_divergence``. top_k: see ``top_k_divergence``; None: the entire
    vocabulary. vocabulary: number of token ids that both models share; other ids have no
    probability under either.
    """

    source: Distributions | TopTokens
    vocabulary: int
    beta: float = 1.0
    top_k: int | None = None

    def at(self, rows: Tensor | slice) -> TeacherDistributions:
        """Return the distributions of some of the tokens."""
        source = self.source
        if isinstance(source, Distributions):
            source = source._replace(states=source.states[rows])
        else:
            source = TopTokens(*(column[rows] for column in source))
        return replace(self, source=source)

    def divergence(self, head: Head, states: Tensor, target: Tensor) -> Divergence:
        """The divergence at N tokens from the policy's hidden states [N, h]. target[N]: the
        tokens.
        """
        source = self.source
        with torch.autocast(states.device.type, enabled=False):
            if isinstance(source, TopTokens):
                return self._of_rows(head, states, target, source)
            if self.top_k is None and head.is_linear and source.head.is_linear:
                weight, bias = head.local_weights
                columns: Any = LinearDivergence.apply(states, weight, bias, target, head, self)
                return Divergence(*columns)
            return self._of_rows(head, states, target, source)

    def _of_rows(
        self, head: Head, states: Tensor, target: Tensor, source: Distributions | TopTokens
    ) -> Divergence:
        """All logits of a few tokens at a time, which are computed again in the backward pass."""

        def divergence(hidden: Tensor, target: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
            log_q = _log_softmax(head, hidden, self.vocabulary)
            if isinstance(source, TopTokens):
                ids, logps, of_tokens = columns
                log_p = with_rest(logps)
                values = distribution_divergence(log_p, with_rest_at(log_q, ids), self.beta)
            else:
                with torch.no_grad():
                    log_p = _log_softmax(source.head, columns[0], self.vocabulary)
                of_tokens = log_p.gather(1, target[:, None])[:, 0]
                if self.top_k is None:
                    values = distribution_divergence(log_p, log_q, self.beta)
                else:
                    values = top_k_divergence(log_p, log_q, self.beta, self.top_k)
            log_q = log_q.detach()
            entropy = -(log_q.exp() * log_q.clamp(min=LOWEST_LOGIT)).sum(-1)
            return values, log_q.gather(1, target[:, None])[:, 0], of_tokens, entropy

        inputs = tuple(source) if isinstance(source, TopTokens) else (source.states,)
        parts: list[Any] = []
        for rows in zip(*(x.split(LAYER_ROWS) for x in (states, target, *inputs)), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(divergence, *rows, use_reentrant=False))
            else:
                parts.append(divergence(*rows))
        return Divergence(*(torch.cat(column) for column in zip(*parts, strict=True)))


def distribution_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence of P (teacher) and Q (policy), in nats.

    beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q, for 0 < beta < 1; its limits
    divided by beta and 1 - beta at the ends: KL(P || Q) for 0, KL(Q || P) for 1. Agarwal et al.
    2024, arXiv 2306.13649, section 2 and equation 1.

    log_p, log_q: log-probabilities [..., V]. Returns [...].
    """
    log_p, log_q = log_p.clamp(min=LOWEST_LOGIT), log_q.clamp(min=LOWEST_LOGIT)
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = _log_mixture(log_p, log_q, beta)
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def top_k_divergence(log_p: Tensor, log_q: Tensor, beta: float, k: int) -> Tensor:
    """``distribution_divergence`` over the teacher's k most likely tokens, with all other tokens as
    one further outcome. It is at most the divergence over the vocabulary, and equal for k = V.

    log_p, log_q: log-probabilities [..., V]. Returns [...].
    """
    if k >= log_p.shape[-1]:
        return distribution_divergence(log_p, log_q, beta)
    ids = log_p.topk(k, -1).indices
    return distribution_divergence(with_rest_at(log_p, ids), with_rest_at(log_q, ids), beta)


def with_rest_at(logps: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of these tokens, and that of all others together, from those of the
    vocabulary: [..., V], [..., k] -> [..., k + 1].
    """
    # One minus the sum of the others would be inaccurate where the rest is small.
    rest = logps.scatter(-1, ids, LOWEST_LOGIT).logsumexp(-1, keepdim=True)
    return torch.cat([logps.gather(-1, ids), rest], -1)


def with_rest(logps: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together: [..., k] -> [..., k + 1]."""
    # Rounding may make the sum 1 or more; the rest has at least the resolution of the dtype.
    total = logps.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logps.dtype).eps)
    return torch.cat([logps, torch.log(-torch.expm1(total))], -1)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log(beta p + (1 - beta) q)."""
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def _log_softmax(head: Head, hidden: Tensor, vocabulary: int) -> Tensor:
    """The log-probabilities [n, vocabulary] of hidden[n, h], all at once."""
    stored = next(head.layer.parameters()).dtype
    dtype = torch.promote_types(torch.float32, stored)
    if head.is_linear:  # whose output would be rounded to the dtype of its weights
        weight, bias = head.local_weights
        bias = None if bias is None else bias[:vocabulary].to(dtype)
        logits = linear(hidden.to(dtype), weight[:vocabulary].to(dtype), bias)
    else:
        logits = head.layer(hidden.to(stored))[:, :vocabulary].to(dtype)
    logits = head.finish(logits)
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    # The rounding errors of torch.log_softmax would all have the same sign.
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


class LinearDivergence(torch.autograd.Function):
    """The divergence for heads that are linear layers: hidden[N, h], weight[V, h] -> see
    ``Divergence``.

    With the log-probabilities log_p of the teacher and log_q of the policy, the gradient of the
    divergence D with respect to the policy's logits is q (log_q - log_p - D) for beta 1, q - p for
    beta 0, and (1 - beta) q (log(q / m) - KL(Q || M)) between them. The backward pass computes the
    logits of both models again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: Head,
        teacher: TeacherDistributions,
    ) -> tuple[Tensor, ...]:
        pair = _HeadPair(head, hidden, weight, bias, teacher)
        stats = torch.stack([_statistics(zq, zp, target - k) for k, zq, zp in pair.logits()])
        tops = stats[:, :, :1]
        peak = tops.amax(0)
        factors = torch.exp(tops - peak)
        totals, excess, difference = (stats[:, :, 1:4] * factors).sum(0).unbind(1)
        # ``excess`` is relative to the maximum of each range.
        excess = excess + (stats[:, :, 1] * factors[:, :, 0] * (tops - peak)[:, :, 0]).sum(0)
        log_totals = peak[:, 0] + totals.log()
        logps, teacher_logps = stats[:, :, 4].sum(0) - log_totals
        entropy = totals[0].log() - excess[0] / totals[0]
        # difference[0]: sum of exp(zq) (zq - zp); difference[1]: sum of exp(zp) (zp - zq)
        means = difference / totals
        beta, of_policy = teacher.beta, logps.new_zeros(0)
        if beta == 1:
            values = of_policy = means[0] - log_totals[0] + log_totals[1]
        elif beta == 0:
            values = means[1] - log_totals[1] + log_totals[0]
        else:
            of_teacher, of_policy = torch.zeros_like(logps), torch.zeros_like(logps)
            for _, zq, zp in pair.logits():
                log_q, log_p = _normalized(zq, zp, log_totals)
                log_m = _log_mixture(log_p, log_q, beta)
                of_teacher += (log_p.exp() * (log_p - log_m)).sum(-1)
                of_policy += (log_q.exp() * (log_q - log_m)).sum(-1)
            values = beta * of_teacher + (1 - beta) * of_policy
        ctx.head, ctx.teacher, ctx.dtype = head, teacher, hidden.dtype
        ctx.save_for_backward(hidden, weight, bias, log_totals, of_policy)
        ctx.mark_non_differentiable(logps, teacher_logps, entropy)
        return values, logps, teacher_logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, log_totals, of_policy = ctx.saved_tensors
        head, teacher = ctx.head, ctx.teacher
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            pair = _HeadPair(head, hidden, weight, bias, teacher)
            tiles, dtype = pair.policy, pair.policy.buffer.dtype
            in_place = (
                gradients.to_write(ctx.next_functions[1][0], weight, dtype)
                if needs_weight
                else None
            )
            grad_weight, accumulates = in_place or (
                torch.empty_like(weight, dtype=dtype) if needs_weight else None,
                False,
            )
            grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
            grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
            for start, zq, zp in pair.logits():
                stop, slope = start + zq.shape[1], 1.0
                if head.max_logit is not None:
                    slope = 1 - (zq / head.max_logit).square()
                log_q, log_p = _normalized(zq, zp, log_totals)
                if teacher.beta == 1:
                    part = log_q.exp() * (log_q - log_p - of_policy[:, None])
                elif teacher.beta == 0:
                    part = log_q.exp() - log_p.exp()
                else:
                    log_m = _log_mixture(log_p, log_q, teacher.beta)
                    part = log_q.exp() * (log_q - log_m - of_policy[:, None])
                    part *= 1 - teacher.beta
                part = (part * (grad * head.slope)[:, None] * slope).to(tiles.hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden += product(part, tiles.weight_operand(start, stop), dtype)
                if grad_weight is not None:
                    operand = tiles.product_operand.to(part.dtype)
                    write_product(grad_weight[start:stop], part.t(), operand, add=accumulates)
                if grad_bias is not None:
                    grad_bias[start:stop] = part.sum(0)
            if grad_weight is not None and not accumulates:
                grad_weight[teacher.vocabulary :] = 0
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.dtype),
            None if grad_weight is None or in_place else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 3,
        )


class _HeadPair:
    """The logits of policy and teacher for one range of the shared vocabulary after another."""

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: TeacherDistributions,
    ) -> None:
        source = teacher.source
        assert isinstance(source, Distributions)
        weights = source.head.local_weights
        self.policy = Tiles(head, hidden, weight, bias, teacher.vocabulary)
        self.teacher = Tiles(source.head, source.states, *weights, teacher.vocabulary)

    def logits(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the first token of each range, and its logits [N, w] under policy and teacher."""
        for start, stop in self.policy.ranges:  # equal to those of the teacher: both have N rows
            of_policy, of_teacher = (x.logits(start, stop) for x in (self.policy, self.teacher))
            yield (
                start,
                of_policy.clamp_(min=LOWEST_LOGIT),
                of_teacher.to(of_policy.dtype).clamp_(min=LOWEST_LOGIT),
            )


def _statistics(zq: Tensor, zp: Tensor, column: Tensor) -> Tensor:
    """Statistics of a range of logits [N, w], for policy and teacher [2, 5, N]: the maximum;
    relative to it, the sums of exp(z), z exp(z) and (z - other) exp(z); and the logit at column[N],
    0 if it is outside.
    """
    is_inside, place = ((column >= 0) & (column < zq.shape[1])), column.clamp(0, zq.shape[1] - 1)
    rows: list[Tensor] = []
    difference = zq - zp
    for z, sign in ((zq, 1), (zp, -1)):
        at_column = torch.where(is_inside, z.gather(1, place[:, None])[:, 0], 0)
        top = z.amax(-1)
        distance = z - top[:, None]
        exponentials = (distance * LOG2E).exp2_()
        excess = distance.mul_(exponentials).sum(-1)
        sums = exponentials.sum(-1), excess, exponentials.mul_(difference).sum(-1) * sign
        rows.append(torch.stack([top, *sums, at_column]))
    return torch.stack(rows)


def _normalized(zq: Tensor, zp: Tensor, log_totals: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of policy and teacher [N, w]. The logits are overwritten."""
    return zq.sub_(log_totals[0][:, None]), zp.sub_(log_totals[1][:, None])
