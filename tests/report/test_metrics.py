"""Metrics are pooled as sums and counts; what is not there is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import Tensor

from valence.dist.single import Single
from valence.report.metrics import Meter, auc
from valence.types import Mean, Ranked


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(*values: float) -> Mean:
    return Mean(column(*values).sum(), torch.tensor(len(values)))


@dataclass
class Two:
    """Two processes, of which the other one has these sums and these columns."""

    sums: Tensor
    columns: list[Tensor]
    rank: int = 0
    size: int = 2

    def sum(self, values: Tensor) -> Tensor:
        return values + self.sums

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat([values, self.columns.pop(0)])


numbers = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(numbers, numbers)
def test_auc_is_the_share_of_pairs_in_the_right_order(up: list[float], down: list[float]) -> None:
    """Against counting pairs, and against Mann and Whitney's U. Small integers: many ties."""
    found = auc(column(*up, *down), torch.tensor([True] * len(up) + [False] * len(down)))
    wins = sum((a > b) + 0.5 * (a == b) for a in up for b in down)
    assert found == pytest.approx(wins / (len(up) * len(down)))
    assert found == pytest.approx(mannwhitneyu(up, down).statistic / (len(up) * len(down)))


@pytest.mark.parametrize("positive", [[True, True], [False, False]])
def test_auc_without_both_classes_is_nothing(positive: list[bool]) -> None:
    assert auc(column(1.0, 2.0), torch.tensor(positive)) is None


def test_means_are_pooled_by_count_and_not_averaged() -> None:
    meter = Meter()
    meter.add({"x": mean(1.0)})
    meter.add({"x": mean(4.0, 4.0, 4.0)})
    assert meter.reduce(Single()) == {"x": pytest.approx(13 / 4)}


def test_a_mean_over_nothing_is_left_out() -> None:
    meter = Meter()
    meter.add({"rewards/chosen": mean(2.0), "rewards/rejected": mean(), "rewards/auc": Ranked(column(2.0), torch.tensor([True]))})
    assert meter.reduce(Single()) == {"rewards/chosen": 2.0}
    meter.add({"rewards/chosen": mean(), "rewards/rejected": mean(1.0, 2.0)})
    assert meter.reduce(Single()) == {"rewards/chosen": 2.0, "rewards/rejected": 1.5, "rewards/margins": 0.5}


def test_a_number_that_is_not_finite_is_seen() -> None:
    meter = Meter()
    meter.add({"x": mean(1.0, math.nan), "y": mean(1.0, math.inf)})
    found = meter.reduce(Single())
    assert math.isnan(found["x"])
    assert found["y"] == math.inf


def test_auc_ranks_all_micro_batches_together() -> None:
    """Each micro-batch alone would say 1, or nothing at all."""
    meter = Meter()
    meter.add({"auc": Ranked(column(1.0, 0.0), torch.tensor([True, False]))})
    meter.add({"auc": Ranked(column(5.0), torch.tensor([False]))})
    assert meter.reduce(Single()) == {"auc": pytest.approx(0.5)}


def test_processes_are_pooled_by_count() -> None:
    meter = Meter()
    meter.add({"x": mean(1.0), "y": mean()})
    other = Two(torch.tensor([[12.0, 3.0], [6.0, 2.0]], dtype=torch.float64), [])
    assert meter.reduce(other) == {"x": pytest.approx(13 / 4), "y": pytest.approx(3.0)}


def test_labels_travel_with_the_values_of_their_own_process() -> None:
    meter = Meter()
    meter.add({"auc": Ranked(column(2.0, 1.0), torch.tensor([True, False]))})
    other = Two(torch.zeros(0), [column(3.0, 0.0), torch.tensor([False, True])])
    wins = (2 > 1) + (2 > 3) + (0 > 1) + (0 > 3)
    assert meter.reduce(other) == {"auc": pytest.approx(wins / 4)}


def test_nothing_added_is_nothing() -> None:
    assert Meter().reduce(Single()) == {}


@pytest.mark.parametrize("at", [0, 1])
def test_auc_of_what_is_not_a_number_is_not_a_number(at: int) -> None:
    values = column(1.0, 0.0, 2.0)
    values[at] = math.nan
    found = auc(values, torch.tensor([True, False, True]))
    assert found is not None
    assert math.isnan(found)
