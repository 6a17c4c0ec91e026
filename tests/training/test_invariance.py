"""A training step does not depend on its micro-batches, memory layout, or order of rows."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny
from tests.units import objective, unit, units
from valence.batching import prefix_tree
from valence.batching.kl_pairs import make_kl_pairs
from valence.batching.micro_batches import StepPacker, token_sequences
from valence.batching.prefix_tree import build_prefix_tree
from valence.data.sampler import Sampler
from valence.methods import METHODS
from valence.models.build import build_policy, build_reference
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference
from valence.training.metrics import Meter
from valence.training.step import optimizer_step
from valence.types import Kind, TokenizedExample

ROWS = 14
UNLIMITED = 10_000
TOLERANCE = {
    # Sums of some hundred terms in another order: a few units in the last of 53 bits.
    torch.float64: 1e-10,
    # The last of 24 bits is 6e-8 of a number. z0 is a mean of differences between log-probabilities
    # of some tens of nats, which
    # rounding can move by some 1e-6 of a nat. The test at the end shows that a mistake moves these
    # numbers by far more.
    torch.float32: 1e-5,
}


@dataclass(frozen=True)
class Pair:
    policy: PolicyModel
    reference: FrozenReference

    def lay_out(self, *, packed: bool) -> None:
        for engine in (self.policy, self.reference.engine):
            engine.lay_out(packed=packed)


def models(dtype: torch.dtype) -> Pair:
    """Two different random models.

    Their roles are such that z0 is above its clamp. Their norms round as ``dtype`` does (those of
    many models are in float32 whatever the rest is, which rounds what a shared token gets once).
    """
    policy = build_policy(tiny("gpt2", seed=3, dtype=dtype), dtype=dtype)
    reference = build_reference(
        policy, fresh_adapter=False, model=tiny("gpt2", seed=8, dtype=dtype), name="another"
    )
    assert isinstance(reference, FrozenReference)
    return Pair(policy, reference)


def tokens(rows: Iterable[TokenizedExample]) -> int:
    return len(
        build_prefix_tree([sequence for row in rows for sequence in token_sequences(row)]).tokens
    )


def num_micro_batches_of(rows: list[TokenizedExample], max_tokens: int) -> int:
    return len(StepPacker(rows).pack(range(len(rows)), max_tokens))


def budget_for(rows: list[TokenizedExample], micro_batches: int) -> int:
    """A large token budget that divides these rows into ``micro_batches`` micro-batches, or into
    the next possible number.
    """
    return next(
        budget
        for budget in range(tokens(rows), 0, -5)
        if num_micro_batches_of(rows, budget) >= micro_batches
    )


def related(kind: Kind) -> list[TokenizedExample]:
    """Several verdicts on answers to one prompt, turns of one talk that are judged one by one, and
    prompts that begin alike.
    """
    draw = random.Random(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 97) for _ in range(length))

    system = ids(18)
    request, talk, alike = system + ids(20), system + ids(17), system + ids(3)
    prompts = [request] * 4 + [alike] * 3 + [ids(5), ids(30)]
    for _ in range(5):
        prompts.append(talk)
        talk += ids(draw.randint(1, 18))
    results: list[TokenizedExample] = []
    for i, prompt in enumerate(prompts):
        after = next(
            (
                p
                for p in prompts[i + 1 :]
                if len(p) > len(prompt) and p[: len(prompt)] == prompt and prompt != system
            ),
            (),
        )
        first = after[len(prompt) : len(prompt) + 6] or ids(draw.randint(1, 9))
        sides = (first, ids(4))[: 2 if kind == "preference" else 1]
        results.append(
            unit(
                f"row{i}",
                kind,
                prompt,
                *sides,
                label=i % 3 != 0 if kind == "judgement" else None,
                weight=1.0 + i % 2,
            )
        )
    return results


def step(
    pair: Pair, method: str, rows: list[TokenizedExample], budget: int, **settings: Any
) -> tuple[dict[str, float], int]:
    """Loss, z0 (with kto) and gradient norm of a step over all rows as they arrive, and its
    micro-batches.
    """
    sampler = Sampler(tuple(rows), batch_size=len(rows))
    chosen, following = sampler.step(0)
    actual = objective(
        method, pair.policy, pair.reference, budget=budget, max_length=200, **settings
    )
    stands_still = torch.optim.SGD(pair.policy.parameters(), lr=0.0)
    examples = [rows[i] for i in chosen]
    plan = actual.plan(examples, (rows[i] for i in following), backward=True)
    outcome, norm, applied = optimizer_step(actual, stands_still, examples, 1.0, plan=plan)
    assert applied
    meter = Meter()
    for name in ("kl", "kl/raw"):
        for part in outcome.metrics.get(name, []):
            meter.add({name: part})
    return {"loss": float(outcome.loss), "grad_norm": norm} | meter.reduce(
        actual.group
    ), outcome.micro_batches


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    share: tokens from which a common prefix is shared. along: tokens up to which mismatched rows
    run with the others, over their keys and values. micro_batches: None for the largest budget.
    order: seed of the order of the rows.
    """

    share: int
    packed: bool
    max_joint_rows: int
    micro_batches: int | None
    order: int | None


