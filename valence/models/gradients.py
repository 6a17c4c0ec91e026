"""Gradients of vocabulary matrices, written in place by the backward pass into memory that is
reused from step to step.

On a CPU allocating memory of their size takes several times longer than writing it, since the
operating system provides it page by page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

LARGE = 2**25
"""Bytes from which the C library allocates memory from the operating system each time. It reuses
smaller blocks by itself.
"""
REUSABLE, MEMORY = "_valence_reusable_gradient", "_valence_gradient_memory"
"""Attributes of a weight: whether to reuse the memory of its gradient, and that memory between
steps.
"""


def to_write(node: Any, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
    """Return the gradient of a weight for a backward function to write in place, and whether to add
    to it instead; the function then returns no gradient to autograd.

    Return None if autograd itself needs the gradient (hooks, ``torch.autograd.grad``, another
    dtype). node: the node of the graph that would receive the gradient, which has this dtype.
    """
    if not weight.is_leaf or weight.dtype != dtype:
        return None
    grad = weight.grad
    if grad is not None and (grad.dtype != dtype or grad.layout != torch.strided):
        return None
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    try:
        if not torch._C._will_engine_execute_node(node):
            return None
    except RuntimeError:  # torch.autograd.grad returns this gradient
        return None
    if grad is not None:
        return grad, True
    attributes = vars(weight)
    memory: Tensor | None = attributes.pop(MEMORY, None)
    if memory is None or (memory.shape, memory.dtype, memory.device) != (
        weight.shape,
        dtype,
        weight.device,
    ):
        memory = torch.empty_like(weight)
    weight.grad = memory
    attributes[REUSABLE] = memory.device.type == "cpu" and memory.nbytes >= LARGE
    return memory, False


def clear(parameters: Iterable[Tensor], *, keep: bool = True) -> None:
    """Set gradients to None. keep: reuse the memory of large ones from ``to_write``, to which
    nothing else may then refer; otherwise free it.
    """
    for p in parameters:
        attributes = vars(p)
        is_reusable = attributes.pop(REUSABLE, False)
        if not keep:
            attributes.pop(MEMORY, None)
        elif is_reusable and p.grad is not None:
            attributes[MEMORY] = p.grad
        p.grad = None


class Embedding(nn.Embedding):
    """An embedding that writes its gradient in place instead of allocating [V, h] for each
    micro-batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if (
            not torch.is_grad_enabled()
            or type(self.weight) is not nn.Parameter
            or self.weight.device.type != "cpu"
        ):
            return super().forward(input)
        rows: Any = EmbeddingLookup.apply(self.weight, input, self.padding_idx)
        return rows


class EmbeddingLookup(torch.autograd.Function):
    """weight[ids]: weight[V, h], ids[...] -> [..., h]. padding: the token whose row has no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding = padding
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        weight, ids = ctx.saved_tensors
        in_place = to_write(ctx.next_functions[0][0], weight, grad.dtype)
        grad_weight, accumulates = in_place or (torch.empty_like(weight), False)
        if not accumulates:
            grad_weight.zero_()
        rows, grad = ids.flatten(), grad.reshape(-1, weight.shape[1])
        if ctx.padding is not None:
            grad = grad.masked_fill((rows == ctx.padding)[:, None], 0)
        grad_weight.index_add_(0, rows, grad)
        return None if in_place else grad_weight, None, None


def write_embedding_gradients(model: Any) -> None:
    """Make the input embedding of a model write its gradient in place, if it is a plain embedding
    in float32 or float64.
    """
    table = model.get_input_embeddings()
    is_plain = (
        type(table) is nn.Embedding
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )
    if is_plain and table.weight.dtype in (torch.float32, torch.float64):
        table.__class__ = Embedding  # the same object, to which adapters and shards refer
