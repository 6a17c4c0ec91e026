"""The loss of a step and its derivative, compared with reference formulas on logits in Python
numbers, for every row and modifier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch

from tests.golden.model_outputs import ModelOutputs, Of, measured, models, rows, slope
from tests.golden.step_formulas import (
    IDLE,
    STEP_FORMULAS,
    Step,
    answers,
    reference_points,
    value_error,
)
from tests.units import objective
from valence.batching.kl_pairs import make_kl_pairs
from valence.batching.micro_batches import StepPacker
from valence.distributed.process_group import SingleProcess
from valence.losses import LOSSES
from valence.losses.modifiers import MODIFIERS
from valence.methods import METHODS
from valence.training.evaluate import evaluate
from valence.training.metrics import Meter
from valence.training.step import Objective, optimizer_step
from valence.types import Kind

BUDGET, TOGETHER = 55, 10_000
"""Tokens of a micro-batch: a step has several of unequal size, or one."""

ON: dict[str, list[dict[str, Any]]] = {
    "humanline": [{"humanline": (-0.6, 1.5)}, {"humanline": (-1.0, 0.3)}],
    "ld_alpha": [{"ld_alpha": 0.25}],
    "edits": [{"shared_weight": 0.25}, {"shared_weight": 0.0}],
    "smoothing": [{"label_smoothing": 0.2}],
    "f_divergence": [{"f_divergence": name} for name in ("forward_kl", "js", "alpha")],
    "wpo": [{"wpo": True}],
    "nll": [{"nll_weight": 0.7}, {"nll_weight": 0.7, "nll_average": "sequence"}],
    "kl_penalty": [{"kl_weight": 0.3}, {"kl_weight": 0.3, "kl_estimator": "k2"}],
}
"""Settings that turn each modifier on."""
SUMMED: dict[str, dict[str, Any]] = {"ipo": {"normalize": False}}
CASES = [(name, {}) for name in STEP_FORMULAS]
CASES += [
    (name, (SUMMED.get(name, {}) if modifier in ("ld_alpha", "edits") else {}) | on)
    for name in STEP_FORMULAS
    for modifier in LOSSES[name].modifiers
    for on in ON.get(modifier, [])
]
CASES += [
    (
        "dpo",
        {
            "humanline": (-0.6, 1.5),
            "ld_alpha": 0.25,
            "label_smoothing": 0.1,
            "f_divergence": "js",
            "wpo": True,
            "nll_weight": 1.0,
        },
    ),
    ("kto", {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}),
    *(
        ("kto", {"z0_scope": {"group": 4, "pairing": pairing}})
        for pairing in ("next", "previous", "reversed")
    ),
    ("aot_unpaired", {"label_smoothing": 0.2}),
    ("ipo", {"tau": 0.4, "normalize": False}),
    ("dpop", {"penalty": 0.5}),
    ("dpo", {"f_divergence": "alpha", "f_alpha": 0.8}),
    ("grpo", {"dual_clip": 1.5, "eps_high": 0.28}),
    ("dr_grpo", {"max_tokens": 40}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.2, "dual_clip": 1.5}),
    ("cispo", {"eps_high": 1.1}),
    ("grpo", {"humanline": (-0.6, 1.5), "kl_weight": 0.3}),
    ("bradley_terry", {"center_coef": 0.25}),
    ("hindsight", {"clip": 0.1}),
    ("hindsight", {"target": "distribution", "beta": 0.3}),
    ("distill", {"target": "token", "clip": 0.1}),
    *(("distill", {"beta": beta}) for beta in (0.0, 0.3)),
    *(("distill", {"beta": beta, "top_k": 7}) for beta in (0.0, 0.3, 1.0)),
    *(("pointwise", {"error": error}) for error in ("squared", "huber")),
]


SAMPLED = ("adv", "old", "return", "sampler", "value")
ALL: dict[str, Any] = {"correction": 1.2, "kl_weight": 0.3}
KNOWN: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *((name, {}, SAMPLED) for name in STEP_FORMULAS if LOSSES[name].credit),
    *((name, {"correction": 1.2}, SAMPLED) for name in STEP_FORMULAS if LOSSES[name].credit),
    *((name, ALL, ("adv", "sampler")) for name in ("grpo", "dr_grpo", "gspo", "cispo", "rloo")),
    *((name, {"correction": None}, SAMPLED) for name in ("grpo", "rloo")),
    *((name, ALL, ("old", "sampler")) for name in ("grpo", "gspo", "ppo")),
    ("dapo", {"humanline": (-0.6, 1.5), **ALL}, SAMPLED),
    ("ppo", {"value": True}, SAMPLED),
    ("ppo", {"value": True, "value_weight": 0.7, "value_clip": None, **ALL}, SAMPLED),
    ("ppo", {"value": True}, ("adv", "old")),
]
"""Of answers that were sampled, and what was known of their tokens: all, no log-probabilities, or
no advantage.
"""


def of(name: str, settings: dict[str, Any] | None = None) -> Of:
    """What its row of the table reads."""
    if (settings or {}).get("value"):
        return "values"
    return (
        "levels"
        if name == "ordinal"
        else "scores"
        if LOSSES[name].view.startswith("score")
        else "tokens"
    )


def the_step(
    name: str,
    settings: dict[str, Any],
    chosen: Sequence[int] | None = None,
    distance: float = 0.0,
    delta: float = 0.0,
    known: tuple[str, ...] = (),
) -> Step:
    kind = METHODS[name].kind
    chosen = range(len(rows(kind))) if chosen is None else chosen
    now, held = (
        [measured(kind, d, of(name, settings))[i] for i in chosen] for d in (distance, 0.0)
    )
    return Step(name, IDLE | STEP_FORMULAS[name][1] | settings, chosen, now, held, delta, known)


def build_objective(name: str, settings: dict[str, Any], budget: int = BUDGET) -> Objective:
    both = models(of(name, settings))
    return objective(name, both.policy, both.reference, budget=budget, **settings)


def test_every_row_and_modifier_has_its_formula() -> None:
    assert sorted(LOSSES.keys() - STEP_FORMULAS.keys()) == [], (
        "give these rows a formula of their whole step in tests/golden/step_formulas.py"
    )
    known = {
        m
        for name, value, _ in KNOWN
        for m in LOSSES[name].modifiers
        if MODIFIERS[m].idle[0] in value
    }
    assert sorted(MODIFIERS.keys() - ON.keys() - known) == [], (
        "say here (ON) what turns these modifiers on, and compute them in whole.Step"
    )


@pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=[" ".join([n, *map(str, g.values())]) for n, g in CASES]
)
def test_a_whole_step_from_logits_to_the_number(name: str, settings: dict[str, Any]) -> None:
    loss, _ = STEP_FORMULAS[name]
    wanted = slope(loss, lambda distance: the_step(name, settings, distance=distance))
    assert abs(wanted) > 1e-5
    # What is only measured goes along with what trains where all are together.
    for budget in (BUDGET, TOGETHER) if METHODS[name].needs_kl_pairs else (BUDGET,):
        models(of(name)).policy.zero_grad()
        outcome = build_objective(name, settings, budget).run(
            the_step(name, settings).rows, backward=True
        )
        assert (outcome.micro_batches > 1) is (budget == BUDGET)
        assert float(outcome.loss) == pytest.approx(loss(the_step(name, settings)), rel=1e-9)
        assert models(of(name)).slope() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "known"),
    KNOWN,
    ids=[" ".join([n, *map(str, g.values()), *k]) for n, g, k in KNOWN],
)
def test_a_whole_step_of_sampled_answers(
    name: str, settings: dict[str, Any], known: tuple[str, ...]
) -> None:
    loss, _ = STEP_FORMULAS[name]
    wanted = slope(loss, lambda distance: the_step(name, settings, distance=distance, known=known))
    assert abs(wanted) > 1e-5
    step = the_step(name, settings, known=known)
    models(of(name, settings)).policy.zero_grad()
    outcome = build_objective(name, settings).run(step.rows, backward=True)
    assert outcome.micro_batches > 1
    assert float(outcome.loss) == pytest.approx(loss(step), rel=1e-9)
    assert models(of(name, settings)).slope() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["judgement", "preference", "demonstration"])
def test_micro_batches_are_unequal(kind: Kind) -> None:
    """Of equal ones, the mean of their means would be right by accident."""
    measured_too = make_kl_pairs(rows(kind), max_length=64) if kind == "judgement" else rows(kind)
    for step in (rows(kind), measured_too):
        assert (
            len({len(numbers) for numbers in StepPacker(step).pack(range(len(step)), BUDGET)}) > 1
        )


def test_the_reference_point_of_these_rows_is_seen_and_so_is_its_clamp() -> None:
    assert reference_points(the_step("kto", {}))[0] > 0.1
    clamps = [case["humanline"] for case in ON["humanline"]]
    assert [
        reference_points(the_step("kto", {"humanline": clamp}))[0] > 0.1 for clamp in clamps
    ] == [True, False]


def test_policy_and_reference_rank_these_pairs_differently() -> None:
    """Otherwise aot, which compares equal ranks, would compare the numbers of the same pair."""
    step = the_step("aot", {})
    pairs = [step.pair(i) for i in range(len(step.rows))]
    gaps, refs = (
        [pair[f"{name}_w"] - pair[f"{name}_l"] for pair in pairs] for name in ("logp", "ref")
    )
    order = sorted(range(len(pairs)), key=gaps.__getitem__)
    assert order != sorted(range(len(pairs)), key=refs.__getitem__)
    assert abs(STEP_FORMULAS["aot"][0](step) - STEP_FORMULAS["dpo"][0](step)) > 1e-3


def middle(step: Step) -> float | None:
    """Half-way between the mean rewards of both classes; None without one of them."""
    sides: dict[bool, list[float]] = {True: [], False: []}
    for row, message in zip(step.rows, step.now, strict=True):
        labels = [bool(row.label)] if len(message) == 1 else [True, False]
        largest = min(x.n for x in message) if len(message) > 1 else None
        for up, x in zip(labels, message, strict=True):
            logp, ref = step.sums(x, largest)
            sides[up].append(step.settings["beta"] * (logp - ref))
    return fmean(map(fmean, sides.values())) if all(sides.values()) else None


@pytest.mark.parametrize("settings", [{}, {"beta": 0.5}, {"humanline": (-0.6, 1.5)}], ids=str)
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.shifts])
def test_delta_is_the_mean_of_the_steps_before(name: str, settings: dict[str, Any]) -> None:
    """Of unpaired rows, the third step has thumbs up only and says nothing."""
    now = build_objective(name, settings)
    stands_still = torch.optim.SGD(models("tokens").policy.parameters(), lr=0.0)
    middles: list[float] = []
    for chosen in ([0, 1, 2, 3], [3, 4, 5, 6, 7], [1, 2, 4], [5, 6], [*range(9)]):
        step = the_step(name, settings, chosen, delta=fmean(middles) if middles else 0.0)
        wanted = pytest.approx(
            STEP_FORMULAS[name][0](step), rel=1e-6
        )  # delta is a number of 24 bits
        assert float(now.run(step.rows, backward=False).loss) == wanted
        outcome, _, _ = optimizer_step(now, stands_still, step.rows, 1.0)
        assert float(outcome.loss) == wanted
        result = middle(step)
        middles += [] if result is None else [result]
        assert (now.shift.delta, now.shift.steps) == (
            pytest.approx(fmean(middles), rel=1e-9),
            len(middles),
        )
    assert len(middles) == (4 if METHODS[name].kind == "judgement" else 5)


def test_delta_is_frozen_in_evaluation() -> None:
    now = build_objective("bco", {})
    now.shift = replace(now.shift, delta=0.3, steps=2)
    evaluate(now, rows("judgement"), {}, None)  # type: ignore[arg-type]
    assert (now.shift.delta, now.shift.steps) == (0.3, 2)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6], ids=str)
def test_the_gradient_is_clipped_once_and_then_applied(clip_norm: float | None) -> None:
    """A step of gradient descent follows the step's gradient, clipped by its global norm."""
    policy = models("tokens").policy
    before = [p.detach().clone() for p in policy.parameters()]
    policy.zero_grad()
    build_objective("dpo", {}).run(rows("preference"), backward=True)
    gradient = torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in policy.parameters()
        ]
    )
    size = float(gradient.norm())
    assert size > 0.6
    _, norm, applied = optimizer_step(
        build_objective("dpo", {}),
        torch.optim.SGD(policy.parameters(), lr=0.01),
        rows("preference"),
        clip_norm,
    )
    moved = torch.cat(
        [(p.detach() - old).flatten() for p, old in zip(policy.parameters(), before, strict=True)]
    )
    with torch.no_grad():
        for p, old in zip(policy.parameters(), before, strict=True):
            p.copy_(old)
    assert applied
    assert norm == pytest.approx(size)
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / size)
    torch.testing.assert_close(moved, -0.01 * factor * gradient, rtol=1e-5, atol=1e-12)


