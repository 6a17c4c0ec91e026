"""A step of several processes equals that of one for every row of the table of losses, also if the
number of rows is not divisible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.process_groups import run
from tests.errors import check_error
from tests.units import models_for, objective, units_for
from valence.distributed.context_parallel import context_parallel
from valence.distributed.process_group import Group, SingleProcess
from valence.losses import LOSSES
from valence.training.metrics import Meter
from valence.training.step import optimizer_step

pytestmark = pytest.mark.dist


def steps(
    world: Group, count: int, budget: int, names: Sequence[str], context: int = 1
) -> dict[str, Any]:
    """What two steps of each method measure, and a digest of the weights after them. names: of
    methods; "hindsight distribution" sets loss.target. context: how many processes share the tokens
    of a micro-batch.
    """
    group, neighbours = world.split(context, "context")
    return {case: steps_of_case(world, group, neighbours, count, budget, case) for case in names}


def steps_of_case(
    world: Group, group: Group, neighbours: Group, count: int, budget: int, case: str
) -> dict[str, Any]:
    torch.manual_seed(0)
    name, _, target = case.partition(" ")
    policy, reference = models_for(name)
    for engine in (policy, *([reference.engine] if reference else [])):  # type: ignore[union-attr]
        context_parallel(engine, neighbours, world)
    settings: dict[str, Any] = {"target": target} if target else {}
    actual = objective(name, policy, reference, budget=budget, **settings)
    actual.group = group
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    message: list[dict[str, float]] = []
    for seed in (0, 1):
        meter = Meter()
        rows = units_for(name, count, seed)
        plan = actual.plan(rows, iter(units_for(name, 3, 9)), backward=True)
        outcome, norm, applied = optimizer_step(actual, optimizer, rows, 1.0, plan=plan)
        meter.pool(outcome.metrics)
        message.append(
            {"loss": float(outcome.loss), "norm": norm, "applied": applied} | meter.reduce(group)
        )
        message[-1] |= {
            "tokens": outcome.tokens,
            "distinct": outcome.num_unique_tokens,
            "shift": actual.shift.delta,
        }
    evaluated = actual.run(units_for(name, count, 3), backward=False, rows=True)
    weights = [p.detach() for p in policy.parameters()]
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in weights)).hexdigest()
    return {
        "steps": message,
        "digest": digest,
        "sum": sum(float(p.double().abs().sum()) for p in weights),
        "evaluated": float(evaluated.loss),
        "rows": len(evaluated.rows),
        "tokens_of": evaluated.tokens_per_rank,
    }


@cache
def steps_alone(count: int, budget: int, case: str) -> dict[str, Any]:
    world = SingleProcess()
    return steps_of_case(world, world, world, count, budget, case)


SOME = ("kto", "dpo", "sft", "bco", "aot_unpaired", "pointwise", "bradley_terry", "ppo")


SHARED = ("kto", "dpo", "hindsight distribution")
slow = pytest.mark.slow


@pytest.mark.parametrize(("size", "count", "budget", "names", "context"), [
    pytest.param(2, 7, 40, tuple(LOSSES), 1, id="2-all", marks=slow),
    pytest.param(4, 7, 10_000, SOME, 1, id="4", marks=slow),
    pytest.param(4, 3, 10_000, SOME, 1, id="4-of-3-rows", marks=slow),
    pytest.param(2, 7, 40, SHARED, 2, id="2-shared-few"),
    pytest.param(2, 7, 10_000, (*LOSSES, *SHARED[2:]), 2, id="2-shared-all", marks=slow),
    pytest.param(4, 7, 40, SOME, 4, id="4-shared", marks=slow),
    pytest.param(4, 3, 40, SOME, 2, id="4-shared-by-2", marks=slow),
])  # fmt: skip
def test_a_step_of_several_processes_is_that_of_one(
    size: int, count: int, budget: int, names: Sequence[str], context: int
) -> None:
    """Of every method on two; of some on four: seven rows, and three, of which one process has
    none. Processes have other rows, or other tokens of the same rows.
    """
    ranks = run(steps, size, count, budget, names, context, deadline=60.0)
    assert [rank.error for rank in ranks] == [""] * size
    for name in names:
        wanted = steps_alone(count, budget, name)
        item = [rank.value[name] for rank in ranks]
        assert len({outcome["digest"] for outcome in item}) == 1, name
        for result in item:
            for one, other in zip(result["steps"], wanted["steps"], strict=True):
                assert one.keys() == other.keys(), name
                # Tokens that run more than once depend on how a step was cut.
                same = {key: value for key, value in other.items() if key not in ("tokens",)}
                assert {key: one[key] for key in same} == pytest.approx(
                    same, rel=1e-6, abs=1e-9, nan_ok=True
                ), name
            assert result["sum"] == pytest.approx(wanted["sum"], rel=1e-9), name
            assert result["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-6, abs=1e-9), (
                name
            )
            assert result["tokens_of"] == item[0]["tokens_of"]
        assert sum(outcome["rows"] for outcome in item) == context * wanted["rows"], name
        assert len(item[0]["tokens_of"]) == size // context


def without_memory(world: Group, place: str) -> None:
    """A step of two processes that share tokens, in which memory runs out in rank 1 alone."""
    group, neighbours = world.split(2, "context")
    policy, reference = models_for("dpo")
    for engine in (policy, reference.engine):  # type: ignore[union-attr]
        context_parallel(engine, neighbours, world)
    actual = objective("dpo", policy, reference, budget=40)
    actual.group = group

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1 and place == "gradients":
            patch.setattr(type(actual.gradient_group), "reduce_gradients", fail)
        if world.rank == 1 and place == "sizes":
            patch.setattr(type(actual), "_sum_over_ranks", fail)
        optimizer_step(actual, optimizer, units_for("dpo", 4, 0), 1.0)


@pytest.mark.parametrize("place", ["gradients", "sizes"])
def test_out_of_memory_that_the_others_do_not_notice_is_an_error(place: str) -> None:
    _, second = run(without_memory, 2, place, deadline=5.0)
    assert second.mistake is not None
    check_error(second.mistake, "out-of-memory", where="train.micro_batch_tokens")
