"""The divergence of two heads: values and gradients of the formula on complete logits in float64,
however the vocabulary is divided.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import tiny
from tests.units import units_for
from valence.batching.micro_batches import StepPacker
from valence.models.build import build_policy
from valence.models.divergence import (
    Distributions,
    TeacherDistributions,
    TopTokens,
    distribution_divergence,
    top_k_divergence,
)
from valence.models.head import Head
from valence.models.reference import AdapterDisabledReference

TOKENS, WIDTH, TEACHER_WIDTH = 7, 16, 24
narrow_head = partial(Head, max_columns=64)
"""Divides the vocabulary into ranges of 64 tokens."""


def layer(width: int, vocabulary: int, seed: int, **options: Any) -> nn.Linear:
    torch.manual_seed(seed)
    result = nn.Linear(width, vocabulary, **options)
    with torch.no_grad():
        result.weight *= 8  # some tokens are nearly certain
    return result


def formula(log_p: Tensor, log_q: Tensor, beta: float, top_k: int | None) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if top_k is not None:
        ids = p.topk(top_k).indices
        p, q = (
            torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1)
            for x in (p, q)
        )
    m = beta * p + (1 - beta) * q
    to_p, to_q = (p * (p / m).log()).sum(-1), (q * (q / m).log()).sum(-1)
    if beta in (0, 1):
        return to_q if beta else to_p
    return beta * to_p + (1 - beta) * to_q


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("vocabulary", "softcap", "temperature", "top_k"),
    [(203, None, 1.0, None), (210, 5.0, 0.7, None), (199, None, 1.0, 20), (203, None, 1.3, 203)],
)
def test_values_and_gradients(
    beta: float, vocabulary: int, softcap: float | None, temperature: float, top_k: int | None
) -> None:
    ours = layer(WIDTH, 203, 0, dtype=torch.float64)
    theirs = layer(TEACHER_WIDTH, vocabulary, 1, dtype=torch.float64, bias=False)
    shared = min(203, vocabulary)
    torch.manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    states = torch.randn(TOKENS, TEACHER_WIDTH, dtype=torch.float64)
    target = torch.randint(0, shared, (TOKENS,))
    upstream = torch.randn(TOKENS, dtype=torch.float64)

    distributions = Distributions(narrow_head(theirs), states, vocabulary)
    teacher = TeacherDistributions(distributions, shared, beta, top_k)
    result = teacher.divergence(
        narrow_head(ours, softcap=softcap, temperature=temperature), hidden, target
    )
    inputs = [hidden, ours.weight, ours.bias]
    gradients = torch.autograd.grad((result.divergence * upstream).sum(), inputs)

    logits = ours(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_q = torch.log_softmax(logits[:, :shared] / temperature, -1)
    log_p = torch.log_softmax(theirs(states)[:, :shared], -1).detach()
    wanted = formula(log_p, log_q, beta, None if top_k == shared else top_k)
    expected = torch.autograd.grad((wanted * upstream).sum(), inputs)
    torch.testing.assert_close(result.divergence, wanted, rtol=1e-9, atol=1e-11)
    for gradient, of_formula in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, of_formula, rtol=1e-9, atol=1e-11)
    at = torch.arange(TOKENS), target
    torch.testing.assert_close(result.logp, log_q[at].detach())
    torch.testing.assert_close(result.teacher, log_p[at])
    torch.testing.assert_close(result.entropy, -(log_q.exp() * log_q).sum(-1).detach())


def test_in_float32_the_result_is_that_of_float64() -> None:
    ours, theirs = layer(WIDTH, 203, 0), layer(TEACHER_WIDTH, 203, 1)
    torch.manual_seed(2)
    hidden, states = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, TEACHER_WIDTH)
    target = torch.zeros(TOKENS, dtype=torch.long)
    results: list[Tensor] = []
    for dtype in (torch.float64, torch.float32):
        distributions = Distributions(narrow_head(theirs.to(dtype)), states.to(dtype), 203)
        teacher = TeacherDistributions(distributions, 203)
        results.append(teacher.divergence(narrow_head(ours.to(dtype)), hidden.to(dtype), target)[0])
    assert results[1].dtype == torch.float32
    torch.testing.assert_close(results[1].double(), results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [None, 203])
def test_the_logits_of_bfloat16_weights_are_not_rounded(top_k: int | None) -> None:
    ours = layer(WIDTH, 203, 0).bfloat16()
    theirs = layer(WIDTH, 203, 0).bfloat16()
    torch.manual_seed(2)
    with torch.no_grad():
        theirs.weight += 0.05 * torch.randn_like(theirs.weight)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    target = torch.zeros(TOKENS, dtype=torch.long)
    results: list[Tensor] = []
    for dtype in (torch.bfloat16, torch.float64):
        states, rounds = hidden.to(dtype), dtype == torch.bfloat16
        distributions = Distributions(
            narrow_head(theirs.to(dtype), rounds_to_bfloat16=rounds), states, 203
        )
        teacher = TeacherDistributions(distributions, 203, top_k=top_k)
        head = narrow_head(ours.to(dtype), rounds_to_bfloat16=rounds)
        results.append(teacher.divergence(head, states, target).divergence.detach())
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equal_models_have_no_divergence_and_no_gradient(beta: float) -> None:
    ours = layer(WIDTH, 203, 0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    teacher = TeacherDistributions(
        Distributions(narrow_head(ours), hidden.detach(), 203), 203, beta
    )
    result = teacher.divergence(narrow_head(ours), hidden, torch.zeros(TOKENS, dtype=torch.long))
    gradients = torch.autograd.grad(result.divergence.sum(), [hidden, ours.weight])
    limit = 0 if beta in (0, 1) else 1e-6  # of a mixture, log(beta p + (1 - beta) p) is rounded
    for values in (result.divergence, *gradients):
        assert values.abs().max() <= limit


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_of_the_likeliest_tokens_is_a_lower_bound(beta: float) -> None:
    torch.manual_seed(0)
    log_p, log_q = (torch.log_softmax(3 * torch.randn(50, 40).double(), -1) for _ in "pq")
    before = torch.zeros(50).double()
    for k in (1, 3, 10, 39, 40):
        values = top_k_divergence(log_p, log_q, beta, k)
        assert (values >= before - 1e-12).all(), k
        before = values
    torch.testing.assert_close(before, distribution_divergence(log_p, log_q, beta))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_likeliest_tokens_alone_are_enough(beta: float) -> None:
    """As a server sends them: without the logits of other tokens."""
    ours, theirs = layer(WIDTH, 203, 0, dtype=torch.float64), layer(8, 203, 1, dtype=torch.float64)
    torch.manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    states = torch.randn(TOKENS, 8, dtype=torch.float64)
    target = torch.randint(0, 203, (TOKENS,))
    log_p = torch.log_softmax(theirs(states), -1).detach()
    top = log_p.topk(9)
    known = TopTokens(top.indices, top.values, log_p[torch.arange(TOKENS), target])
    results = [
        TeacherDistributions(source, 203, beta, 9).divergence(narrow_head(ours), hidden, target)
        for source in (known, Distributions(narrow_head(theirs), states, 203))
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    slopes = [torch.autograd.grad(r.divergence.sum(), [hidden, ours.weight]) for r in results]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_tokens_without_probability_add_nothing() -> None:
    log_p = torch.tensor([[0.5, 0.5, 0.0]]).double().log()
    log_q = torch.tensor([[0.2, 0.8, 0.0]]).double().log()
    for beta in (0.0, 0.3, 1.0):
        complete = distribution_divergence(log_p, log_q, beta)
        torch.testing.assert_close(
            complete, distribution_divergence(log_p[:, :2], log_q[:, :2], beta)
        )


def test_an_adapter_of_the_head_is_none_of_the_teachers() -> None:
    lora: Any = SimpleNamespace(rank=2, alpha=4, dropout=0.0, targets=["lm_head"])
    policy = build_policy(tiny(layers=1), dtype=torch.float64, lora=lora)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    packer = StepPacker(units_for("sft", 3, 0))
    batch = packer.host_micro_batch(packer.example_indices)
    reference, rows = AdapterDisabledReference(policy), batch.scored
    distributions = reference.distributions(batch, rows, None)
    teacher = TeacherDistributions(distributions, distributions.vocabulary)
    head, states, _ = policy.distributions(batch, rows)
    result = teacher.divergence(head, states, batch.tokens[rows])
    torch.testing.assert_close(result.teacher, reference(batch)[rows])
