"""Tensor parallelism: each process holds a part of each layer's weights, and computes its part of
the matrix multiplications.

Weights are DTensors, so that saving, loading and sharding know the parts. Multiplications run on
this process's part as a plain tensor, which works with adapters, autocast and activation
checkpointing. Computations on replicated tensors are the same in all processes of the group.
``parallelize_module`` does not replace this: dev/decisions/0042-pytorch-for-processes.md.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import embedding, linear

from valence.distributed.process_group import Group, Subgroup
from valence.errors import UserError

WHERE = "parallel.tensor"
REPLICATED = "replicated_with_grad_allreduce"
"""transformers' name for a replicated layer whose input is different in each process."""


def tensor_parallel(model: nn.Module, group: Group) -> None:
    """Keep this process's part of each layer by the model's plan, and of the embedding and the head
    its part of the vocabulary.

    model: with its adapter, if any, so that the adapter's initial weights are those of a single
    process. All processes hold the same weights, or none (meta device). group: the tensor-parallel
    group (the second of ``Group.split``). Raises UserError if the model cannot be divided by its
    size.
    """
    if group.size == 1:
        return
    assert isinstance(group, Subgroup)
    inner: Any = model
    causal: Any = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    plan = _plan(causal, group.size)
    for name, style in plan.items():
        _divide(causal.get_submodule(name), name, style, group)
    _divide_vocabulary(causal, group)


def check_tensor_parallel(causal: nn.Module, size: int) -> None:
    """Raise UserError if a model cannot be divided by ``size``. Works on the meta device."""
    if size > 1:
        _plan(causal, size)


def _plan(causal: Any, size: int) -> dict[str, str]:
    """transformers' tensor-parallel style of each layer of the decoder, by name."""
    patterns: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    styles = {
        name: patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        for name, _ in causal.named_modules()
    }
    plan = {
        name: style
        for name, style in styles.items()
        if style is not None
        and name.startswith(f"{causal.base_model_prefix}.")
        and not style.startswith("embedding")
    }
    architecture = type(causal).__name__
    if not plan:
        raise _error(
            f"transformers has no tensor-parallel plan for {architecture}", "tensor-plan-missing"
        )
    if unknown := sorted({*plan.values()} - {*STYLES, REPLICATED}):
        raise _error(
            f"the tensor-parallel plan of {architecture} has unsupported styles: "
            f"{', '.join(unknown)}"
        )
    if any(style == "colwise" and "att" in name.split(".")[-2] for name, style in plan.items()):
        config = causal.config.get_text_config()
        heads = (
            config.num_attention_heads,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        )
        if any(count % size for count in heads):
            common = math.gcd(*heads)
            hint = f"; parallel.tensor can be a divisor of {common}" if common > 1 else ""
            raise _error(
                f"{heads[0]} attention heads, with {heads[1]} key-value heads, cannot be divided "
                f"evenly by {size} processes{hint}",
                "tensor-heads-uneven",
            )
    return plan


def _error(message: str, code: str = "tensor-unsupported") -> UserError:
    return UserError(
        message,
        code=code,
        where=WHERE,
        fix="set parallel.tensor: 1 (parallel.shard: full splits the weights of any model)",
    )


# Communication. torch.distributed's differentiable functions would bypass the group, whose errors
# name the collective that a process does not reach.


class _CopyToGroup(torch.autograd.Function):
    """A replicated tensor as the input of layers that are divided: each process computes a part of
    its gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum(grad), None


class SumOverGroup(torch.autograd.Function):
    """The sum over the processes, as a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherColumns(torch.autograd.Function):
    """The columns [..., n] of all processes, concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_columns(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _local_part(grad, -1, ctx.group), None


class _ScatterColumns(torch.autograd.Function):
    """This process's columns of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _local_part(x, -1, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_columns(grad, ctx.group), None


def _gather_columns(x: Tensor, group: Group) -> Tensor:
    return group.gather(x.movedim(-1, 0).contiguous()).movedim(0, -1)


