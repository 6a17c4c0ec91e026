"""AdamW's groups, and the learning rate over a run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.errors import raises_error
from valence.config.schema import Recipe
from valence.training import state_files
from valence.training.optim import adamw, check_optimizer, schedule, warmup_steps

# PyTorch's names for them, and those of bitsandbytes
MOMENTS = (
    "exp_avg",
    "exp_avg_sq",
    "state1",
    "state2",
)


def rates(kind: str, warmup: float, total: int, steps: int | None = None) -> list[float]:
    """The learning rate that each optimizer step is made with, at a peak of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    result = schedule(optimizer, kind=kind, warmup=warmup, total=total)
    results: list[float] = []
    for _ in range(total if steps is None else steps):
        results.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        result.step()
    return results


@pytest.mark.parametrize(
    ("warmup", "total", "expected"),
    [
        (0.0, 100, 0),
        (0.1, 100, 10),
        (0.03, 100, 3),
        (0.03, 10, 1),
        (0.5, 3, 2),
        (1, 100, 1),
        (20.0, 10, 20),
        (0.03, 1, 1),
    ],
)
def test_warm_up_is_a_share_of_all_steps_or_a_number_of_steps(
    warmup: float, total: int, expected: int
) -> None:
    assert warmup_steps(warmup, total) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (
            "cosine",
            [0.5, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2],
        ),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_by_hand(kind: str, expected: list[float]) -> None:
    assert rates(kind, 2, 6) == pytest.approx(expected)


@given(
    st.sampled_from(["linear", "cosine", "constant"]),
    st.sampled_from([0.0, 0.03, 0.5, 0.99, 1, 3, 50]),
    st.integers(1, 60),
)
def test_every_step_trains_and_none_above_the_peak(kind: str, warmup: float, total: int) -> None:
    result = rates(kind, warmup, total)
    assert all(0 < rate <= 1 + 1e-12 for rate in result)
    rise = min(warmup_steps(warmup, total), total)
    assert result[:rise] == sorted(result[:rise])
    assert result[rise:] == sorted(result[rise:], reverse=True)


@pytest.mark.parametrize(("kind", "last"), [("linear", 0.0), ("cosine", 0.0), ("constant", 1.0)])
def test_the_rate_reaches_its_end_at_the_last_step_and_stays(kind: str, last: float) -> None:
    assert rates(kind, 0.1, 10, steps=13)[10:] == pytest.approx([last] * 3, abs=1e-12)


def test_only_matrices_that_train_decay() -> None:
    model = nn.ModuleDict(
        {"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2), "frozen": nn.Linear(2, 2)}
    )
    model["frozen"].requires_grad_(False)
    result = adamw(model, learning_rate=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    results = {
        id(p): group["weight_decay"] for group in result.param_groups for p in group["params"]
    }
    names = {name: results.get(id(p)) for name, p in model.named_parameters()}
    assert {name for name, decay in names.items() if decay == 0.5} == {"linear.weight"}
    assert {name for name, decay in names.items() if decay == 0} == {
        "linear.bias",
        "norm.weight",
        "norm.bias",
    }
    assert {name for name, decay in names.items() if decay is None} == {
        "frozen.weight",
        "frozen.bias",
    }
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.1 for group in result.param_groups)


def test_decay_is_decoupled_from_the_gradient() -> None:
    """With a gradient of zero, a matrix shrinks by lr * decay and a bias stays."""
    model = nn.Linear(2, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    result = adamw(model, learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.999))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    result.step()
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias.detach(), bias)


def test_a_model_with_matrices_alone_has_one_group() -> None:
    assert (
        len(
            adamw(
                nn.Linear(2, 2, bias=False), learning_rate=0.1, weight_decay=0.0, betas=(0.9, 0.999)
            ).param_groups
        )
        == 1
    )


def test_a_critic_has_separate_groups_and_a_separate_rate_under_one_schedule() -> None:
    """The first group stays the policy's: its rate is the one that is logged."""
    model = nn.ModuleDict({"critic": nn.Linear(2, 1), "model": nn.Linear(3, 2)})
    options: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.99)}
    result = adamw(model, **options, value_learning_rate=0.4)
    wanted = [
        ("model.weight", 0.1, 0.5),
        ("model.bias", 0.1, 0.0),
        ("critic.weight", 0.4, 0.5),
        ("critic.bias", 0.4, 0.0),
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    assert [
        (names[id(p)], g["lr"], g["weight_decay"]) for g in result.param_groups for p in g["params"]
    ] == wanted
    assert [group["lr"] for group in adamw(model, **options).param_groups] == [0.1] * 4
    falls = schedule(result, kind="linear", warmup=0, total=4)
    results: list[list[float]] = []
    for _ in range(4):
        results.append([group["lr"] for group in result.param_groups])
        result.step()
        falls.step()
    assert results == [
        pytest.approx([rate * part for _, rate, _ in wanted]) for part in (1, 0.75, 0.5, 0.25)
    ]


def test_a_share_of_a_round_number_of_steps_is_exact() -> None:
    assert warmup_steps(0.07, 100) == 7


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_state_of_an_optimizer_survives_its_file(
    kind: Literal["adamw", "adamw_8bit"], tmp_path: Path
) -> None:
    """Saved and restored, the optimizer takes the same steps, bit for bit."""
    through, stopped, other = (_model_and_optimizer(kind) for _ in range(3))
    _train(through, range(5))
    _train(stopped, range(3))
    state_files.Snapshot(
        {"weights": dict(stopped[0].state_dict()), "optimizer": stopped[1].state_dict()}
    ).write(tmp_path)
    saved = state_files.load(tmp_path)
    other[0].load_state_dict(saved["weights"])
    other[1].load_state_dict(saved["optimizer"])
    _train(other, range(3, 5))
    for wanted, result in zip(through[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(wanted, result)
    assert not torch.equal(next(through[0].parameters()), next(stopped[0].parameters()))


def _model_and_optimizer(
    kind: Literal["adamw", "adamw_8bit"],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128))
    return model, adamw(model, learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.99), kind=kind)


def _train(of: tuple[nn.Module, torch.optim.Optimizer], steps: range) -> None:
    """Steps along gradients that depend on nothing but their number."""
    model, optimizer = of
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
        optimizer.step()


def test_moments_of_8_bits_train_as_those_of_32_do() -> None:
    results: list[Tensor] = []
    sizes: list[int] = []
    for kind in ("adamw", "adamw_8bit"):
        model, optimizer = result = _model_and_optimizer(kind)
        before = next(model.parameters()).detach().clone()
        _train(result, range(4))
        results.append(next(model.parameters()).detach() - before)
        sizes.append(
            sum(
                t.nbytes
                for name, t in optimizer.state[next(model.parameters())].items()
                if name in MOMENTS
            )
        )
    assert 0 < (results[0] - results[1]).norm() < 0.1 * results[0].norm()
    assert sizes[1] == sizes[0] // 4 > 0


def test_moments_of_8_bits_need_their_library_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(optimizer: str, dtype: str) -> Recipe:
        train = {"optimizer": optimizer, "learning_rate": 0.1}
        model = {"name": "m", "dtype": dtype}
        return Recipe.model_validate({"method": "sft", "model": model, "train": train})

    check_optimizer(recipe("adamw_8bit", "bfloat16"))
    with raises_error("optimizer-dtype", where="train.optimizer", fix="adamw"):
        check_optimizer(recipe("adamw_8bit", "float64"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_error("library-missing", where="train.optimizer", fix="valence-align[eightbit]"):
        check_optimizer(recipe("adamw_8bit", "float32"))
    check_optimizer(recipe("adamw", "float64"))
