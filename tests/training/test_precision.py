"""The dependence of a step on its micro-batches, order and layout, for each compute dtype."""

from __future__ import annotations

import pytest
import torch

from benchmarks.invariance.__main__ import BOUNDS, BUDGETS, CASES, differences, exceeded

pytestmark = pytest.mark.slow
SOME_CUTS = [(i % 2, budget) for i, budget in enumerate(BUDGETS)]
"""Each budget in one of two orders. The benchmark runs each in both."""


@pytest.mark.parametrize(
    ("dtype", "name", "packed"),
    CASES,
    ids=[f"{dtype} {name} {'packed' if packed else 'one by one'}" for dtype, name, packed in CASES],
)
def test_differences_are_within_the_documented_bounds(
    dtype: torch.dtype, name: str, packed: bool
) -> None:
    result, counts = differences(name, dtype, packed=packed, cuts=SOME_CUTS)
    assert {1, 14} <= counts
    assert not exceeded(result, dtype, packed), result


def test_bounds_tell_types_of_products_apart() -> None:
    """In bfloat16 the gradient depends on the cut by more than is stated of float32."""
    result, _ = differences("dpo", torch.bfloat16, cuts=SOME_CUTS)
    assert exceeded(result, torch.float32, packed=True)
    assert BOUNDS[torch.float32].gradient < result.gradient
