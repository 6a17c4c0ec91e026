"""Metrics are pooled as sums and counts; missing values are ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import Tensor

from tests.simulated_cuda import CUDA, simulated_device
from valence.distributed.process_group import SingleProcess
from valence.training.metrics import Meter, auc
from valence.types import Mean, Ranked


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(*values: float) -> Mean:
    return Mean(column(*values).sum(), torch.tensor(len(values)))


@dataclass
class Several:
    """A group whose other processes send these messages."""

    others: list[Tensor]
    rank: int = 0
    messages: int = 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def sum(self, values: Tensor) -> Tensor:
        raise AssertionError("metrics travel in one message")

    def gather(self, values: Tensor) -> Tensor:
        self.messages += 1
        self.mine = values
        return torch.cat([values, *self.others])


def reduce_together(*meters: Meter) -> dict[str, float]:
    """Reduce the meters of several processes. Asserts that all processes get the same result."""
    sent: list[Tensor] = []
    for meter in meters:
        meter.reduce(alone := Several([]))
        sent.append(alone.mine)
    results = [meter.reduce(Several(sent[:i] + sent[i + 1 :])) for i, meter in enumerate(meters)]
    for other in results[1:]:
        assert other == pytest.approx(results[0])
    return results[0]


numbers = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(numbers, numbers)
def test_auc_is_the_share_of_pairs_in_the_right_order(up: list[float], down: list[float]) -> None:
    """Against counting pairs, and against Mann and Whitney's U. Small integers: many ties."""
    result = auc(column(*up, *down), torch.tensor([True] * len(up) + [False] * len(down)))
    wins = sum((a > b) + 0.5 * (a == b) for a in up for b in down)
    assert result == pytest.approx(wins / (len(up) * len(down)))
    assert result == pytest.approx(mannwhitneyu(up, down).statistic / (len(up) * len(down)))


@pytest.mark.parametrize("positive", [[True, True], [False, False]])
def test_auc_without_both_classes_is_missing(positive: list[bool]) -> None:
    assert auc(column(1.0, 2.0), torch.tensor(positive)) is None


def test_means_are_pooled_by_count_and_not_averaged() -> None:
    meter = Meter()
    meter.add({"x": mean(1.0)})
    meter.add({"x": mean(4.0, 4.0, 4.0)})
    assert meter.reduce(SingleProcess()) == {"x": pytest.approx(13 / 4)}


def test_a_mean_without_values_is_omitted() -> None:
    meter = Meter()
    meter.add(
        {
            "rewards/chosen": mean(2.0),
            "rewards/rejected": mean(),
            "rewards/auc": Ranked(column(2.0), torch.tensor([True])),
        }
    )
    assert meter.reduce(SingleProcess()) == {"rewards/chosen": 2.0}
    meter.add({"rewards/chosen": mean(), "rewards/rejected": mean(1.0, 2.0)})
    assert meter.reduce(SingleProcess()) == {
        "rewards/chosen": 2.0,
        "rewards/rejected": 1.5,
        "rewards/margins": 0.5,
    }


def test_a_number_that_is_not_finite_is_seen() -> None:
    meter = Meter()
    meter.add({"x": mean(1.0, math.nan), "y": mean(1.0, math.inf)})
    result = meter.reduce(SingleProcess())
    assert math.isnan(result["x"])
    assert result["y"] == math.inf


def test_auc_ranks_all_micro_batches_together() -> None:
    """Each micro-batch alone would say 1, or nothing at all."""
    meter = Meter()
    meter.add({"auc": Ranked(column(1.0, 0.0), torch.tensor([True, False]))})
    meter.add({"auc": Ranked(column(5.0), torch.tensor([False]))})
    assert meter.reduce(SingleProcess()) == {"auc": pytest.approx(0.5)}


def test_processes_are_pooled_by_count() -> None:
    first, second, third = Meter(), Meter(), Meter()
    first.add({"x": mean(1.0), "y": mean()})
    second.add({"x": mean(4.0, 4.0, 4.0), "y": mean(3.0)})
    third.add({"x": mean(), "y": mean()})
    assert reduce_together(first, second, third) == {
        "x": pytest.approx(13 / 4),
        "y": pytest.approx(3.0),
    }


def test_columns_of_processes_are_ranked_together() -> None:
    """They may be of different lengths, and one may have none of a class."""
    meters = [Meter(), Meter(), Meter()]
    for meter, values, classes in zip(
        meters, ((2.0, 1.0), (3.0,), ()), ((True, False), (False,), ()), strict=True
    ):
        meter.add(
            {
                "auc": Ranked(column(*values), torch.tensor(classes, dtype=torch.bool)),
                "x": mean(*values),
            }
        )
        meter.add(
            {"other": Ranked(column(*values[:1]), torch.tensor(classes[:1], dtype=torch.bool))}
        )
    wins = (2 > 1) + (2 > 3)
    assert reduce_together(*meters) == {
        "auc": pytest.approx(wins / 2),
        "other": 0.0,
        "x": pytest.approx(2.0),
    }


def test_a_window_costs_one_message_and_one_way_to_the_host() -> None:
    """However much was added."""
    for micro_batches in (1, 7):
        meter, group = Meter(), Several([])
        with simulated_device() as waits:
            values = torch.zeros(2, device=CUDA)
            for _ in range(micro_batches):
                meter.pool(
                    {
                        "x": [Mean(values.sum(), (values > 0).sum())],
                        "auc": [Ranked(values, values > 0)],
                    }
                )
                meter.add({"y": mean(2.0)})
            assert waits == []
            meter.reduce(group)
            assert group.messages == 1
            assert len(waits) == 1  # all else is read after that, on the host


def test_an_empty_meter_has_no_metrics() -> None:
    assert Meter().reduce(SingleProcess()) == {}


@pytest.mark.parametrize("at", [0, 1])
def test_auc_of_nan_is_nan(at: int) -> None:
    values = column(1.0, 0.0, 2.0)
    values[at] = math.nan
    result = auc(values, torch.tensor([True, False, True]))
    assert result is not None
    assert math.isnan(result)


def test_processes_may_lack_metrics_of_others() -> None:
    one, other, idle = Meter(), Meter(), Meter()
    one.add({"x": mean(1.0, 2.0), "rewards/auc": Ranked(column(1.0, 3.0), column(0.0, 1.0))})
    other.add({"y": mean(5.0), "rewards/auc": Ranked(column(2.0), column(1.0)), "x": mean(6.0)})
    assert reduce_together(one, idle, other) == {"rewards/auc": 1.0, "x": 3.0, "y": 5.0}
    assert reduce_together(idle, Meter()) == {}
