"""The optimizer and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def adamw(model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW over the weights that train. Decay applies to matrices only: biases and norms keep their scale."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True)


def warmup_steps(warmup: float, total: int) -> int:
    """A number of optimizer steps: a fraction of all steps below 1, else the number itself."""
    return up(warmup * total) if warmup < 1 else int(warmup)


def up(steps: float) -> int:
    """The next whole number, forgiving the rounding of a product: 0.07 * 100 is 7."""
    return math.ceil(round(steps, 9))


def schedule(optimizer: torch.optim.Optimizer, *, kind: str, warmup: float, total: int) -> LambdaLR:
    """Rises linearly from 0 over the warm-up, then falls to 0 at ``total`` steps (linear, cosine) or stays (constant).

    The first step already trains: its factor is 1/(warm-up steps), never 0.
    """
    rise = warmup_steps(warmup, total)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, total - rise))
        return {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}[kind]

    return LambdaLR(optimizer, factor)
