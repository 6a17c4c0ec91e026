"""The implicit reward that a row reports is the one that its loss optimizes.

For every row that reads pairs, with each modifier: a loss depends on a completion only through its
reward, so that the gradients of both with respect to what is measured of that completion
(log-probability, reference, length, or each token) are parallel; and the loss prefers a pair to the
same pair turned round exactly where the chosen side has the larger reward. A new row is tested
without being named here, unless it belongs in ``SEPARATE`` or ``NOT_COMPARABLE_REVERSED``.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.test_contract import ON, SUMMED
from tests.units import objective, policy_and_reference, units, units_for
from valence.batching.micro_batches import make_micro_batch
from valence.losses import LOSSES, Loss
from valence.losses.metrics import won
from valence.methods import METHODS
from valence.types import PolicyOutput

PAIRED = [name for name, loss in LOSSES.items() if loss.view == "pair"]
OTHERS: dict[str, list[dict[str, Any]]] = {
    "ipo": [{"normalize": False}, {"f_divergence": "alpha"}],
    "dpo": [{"f_divergence": name} for name in ("forward_kl", "js", "alpha")]
    + [{"ld_alpha": 0.0, "humanline": (-0.5, 0.2)}],
    "dpop": [{"penalty": 0.0}, {"penalty": 3.0}],
    "slic": [{"nll_weight": 0.0, "margin": 0.2}],
}
"""More settings of some rows than the defaults and one of each modifier."""
CASES = [(name, {}) for name in PAIRED]
CASES += [
    (name, SUMMED.get(name, {}) | ON[modifier])
    for name in PAIRED
    for modifier in LOSSES[name].modifiers
    if modifier in ("humanline", "ld_alpha", "f_divergence", "smoothing", "wpo")
]
CASES += [(name, settings) for name, several in OTHERS.items() for settings in several]
IDS = [
    " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
    for name, settings in CASES
]

SEPARATE = {"slic", "orpo", "apo_zero", "apo_down", "nca", "bco_pair", "sppo"}
"""Rows that also look at each side by itself.

