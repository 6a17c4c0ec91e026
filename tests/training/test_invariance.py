"""One training step is the same however it is cut into micro-batches, laid out in memory, or ordered."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.units import objective, units
from valence.data.pack import pack
from valence.data.sampler import Sampler
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy, build_reference
from valence.engine.reference import Frozen
from valence.report.metrics import Meter
from valence.training.methods import METHODS
from valence.training.step import optimizer_step
from valence.types import Encoded

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
    """Two different random models. Their roles are such that z0 is above its clamp."""
    policy = build_policy(tiny(seed=0, dtype=dtype), dtype=dtype)
    reference = build_reference(policy, fresh_adapter=False, model=tiny(seed=5, dtype=dtype), name="another")
    assert isinstance(reference, Frozen)
    return Pair(policy, reference)


def budget_for(rows: Iterable[Encoded], micro_batches: int) -> int:
    """The largest token budget that cuts these rows into so many micro-batches."""
    lengths = [row.tokens for row in rows]
    return next(budget for budget in range(WHOLE, 0, -1) if len(pack(lengths, budget)) == micro_batches)


def step(pair: Pair, method: str, rows: list[Encoded], budget: int, **settings: Any) -> tuple[dict[str, float], int]:
    """Loss, z0 (with kto) and gradient norm of a step over all rows as they arrive, and its micro-batches."""
    sampler = Sampler(tuple(rows), batch_size=len(rows))
    chosen, following = sampler.step(0)
    made = objective(method, pair.policy, pair.reference, budget=budget, **settings)
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
@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_step_is_the_same_however_it_is_run(method: str, dtype: torch.dtype) -> None:
    pair = models(dtype)
    rows = units(METHODS[method].kind, ROWS)
    expected, cut = step(pair, method, rows, WHOLE)
    assert cut == 1
    assert expected["grad_norm"] > 1e-3
    assert method != "kto" or expected["kl"] == expected["kl/raw"] > 0.1, "z0 must not be clamped for this to say anything"
    for micro_batches in (1, 2, 7):
        for packed in (True, False):
            for seed in (None, 1, 2):
                arriving = rows if seed is None else random.Random(seed).sample(rows, len(rows))
                pair.lay_out(packed=packed)
                found, cut = step(pair, method, arriving, budget_for(rows, micro_batches))
                assert cut == micro_batches
                assert found == pytest.approx(expected, rel=TOLERANCE[dtype], abs=0), (micro_batches, packed, seed)


def test_the_tolerance_is_far_below_what_a_mistake_amounts_to() -> None:
    """A reference point for each half of the step, as if it were estimated in every micro-batch, is seen at once."""
    pair = models(torch.float32)
    rows = units("judgement", ROWS)
    right, _ = step(pair, "kto", rows, WHOLE)
    wrong, _ = step(pair, "kto", rows, WHOLE, z0_scope={"group": ROWS // 2, "pairing": "next"})
    for name in ("loss", "grad_norm", "kl"):
        assert abs(wrong[name] - right[name]) > 100 * TOLERANCE[torch.float32] * abs(right[name]), name
