"""Tensor parallelism: processes hold a part of each layer's weights and share its products.

Weights are DTensors, so that whoever saves, loads or shards them knows their parts; products run on
this process's part as a plain tensor. That goes along with an adapter's layers, autocast, and
layers that run again in the backward pass. What all processes of the group hold alike, they compute
alike.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import embedding, linear

from valence.distributed.processes import Subgroup
from valence.distributed.protocol import Group
from valence.errors import UserError

WHERE = "parallel.tensor"
SMALL = "replicated_with_grad_allreduce"
"""transformers' name for a layer that all have, and through which each runs its own part."""


def tensor_parallel(model: nn.Module, group: Group) -> None:
    """Keeps of each layer this process's part, by the model's own plan; of the embedding and the
    head these tokens' rows.

    model: with its adapter, if it is to have one, whose weights are then those that one process
    draws. All processes hold the same weights, or none (meta). group: those that share each layer
    (the second of ``Group.split``). Raises UserError when the model cannot be shared among so many.
    """
    if group.size == 1:
        return
    assert isinstance(group, Subgroup)
    inner: Any = model
    causal: Any = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    plan = _plan(causal, group.size)
    for name, style in plan.items():
        _share(causal.get_submodule(name), name, style, group)
    _share_vocabulary(causal, group)


def check_shares(causal: nn.Module, size: int) -> None:
    """Raises UserError when the layers of a model cannot be shared among so many processes.

    The model needs no memory.
    """
    if size > 1:
        _plan(causal, size)


def _plan(causal: Any, size: int) -> dict[str, str]:
    """What transformers says of each layer of the decoder."""
    asked: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    styles = {
        name: asked.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, _ in causal.named_modules()
    }
    found = {
        name: style
        for name, style in styles.items()
        if style is not None
        and name.startswith(f"{causal.base_model_prefix}.")
        and not style.startswith("embedding")
    }
    what = type(causal).__name__
    if not found:
        raise _mistake(
            f"transformers has no plan of how to share the layers of {what}", "tensor-plan-missing"
        )
    if unknown := sorted({*found.values()} - {*STYLES, SMALL}):
        raise _mistake(f"the plan of {what} asks for {', '.join(unknown)}, which is not done here")
    if any(style == "colwise" and "att" in name.split(".")[-2] for name, style in found.items()):
        config = causal.config.get_text_config()
        heads = (
            config.num_attention_heads,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        )
        if any(count % size for count in heads):
            common = math.gcd(*heads)
            fits = f"; numbers that divide {common} fit" if common > 1 else ""
            why = f"{heads[0]} heads, with keys and values of {heads[1]}, evenly{fits}"
            raise _mistake(f"{size} processes cannot share {why}", "tensor-heads-uneven")
    return found


def _mistake(what: str, code: str = "tensor-unsupported") -> UserError:
    return UserError(
        what,
        code=code,
        where=WHERE,
        fix="set parallel.tensor: 1 (parallel.shard: full splits the weights of any model)",
    )


# ---------------------------------------------------------------- what crosses from one process to
# another


class _Spread(torch.autograd.Function):
    """What all processes have, as the input of products that they share: each knows a part of its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum(grad), None


class _Total(torch.autograd.Function):
    """The sum of what each process has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Whole(torch.autograd.Function):
    """The columns [..., n] of all processes, one after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _joined(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _own(grad, -1, ctx.group), None


class _Cut(torch.autograd.Function):
    """This process's columns of what all have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own(x, -1, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _joined(grad, ctx.group), None


def _joined(x: Tensor, group: Group) -> Tensor:
    return group.gather(x.movedim(-1, 0).contiguous()).movedim(0, -1)