All others are functions of the difference of both rewards.
"""
NOT_COMPARABLE_REVERSED = {
    "dpop": "its penalty is on the chosen side alone",
    "discopop": "it is not monotone: a small lead costs more than a small deficit",
}
PAIRS = 64


def resolve(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return METHODS[name].resolve(settings)


def measured(loss: Loss, seed: int, *, margin: float = 0.0) -> dict[str, Tensor]:
    """Sums of PAIRS random pairs of unequal lengths, as leaves."""
    draw = torch.Generator().manual_seed(seed)
    view: dict[str, Tensor] = {}
    for side in "wl":
        n = torch.randint(1, 30, (PAIRS,), generator=draw).double()
        mean = -2 + torch.randn(PAIRS, generator=draw, dtype=torch.float64)
        view |= {f"n_{side}": n, f"logp_{side}": n * mean.clamp(max=-0.01)}
        if loss.needs_reference:
            view[f"ref_{side}"] = view[f"logp_{side}"] + 3 * torch.randn(
                PAIRS, generator=draw, dtype=torch.float64
            )
    for values in view.values():
        values.requires_grad_()
    rest = {
        "margin": margin,
        "soft": math.nan,
        "weight": 1.0,
        "confidence_w": -0.3,
        "confidence_l": -0.2,
    }
    view |= {name: torch.full((PAIRS,), value, dtype=torch.float64) for name, value in rest.items()}
    return view | {"delta": torch.tensor(0.2 if loss.shifts else 0.0, dtype=torch.float64)}


def read(loss: Loss, view: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    for modifier in loss.acting("view", settings):
        view = modifier(view, settings=settings)
    return view


def losses_of(loss: Loss, view: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """The loss of each pair as the only one of its step [P]."""
    one_by_one = [
        {k: v[i : i + 1] if v.ndim else v for k, v in view.items()} for i in range(len(view["n_w"]))
    ]
    return (
        torch.cat([loss(item, settings) for item in one_by_one])
        if loss.couples
        else loss(view, settings)
    )


def rewards_of(
    loss: Loss, view: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """As ``Loss.rewards``, with gradient."""
    assert loss.reward is not None
    results: list[Tensor] = []
    for side in "wl":
        sums = {
            name: view[f"{name}_{side}"]
            for name in ("logp", "ref", "n")
            if f"{name}_{side}" in view
        }
        results.append(
            loss.reward(sums | {"chosen": torch.full((len(sums["n"]),), side == "w")}, settings)
        )
    reported = loss.rewards(view, settings)
    assert reported is not None
    assert all(torch.equal(a.detach(), b) for a, b in zip(results, reported, strict=True))
    return results[0], results[1]


def slopes(values: Tensor, leaves: list[Tensor]) -> Tensor:
    """[P, leaves]: gradient of each value with respect to its own pair's leaves."""
    result = torch.autograd.grad(values.sum(), leaves, retain_graph=True, allow_unused=True)
    return torch.stack(
        [
            torch.zeros_like(leaf) if item is None else item
            for item, leaf in zip(result, leaves, strict=True)
        ],
        -1,
    )


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_a_loss_depends_on_a_completion_only_through_its_reward(
    name: str, settings: dict[str, Any]
) -> None:
    loss, inputs = LOSSES[name], resolve(name, settings)
    plain = measured(loss, 0, margin=0.25)
    view = read(loss, plain, inputs)
    values, by_side = losses_of(loss, view, inputs), []
    for side, reward in zip("wl", rewards_of(loss, view, inputs), strict=True):
        leaves = [
            plain[f"{item}_{side}"] for item in ("logp", "ref", "n") if f"{item}_{side}" in plain
        ]
        of_loss, of_reward = slopes(values, leaves), slopes(reward, leaves)
        share = (of_loss * of_reward).sum(-1) / of_reward.square().sum(-1)
        torch.testing.assert_close(of_loss, share[:, None] * of_reward, rtol=1e-9, atol=1e-12)
        by_side.append(share)
    assert (by_side[0].abs() > 1e-9).any()
    if name not in SEPARATE:
        torch.testing.assert_close(by_side[0], -by_side[1], rtol=1e-9, atol=1e-12)


REVERSIBLE = [(name, settings) for name, settings in CASES if name not in NOT_COMPARABLE_REVERSED]


@pytest.mark.parametrize(
    ("name", "settings"), REVERSIBLE, ids=[IDS[CASES.index(case)] for case in REVERSIBLE]
)
def test_a_loss_prefers_the_order_in_which_the_chosen_side_has_the_larger_reward(
    name: str, settings: dict[str, Any]
) -> None:
    loss, inputs = LOSSES[name], resolve(name, settings)
    plain = measured(loss, 1)
    swap = str.maketrans("wl", "lw")
    turned = {
        key[:-1] + key[-1].translate(swap) if key[-2:] in ("_w", "_l") else key: v
        for key, v in plain.items()
    }
    views = [read(loss, item, inputs) for item in (plain, turned)]
    here, there = (losses_of(loss, view, inputs).detach() for view in views)
    chosen, rejected = (item.detach() for item in rewards_of(loss, views[0], inputs))
    clear = (here - there).abs() > 1e-9  # a hinge is flat for both orders beyond its target
    assert clear.sum() > PAIRS // 4
    assert torch.equal((here < there)[clear], (chosen > rejected)[clear])
    assert 0.1 < won(chosen - rejected).mean() < 0.9


def test_the_penalty_of_dpop_is_in_its_reward() -> None:
    """A pair in which both completions become rarer, the rejected one more: d > 0, and the loss is
    above log 2.
    """
    loss, settings = LOSSES["dpop"], resolve("dpop", {"beta": 0.5, "penalty": 50.0})
    view = {
        name: torch.tensor([value], dtype=torch.float64)
        for name, value in {
            "logp_w": -10.1,
            "ref_w": -10.0,
            "n_w": 3.0,
            "logp_l": -11.0,
            "ref_l": -10.0,
            "n_l": 3.0,
        }.items()
    }
    (chosen,), (rejected,) = loss.rewards(view, settings)  # type: ignore[misc]
    assert float(chosen) == pytest.approx(0.5 * (-0.1 - 50 * 0.1))
    assert float(rejected) == pytest.approx(-0.5)
    assert float(loss(view, settings)) > math.log(2)


