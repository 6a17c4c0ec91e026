"""Gradients of vocabulary matrices equal those of PyTorch's functions, also in reused memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import tiny
from tests.units import models_for, objective, units_for
from valence.models import gradients
from valence.models.build import build_policy
from valence.models.gradients import MEMORY, Embedding, clear, write_embedding_gradients
from valence.training.step import optimizer_step

ROWS, WIDTH = 12, 5
LARGE_ROWS = gradients.LARGE // (8 * WIDTH) + 1
IDS = torch.tensor([[3, 0, 3, 11], [3, 7, 0, 1]])


def pair(
    padding: int | None = None, dtype: torch.dtype = torch.float64, rows: int = ROWS
) -> tuple[nn.Embedding, nn.Embedding]:
    """PyTorch's own and ours, with the same weights."""
    torch.manual_seed(0)
    actual = nn.Embedding(rows, WIDTH, padding_idx=padding, dtype=dtype)
    ours = nn.Embedding(rows, WIDTH, padding_idx=padding, dtype=dtype)
    ours.load_state_dict(actual.state_dict())
    ours.__class__ = Embedding
    return actual, ours


def value(table: nn.Embedding, ids: Tensor = IDS) -> Tensor:
    return (table(ids) * torch.arange(1.0, WIDTH + 1)).sin().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_the_gradient_of_an_embedding_is_pytorchs_and_adds_up(
    padding: int | None, dtype: torch.dtype
) -> None:
    actual, ours = pair(padding, dtype)
    for ids in (IDS, IDS.flip(0), torch.tensor([3])):
        assert torch.equal(ours(ids), actual(ids))
        value(actual, ids).backward()
        value(ours, ids).backward()
        torch.testing.assert_close(
            ours.weight.grad,
            actual.weight.grad,
            rtol=1e-6 if dtype == torch.float32 else 1e-12,
            atol=1e-12,
        )
    with torch.no_grad():
        assert torch.equal(ours(IDS), actual(IDS))


@pytest.mark.parametrize("mode", ["grad", "hook", "after"])
def test_it_is_handed_over_where_somebody_waits_for_it(mode: str) -> None:
    actual, ours = pair()
    value(actual).backward()
    observed: list[Any] = []
    if mode == "grad":
        observed += torch.autograd.grad(value(ours), [ours.weight])
        assert ours.weight.grad is None
    else:
        wait = (
            ours.weight.register_hook
            if mode == "hook"
            else ours.weight.register_post_accumulate_grad_hook
        )
        wait(
            (lambda slope: observed.append(slope.clone()))
            if mode == "hook"
            else (lambda weight: observed.append(weight.grad))
        )
        value(ours).backward()
    torch.testing.assert_close(observed[0], actual.weight.grad, rtol=1e-12, atol=1e-12)


def test_memory_is_used_again_and_its_content_forgotten() -> None:
    actual, ours = pair(rows=LARGE_ROWS)
    value(ours).backward()
    first: Any = ours.weight.grad
    first.fill_(torch.nan)
    clear(ours.parameters())
    assert ours.weight.grad is None
    value(actual, IDS[:1]).backward()
    value(ours, IDS[:1]).backward()
    assert ours.weight.grad is first
    torch.testing.assert_close(first, actual.weight.grad, rtol=1e-12, atol=1e-12)
    clear(ours.parameters())
    clear(ours.parameters())  # without a backward pass in between
    value(ours).backward()
    assert ours.weight.grad is first


def test_memory_is_given_back_on_demand_and_where_it_does_not_fit() -> None:
    for change in ("demand", "dtype", "shape"):
        _, ours = pair(rows=LARGE_ROWS)
        value(ours).backward()
        first: Any = ours.weight.grad
        clear(ours.parameters(), keep=change != "demand")
        if change == "dtype":
            ours.float()
        elif change == "shape":
            ours.weight.data = ours.weight.data[:-1].clone()
        assert (MEMORY in vars(ours.weight)) == (change != "demand")
        value(ours, IDS.clamp_max(10)).backward()
        assert ours.weight.grad is not None
        assert ours.weight.grad.data_ptr() != first.data_ptr()
        assert (ours.weight.grad.dtype, ours.weight.grad.shape) == (
            ours.weight.dtype,
            ours.weight.shape,
        )


def test_a_gradient_that_was_moved_away_is_not_changed() -> None:
    """Only ``clear`` marks the memory of a gradient as unused."""
    _, ours = pair(rows=LARGE_ROWS)
    value(ours).backward()
    first: Any = ours.weight.grad
    before = first.clone()
    ours.zero_grad(set_to_none=True)
    value(ours, IDS[:1]).backward()
    assert ours.weight.grad is not first
    assert torch.equal(first, before)


def test_small_gradients_are_not_kept() -> None:
    _, ours = pair()
    value(ours).backward()
    clear(ours.parameters())
    assert MEMORY not in vars(ours.weight)


@pytest.mark.parametrize(
    ("architecture", "plain"),
    [("llama", True), ("llama-tied", True), ("gpt2", True), ("gemma2", False)],
)
def test_tables_that_do_more_than_look_up_are_left_alone(architecture: str, plain: bool) -> None:
    policy = build_policy(tiny(architecture), dtype=torch.float32)
    assert (type(policy.causal.get_input_embeddings()) is Embedding) == plain
    clipped = nn.Embedding(ROWS, WIDTH, max_norm=1.0)

    class Model:
        def get_input_embeddings(self) -> nn.Embedding:
            return clipped

    write_embedding_gradients(Model())
    assert type(clipped) is nn.Embedding


@pytest.mark.parametrize(
    "method", ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "sft"))]
)
def test_steps_are_the_same_to_the_last_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[list[Tensor]] = []
    for large in (0, 2**60):
        monkeypatch.setattr(gradients, "LARGE", large)
        policy, reference = models_for(method)
        actual = objective(method, policy, reference, budget=40)
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
        for seed in range(3):
            rows = units_for(method, 6, seed)
            plan = actual.plan(rows, iter(units_for(method, 3, 9)), backward=True)
            optimizer_step(actual, optimizer, rows, 1.0, plan=plan)
        remaining = [p for p in policy.parameters() if MEMORY in vars(p)]
        assert bool(remaining) == (large == 0)
        results.append([p.detach() for p in policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
