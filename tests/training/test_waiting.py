"""On a CUDA device the host launches a full step and synchronizes once, at its end. Tested on a
simulated device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.prefix_trees import conversations
from tests.simulated_cuda import CUDA, simulated_device
from tests.tiny_models import tiny
from tests.units import models_for, objective, units_for
from valence.batching.micro_batches import make_micro_batch
from valence.methods import METHODS
from valence.models.build import build_policy
from valence.models.values import add_values
from valence.training.step import optimizer_step
from valence.types import sent

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


def moved(policy: Any, reference: Any) -> tuple[Any, Any]:
    for item in [policy, *([reference.engine] if reference else [])]:
        for engine in item.to(CUDA, non_blocking=True).modules():
            engine.attention_backend = "flex"  # as on a device from the start
    return policy, reference


BUDGETS = {"preference": 90, "ranking": 90}
"""Tokens of a micro-batch, 30 if not named: each kind of rows runs in a few micro-batches."""
FAST = ("dpo", "ppo", "bradley_terry")
"""Methods that differ in what they read of a step."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in METHODS],
)
def test_no_micro_batch_is_waited_for(name: str) -> None:
    with simulated_device() as waits:
        policy, reference = moved(*models_for(name))
        budget = BUDGETS.get(METHODS[name].kind, 30)
        actual = objective(name, policy, reference, budget=budget)
        rows = units_for(name)
        plan = actual.plan(rows, iter(units_for(name, 3, 9)), backward=True)
        outcome = actual.run(rows, plan=plan, backward=True)
        assert outcome.loss.device == CUDA
        assert outcome.micro_batches >= 3
        assert all(
            p.grad is not None and p.grad.device == CUDA
            for p in policy.parameters()
            if p.requires_grad
        )
        assert waits == []


def test_a_step_is_waited_for_once_when_all_of_it_has_been_handed_over() -> None:
    with simulated_device() as waits:
        policy, reference = moved(*models_for("kto"))
        actual = objective("kto", policy, reference, budget=30)
        optimizer = torch.optim.AdamW(policy.parameters())
        rows = units_for("kto")
        plan = actual.plan(rows, iter(units_for("kto", 3, 9)), backward=True)
        _, _, applied = optimizer_step(actual, optimizer, rows, 1.0, plan=plan)
        assert applied
        assert len(waits) == 1
        assert waits[0].startswith("step.py:optimizer_step:")


LORA = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})


@pytest.mark.parametrize("trunk", ["shared", "separate", None])
def test_adapters_and_critics_do_not_block_the_host(trunk: Any) -> None:
    with simulated_device() as waits:
        policy = build_policy(
            tiny(dtype=torch.float32), dtype=torch.float32, lora=None if trunk else LORA
        )
        if trunk:
            add_values(policy, trunk=trunk)
        policy, _ = moved(policy, None)
        units = conversations()
        batch = make_micro_batch(units, device=CUDA)
        with policy.tempered(0.7):
            out = policy(batch, ("entropy", "sum_sq", *(["value"] if trunk else [])))
        (out.logp.sum() + out.entropy.sum() + (out.value.sum() if trunk else 0)).backward()
        assert waits == []


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x.sum() > 0),
    "a list": lambda x: x.tolist(),
    "numbers on the host": lambda x: x.cpu(),
    "numbers moved to the host": lambda x: x.to(torch.device("cpu")),
    "places": lambda x: x.nonzero(),
    "a choice of rows": lambda x: x[x > 0],
    "places on the host": lambda x: x[torch.tensor([0])],
    "a new tensor": lambda x: torch.tensor([1.0], device=CUDA),
    "a new one like it": lambda x: x.new_tensor([1]),
    "numbers of the host": lambda x: torch.ones(3).to(CUDA),
    "numbers of the host put there": lambda x: x.copy_(torch.ones(3)),
}
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "two devices": lambda x: x + torch.ones(3),
    "places on the device": lambda x: torch.ones(3)[x.long()],
}


@pytest.mark.parametrize("kind", [*WAITS, *REFUSED])
def test_the_simulated_device_reports_operations_that_block_the_host(kind: str) -> None:
    with simulated_device() as waits:
        x = sent(torch.ones(3), CUDA)
        assert x.device == CUDA
        assert x.is_cuda
        assert (x.sum() * torch.tensor(2.0)).is_cuda
        assert torch.ones(3)[torch.tensor([True, False, True])].tolist() == [1.0, 1.0]
        assert waits == []
        if kind in WAITS:
            WAITS[kind](x)
            assert len(waits) == 1
        else:
            with pytest.raises(AssertionError):
                REFUSED[kind](x)
