"""Properties of every row of the table of losses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.units import (
    models_for,
    objective,
    policy_and_reference,
    policy_with_values,
    sampled,
    units,
    units_for,
)
from valence.batching.micro_batches import make_micro_batch
from valence.data.sampler import canonical_order
from valence.losses import LOSSES
from valence.losses.average import Average, counts, divisors
from valence.losses.stats import RewardShift, moments, powers, reference_point
from valence.methods import METHODS, method_of
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.models.scores import Scorer
from valence.training.metrics import Meter
from valence.training.step import Objective, StepResult
from valence.types import Mean, MicroBatch, PolicyOutput, TokenizedExample

ROWS = sorted(LOSSES)
SUMMED = {"ipo": {"normalize": False}}
"""What makes a row read sums over whole answers, which some modifiers ask for."""
NEVER_ALONE = 10_000
ONE_ROW, SEVERAL = 1, 60
"""Tokens of a micro-batch: one row of data per micro-batch, or several."""
ON: dict[str, dict[str, Any]] = {
    "humanline": {"humanline": (-0.05, 0.1)},
    "ld_alpha": {"ld_alpha": 0.3},
    "edits": {"shared_weight": 0.3},
    "smoothing": {"label_smoothing": 0.2},
    "f_divergence": {"f_divergence": "js"},
    "wpo": {"wpo": True},
    "nll": {"nll_weight": 0.7},
    "kl_penalty": {"kl_weight": 0.5},
}
"""Settings that turn each modifier on, of those that act on rows as they are stored."""
OF_SAMPLED: dict[str, dict[str, Any]] = {
    "correction": {"correction": 1.1},
    "value": {"value": True},
}
"""Of those that act on answers with what was known of them when they were sampled."""
CASES = [(name, {}) for name in ROWS] + [
    (name, SUMMED.get(name, {}) | ON[modifier])
    for name in ROWS
    for modifier in LOSSES[name].modifiers
    if modifier in ON
]
CASES += [
    ("dpo", {"nll_weight": 1.0, "nll_average": "sequence"}),
    ("dpo", {"f_divergence": "forward_kl", "humanline": (-1.0, 0.3)}),
    ("distill", {"target": "token"}),
    ("distill", {"beta": 0.3}),
    ("distill", {"beta": 0.0, "top_k": 7}),
    ("hindsight", {"target": "distribution"}),
]
NAMES = [" ".join([name, *settings]) for name, settings in CASES]


POLICIES = [name for name in ROWS if LOSSES[name].credit]
ADVANTAGE_CASES = [
    (name, (ON | OF_SAMPLED)[modifier]) for name in POLICIES for modifier in LOSSES[name].modifiers
]
EVERY = {"correction": 1.1, "kl_weight": 0.5}
ADVANTAGE_NAMES = [" ".join([name, *settings]) for name, settings in ADVANTAGE_CASES]
OF_TOKENS = {"target": "token"}
"""What makes a loss with a teacher read only the log-probabilities of sampled tokens."""
models_of = cache(models_for)
valued = cache(policy_with_values)
"""Nothing here changes a weight, and making a model takes longer than asking it."""


def in_order(rows: list[TokenizedExample]) -> list[TokenizedExample]:
    return [rows[i] for i in canonical_order(rows, 0, 0)]


def gradient(
    objective: Objective, rows: list[TokenizedExample]
) -> tuple[StepResult, dict[str, float], Tensor]:
    """The outcome of a step's rows, its pooled numbers, and the gradient of all weights as one
    vector.
    """
    objective.policy.zero_grad()
    outcome = objective.run(in_order(rows), backward=True)
    meter = Meter()
    for name, parts in outcome.metrics.items():
        for part in parts:
            meter.add({name: part})
    meter.add({"loss": Mean(outcome.loss, torch.ones(()))})
    return outcome, meter.reduce(objective.group), slopes(objective.policy)


def slopes(policy: PolicyModel) -> Tensor:
    """The gradients of all weights as one vector, with 0 where nothing reads a weight."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()]
    )