def _offset(length: int, group: Group) -> int:
    """Start of this process's part of an axis; all parts but the last have the same length."""
    return min(group.rank * -(-length // group.size), length)


def _local_part(x: Tensor, axis: int, group: Group) -> Tensor:
    length, offset = x.shape[axis], _offset(x.shape[axis], group)
    return x.narrow(axis, offset, min(-(-length // group.size), length - offset))


def _copy_to_group(x: Tensor, group: Group) -> Tensor:
    """As ``_CopyToGroup``; layers with the same input sum its gradient once."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    holder: Any = x
    if not hasattr(holder, "copy_to_group"):
        holder.copy_to_group = _CopyToGroup.apply(x, group)
    return holder.copy_to_group


# Layers


class ColumnParallelLinear(nn.Linear):
    """Holds some rows of the weight: from a replicated input to some columns of the output."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        return linear(_copy_to_group(input, self.group), local(self.weight), local(self.bias))


class GatheredColumnParallelLinear(ColumnParallelLinear):
    """From a replicated input to all columns of the output."""

    def forward(self, input: Tensor) -> Tensor:
        return _GatherColumns.apply(super().forward(input), self.group)  # type: ignore[return-value]

    @property
    def first(self) -> int:
        """The first row of the weight in this process."""
        return _offset(self.weight.shape[0], self.group)


class RowParallelLinear(nn.Linear):
    """Holds some columns of the weight: from these columns of the input to a replicated output."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        output: Any = SumOverGroup.apply(linear(input, local(self.weight)), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class ScatteredRowParallelLinear(RowParallelLinear):
    """From a replicated input to a replicated output."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_ScatterColumns.apply(input, self.group))  # type: ignore[arg-type]


class ParallelEmbedding(nn.Embedding):
    """Holds some rows of the table."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        table, offset = local(self.weight), _offset(self.num_embeddings, self.group)
        rows = input - offset
        is_elsewhere = (rows < 0) | (rows >= len(table))
        padding = None if self.padding_idx is None else self.padding_idx - offset
        padding = padding if padding is not None and 0 <= padding < len(table) else None
        vectors = embedding(rows.masked_fill(is_elsewhere, 0), table, padding)
        vectors = vectors.masked_fill(is_elsewhere[..., None], 0)
        return SumOverGroup.apply(vectors, self.group)  # type: ignore[return-value]


STYLES: dict[str, tuple[type[nn.Linear], int]] = {
    "colwise": (ColumnParallelLinear, 0),
    "colwise_gather_output": (GatheredColumnParallelLinear, 0),
    "colwise_rep": (GatheredColumnParallelLinear, 0),
    "rowwise": (RowParallelLinear, 1),
    "rowwise_split_input": (ScatteredRowParallelLinear, 1),
    "rowwise_rep": (ScatteredRowParallelLinear, 1),
}
"""transformers' style of a linear layer -> its class, and the axis of the weight to split."""


def _divide(module: Any, name: str, style: str, group: Subgroup) -> None:
    """Turn a layer of the decoder, with its adapter, into a tensor-parallel one."""
    if style == REPLICATED:
        module.group = group
        module.register_forward_pre_hook(_copy_weights_to_group)
        module.register_forward_hook(_restore_weights, always_call=True)
        return
    base = module.base_layer if hasattr(module, "lora_A") else module
    if not isinstance(base, nn.Linear):
        raise _error(f"{name} is not a linear layer, but {type(base).__name__}")
    kind, axis = STYLES[style]
    # with uneven parts, an adapter's dropout would draw differently in each process
    if base.weight.shape[axis] % group.size:
        raise _error(
            f"the axis of length {base.weight.shape[axis]} of {name} cannot be divided evenly by "
            f"{group.size} processes",
            "tensor-layer-uneven",
        )
    convert_layer(base, kind, axis, group)
    # with these classes, an adapter has replicated inputs and outputs
    if base is module or kind in (GatheredColumnParallelLinear, ScatteredRowParallelLinear):
        return
    if module.lora_magnitude_vector:
        raise _error(f"the adapter on {name} uses DoRA")
    adapters = module.lora_B if kind is ColumnParallelLinear else module.lora_A
    for layer in adapters.values():
        convert_layer(layer, kind, axis, group)


def convert_layer(module: Any, kind: type[nn.Module], axis: int, group: Subgroup) -> None:
    """Turn a linear or embedding layer into a tensor-parallel one that holds this process's part of
    its weight.

    kind: the tensor-parallel class. axis: the axis along which the weight is split; a bias is split
    with axis 0.
    """
    original = type(module)
    # The model's subclass of a layer keeps what it computes in addition.
    module.__class__ = (
        kind if issubclass(kind, original) else type(original.__name__, (original, kind), {})
    )
    module.group = group
    module.weight = _shard(module.weight, axis, group)
    if axis == 0 and getattr(module, "bias", None) is not None:
        module.bias = _shard(module.bias, 0, group)


def _shard(weight: nn.Parameter, axis: int, group: Subgroup) -> nn.Parameter:
    part = _local_part(weight.detach(), axis, group).clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(
        part,
        group.mesh,
        [Shard(axis)],
        run_check=False,
        shape=weight.shape,
        stride=weight.detach().contiguous().stride(),
    )
    return nn.Parameter(tensor, requires_grad=weight.requires_grad)


def local(weight: Any) -> Any:
    """This process's part of a tensor, which shares its memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _divide_vocabulary(causal: Any, group: Subgroup) -> None:
    """Divide the embedding and the head, whose weights may be tied. A layer with an adapter is
    replicated.
    """
    table, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    is_tied = head is not None and getattr(table, "weight", None) is getattr(head, "weight", None)
    divides_table, divides_head = isinstance(table, nn.Embedding), type(head) is nn.Linear
    if is_tied and not (divides_table and divides_head):
        return
    if divides_table:
        convert_layer(table, ParallelEmbedding, 0, group)
    if divides_head:
        convert_layer(head, GatheredColumnParallelLinear, 0, group)
    if is_tied:
        head.weight = table.weight  # type: ignore[union-attr]


def _copy_weights_to_group(module: Any, _inputs: Any) -> None:
    """Before the forward pass of a replicated layer, whose weights get a part of their gradient in
    each process.
    """
    for name, weight in module.named_parameters(recurse=False):
        if torch.is_grad_enabled() and weight.requires_grad:
            # takes precedence over the parameter
            module.__dict__[name] = _CopyToGroup.apply(weight, module.group)


def _restore_weights(module: Any, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
