"""Compiled decoder layers: the same model with fewer passes over memory, where PyTorch's compiler can be had."""

from __future__ import annotations

import shutil
import sys
import warnings
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from valence.engine.check import FAILURES, TOLERANCE, plain_batch, said
from valence.engine.logprobs import Engine

KEPT = 0.9
"""Share of what a plain compiled layer would keep for its backward pass: the cheapest tenth is computed again, in no more
time."""


def why_not(device: torch.device) -> str | None:
    """What keeps layers from being compiled for this device, or None."""
    if device.type == "cpu":
        return None if shutil.which("g++") else "there is no C++ compiler (g++)"
    return None if device.type == "cuda" else f"there is no compiler for {device.type}"


def compile_layers(engine: Engine) -> bool:
    """Compiles the engine's decoder layers; says so (a warning) and leaves them as they were when the compiler fails on them, or
    makes another computation of them. All layers of one kind share one compiled program, for any number of tokens.

    The first passes take the time of compiling, some ten seconds for each kind of layer and pass.
    """
    layers = [layer for layer in engine.causal.modules() if isinstance(layer, GradientCheckpointingLayer)]
    why = why_not(engine.device) if engine.packs and layers else "its layers run one sequence at a time"
    why = why or _failure(engine, layers)
    if why:
        for layer in layers:
            layer._compiled_call_impl = None
        warnings.warn(f"the layers of {type(engine.causal).__name__} are not compiled: {why}", stacklevel=2)
    engine.compiled = why is None
    if engine.compiled and engine.device.type == "cuda":
        engine.along = sys.maxsize  # the compiler does not look into what a second pass reads
    return engine.compiled


def _failure(engine: Engine, layers: list[Any]) -> str | None:
    """Compiles, and says what is wrong with the result, if anything."""
    size = int(engine.causal.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, size, (40,), generator=torch.Generator().manual_seed(0)).to(engine.device)
    batch = plain_batch([tokens[8:20], tokens[20:]], tokens[:8])
    trained = [p for p in engine.parameters() if p.requires_grad]
    plain = said(engine, batch)
    wanted = _gradients(plain, trained)
    try:
        # Process-wide switches, and the only ones there are for compiled autograd.
        torch._functorch.config.activation_memory_budget = KEPT
        torch._functorch.config.is_non_builtin_to_include = True  # attention is not a cheap operation
        for layer in layers:
            nn.Module.compile(layer, dynamic=True)
        values = said(engine, batch)
        found = _gradients(values, trained)
    except (*FAILURES, AssertionError, TorchDynamoException) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    dtype = engine.compute or next(engine.parameters()).dtype
    apart = (values - plain).abs().max().item()
    if not apart <= TOLERANCE[dtype]:
        return f"what it says differs by {apart:.2g}"
    far = float((wanted - found).abs() / wanted) if trained else 0.0
    return None if far <= 10 * TOLERANCE[dtype] else f"the norm of gradients differs by {far:.1%}"


def _gradients(values: Tensor, trained: list[nn.Parameter]) -> Tensor:
    """The norm of the gradients of the sum, 0 if nothing trains."""
    if not trained:
        return torch.zeros(())
    found = torch.autograd.grad(values.sum(), trained, allow_unused=True)
    return torch.stack([slope.detach().float().norm() for slope in found if slope is not None]).norm()
