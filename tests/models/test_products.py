"""The rounding of matrix multiplications is one setting of the process, set by several threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from valence.models.products import bfloat16_operands


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_it_is_as_before_when_all_threads_have_left(hasty: None) -> None:
    """Two reward models may be asked at once.

    Left behind, products of a float32 model would be rounded from then on.
    """
    before, a = precision(), torch.ones(8, 8)

    def run(_: int) -> set[str]:
        observed: set[str] = set()
        for _ in range(1000):
            with bfloat16_operands(True):
                a @ a
                observed.add(precision())
        return observed

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, range(3))) == [{"bf16"}] * 3
    assert precision() == before


def test_one_inside_another_and_none(hasty: None) -> None:
    before = precision()
    with bfloat16_operands(False):
        assert precision() == before
    with pytest.raises(RuntimeError), bfloat16_operands(True), bfloat16_operands(True):
        raise RuntimeError
    assert precision() == before