TOKENS = [
    (name, settings) for name, settings in CASES if settings.keys() & {"humanline", "ld_alpha"}
]


@pytest.mark.parametrize(
    ("name", "settings"), TOKENS, ids=[IDS[CASES.index(case)] for case in TOKENS]
)
def test_token_modifiers_are_in_the_reward(name: str, settings: dict[str, Any]) -> None:
    """Tokens that count less for the loss, or have no gradient, count as little for the reward."""
    loss, inputs = LOSSES[name], resolve(name, settings)
    batch = make_micro_batch(units("preference"))
    draw = torch.Generator().manual_seed(2)
    logp, ref = (
        -2 + torch.randn(len(batch.tokens), generator=draw, dtype=torch.float64) for _ in range(2)
    )
    logp = logp.requires_grad_()
    reference = ref if loss.needs_reference else None
    shared = {"delta": torch.tensor(0.2, dtype=torch.float64)} if loss.shifts else {}
    plain, view = loss.read(batch, PolicyOutput(logp), reference, inputs, shared)
    rewards = rewards_of(loss, view, inputs)
    numbers = loss.measure(batch, PolicyOutput(logp), reference, plain, view, inputs)
    for side, reward in zip(("chosen", "rejected"), rewards, strict=True):
        metric = numbers[f"rewards/{side}"]
        assert float(metric.total / metric.count) == pytest.approx(reward.mean().item(), rel=1e-12)  # type: ignore[union-attr]
    accuracy = numbers["rewards/accuracies"]
    assert float(accuracy.total / accuracy.count) == won(rewards[0] - rewards[1]).mean().item()  # type: ignore[union-attr]
    chosen_only = torch.autograd.grad(rewards[0].sum(), logp, retain_graph=True)[0]
    values = losses_of(loss, view, inputs)
    owner = batch.sequence_ids
    of_loss, of_reward = (
        torch.autograd.grad(v.sum(), logp, retain_graph=True)[0]
        for v in (values, rewards[0] + rewards[1])
    )
    assert (chosen_only != 0).any()
    for sequence in range(batch.sequences):
        rows = batch.scored[owner[batch.scored] == sequence]
        a, b = of_loss[rows], of_reward[rows]
        share = (a * b).sum() / b.square().sum().clamp(min=1e-30)
        torch.testing.assert_close(a, share * b, rtol=1e-9, atol=1e-12)


@cache
def models() -> Any:
    return policy_and_reference()


@pytest.mark.parametrize(("name", "settings"), CASES + [
    (name, settings) for name, loss in LOSSES.items() if loss.data == "judgement"
    for settings in ({}, {"humanline": (-0.05, 0.1)} if "humanline" in loss.modifiers else {})
], ids=str)  # fmt: skip
def test_rows_have_the_rewards_of_the_metrics(name: str, settings: dict[str, Any]) -> None:
    rows = units_for(name)
    outcome = objective(name, *models(), budget=40, **settings).run(rows, backward=False, rows=True)
    assert outcome.micro_batches > 1
    labels = {i: row.label for i, row in enumerate(rows)}
    is_chosen = [
        side.side == 0 if labels[side.unit] is None else labels[side.unit] for side in outcome.rows
    ]
    for metric, wanted in (("rewards/chosen", True), ("rewards/rejected", False)):
        parts = outcome.metrics[metric]
        total, count = (
            sum(float(getattr(part, field)) for part in parts) for field in ("total", "count")
        )
        actual = [
            side.reward
            for side, chosen in zip(outcome.rows, is_chosen, strict=True)
            if chosen == wanted
        ]
        assert count == len(actual)
        assert total / count == pytest.approx(fmean(actual), rel=1e-9)  # type: ignore[arg-type]