def reward(name: str, message: ModelOutputs, settings: dict[str, Any]) -> float:
    """The implicit reward of an answer."""
    logp, r = sum(message.logp), sum(message.logp) - sum(message.ref)
    match name:
        case "ipo":
            return settings["tau"] * r / message.n
        case "dpo_norm":
            return settings["beta"] * r / message.n
        case "simpo" | "orpo":
            return settings["beta"] * logp / message.n
        case "slic":
            return logp
        case "cpo":
            return settings["beta"] * logp
        case _:
            return settings["beta"] * r


@pytest.mark.parametrize(
    "name", ["kto", "bco", "dpo", "dpo_norm", "ipo", "slic", "simpo", "cpo", "orpo"]
)
def test_the_numbers_that_a_step_reports(name: str) -> None:
    step = the_step(name, {})
    meter = Meter()
    meter.pool(build_objective(name, {}).run(step.rows, backward=False).metrics)
    result = meter.reduce(SingleProcess())
    flat = [
        (message, side == 0 if row.label is None else row.label)
        for row, answers in zip(step.rows, step.now, strict=True)
        for side, message in enumerate(answers)
    ]
    chosen, rejected = (
        [reward(name, message, step.settings) for message, up in flat if up is actual]
        for actual in (True, False)
    )
    wanted = {"rewards/chosen": fmean(chosen), "rewards/rejected": fmean(rejected)}
    wanted["rewards/margins"] = fmean(chosen) - fmean(rejected)
    for side, flag in (("chosen", True), ("rejected", False)):
        wanted[f"logps/{side}"] = fmean(sum(message.logp) for message, up in flat if up is flag)
        if METHODS[name].needs_reference:
            wanted[f"logratio/{side}"] = fmean(
                sum(message.logp) - sum(message.ref) for message, up in flat if up is flag
            )
    if METHODS[name].kind == "preference":
        wanted["rewards/accuracies"] = fmean(w > l for w, l in zip(chosen, rejected, strict=True))
    else:
        wanted["rewards/auc"] = fmean(w > l for w in chosen for l in rejected)
    if name == "kto":
        wanted["kl"] = wanted["kl/raw"] = reference_points(step)[0]
    if name == "bco":
        wanted["delta"] = 0.0  # of a run that begins
    assert result == pytest.approx(wanted, rel=1e-9)


