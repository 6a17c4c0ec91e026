"""A device is waited for once per optimizer step, not once per micro-batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.fetched import Fetched
from tests.units import models_for, objective, units_for
from valence.data.pack import pack
from valence.training.methods import METHODS
from valence.training.step import optimizer_step

ROWS = 8


@pytest.mark.parametrize("method", METHODS)
def test_more_micro_batches_are_not_waited_for_more_often(method: str) -> None:
    policy, reference = models_for(method)
    rows = units_for(method, ROWS)
    stands_still = torch.optim.SGD(policy.parameters(), lr=0.0)
    found: list[Counter[str]] = []
    cuts = {len(pack(rows, budget)): budget for budget in range(400, 10, -1)}
    for micro_batches in (1, 7):
        made = objective(method, policy, reference, budget=cuts[micro_batches])
        with Fetched() as fetched:
            outcome, _, applied = optimizer_step(made, stands_still, rows, reversed(rows), clip_norm=1.0)
        assert applied
        assert outcome.micro_batches == micro_batches
        found.append(Counter(fetched.calls))
    assert found[0] == found[1]


def test_what_waits_is_seen() -> None:
    host = torch.tensor([1.0, 2.0])
    with Fetched() as fetched:
        there = host.to(torch.device("cpu"))
        _ = there.sum().item(), there[there > 1], float(there[0]), there.nonzero(), there.cpu(), bool((host * there)[0] > 0)
        _ = there.sum() + there[0] * there[torch.tensor([1])], there.to(torch.float64), float(host[0]), float(there.cpu()[0])
    assert fetched.names == ["item", "masked_select", "__float__", "nonzero", "cpu", "__bool__", "cpu"]
    assert {call.split()[1].split(":")[0] for call in fetched.calls} == {"test_waiting.py"}
