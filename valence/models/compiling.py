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

from valence.models.check import TOLERANCE, compiler_failures, plain_batch, scores_or_logps
from valence.models.policy_model import PolicyModel

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
    """
    layers = [
        layer for layer in engine.causal.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    reason = (
        why_not(engine.device)
        if engine.packs and layers
        else "its layers run one sequence at a time"
    )
    reason = reason or _failure(engine, layers)
    if reason:
        for layer in layers:
            _restore(layer)
        warnings.warn(
            f"the layers of {type(engine.causal).__name__} are not compiled: {reason}", stacklevel=2
        )
    engine.compiled = reason is None
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
    expected = scores_or_logps(engine, batch)
    expected_norm = _gradient_norm(expected, trained)
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
            _compile(layer)
        values = scores_or_logps(engine, batch)
        norm = _gradient_norm(values, trained)
    except compiler_failures() as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    dtype = engine.compute or next(engine.parameters()).dtype
    # Not the largest difference: in bfloat16 with 30 layers that was measured to be 0.5 for one
    # random token, and the root mean square 0.19.
    difference = (values - expected).square().mean().sqrt().item()
    if not difference <= TOLERANCE[dtype]:
        return f"log-probabilities or scores differ by {difference:.2g}"
    error = float((expected_norm - norm).abs() / expected_norm) if trained else 0.0
    if not error <= 10 * TOLERANCE[dtype]:
        return f"the norm of gradients differs by {error:.1%}"
    return None


def _compile(layer: Any) -> None:
    # Older versions of transformers recompute the call instead of the forward.
    recomputes_calls = "__call__" in vars(GradientCheckpointingLayer)
    if layer.gradient_checkpointing and not recomputes_calls:
        layer.forward = partial(_forward, layer)
    else:
        nn.Module.compile(layer, dynamic=True)


def _restore(layer: Any) -> None:
    """Undo ``_compile``."""
    layer._compiled_call_impl = None
    vars(layer).pop("forward", None)


def _forward(layer: Any, *inputs: Any, **options: Any) -> Any:
    """The forward of a checkpointed layer with a compiled program inside the recomputation: the
    compiler does not support the contexts of a recomputation, which adapters need.
    """
    forward, checkpoint = type(layer).forward, layer._gradient_checkpointing_func
    if not layer.training:
        return compiled_program(forward)(layer, *inputs, **options)
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
    return torch.compile(forward, dynamic=True)


def _gradient_norm(values: Tensor, trained: list[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of the sum; 0 without trained parameters."""
    if not trained:
        return torch.zeros(())
    grads = torch.autograd.grad(values.sum(), trained, allow_unused=True)
    return torch.stack([grad.detach().float().norm() for grad in grads if grad is not None]).norm()
