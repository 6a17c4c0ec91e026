"""Changes that make TRL's step as fast as possible with its trainers, losses and padded batches.

- The head runs only at completion positions. TRL 1.16 does this on a GPU; elsewhere it runs the
  head at every position.
- The head is one matrix multiplication, whose logits become probabilities in place and are kept, so
  that the backward pass is two multiplications. Entropy and mean logit, which TRL computes for its
  logs, are omitted.
- Batches that are padded on the right have no mask, which causal attention does not need. Attention
  then runs in a causal kernel over grouped heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from trl.trainer import utils

ROWS = 64  # rows per block of float32 probabilities
ROWS_NO_GRAD = 1024  # rows per block of logits in passes without a gradient


@contextmanager
def best() -> Iterator[None]:
    """Replace TRL's head inside the block."""
    with mock.patch.multiple(
        utils,
        _use_triton=mock.Mock(return_value=True),
        _ChunkedLogProbFunction=HeadWithSavedProbabilities,
    ):
        yield


def without_needless_mask(backbone: nn.Module) -> None:
    """Remove the mask of batches that are padded only on the right."""

    def drop(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is not None and bool((mask[:, :-1] >= mask[:, 1:]).all()):
            kwargs = kwargs | {"attention_mask": None}
        return args, kwargs

    backbone.register_forward_pre_hook(drop, with_kwargs=True)


class HeadWithSavedProbabilities(torch.autograd.Function):
    """log softmax(hidden W')[target]: hidden[N, h], W[V, h], target[N] -> [N].

    The signature is that of TRL's function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None,
        scale: float,
        _outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        if bias is not None or temperature != 1.0 or softcap is not None or scale != 1.0:
            raise NotImplementedError(
                "only a head without bias, temperature, softcap and scale is supported"
            )
        ctx.set_materialize_grads(False)
        ctx.dtypes = hidden.dtype, weight.dtype
        dtype = (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        )
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        # not under no_grad, where only the weight requires a gradient
        if ctx.needs_input_grad[0]:
            weights, logp = hidden @ weight.t(), hidden.new_empty(len(hidden), dtype=torch.float32)
            _normalize(weights, target, logp)
            ctx.save_for_backward(hidden, weight, weights, target)
        else:
            blocks = zip(hidden.split(ROWS_NO_GRAD), target.split(ROWS_NO_GRAD), strict=True)
            logp = torch.cat(
                [_normalize(rows @ weight.t(), targets, None) for rows, targets in blocks]
            )
        omitted_outputs = [torch.zeros_like(logp) for _ in range(3)] + [
            torch.zeros_like(logp, dtype=torch.bool)
        ]
        ctx.mark_non_differentiable(*omitted_outputs)
        return logp, *omitted_outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, weights, target = ctx.saved_tensors
        grad = grad[:, None].to(hidden.dtype)
        d_hidden, d_weight = ((weight[target] - weights @ weight) * grad).to(ctx.dtypes[0]), None
        if ctx.needs_input_grad[1]:
            scaled = hidden * grad
            d_weight = (
                (weights.t() @ -scaled)
                .to(ctx.dtypes[1])
                .index_add_(0, target, scaled.to(ctx.dtypes[1]))
            )
        return d_hidden, d_weight, *[None] * 7


def _normalize(logits: Tensor, target: Tensor, logp: Tensor | None) -> Tensor:
    """Turn logits[N, V] into probabilities in place.

    Returns the log-probabilities of the targets [N], in ``logp`` if it is not None.
    """
    logp = logits.new_empty(len(logits), dtype=torch.float32) if logp is None else logp
    for rows, targets, out in zip(
        logits.split(ROWS), target.split(ROWS), logp.split(ROWS), strict=True
    ):
        probabilities = torch.softmax(rows, -1, dtype=torch.float32)
        torch.log(probabilities.gather(1, targets[:, None]).squeeze(1), out=out)
        rows.copy_(probabilities)
    return logp
