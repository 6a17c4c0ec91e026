"""Modifiers of losses, against the definitions in their papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from valence.losses import modifiers


def test_weights_of_wpo_are_at_most_one() -> None:
    """The authors' code cuts exp(c_w + c_l) at 1: without that a pair of certain tokens counts more
    than one that the policy has just sampled from itself."""
    confidence_w, confidence_l = (
        torch.tensor(values) for values in ([-0.5, 0.4, 2.0], [-0.25, -0.4, 0.5])
    )
    view = {
        "weight": torch.tensor([2.0, 1.0, 0.5]),
        "confidence_w": confidence_w,
        "confidence_l": confidence_l,
    }
    weight = modifiers.wpo(view, wpo=True)["weight"]
    assert weight.tolist() == pytest.approx([2 * math.exp(-0.75), 1.0, 0.5])


def alpha_generator(a: float) -> Callable[[Tensor], Tensor]:
    return lambda u: (u ** (1 - a) - (1 - a) * u - a) / (a * (a - 1))


GENERATORS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "forward_kl": ({}, lambda u: -u.log()),
    "js": ({}, lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log()),
    **{f"alpha {a}": ({"f_alpha": a}, alpha_generator(a)) for a in (0.1, 0.5, 0.8)},
}
"""f of each divergence E_ref[f(policy/ref)], as Table 1 of arXiv 2309.16240 has it."""


def scores(name: str, r: Tensor, **settings: Any) -> Tensor:
    zeros = torch.zeros_like(r)
    view = {"logp_w": r, "ref_w": zeros, "logp_l": zeros, "ref_l": zeros}
    return modifiers.f_divergence(view, f_divergence=name, **settings)["logp_w"]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", GENERATORS)
def test_the_score_of_a_divergence_is_the_slope_of_its_generator(case: str) -> None:
    """Up to a constant, which cancels in the difference of a pair."""
    settings, generator = GENERATORS[case]
    r = torch.linspace(-4, 4, 41, dtype=torch.float64)
    u = r.exp().requires_grad_()
    (slope,) = torch.autograd.grad(generator(u).sum(), u)
    score = scores(case.split()[0], r, **settings)
    torch.testing.assert_close(score - score[20], slope - slope[20], rtol=1e-9, atol=1e-9)


def test_alpha_goes_from_reverse_to_forward_kl() -> None:
    r = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(scores("alpha", r, f_alpha=1e-6), r, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        scores("alpha", r, f_alpha=1 - 1e-6), scores("forward_kl", r), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["forward_kl", "js", "alpha"])
def test_scores_of_far_answers_are_finite(name: str) -> None:
    """A log-ratio of hundreds of nats is common for long answers, and e to it overflows float32."""
    r = torch.tensor([-300.0, -90.0, 90.0, 300.0], requires_grad=True)
    score = scores(name, r)
    score.square().sum().backward()
    assert r.grad is not None
    assert score.isfinite().all()
    assert r.grad.isfinite().all()
    assert (score.diff() >= 0).all()  # a more likely answer never scores less
