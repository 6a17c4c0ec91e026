"""The load-balancing loss of routers in a step of several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.process_groups import run
from tests.tiny_models import tiny
from tests.units import objective, units_for
from valence.distributed.process_group import Group, SingleProcess
from valence.models.build import build_policy, build_reference
from valence.training.metrics import Meter
from valence.training.step import optimizer_step

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def step(group: Group, name: str, count: int, weight: float) -> dict[str, Any]:
    """Loss, metrics and updated weights of one step whose micro-batches have one row each."""
    policy = build_policy(tiny("qwen3_moe", dtype=torch.float32, layers=1), dtype=torch.float32)
    other = tiny("qwen3_moe", dtype=torch.float32, layers=1, seed=5)
    reference = build_reference(policy, fresh_adapter=False, model=other, name="another")
    actual = objective(name, policy, reference, budget=1)
    actual.group, actual.router_aux_loss = group, weight
    sgd = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    rows = units_for(name, count)
    plan = actual.plan(rows, iter(units_for(name, 3, 9)), backward=True)
    outcome, norm, _ = optimizer_step(actual, sgd, rows, None, plan=plan)
    meter = Meter()
    meter.pool(outcome.metrics)
    weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {
        "numbers": {"loss": float(outcome.loss), "norm": norm} | meter.reduce(group),
        "weights": weights,
    }


@pytest.mark.parametrize(("name", "count"), [("dpo", 5), ("aot", 5), ("aot", 1), ("kto", 1)])
def test_several_processes_compute_the_same_term_as_one(name: str, count: int) -> None:
    """Also where a process has no row, or runs one only to take part (aot)."""
    wanted = step(SingleProcess(), name, count, 0.5)
    without = step(SingleProcess(), name, count, 0.0)
    assert not torch.allclose(wanted["weights"], without["weights"], rtol=1e-4, atol=1e-6)
    ranks = run(step, 2, name, count, 0.5, deadline=60.0)
    assert [rank.error for rank in ranks] == ["", ""]
    for rank in ranks:
        assert rank.value["numbers"] == pytest.approx(wanted["numbers"], rel=1e-4, abs=1e-5)
        assert torch.allclose(rank.value["weights"], wanted["weights"], rtol=1e-4, atol=1e-6)
