"""The model behind the tables of docs/scale.md: its counts by hand."""

from __future__ import annotations

import pytest

from benchmarks.scale_model import cases
from benchmarks.scale_model.model import Layout, distribute_rows, sharded
from valence.models.shape import Shape

SHAPE = Shape(
    parameters=1000,
    trained=1000,
    layers=4,
    hidden=8,
    vocabulary=10,
    operands=96,
    largest=200,
    outside=200,
)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.5B", 0.494), ("1.5B", 1.54), ("8B", 8.03), ("70B", 70.6)]
)
def test_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    result = cases.shape(name)
    assert result.parameters == pytest.approx(billions * 1e9, rel=3e-3)
    assert result.largest * result.layers + result.outside == result.parameters


def test_rows_are_dealt_as_a_step_deals_them() -> None:
    assert distribute_rows([4, 4, 4, 4], Layout(2), 4) == (2, 1.0)
    assert distribute_rows([4, 4, 4], Layout(2), 4) == (2, 0.75)
    assert distribute_rows([4, 2], Layout(4), 100) == (1, pytest.approx(6 / 4 / 4))
    assert distribute_rows([1] * 64, Layout(8), 4) == (2, 1.0)
    assert distribute_rows([8, 7, 6, 5], Layout(2), 8) == (2, 1.0)  # 8 and 5, 7 and 6
    # 8 and 7 in the first round, 6 and 5 in the second
    assert distribute_rows([8, 7, 6, 5], sharded(2), 8) == (
        2,
        pytest.approx(26 / 2 / (8 + 6)),
    )