def cut(ratio: float, adv: float, settings: dict[str, Any]) -> bool:
    """Whether a ratio has no gradient."""
    if "eps_low" not in settings:
        return ratio > settings["eps_high"]
    up = adv > 0 and ratio > 1 + settings["eps_high"]
    return up or (
        adv < 0 and (ratio < 1 - settings["eps_low"] or ratio > (settings["dual_clip"] or math.inf))
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("dr_grpo", {"dual_clip": 1.25}),
        ("cispo", {"eps_high": 1.1}),
        ("gspo", {"eps_low": 0.05, "eps_high": 0.1}),
        ("rloo", {"correction": 1.2}),
        ("ppo", {"value": True, "correction": 1.1}),
    ],
)
def test_the_numbers_that_a_step_of_sampled_answers_reports(
    name: str, settings: dict[str, Any]
) -> None:
    step = the_step(name, settings, known=SAMPLED)
    meter = Meter()
    meter.pool(build_objective(name, settings).run(step.rows, backward=False).metrics)
    result = meter.reduce(SingleProcess())
    every = answers(step, [[0.0] * 3] * 9)
    tokens = [t for a in every for t in a.tokens]
    separate = [t.logp - t.old for t in tokens]
    wanted = {
        "logps/token": fmean(t.logp for t in tokens),
        "logratio/token": fmean(separate),
        "kl/old": fmean(math.exp(d) - d - 1 for d in separate),
        "kl/reference": fmean(math.exp(t.ref - t.logp) - (t.ref - t.logp) - 1 for t in tokens),
        "advantages/logratio": fmean(t.adv * d for t, d in zip(tokens, separate, strict=True)),
        "advantages/positive": fmean(t.adv > 0 for t in tokens),
        "sampler/kl": fmean(t.known["sampler"] - t.old for t in tokens),
    }
    pairs = [(d, t.adv) for t, d in zip(tokens, separate, strict=True)]
    weights = [t.old - t.known["sampler"] for t in tokens]
    if LOSSES[name].view == "answer":
        pairs = [((a.sum("logp") - a.sum("old")) / a.n, a.sum("adv") / a.n) for a in every]
        weights = [sum(t.old - t.known["sampler"] for t in a.tokens) for a in every]
    wanted["sampler/truncated"] = fmean(w > math.log(step.settings["correction"]) for w in weights)
    if name != "rloo":
        wanted["clipped"] = fmean(cut(math.exp(d), adv, step.settings) for d, adv in pairs)
        assert 0 < wanted["clipped"] < 1
    if name == "ppo":
        returns = [t.known["return"] for t in tokens]
        wanted["value/loss"] = (
            fmean(value_error(step, t) for t in tokens) / step.settings["value_weight"]
        )
        wanted["value/mean"] = fmean(t.critic for t in tokens)
        errors = [g - t.critic for g, t in zip(returns, tokens, strict=True)]
        wanted["value/explained"] = 1 - pvariance(errors) / pvariance(returns)
    assert result == pytest.approx(wanted, rel=1e-9)


