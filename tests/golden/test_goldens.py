"""Losses against formulas written out again in plain Python numbers, and fixed points worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.units import objective, policy_and_reference, units
from valence.data.mismatch import mismatch
from valence.losses import LOSSES, apo_zero_unpaired, dpo, kto, sft
from valence.training.methods import METHODS


def s(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def kto_formula(r: float, up: bool, z0: float, beta: float, w_up: float, w_down: float) -> float:
    return w_up * (1 - s(beta * (r - z0))) if up else w_down * (1 - s(beta * (z0 - r)))


def apo_formula(r: float, up: bool, beta: float) -> float:
    return 1 - s(beta * r) if up else s(beta * r)


def dpo_formula(d: float, beta: float, e: float, m: float) -> float:
    return -(1 - e) * math.log(s(beta * d - m)) - e * math.log(s(-beta * d))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGP, REF = column(-12.0, -7.5, -30.0, -3.0), column(-10.0, -9.0, -29.0, -8.0)
UP = torch.tensor([True, True, False, False])


@pytest.mark.parametrize("z0", [0.0, 0.7])
@pytest.mark.parametrize(("beta", "w_up", "w_down"), [(0.1, 1.0, 1.0), (0.5, 1.33, 0.25)])
def test_kto(z0: float, beta: float, w_up: float, w_down: float) -> None:
    found = kto(
        LOGP, REF, UP, torch.full((4,), z0, dtype=torch.float64), beta=beta, desirable_weight=w_up, undesirable_weight=w_down
    )
    wanted = [kto_formula(r, up, z0, beta, w_up, w_down) for r, up in zip((LOGP - REF).tolist(), UP.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_kto_by_hand() -> None:
    """r = z0 gives one half; r far above z0 gives 0 for thumbs up and the weight for thumbs down."""
    at = kto(column(1.0, 1.0), column(0.0, 0.0), torch.tensor([True, False]), column(1.0, 1.0), beta=1.0)
    assert at.tolist() == [0.5, 0.5]
    far = kto(column(900.0, 900.0), column(0.0, 0.0), torch.tensor([True, False]), column(0.0, 0.0), beta=1.0)
    assert far.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_apo_zero_unpaired(beta: float) -> None:
    wanted = [apo_formula(r, up, beta) for r, up in zip((LOGP - REF).tolist(), UP.tolist(), strict=True)]
    assert apo_zero_unpaired(LOGP, REF, UP, beta=beta).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("margin", [0.0, 0.4])
@pytest.mark.parametrize(("beta", "e"), [(0.1, 0.0), (0.3, 0.2)])
def test_dpo(beta: float, e: float, margin: float) -> None:
    other, other_ref = LOGP.flip(0), REF.flip(0) + 0.5
    found = dpo(LOGP, other, REF, other_ref, torch.full((4,), margin, dtype=torch.float64), beta=beta, label_smoothing=e)
    ds = ((LOGP - REF) - (other - other_ref)).tolist()
    assert found.tolist() == pytest.approx([dpo_formula(d, beta, e, margin) for d in ds], rel=1e-12)


def test_dpo_by_hand() -> None:
    zero = column(0.0)
    assert dpo(zero, zero, zero, zero, zero).item() == pytest.approx(math.log(2))
    assert dpo(column(-1e4), zero, zero, zero, zero, beta=1.0).item() == pytest.approx(1e4)  # no overflow


def test_sft() -> None:
    assert sft(column(-0.5, -2.0)).tolist() == [0.5, 2.0]


def sums(policy: object, prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
    """Summed log-probability of a completion, from the model's own logits, one sequence at a time."""
    model = policy.causal  # type: ignore[attr-defined]
    ids = torch.tensor([*prompt, *completion])
    with policy.stock(), torch.no_grad():  # type: ignore[attr-defined]
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    total = 0.0
    for t in range(len(prompt), len(ids)):
        row = logits[t - 1].tolist()
        top = max(row)
        total += row[int(ids[t])] - top - math.log(sum(math.exp(v - top) for v in row))
    return total


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_whole_step_from_logits_to_the_number(name: str) -> None:
    """The step's loss from nothing but logits, plain Python and the formula book: weights, counts, z0, averages included."""
    policy, reference = policy_and_reference()
    rows = units(METHODS[name].kind)
    settings = {"kto": {"desirable_weight": 1.3}, "dpo": {"label_smoothing": 0.1}}.get(name, {})
    outcome = objective(name, policy, reference, budget=40, **settings).run(rows, backward=False)
    engines = policy, reference.engine  # type: ignore[attr-defined]
    measured = [[[sums(e, row.prompt_ids, a.ids) for a in row.answers] for e in engines] for row in rows]
    if name == "sft":
        tokens = sum(len(row.answers[0].ids) for row in rows)
        wanted = -sum(row.weight * m[0][0] for row, m in zip(rows, measured, strict=True)) / tokens
    elif name == "dpo":
        ds = [(m[0][0] - m[1][0]) - (m[0][1] - m[1][1]) for m in measured]
        wanted = sum(row.weight * dpo_formula(d, 0.1, 0.1, row.margin) for row, d in zip(rows, ds, strict=True)) / len(rows)
    else:
        rs = [m[0][0] - m[1][0] for m in measured]
        z0 = 0.0
        if name == "kto":
            wrong = mismatch(rows, max_length=64)
            kl = [
                sums(engines[0], u.prompt_ids, u.answers[0].ids) - sums(engines[1], u.prompt_ids, u.answers[0].ids) for u in wrong
            ]
            z0 = max(0.0, sum(kl) / len(kl))
            terms = [kto_formula(r, bool(row.label), z0, 0.1, 1.3, 1.0) for row, r in zip(rows, rs, strict=True)]
        else:
            terms = [apo_formula(r, bool(row.label), 0.1) for row, r in zip(rows, rs, strict=True)]
        wanted = sum(row.weight * term for row, term in zip(rows, terms, strict=True)) / len(rows)
    assert float(outcome.loss) == pytest.approx(wanted, rel=1e-9)
