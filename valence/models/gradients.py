"""Gradients of vocabulary matrices: written where they belong by the backward pass itself, in
memory kept from step to step.

On a CPU fresh memory of their size costs several times what is written to it: the system hands it
out page by page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

LARGE = 2**25
"""Bytes from which the C library takes memory from the system each time; what is smaller it keeps
by itself.
"""
WRITTEN, KEPT = "_valence_written", "_valence_kept"
"""What a weight remembers: that its gradient's memory is worth keeping, and that memory between
steps.
"""


def to_write(node: Any, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
    """The gradient of a weight, of its shape, for a backward function to write or, if the flag says
    so, to add to; nothing is then returned to autograd. None where autograd would do more than that
    with it, or is asked for it itself. node: where it would go; dtype: that of the gradient.
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
    except RuntimeError:  # torch.autograd.grad asks for this gradient itself
        return None
    if grad is not None:
        return grad, True
    own = vars(weight)
    memory: Tensor | None = own.pop(KEPT, None)
    if memory is None or (memory.shape, memory.dtype, memory.device) != (
        weight.shape,
        dtype,
        weight.device,
    ):
        memory = torch.empty_like(weight)
    weight.grad = memory
    own[WRITTEN] = memory.device.type == "cpu" and memory.nbytes >= LARGE
    return memory, False


def clear(parameters: Iterable[Tensor], *, keep: bool = True) -> None:
    """Sets gradients to None. keep: the memory of large ones that ``to_write`` gave is used again,
    so that nothing else may hold them any more; else all of it is given back.
    """
    for p in parameters:
        own = vars(p)
        written = own.pop(WRITTEN, False)
        if not keep:
            own.pop(KEPT, None)
        elif written and p.grad is not None:
            own[KEPT] = p.grad
        p.grad = None


class Embedding(nn.Embedding):
    """An embedding whose gradient is not made anew, with a row for every token there is, in each
    micro-batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if (
            not torch.is_grad_enabled()
            or type(self.weight) is not nn.Parameter
            or self.weight.device.type != "cpu"
        ):
            return super().forward(input)
        found: Any = EmbeddingLookup.apply(self.weight, input, self.padding_idx)
        return found


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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        weight, ids = ctx.saved_tensors
        placed = to_write(ctx.next_functions[0][0], weight, slope.dtype)
        grad, adds = placed or (torch.empty_like(weight), False)
        if not adds:
            grad.zero_()
        rows, slope = ids.flatten(), slope.reshape(-1, weight.shape[1])
        if ctx.padding is not None:
            slope = slope.masked_fill((rows == ctx.padding)[:, None], 0)
        grad.index_add_(0, rows, slope)
        return None if placed else grad, None, None


def write_embedding_gradients(model: Any) -> None:
    """From now on those of a model's tokens go where they belong at once, if it has a plain table
    of them in full precision.
    """
    table = model.get_input_embeddings()
    plain = (
        type(table) is nn.Embedding
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )
    if plain and table.weight.dtype in (torch.float32, torch.float64):
        table.__class__ = Embedding  # not a new module: adapters and shards know this one
