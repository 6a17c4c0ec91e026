"""The policy's entropy in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.training.online.recipes import make, recipe
from tests.units import models_for, objective, units_for
from valence.batching.micro_batches import make_micro_batch
from valence.losses import LOSSES
from valence.training.metrics import Meter


def measured(
    name: str, budget: int, *, backward: bool, entropy: bool = True
) -> tuple[dict[str, float], torch.Tensor]:
    policy, reference = models_for(name)
    actual = objective(name, policy, reference, budget=budget)
    outcome = actual.run(units_for(name), backward=backward, entropy=entropy)
    assert (outcome.micro_batches > 1) == (budget < 1000)
    meter = Meter()
    meter.pool(outcome.metrics)
    gradient = [torch.zeros(1) if p.grad is None else p.grad.flatten() for p in policy.parameters()]
    return meter.reduce(actual.group), torch.cat(gradient)


@pytest.mark.parametrize(
    "name",
    [
        "kto",
        "ppo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "aot", "sft", "grpo")),
    ],
)
def test_entropy_is_that_of_the_whole_vocabulary_for_every_split(name: str) -> None:
    """Against the softmax of the model's own logits, one sequence at a time in float64."""
    policy, _ = models_for(name)
    batch = make_micro_batch(units_for(name))
    entropies: list[float] = []
    for s in range(batch.sequences):
        rows = batch.rows(s)
        read = torch.nonzero(batch.loss_mask[rows] & (batch.sequence_ids[rows] == s)).squeeze(1)
        with policy.stock(), torch.no_grad():
            p = policy.causal(input_ids=batch.tokens[rows][None]).logits[0].double().softmax(-1)
        entropies += (-(p * p.log()).sum(-1))[read - 1].tolist()
    wanted = sum(entropies) / len(entropies)
    for budget in (40, 10_000):
        for backward in (False, True):
            assert measured(name, budget, backward=backward)[0]["entropy"] == pytest.approx(
                wanted, rel=1e-9
            )


def test_measuring_entropy_changes_neither_gradient_nor_other_numbers() -> None:
    numbers, gradient = measured("dpo", 40, backward=True)
    plain, plain_gradient = measured("dpo", 40, backward=True, entropy=False)
    assert numbers.keys() - plain.keys() == {"entropy"}
    assert {name: numbers[name] for name in plain} == plain
    assert torch.equal(gradient, plain_gradient)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.is_reward_model])
def test_reward_models_have_no_entropy(name: str) -> None:
    assert "entropy" not in measured(name, 10_000, backward=True)[0]


@pytest.mark.parametrize("method", ["grpo", pytest.param("online_dpo", marks=pytest.mark.slow)])
def test_records_of_a_run_have_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the steps that are logged compute it."""
    from valence.training import step

    make(tmp_path)
    requests: list[bool] = []
    run = step.Objective.run

    def note(self: Any, *rest: Any, **options: Any) -> Any:
        if options.get("backward"):
            requests.append(options["entropy"])
        return run(self, *rest, **options)

    monkeypatch.setattr(step.Objective, "run", note)
    settings = recipe(
        tmp_path, method, run={"log_every": 3}, train={"max_steps": 5}, data={"eval": []}
    )
    valence.train(settings | {"eval": {}}, quiet=True)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert requests == [False, False, True, False, True]
    assert [(record["step"], 0 < record["entropy"] < 7) for record in records] == [
        (3, True),
        (5, True),
    ]
