"""Python numbers to compare losses with: stable scalars, and derivatives by central differences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

Point = Mapping[str, Any]
Formula = Callable[..., float]


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def positional(fn: Callable[..., Any]) -> list[str]:
    return [
        p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY
    ]


def columns(
    fn: Callable[..., Any], points: Sequence[Point], dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Inputs of a loss, one row per point. The policy's log-probabilities require a gradient."""
    results: dict[str, torch.Tensor] = {}
    for name in positional(fn):
        values = [point[name] for point in points]
        results[name] = (
            torch.tensor(values)
            if isinstance(values[0], bool)
            else torch.tensor(values, dtype=dtype)
        )
        results[name].requires_grad_(name.startswith("logp"))
    return results


def difference(
    formula: Formula, point: Point, name: str, settings: Point, step: float = 1e-5
) -> float:
    """Derivative of a formula with respect to one of its numbers."""
    ends = [formula(**{**point, name: point[name] + h}, **settings) for h in (step, -step)]
    return (ends[0] - ends[1]) / (2 * step)


def check(
    fn: Callable[..., torch.Tensor], formula: Formula, points: Sequence[Point], **settings: Any
) -> None:
    """Compare value and gradient of a loss with its formula at every point."""
    inputs = columns(fn, points)
    points = [{name: point[name] for name in inputs} for point in points]
    loss = fn(*inputs.values(), **settings)
    assert loss.shape == (len(points),)
    assert loss.tolist() == pytest.approx(
        [formula(**point, **settings) for point in points], rel=1e-12, abs=1e-14
    )
    loss.sum().backward()
    for name, values in inputs.items():
        if values.requires_grad:
            assert values.grad is not None
            wanted = [difference(formula, point, name, settings) for point in points]
            assert values.grad.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def check_finite(
    fn: Callable[..., torch.Tensor], points: Sequence[Point], **settings: Any
) -> list[float]:
    """Values at points where a careless formula overflows, after a look at their gradients, in
    float32.
    """
    inputs = columns(fn, points, torch.float32)
    loss = fn(*inputs.values(), **settings)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(
        values.grad.isfinite().all() for values in inputs.values() if values.grad is not None
    )
    return loss.tolist()