def test_the_share_of_tokens_inside_the_clamp() -> None:
    step = the_step("kto", {"humanline": (-0.6, 1.5)})
    meter = Meter()
    meter.pool(
        build_objective("kto", {"humanline": (-0.6, 1.5)}).run(step.rows, backward=False).metrics
    )
    ratios = [
        p - ref for (message,) in step.now for p, ref in zip(message.logp, message.ref, strict=True)
    ]
    assert meter.reduce(SingleProcess())["humanline/unclamped"] == pytest.approx(
        fmean(-0.6 <= d <= 1.5 for d in ratios)
    )


def test_a_step_that_is_not_finite_changes_neither_weights_nor_delta() -> None:
    policy = models("tokens").policy
    before = [p.detach().clone() for p in policy.parameters()]
    now = build_objective("bco", {})
    now.shift = replace(now.shift, delta=0.3, steps=2)
    broken = [
        replace(row, weight=math.inf if i == 2 else row.weight)
        for i, row in enumerate(rows("judgement"))
    ]
    _, _, applied = optimizer_step(now, torch.optim.SGD(policy.parameters(), lr=1.0), broken, 1.0)
    assert not applied
    assert all(torch.equal(p, old) for p, old in zip(policy.parameters(), before, strict=True))
    assert (now.shift.delta, now.shift.steps) == (0.3, 2)