NEVER = 10**9
LAYOUTS = (
    (prefix_tree.MIN_SHARED_TOKENS, True),
    (3, True),
    (NEVER, True),
    (prefix_tree.MIN_SHARED_TOKENS, False),
)
CUTS = ((UNLIMITED, None), (0, None), (0, 1), (0, 2), (0, 7))
ALL_WAYS = [
    Way(*layout, *cut, (None, 1)[(i + j) % 2])
    for i, layout in enumerate(LAYOUTS)
    for j, cut in enumerate(CUTS)
]
"""Each layout with each cut. Each layout and each cut has rows in both orders."""
FEW_WAYS = [
    Way(prefix_tree.MIN_SHARED_TOKENS, True, UNLIMITED, None, 1),
    Way(3, True, 0, None, None),
    Way(3, True, 0, 2, 1),
    Way(NEVER, True, 0, 7, None),
    Way(prefix_tree.MIN_SHARED_TOKENS, False, 0, 7, 1),
]
UNRELATED, RELATED = "apart", "related"


@pytest.mark.parametrize(("method", "rows_of", "dtype", "ways"), [
    ("kto", RELATED, torch.float64, FEW_WAYS), ("dpo", RELATED, torch.float32, FEW_WAYS),
    ("dpo", UNRELATED, torch.float64, FEW_WAYS), ("kto", UNRELATED, torch.float32, FEW_WAYS),
    *(
        pytest.param(method, rows_of, dtype, ALL_WAYS, marks=pytest.mark.slow)
        for method in ("kto", "dpo") for rows_of in (UNRELATED, RELATED) for dtype in TOLERANCE
    ),
], ids=lambda value: f"{len(value)} ways" if isinstance(value, list) else str(value))  # fmt: skip
def test_a_step_is_the_same_however_it_is_run(
    method: str, rows_of: str, dtype: torch.dtype, ways: list[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = models(dtype)
    kind = METHODS[method].kind
    rows = units(kind, ROWS) if rows_of == UNRELATED else related(kind)
    expected, num_micro_batches = step(pair, method, rows, UNLIMITED)
    assert num_micro_batches == 1
    assert expected["grad_norm"] > 1e-3
    assert method != "kto" or expected["kl"] == expected["kl/raw"] > 0.1, (
        "z0 must not be clamped for this to say anything"
    )
    for way in ways:
        monkeypatch.setattr(prefix_tree, "MIN_SHARED_TOKENS", way.share)
        budget = UNLIMITED if way.micro_batches is None else budget_for(rows, way.micro_batches)
        pair.policy.max_joint_rows = way.max_joint_rows
        pair.lay_out(packed=way.packed)
        arriving = rows if way.order is None else random.Random(way.order).sample(rows, len(rows))
        result, num_micro_batches = step(pair, method, arriving, budget)
        assert num_micro_batches == num_micro_batches_of(rows, budget)
        assert result == pytest.approx(expected, rel=TOLERANCE[dtype], abs=0), (way, budget)


@pytest.mark.parametrize("kind", ["judgement", "preference"])
def test_related_rows_share_much(kind: Kind) -> None:
    rows = related(kind)
    assert tokens(rows) < 0.6 * sum(row.tokens for row in rows)
    extra = make_kl_pairs(rows, max_length=200)
    assert kind == "preference" or tokens([*rows, *extra]) < tokens(rows) + 0.5 * tokens(extra)


def test_the_tolerance_is_far_below_what_a_mistake_amounts_to() -> None:
    """A reference point for each half of the step, as if it were estimated in every micro-batch, is
    seen at once.
    """
    pair = models(torch.float32)
    rows = units("judgement", ROWS)
    right, _ = step(pair, "kto", rows, UNLIMITED)
    wrong, _ = step(pair, "kto", rows, UNLIMITED, z0_scope={"group": ROWS // 2, "pairing": "next"})
    for name in ("loss", "grad_norm", "kl"):
        assert abs(wrong[name] - right[name]) > 100 * TOLERANCE[torch.float32] * abs(right[name]), (
            name
        )