def _first(length: int, group: Group) -> int:
    """Where this process's part of an axis begins, which all but the last have equally much of."""
    return min(group.rank * -(-length // group.size), length)


def _own(x: Tensor, axis: int, group: Group) -> Tensor:
    length, first = x.shape[axis], _first(x.shape[axis], group)
    return x.narrow(axis, first, min(-(-length // group.size), length - first))


def _spread(x: Tensor, group: Group) -> Tensor:
    """As ``_Spread``; products of the same input sum its gradient once."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    holder: Any = x
    if not hasattr(holder, "spread"):
        holder.spread = _Spread.apply(x, group)
    return holder.spread


# ---------------------------------------------------------------- layers


class ShardedColumns(nn.Linear):
    """Has some rows of the weight: from what all processes have to these columns of the product."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        return linear(_spread(input, self.group), local(self.weight), local(self.bias))


class WholeColumns(ShardedColumns):
    """All columns of the product."""

    def forward(self, input: Tensor) -> Tensor:
        return _Whole.apply(super().forward(input), self.group)  # type: ignore[return-value]

    @property
    def first(self) -> int:
        """The first row of the weight that this process has."""
        return _first(self.weight.shape[0], self.group)


class Rows(nn.Linear):
    """Has some columns of the weight: from these columns of the input to the product, which all
    processes have.
    """

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        found: Any = _Total.apply(linear(input, local(self.weight)), self.group)
        return found if self.bias is None else found + self.bias.to(found.dtype)


class CutRows(Rows):
    """From the whole input, which all processes have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_Cut.apply(input, self.group))  # type: ignore[arg-type]


class Lookup(nn.Embedding):
    """Has some rows of the table."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        own, first = local(self.weight), _first(self.num_embeddings, self.group)
        place = input - first
        absent = (place < 0) | (place >= len(own))
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < len(own) else None
        found = embedding(place.masked_fill(absent, 0), own, padding).masked_fill(
            absent[..., None], 0
        )
        return _Total.apply(found, self.group)  # type: ignore[return-value]


STYLES: dict[str, tuple[type[nn.Linear], int]] = {
    "colwise": (ShardedColumns, 0),
    "colwise_gather_output": (WholeColumns, 0),
    "colwise_rep": (WholeColumns, 0),
    "rowwise": (Rows, 1),
    "rowwise_split_input": (CutRows, 1),
    "rowwise_rep": (CutRows, 1),
}
"""transformers' name of how a linear layer is shared -> what it becomes, and the axis of its weight
that is cut.
"""


def _share(module: Any, name: str, style: str, group: Subgroup) -> None:
    if style == SMALL:
        module.group = group
        module.register_forward_pre_hook(_spread_weights)
        module.register_forward_hook(_as_before, always_call=True)
        return
    base = module.base_layer if hasattr(module, "lora_A") else module
    if not isinstance(base, nn.Linear):
        raise _mistake(f"{name} is no linear layer, but {type(base).__name__}")
    kind, axis = STYLES[style]
    # an adapter's dropout would draw unlike numbers in each process
    if base.weight.shape[axis] % group.size:
        why = f"the {base.weight.shape[axis]} numbers of {name} evenly"
        raise _mistake(f"{group.size} processes cannot share {why}", "tensor-layer-uneven")
    convert_layer(base, kind, axis, group)
    # then an adapter sees whole inputs and outputs
    if base is module or kind in (
        WholeColumns,
        CutRows,
    ):
        return
    if module.lora_magnitude_vector:
        raise _mistake(f"the adapter on {name} has magnitudes of its own (DoRA)")
    for each in (module.lora_B if kind is ShardedColumns else module.lora_A).values():
        convert_layer(each, kind, axis, group)


def convert_layer(module: Any, kind: type[nn.Module], axis: int, group: Subgroup) -> None:
    """Turn a linear or embedding layer into a tensor-parallel one that holds this process's part of
    its weight.

    kind: the tensor-parallel class. axis: the axis along which the weight is split; a bias is split
    with axis 0.
    """
    own = type(module)
    # A model's own kind of layer keeps what it does around the product.
    module.__class__ = kind if issubclass(kind, own) else type(own.__name__, (own, kind), {})
    module.group = group
    module.weight = _cut(module.weight, axis, group)
    if axis == 0 and getattr(module, "bias", None) is not None:
        module.bias = _cut(module.bias, 0, group)


def _cut(weight: nn.Parameter, axis: int, group: Subgroup) -> nn.Parameter:
    own = _own(weight.detach(), axis, group).clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(
        own,
        group.mesh,
        [Shard(axis)],
        run_check=False,
        shape=weight.shape,
        stride=weight.detach().contiguous().stride(),
    )
    return nn.Parameter(made, requires_grad=weight.requires_grad)


def local(weight: Any) -> Any:
    """This process's part of a tensor, which shares its memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _share_vocabulary(causal: Any, group: Subgroup) -> None:
    """The embedding and the head, which may have their weight in common.

    One that has an adapter stays whole.
    """
    table, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    tied = head is not None and getattr(table, "weight", None) is getattr(head, "weight", None)
    shared = [isinstance(table, nn.Embedding), type(head) is nn.Linear]
    if tied and not all(shared):
        return
    if shared[0]:
        convert_layer(table, Lookup, 0, group)
    if shared[1]:
        convert_layer(head, WholeColumns, 0, group)
    if tied:
        head.weight = table.weight  # type: ignore[union-attr]


def _spread_weights(module: Any, _inputs: Any) -> None:
    """For the run of a small layer that all processes have, each for its own part of what runs
    through it.
    """
    for name, weight in module.named_parameters(recurse=False):
        if torch.is_grad_enabled() and weight.requires_grad:
            # is found before the parameter
            module.__dict__[name] = _Spread.apply(weight, module.group)


def _as_before(module: Any, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
