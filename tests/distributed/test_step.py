"""A step of several processes is that of one: for every row of the table of losses, with rows that
do not divide evenly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.distributed.rig import run
from tests.units import models_for, objective, units_for
from valence.distributed.process_group import Group, SingleProcess
from valence.losses import LOSSES
from valence.reports.metrics import Meter
from valence.trainer.step import optimizer_step

pytestmark = pytest.mark.dist


def steps(group: Group, count: int, budget: int, names: Sequence[str]) -> dict[str, Any]:
    """What two steps of each method measure, and a digest of the weights after them."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name in names:
        policy, reference = models_for(name)
        made = objective(name, policy, reference, budget=budget)
        made.group = group
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
        said: list[dict[str, float]] = []
        for seed in (0, 1):
            meter = Meter()
            rows = units_for(name, count, seed)
            outcome, norm, applied = optimizer_step(
                made, optimizer, rows, iter(units_for(name, 3, 9)), 1.0
            )
            meter.pool(outcome.metrics)
            said.append(
                {"loss": float(outcome.loss), "norm": norm, "applied": applied}
                | meter.reduce(group)
            )
            said[-1] |= {
                "tokens": outcome.tokens,
                "distinct": outcome.num_unique_tokens,
                "shift": made.shift.delta,
            }
        evaluated = made.run(units_for(name, count, 3), backward=False, rows=True)
        weights = [p.detach() for p in policy.parameters()]
        digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in weights)).hexdigest()
        found[name] = {
            "steps": said,
            "digest": digest,
            "sum": sum(float(p.double().abs().sum()) for p in weights),
            "evaluated": float(evaluated.loss),
            "rows": len(evaluated.rows),
            "tokens_of": evaluated.tokens_per_rank,
        }
    return found


SOME = ("kto", "dpo", "sft", "bco", "aot_unpaired", "pointwise", "bradley_terry", "ppo")


FEW = ("kto", "dpo", "bco", "aot")
slow = pytest.mark.slow


@pytest.mark.parametrize(("size", "count", "budget", "names"), [
    pytest.param(2, 7, 40, FEW, id="2-few"),
    pytest.param(2, 7, 40, tuple(LOSSES), id="2-all", marks=slow),
    pytest.param(4, 7, 10_000, SOME, id="4", marks=slow),
    pytest.param(4, 3, 10_000, SOME, id="4-of-3-rows", marks=slow),
])  # fmt: skip
def test_a_step_of_several_processes_is_that_of_one(
    size: int, count: int, budget: int, names: Sequence[str]
) -> None:
    """Of every method on two; of some on four: seven rows, and three, of which one process has
    none.
    """
    alone = steps(SingleProcess(), count, budget, names)
    ranks = run(steps, size, count, budget, names, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    for name, wanted in alone.items():
        each = [rank.value[name] for rank in ranks]
        assert len({found["digest"] for found in each}) == 1, name
        for found in each:
            for one, other in zip(found["steps"], wanted["steps"], strict=True):
                assert one.keys() == other.keys(), name
                # Tokens that run more than once depend on how a step was cut.
                same = {key: value for key, value in other.items() if key not in ("tokens",)}
                assert {key: one[key] for key in same} == pytest.approx(
                    same, rel=1e-6, abs=1e-9, nan_ok=True
                ), name
            assert found["sum"] == pytest.approx(wanted["sum"], rel=1e-9), name
            assert found["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-6, abs=1e-9), (
                name
            )
            assert found["tokens_of"] == each[0]["tokens_of"]
        assert sum(found["rows"] for found in each) == wanted["rows"], name
        assert len(each[0]["tokens_of"]) == size