SPLITS = [(ONE_ROW, SEVERAL), pytest.param((24, 33, NEVER_ALONE), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=NAMES)
def test_loss_gradient_and_numbers_do_not_depend_on_micro_batches_or_order(
    name: str, settings: dict[str, Any]
) -> None:
    budgets = (SEVERAL,) if settings else (ONE_ROW, SEVERAL)
    full = same_however_cut(name, settings, models_of(name), units_for(name), budgets)
    assert full.class_sums is None or LOSSES[name].shifts


MORE_BUDGETS = (24, 33, NEVER_ALONE)
MORE_WAYS = [
    (name, settings, (ONE_ROW, MORE_BUDGETS[i % 3]) if settings else MORE_BUDGETS)
    for i, (name, settings) in enumerate(CASES)
]
"""Budgets that the test before leaves out: all of them for each method, and two for each method
with a modifier.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "budgets"), MORE_WAYS, ids=NAMES)
def test_more_ways_to_cut_a_step(
    name: str, settings: dict[str, Any], budgets: Sequence[int]
) -> None:
    same_however_cut(name, settings, models_of(name), units_for(name), budgets)


@pytest.mark.parametrize("budgets", SPLITS, ids=["few", "more"])
@pytest.mark.parametrize("name", POLICIES)
def test_answers_with_what_was_known_of_them_do_not_depend_on_micro_batches_or_order(
    name: str, budgets: Sequence[int]
) -> None:
    """With no reference, where none is read; and with every term."""
    if name == "ppo":
        same_however_cut(name, {**EVERY, "value": True}, valued(), sampled(), budgets)
    else:
        same_however_cut(name, EVERY, models_of(name), sampled(), budgets)
    assert not LOSSES[name].refers(method_of(name).resolve({}))
    same_however_cut(name, {}, (models_of(name)[0], None), sampled(), budgets)


@pytest.mark.parametrize("name", POLICIES)
def test_masked_answers_do_not_depend_on_micro_batches_or_order(name: str) -> None:
    """Also in micro-batches that have nothing else.

    They have no gradient, and count in averages over answers but not in those over tokens.
    """
    settings = {**EVERY, "value": True} if name == "ppo" else EVERY
    models = valued() if name == "ppo" else models_of(name)
    rows = [masked(row) if i % 3 == 1 else row for i, row in enumerate(sampled())]
    same_however_cut(name, settings, models, rows, (ONE_ROW, SEVERAL))

    actual = objective(name, *models, **settings)
    others = [row for row in rows if any(row.answers[0].mask)]
    _, _, with_masked = gradient(actual, rows)
    _, _, without = gradient(actual, others)
    share = 1.0 if LOSSES[name].average == "token_mean" else len(others) / len(rows)
    # The model's norms run in float32, also backward, where 1/9 and 2/3 of 1/6 round differently.
    assert (with_masked - share * without).norm() <= 1e-6 * without.norm()
    outcome, _, nothing = gradient(actual, [masked(row) for row in rows])
    assert float(outcome.loss) == float(nothing.norm()) == 0


def masked(row: TokenizedExample) -> TokenizedExample:
    """The same unit with nothing in its loss mask, as of a truncated answer."""
    (answer,) = row.answers
    return replace(row, answers=(replace(answer, mask=(False,) * len(answer.mask)),))


def same_however_cut(
    name: str,
    settings: dict[str, Any],
    models: tuple[PolicyModel, Reference | None],
    rows: list[TokenizedExample],
    budgets: Sequence[int],
) -> StepResult:
    """Loss, gradient and numbers of a step in one micro-batch and in many, in any order. budgets:
    tokens of a micro-batch.
    """

    def build_objective(budget: int) -> Objective:
        result = objective(name, *models, budget=budget, **settings)
        result.shift = RewardShift(0.3, 2)
        return result

    full, numbers, grad = gradient(build_objective(NEVER_ALONE), rows)
    assert full.micro_batches == 1
    assert grad.norm() > 1e-6
    observed = {1}
    for budget in budgets:
        shuffled = random.Random(budget).sample(rows, len(rows))
        assert shuffled != rows
        cut, cut_numbers, cut_grad = gradient(build_objective(budget), shuffled)
        observed.add(cut.micro_batches)
        assert cut_numbers.keys() == numbers.keys()
        for key, value in numbers.items():
            assert cut_numbers[key] == pytest.approx(value, rel=1e-10, abs=1e-12), key
        torch.testing.assert_close(cut_grad, grad, rtol=1e-10, atol=1e-12)
        if full.class_sums is not None:
            torch.testing.assert_close(cut.class_sums, full.class_sums, rtol=1e-10, atol=1e-12)
    assert len(observed) > 1
    assert SEVERAL not in budgets or any(1 < count < len(rows) for count in observed)
    assert ONE_ROW not in budgets or len(rows) in observed
    return full


@pytest.mark.parametrize(("name", "settings"), CASES[len(ROWS) :], ids=NAMES[len(ROWS) :])
def test_a_modifier_that_is_on_changes_the_gradient(name: str, settings: dict[str, Any]) -> None:
    plain = plain_gradient(name)
    _, _, changed = gradient(objective(name, *models_of(name), **settings), units_for(name))
    assert (changed - plain).norm() > 1e-3 * plain.norm()


@cache
def plain_gradient(name: str) -> Tensor:
    return gradient(objective(name, *models_of(name), **SUMMED.get(name, {})), units_for(name))[2]


@pytest.mark.parametrize(("name", "settings"), ADVANTAGE_CASES, ids=ADVANTAGE_NAMES)
def test_a_modifier_of_sampled_answers_changes_the_gradient(
    name: str, settings: dict[str, Any]
) -> None:
    """Also next to answers without a record of their sampling, on which it has no effect."""
    policy, reference = valued() if settings.get("value") else models_of(name)
    off: dict[str, Any] = {"correction": None}
    _, _, plain = gradient(objective(name, policy, reference, **off), sampled())
    _, _, changed = gradient(objective(name, policy, reference, **off | settings), sampled())
    assert (changed - plain).norm() > 1e-3 * plain.norm()
    if settings.keys() & {"correction", "value"}:
        unknown = sampled(known=("adv", "old"))
        _, _, plain = gradient(objective(name, policy, reference, **off), unknown)
        _, _, changed = gradient(objective(name, policy, reference, **off | settings), unknown)
        torch.testing.assert_close(changed, plain, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in ROWS if LOSSES[name].needs_teacher])
def test_a_teacher_that_is_the_policy_and_reads_the_same_prompt_has_no_signal(name: str) -> None:
    policy, _ = equal_models()
    rows = [replace(row, teacher_ids=row.prompt_ids) for row in units_for(name)]
    outcome, numbers, grad = gradient(objective(name, policy, None), rows)
    assert float(outcome.loss) == float(grad.norm()) == numbers["signal/size"] == 0
    rows = [replace(row, teacher_ids=(5, *row.prompt_ids)) for row in rows]
    _, numbers, grad = gradient(objective(name, policy, None), rows)
    assert numbers["signal/size"] > 0.01
    assert grad.norm() > 1e-4


@pytest.mark.parametrize("name", [name for name in ROWS if LOSSES[name].needs_teacher])
def test_sampled_answers_with_a_teacher_do_not_depend_on_micro_batches_or_order(name: str) -> None:
    """The log-probabilities of the sampling policy change the weights of their tokens."""
    draw = random.Random(0)
    rows: list[TokenizedExample] = []
    for row in units_for(name):
        (answer,) = row.answers
        old = tuple(-4.5 + draw.gauss(0, 0.5) for _ in answer.ids)
        rows.append(replace(row, answers=(replace(answer, columns=(("old", old),)),)))
    same_however_cut(name, OF_TOKENS, models_of(name), rows, (ONE_ROW, SEVERAL))
    actual = objective(name, *models_of(name), **OF_TOKENS)
    grad, plain = (gradient(actual, of)[2] for of in (rows, units_for(name)))
    assert (grad - plain).norm() > 1e-2 * grad.norm()


@cache
def equal_models() -> tuple[PolicyModel, Reference]:
    policy, same = policy_and_reference()
    same.engine.load_state_dict(policy.state_dict())  # type: ignore[attr-defined]
    return policy, same


@pytest.mark.parametrize("name", [name for name in ROWS if LOSSES[name].needs_reference])
def test_finite_and_exact_when_policy_equals_reference(name: str) -> None:
    _, numbers, grad = gradient(objective(name, *equal_models()), units(METHODS[name].kind))
    assert torch.isfinite(grad).all()
    assert all(abs(value) < 1e6 for value in numbers.values())
    for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "kl/raw"):
        assert numbers.get(key, 0.0) == pytest.approx(0.0, abs=1e-12)
    assert numbers.get("rewards/auc", 0.5) == 0.5
    assert numbers.get("rewards/accuracies", 0.5) == 0.5


def of_the_step(
    result: Objective, batch: MicroBatch
) -> tuple[dict[Average, Tensor], dict[str, Tensor]]:
    """What averages divide by, and what losses share, in a step of this micro-batch alone."""
    loss, shared = result.method.loss, dict[str, Tensor]()
    names = loss.averages(result.settings)
    if loss.shifts:
        shared["delta"] = torch.tensor(result.shift.delta)
    if loss.credit is not None:
        scores = torch.zeros(0) if batch.target is None else batch.target[:, 0]
        shared["moments"] = moments(powers(scores.double()))
    return divisors(names, counts(names, [batch])), shared


@pytest.mark.parametrize("name", [name for name in ROWS if not LOSSES[name].is_reward_model])
def test_prompts_get_no_gradient_and_answers_the_declared_direction(name: str) -> None:
    """At r = 0 (and equal likelihoods), by the gradient of the loss with respect to every token's
    log-probability.
    """
    policy, reference = models_of(name)
    settings = OF_TOKENS if LOSSES[name].needs_teacher else {}
    actual = objective(name, policy, reference, **settings)
    loss = actual.method.loss
    rows = [
        replace(row, margin=0.0, soft=None) for row in units(METHODS[name].kind) if row.weight > 0
    ]
    (batch,) = actual.divide(rows).local
    n = torch.bincount(batch.cpu_scored[1])[batch.sequence_ids].double()
    logp = (-batch.loss_mask.double() / n).requires_grad_()
    ref = logp.detach() if actual.method.needs_reference else None
    if loss.needs_teacher:  # which finds every token more likely
        teacher = logp.detach()[batch.scored] + 0.5
        batch = replace(batch, token_columns={**batch.token_columns, "teacher": teacher})
    count, shared = of_the_step(actual, batch)
    if actual.method.needs_kl_pairs:
        shared["z0"] = torch.zeros(batch.sequences, dtype=torch.float64)
    plain, view = loss.read(batch, PolicyOutput(logp), ref, actual.settings, shared)
    loss.total(plain, view, actual.settings, count).backward()
    assert logp.grad is not None
    assert (logp.grad[~batch.loss_mask] == 0).all()
    good = batch.side == 0 if batch.label is None else batch.label
    sides = {"chosen": good, "rejected": ~good}
    if loss.credit is not None:
        assert batch.target is not None
        credit = loss.credit(batch.target[:, 0].double(), batch.unit, shared["moments"])
        sides = {"chosen": credit > 0, "rejected": credit < 0}
    for side, direction in loss.direction.items():
        tokens = batch.loss_mask & sides[side][batch.sequence_ids]
        assert tokens.any()
        result = -logp.grad[tokens]
        if loss.couples and batch.label is not None:  # some of the larger class are left out
            result = result[result != 0]
        assert (torch.sign(result) == direction).all(), side


@pytest.mark.parametrize("name", POLICIES)
def test_a_given_advantage_has_its_direction(name: str) -> None:
    """Where the policy that answers is the one that trains: of every token, or of all of an answer
    that is judged as a whole.
    """
    actual = objective(name, models_of(name)[0], None)
    loss = actual.method.loss
    (batch,) = actual.divide([row for row in sampled(known=("adv",)) if row.weight > 0]).local
    logp = (-batch.loss_mask.double()).requires_grad_()
    count, shared = of_the_step(actual, batch)
    plain, view = loss.read(batch, PolicyOutput(logp), None, actual.settings, shared)
    loss.total(plain, view, actual.settings, count).backward()
    assert logp.grad is not None
    assert (logp.grad[~batch.loss_mask] == 0).all()
    adv = (
        view["adv"][batch.sequence_ids[batch.scored]]
        if loss.view == "answer"
        else batch.token_columns["adv"]
    )
    assert (torch.sign(-logp.grad[batch.scored]) == torch.sign(adv)).all()


@pytest.mark.parametrize("name", [name for name in ROWS if LOSSES[name].is_reward_model])
def test_scores_move_in_the_declared_direction(name: str) -> None:
    """From scores of zero. What the data gives no target for gets no gradient."""
    policy, _ = models_of(name)
    assert isinstance(policy, Scorer)
    actual = objective(name, policy, None)
    loss, rows = (
        actual.method.loss,
        [replace(row, margin=0.0) for row in units_for(name) if row.weight > 0],
    )
    (batch,) = actual.divide(rows).local
    count, shared = of_the_step(actual, batch)
    if policy.thresholds is not None:
        shared["thresholds"] = policy.thresholds.detach()
    attributes = 1 if batch.target is None else batch.target.shape[1]
    score = torch.zeros(batch.sequences, attributes, dtype=torch.float64, requires_grad=True)
    blank = torch.zeros(len(batch.tokens), dtype=torch.float64)
    plain, view = loss.read(batch, PolicyOutput(blank, score=score), None, actual.settings, shared)
    loss.total(plain, view, actual.settings, count).backward()
    assert score.grad is not None
    if batch.target is None:
        up, down = (batch.side == 0)[:, None], (batch.side == 1)[:, None]
    else:
        middle = 3.0 if "thresholds" in shared else 0.5
        up, down = batch.target > middle, batch.target < middle
        assert (score.grad[batch.target.isnan()] == 0).all()
    assert (torch.sign(-score.grad[up]) == loss.direction["chosen"]).all()
    assert (torch.sign(-score.grad[down]) == loss.direction["rejected"]).all()


@pytest.mark.parametrize("name", ROWS)
def test_a_weight_multiplies_and_never_divides(name: str) -> None:
    """sum(w * loss) / count: doubling all weights doubles loss and gradient."""
    policy, reference = models_of(name)
    rows = units_for(name)
    once, _, grad = gradient(objective(name, policy, reference), rows)
    twice, _, doubled = gradient(
        objective(name, policy, reference), [replace(r, weight=2 * r.weight) for r in rows]
    )
    assert float(twice.loss) == pytest.approx(2 * float(once.loss), rel=1e-12)
    torch.testing.assert_close(doubled, 2 * grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", [NEVER_ALONE, 40], ids=["with those that train", "apart"])
@pytest.mark.parametrize("name", [name for name in ROWS if LOSSES[name].statistic])
def test_measuring_sequences_get_no_gradient(name: str, budget: int) -> None:
    """The gradient is that of the loss with its statistic held fixed."""
    policy, reference = models_of(name)
    assert reference is not None
    actual = objective(name, policy, reference, budget=budget)
    rows = in_order(units(METHODS[name].kind))
    outcome, numbers, grad = gradient(actual, rows)
    assert (outcome.micro_batches == 1) is (budget == NEVER_ALONE)
    assert actual.method.loss.statistic is not None
    pairs, _ = actual.make_kl_pairs(rows, ())
    with torch.no_grad():
        batch = make_micro_batch(pairs)
        _, sums = actual.method.loss.read(
            batch, policy(batch), reference(batch), actual.settings, view="seq"
        )
    z0, raw = reference_point(
        actual.method.loss.statistic(sums["logp"], sums["ref"], batch.group, 1)
    )
    assert raw.abs().max() > 1e-3  # else this would hold by accident
    assert numbers["kl/raw"] == pytest.approx(float(raw), rel=1e-10)
    policy.zero_grad()
    for batch in actual.divide(rows).local:
        shared = {"z0": torch.full((batch.sequences,), float(z0), dtype=torch.float64)}
        plain, view = actual.method.loss.read(
            batch, policy(batch), reference(batch), actual.settings, shared
        )
        actual.method.loss.total(
            plain, view, actual.settings, {"seq_mean": torch.tensor(len(rows))}
        ).backward()
    torch.testing.assert_close(grad, slopes(policy), rtol=1e-10, atol=1e-12)


def test_an_absent_class_is_left_out_and_never_zero() -> None:
    policy, reference = models_of("kto")
    rows = [replace(row, label=True) for row in units("judgement")]
    _, numbers, grad = gradient(objective("kto", policy, reference), rows)
    assert "rewards/chosen" in numbers
    assert (
        not {"rewards/rejected", "rewards/margins", "rewards/auc", "logps/rejected"}
        & numbers.keys()
    )
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", ROWS)
def test_a_token_of_the_prompt_is_context_only(name: str) -> None:
    """Summed log-probabilities are over completions: a longer prompt leaves the counts as they
    are.
    """
    policy, reference = models_of(name)
    actual = objective(name, policy, reference)
    rows = in_order(units_for(name))
    outcome = actual.run(rows, backward=False, rows=True)
    measured = {(r.unit, r.side): r.tokens for r in outcome.rows}
    assert measured == {
        (i, side): len(a.ids) for i, row in enumerate(rows) for side, a in enumerate(row.answers)
    }
