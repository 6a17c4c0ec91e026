"""How far a step depends on its micro-batches, its order and its layout, in each type of products."""

from __future__ import annotations

import pytest
import torch

from benchmarks.invariance.__main__ import BOUNDS, CASES, differences, exceeded

FAST = (torch.bfloat16, "dpo", True)


@pytest.mark.parametrize(("dtype", "name", "packed"), [
    pytest.param(
        *case,
        id=f"{case[0]} {case[1]} {'packed' if case[2] else 'one by one'}",
        marks=() if case == FAST else pytest.mark.slow,
    )
    for case in CASES
])  # fmt: skip
def test_differences_are_within_what_is_stated(dtype: torch.dtype, name: str, packed: bool) -> None:
    found, counts = differences(name, dtype, packed=packed)
    assert {1, 14} <= counts
    assert not exceeded(found, dtype, packed), found


@pytest.mark.slow
def test_bounds_tell_types_of_products_apart() -> None:
    """In bfloat16 the gradient depends on the cut by more than is stated of float32."""
    found, _ = differences("dpo", torch.bfloat16)
    assert exceeded(found, torch.float32, packed=True)
    assert BOUNDS[torch.float32].gradient < found.gradient
