"""Compiled decoder layers: the same model with fewer passes over memory, where PyTorch's compiler
can be had.
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
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from valence.models.check import FAILURES, TOLERANCE, plain_batch, said
from valence.models.policy_model import PolicyModel

PROGRAMS = 32  # most of one model
KEPT = 0.9
"""Share of what a plain compiled layer would keep for its backward pass: the cheapest tenth is
computed again, in no more time.
"""


def why_not(device: torch.device) -> str | None:
    """What keeps layers from being compiled for this device, or None."""
    if device.type == "cpu":
        return None if shutil.which("g++") else "there is no C++ compiler (g++)"
    return None if device.type == "cuda" else f"there is no compiler for {device.type}"


def compile_layers(engine: PolicyModel) -> bool:
    """Compiles the engine's decoder layers; says so (a warning) and leaves them as they were when
    the compiler fails on them, or makes another computation of them. All layers of one kind share
    one compiled program, for any number of tokens.

    The first passes take the time of compiling, some ten seconds for each kind of layer and pass.
    """
    layers = [
        layer for layer in engine.causal.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    why = (
        why_not(engine.device)
        if engine.packs and layers
        else "its layers run one sequence at a time"
    )
    why = why or _failure(engine, layers)
    if why:
        for layer in layers:
            _leave(layer)
        warnings.warn(
            f"the layers of {type(engine.causal).__name__} are not compiled: {why}", stacklevel=2
        )
    engine.compiled = why is None
    return engine.compiled


def _failure(engine: PolicyModel, layers: list[Any]) -> str | None:
    """Compiles, and says what is wrong with the result, if anything."""
    size = int(engine.causal.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, size, (40,), generator=torch.Generator().manual_seed(0)).to(
        engine.device
    )
    # Not as many sequences as a forest has columns: the compiler would take these for one number.
    batch = plain_batch([tokens[8:20], tokens[20:30], tokens[30:]], tokens[:8])
    trained = [p for p in engine.parameters() if p.requires_grad]
    plain = said(engine, batch)
    wanted = _gradients(plain, trained)
    try:
        # Switches of this thread for all programs, and the only ones there are for compiled
        # autograd and for the number of
        # programs: layers may be of several kinds, each with and without a gradient, training and
        # not.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, PROGRAMS)
        torch._functorch.config.activation_memory_budget = KEPT
        torch._functorch.config.is_non_builtin_to_include = (
            True  # attention is not a cheap operation
        )
        for layer in layers:
            _compile(layer)
        values = said(engine, batch)
        found = _gradients(values, trained)
    except (*FAILURES, AssertionError, TorchDynamoException) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    dtype = engine.compute or next(engine.parameters()).dtype
    # Not the largest: in bfloat16 what 30 layers say of one random token was seen to differ by 0.5,
    # and of all together by 0.19.
    apart = (values - plain).square().mean().sqrt().item()
    if not apart <= TOLERANCE[dtype]:
        return f"its log-probabilities differ by {apart:.2g}"
    far = float((wanted - found).abs() / wanted) if trained else 0.0
    return None if far <= 10 * TOLERANCE[dtype] else f"the norm of gradients differs by {far:.1%}"


def _compile(layer: Any) -> None:
    # in older versions of transformers what runs again is the call
    around_calls = "__call__" in vars(GradientCheckpointingLayer)
    if layer.gradient_checkpointing and not around_calls:
        layer.forward = partial(_forward, layer)
    else:
        nn.Module.compile(layer, dynamic=True)


def _leave(layer: Any) -> None:
    """As it was before ``_compile``."""
    layer._compiled_call_impl = None
    vars(layer).pop("forward", None)


def _forward(layer: Any, *inputs: Any, **more: Any) -> Any:
    """A layer whose activations are not kept: compiled inside what runs again, not around it.

    Of what surrounds a second run (an adapter has something there) the compiler knows nothing.
    """
    whole, checkpoint = type(layer).forward, layer._gradient_checkpointing_func
    if not layer.training:
        return compiled_program(whole)(layer, *inputs, **more)
    layer._gradient_checkpointing_func = lambda run, *inputs: checkpoint(
        partial(compiled_program(run.func), *run.args, **run.keywords), *inputs
    )
    try:
        return whole(layer, *inputs, **more)
    finally:
        layer._gradient_checkpointing_func = checkpoint


@cache
def compiled_program(forward: Any) -> Any:
    return torch.compile(forward, dynamic=True)


def _gradients(values: Tensor, trained: list[nn.Parameter]) -> Tensor:
    """The norm of the gradients of the sum, 0 if nothing trains."""
    if not trained:
        return torch.zeros(())
    found = torch.autograd.grad(values.sum(), trained, allow_unused=True)
    return torch.stack(
        [slope.detach().float().norm() for slope in found if slope is not None]
    ).norm()
