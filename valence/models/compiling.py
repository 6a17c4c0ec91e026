"""Compiled decoder layers: the same computation with fewer passes over memory, where PyTorch's
compiler is available.
"""

from __future__ import annotations

import shutil
import warnings
from functools import cache, partial
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from valence.errors import UserError
from valence.models.check import TOLERANCE, compiler_failures, plain_batch, scores_or_logps
from valence.models.flex import compiler_options
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch

RECOMPUTES_CALLS = "__call__" in vars(GradientCheckpointingLayer)
"""Whether recomputation repeats the call of a layer with its hooks, as in older versions of
transformers, not only its forward.
"""
MAX_PROGRAMS = 32
"""Limit of compiled programs of a model."""
ACTIVATION_BUDGET = 0.9
"""Share of the activations that a compiled layer keeps. Computing the cheapest tenth again takes no
additional time.
"""


def why_not(device: torch.device) -> str | None:
    """Return the reason why layers cannot be compiled for this device, or None."""
    if device.type == "cpu":
        return None if shutil.which("g++") else "g++ is not installed"
    return None if device.type == "cuda" else f"the compiler does not support {device.type}"


def compile_layers(engine: PolicyModel) -> bool:
    """Compile the decoder layers, and return whether they are compiled. If the compiler fails, or
    its programs compute different results, warn and leave the layers unchanged.

    All layers of one kind share one program for any number of tokens. The first passes include
    the compilation, about ten seconds for each kind of layer and pass.

    Layers of sharded weights are compiled after they were split: all processes call this together.
    Raises UserError if the compiler fails then, because a pass that ends early leaves weights
    gathered.
    """
    layers = [
        layer for layer in engine.causal.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    reason = (
        why_not(engine.device)
        if engine.packs and layers
        else "its layers run one sequence at a time"
    )
    if engine.is_sharded and RECOMPUTES_CALLS:
        reason = reason or "this version of transformers would repeat the communication of FSDP"
    if engine.max_over_ranks(int(reason is not None)):
        reason = reason or "the layers of another process are not compiled"
    reason = reason or _failure(engine, layers)
    if reason:
        for layer in layers:
            _restore(layer)
        warnings.warn(
            f"the layers of {type(engine.causal).__name__} are not compiled: {reason}", stacklevel=2
        )
    engine.compiled_layers = () if reason else layers
    return engine.compiled


def _failure(engine: PolicyModel, layers: list[Any]) -> str | None:
    """Compile the layers; return what is wrong with the result, or None."""
    size = int(engine.causal.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, size, (40,), generator=torch.Generator().manual_seed(0)).to(
        engine.device
    )
    # Not four sequences, the number of columns of the segment table: the compiler would treat equal
    # sizes as one number.
    batch = plain_batch([tokens[8:20], tokens[20:30], tokens[30:]], tokens[:8])
    trained = [p for p in engine.parameters() if p.requires_grad]
    expected, expected_norm = _values_and_norm(engine, batch, trained)
    try:
        # These settings apply to all programs of this thread. The limit has to allow several kinds
        # of layers, each with and without a gradient, in training and in evaluation.
        torch._dynamo.config.recompile_limit = max(
            torch._dynamo.config.recompile_limit, MAX_PROGRAMS
        )
        torch._functorch.config.activation_memory_budget = ACTIVATION_BUDGET
        torch._functorch.config.is_non_builtin_to_include = (
            True  # attention is not a cheap operation
        )
        for layer in layers:
            _compile(layer, is_sharded=engine.is_sharded)
        values, norm = _values_and_norm(engine, batch, trained)
    except compiler_failures() as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if engine.is_sharded:
            raise UserError(
                f"the layers of {type(engine.causal).__name__} cannot be compiled ({problem})",
                code="compile-failed",
                where="train.compile",
                fix="remove train.compile",
            ) from error
        return problem
    dtype = engine.compute or next(engine.parameters()).dtype
    # Not the largest difference: in bfloat16 with 30 layers that was measured to be 0.5 for one
    # random token, and the root mean square 0.19.
    difference = (values - expected).square().mean().sqrt().item()
    problem: str | None = None
    if not difference <= TOLERANCE[dtype]:
        problem = f"log-probabilities or scores differ by {difference:.2g}"
    error = float((expected_norm - norm).abs() / expected_norm) if trained else 0.0
    if problem is None and not error <= 10 * TOLERANCE[dtype]:
        problem = f"the norm of gradients differs by {error:.1%}"
    if engine.max_over_ranks(int(problem is not None)):
        problem = problem or "they compute different results in another process"
    return problem


def _compile(layer: Any, *, is_sharded: bool) -> None:
    """is_sharded: FSDP gathers and frees weights in hooks around the forward, which stay as they
    are.
    """
    if is_sharded or (layer.gradient_checkpointing and not RECOMPUTES_CALLS):
        layer.forward = partial(_forward, layer)
    else:
        nn.Module.compile(layer, dynamic=True, options=compiler_options())


def _restore(layer: Any) -> None:
    """Undo ``_compile``."""
    layer._compiled_call_impl = None
    vars(layer).pop("forward", None)


def _forward(layer: Any, *inputs: Any, **options: Any) -> Any:
    """The forward of a layer with a compiled program. If the layer is checkpointed, the program is
    inside the recomputation: the compiler does not support the contexts of a recomputation, which
    adapters need.
    """
    forward = type(layer).forward
    if not (layer.training and layer.gradient_checkpointing):
        return compiled_program(forward)(layer, *inputs, **options)
    checkpoint = layer._gradient_checkpointing_func
    layer._gradient_checkpointing_func = lambda run, *inputs: checkpoint(
        partial(compiled_program(run.func), *run.args, **run.keywords), *inputs
    )
    try:
        return forward(layer, *inputs, **options)
    finally:
        layer._gradient_checkpointing_func = checkpoint


@cache
def compiled_program(forward: Any) -> Any:
    """Return the compiled forward of a class of layers."""
    return torch.compile(forward, dynamic=True, options=compiler_options())


def _values_and_norm(
    engine: PolicyModel, batch: MicroBatch, trained: list[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities or scores, and the norm of the gradients of their sum: those of this
    process's shards; 0 without trained parameters.
    """
    if not trained:
        with torch.no_grad():  # FSDP would wait for a backward pass
            return scores_or_logps(engine, batch), torch.zeros(())
    values = scores_or_logps(engine, batch)
    if engine.is_sharded:  # gradients reach the shards through the hooks of FSDP
        values.sum().backward()
        grads = [p.grad for p in trained]
        for p in trained:
            p.grad = None
    else:
        grads = torch.autograd.grad(values.sum(), trained, allow_unused=True)
    norms = [_local(grad).float().norm() for grad in grads if grad is not None]
    return values.detach(), torch.stack(norms).norm()


def _local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()  # type: ignore[operator]
