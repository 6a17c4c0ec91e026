"""One training step is the same however it is cut into micro-batches, laid out in memory, or ordered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.units import objective, unit, units
from valence.data import forest
from valence.data.forest import planted
from valence.data.mismatch import mismatch
from valence.data.pack import pack, strands
from valence.data.sampler import Sampler
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy, build_reference
from valence.engine.reference import Frozen
from valence.report.metrics import Meter
from valence.training.methods import METHODS
from valence.training.step import optimizer_step
from valence.types import Encoded, Kind

ROWS = 14
WHOLE = 10_000
TOLERANCE = {
    # Sums of some hundred terms in another order: a few units in the last of 53 bits.
    torch.float64: 1e-10,
    # The last of 24 bits is 6e-8 of a number. z0 is a mean of differences between log-probabilities of some tens of nats, which
    # rounding can move by some 1e-6 of a nat. The test at the end shows that a mistake moves these numbers by far more.
    torch.float32: 1e-5,
}


@dataclass(frozen=True)
class Pair:
    policy: Engine
    reference: Frozen

    def lay_out(self, *, packed: bool) -> None:
        for engine in (self.policy, self.reference.engine):
            engine.lay_out(packed=packed)


def models(dtype: torch.dtype) -> Pair:
    """Two different random models. Their roles are such that z0 is above its clamp. Their norms round as ``dtype`` does (those of
    many models are in float32 whatever the rest is, which rounds what a shared token gets once)."""
    policy = build_policy(tiny("gpt2", seed=3, dtype=dtype), dtype=dtype)
    reference = build_reference(policy, fresh_adapter=False, model=tiny("gpt2", seed=8, dtype=dtype), name="another")
    assert isinstance(reference, Frozen)
    return Pair(policy, reference)


def tokens(rows: Iterable[Encoded]) -> int:
    return planted([strand for row in rows for strand in strands(row)])


def budget_for(rows: list[Encoded], micro_batches: int) -> int:
    """A large token budget that cuts these rows into so many micro-batches, or more where that many cannot be."""
    return next(budget for budget in range(tokens(rows), 0, -5) if len(pack(rows, budget)) >= micro_batches)


def related(kind: Kind) -> list[Encoded]:
    """Several verdicts on answers to one prompt, turns of one talk that are judged one by one, and prompts that begin alike."""
    draw = random.Random(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 97) for _ in range(length))

    system = ids(18)
    asked, talk, alike = system + ids(20), system + ids(17), system + ids(3)
    prompts = [asked] * 4 + [alike] * 3 + [ids(5), ids(30)]
    for _ in range(5):
        prompts.append(talk)
        talk += ids(draw.randint(1, 18))
    made: list[Encoded] = []
    for i, prompt in enumerate(prompts):
        after = next(
            (p for p in prompts[i + 1 :] if len(p) > len(prompt) and p[: len(prompt)] == prompt and prompt != system), ()
        )
        first = after[len(prompt) : len(prompt) + 6] or ids(draw.randint(1, 9))
        sides = (first, ids(4))[: 2 if kind == "preference" else 1]
        made.append(unit(f"row{i}", kind, prompt, *sides, label=i % 3 != 0 if kind == "judgement" else None, weight=1.0 + i % 2))
    return made


def step(pair: Pair, method: str, rows: list[Encoded], budget: int, **settings: Any) -> tuple[dict[str, float], int]:
    """Loss, z0 (with kto) and gradient norm of a step over all rows as they arrive, and its micro-batches."""
    sampler = Sampler(tuple(rows), batch_size=len(rows))
    chosen, following = sampler.step(0)
    made = objective(method, pair.policy, pair.reference, budget=budget, max_length=200, **settings)
    stands_still = torch.optim.SGD(pair.policy.parameters(), lr=0.0)
    outcome, norm, applied = optimizer_step(
        made, stands_still, [rows[i] for i in chosen], (rows[i] for i in following), clip_norm=1.0
    )
    assert applied
    meter = Meter()
    for name in ("kl", "kl/raw"):
        for part in outcome.metrics.get(name, []):
            meter.add({name: part})
    return {"loss": float(outcome.loss), "grad_norm": norm} | meter.reduce(made.group), outcome.micro_batches


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows_of", [lambda kind: units(kind, ROWS), related], ids=["apart", "related"])
@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_step_is_the_same_however_it_is_run(
    method: str, rows_of: Callable[[Kind], list[Encoded]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = models(dtype)
    rows = rows_of(METHODS[method].kind)
    expected, cut = step(pair, method, rows, WHOLE)
    assert cut == 1
    assert expected["grad_norm"] > 1e-3
    assert method != "kto" or expected["kl"] == expected["kl/raw"] > 0.1, "z0 must not be clamped for this to say anything"
    for share, packed in ((forest.SHARE, True), (3, True), (10**9, True), (forest.SHARE, False)):
        monkeypatch.setattr(forest, "SHARE", share)
        # Mismatched rows along with the others, over their keys and values, in a pass of their own; then more micro-batches.
        for budget, along in ((WHOLE, WHOLE), (WHOLE, 0), *((budget_for(rows, n), 0) for n in (1, 2, 7))):
            pair.policy.along = along
            for seed in (None, 1):
                arriving = rows if seed is None else random.Random(seed).sample(rows, len(rows))
                pair.lay_out(packed=packed)
                found, cut = step(pair, method, arriving, budget)
                assert cut == len(pack(rows, budget))
                assert found == pytest.approx(expected, rel=TOLERANCE[dtype], abs=0), (share, packed, budget, along, seed)


@pytest.mark.parametrize("kind", ["judgement", "preference"])
def test_related_rows_share_much(kind: Kind) -> None:
    rows = related(kind)
    assert tokens(rows) < 0.6 * sum(row.tokens for row in rows)
    extra = mismatch(rows, max_length=200)
    assert kind == "preference" or tokens([*rows, *extra]) < tokens(rows) + 0.5 * tokens(extra)


def test_the_tolerance_is_far_below_what_a_mistake_amounts_to() -> None:
    """A reference point for each half of the step, as if it were estimated in every micro-batch, is seen at once."""
    pair = models(torch.float32)
    rows = units("judgement", ROWS)
    right, _ = step(pair, "kto", rows, WHOLE)
    wrong, _ = step(pair, "kto", rows, WHOLE, z0_scope={"group": ROWS // 2, "pairing": "next"})
    for name in ("loss", "grad_norm", "kl"):
        assert abs(wrong[name] - right[name]) > 100 * TOLERANCE[torch.float32] * abs(right[name]), name
