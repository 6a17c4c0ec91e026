"""Optimizers that a recipe names by import path: built, resumed, and used to measure and export."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import valence
from tests.errors import raises_error
from tests.models.test_oracle import oracle
from tests.tiny_models import tiny
from tests.training.resuming import Undisturbed, killed, resumed_steps, settings_for, train
from tests.training.test_run import recipe
from valence.config.schema import Recipe
from valence.models.shape import hidden_matrices
from valence.training.open_run import restore
from valence.training.optim import (
    AdamW,
    CombinedOptimizer,
    check_optimizer,
    evaluation_weights,
    optimizer_class,
    recipe_optimizer,
)
from valence.training.plan import describe, make_plan
from valence.training.trainer import Trainer

SCHEDULE_FREE = "schedulefree.AdamWScheduleFree"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.Muon": {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    SCHEDULE_FREE: {},
    "schedulefree.RAdamScheduleFree": {},
    "torch.optim.Adafactor": {"eps": [None, 1e-3]},
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.SGD ": {},
    "adamw": {"eps": 1e-6},
}
FULL = {"model": {"lora": None}}


def settings(name: str, folder: Path, place: Path, **sections: Any) -> dict[str, Any]:
    result = settings_for(folder, place)
    result["train"] |= {
        "optimizer": name.strip(),
        "optimizer_settings": OPTIMIZERS[name],
        "weight_decay": 0.1,
    }
    for section, values in sections.items():
        result[section] = {**result.get(section, {}), **values}
    return result


def train_section(**settings: Any) -> Recipe:
    return Recipe.model_validate(
        {"method": "sft", "model": {"name": "m"}, "train": {"learning_rate": 0.1, **settings}}
    )


FAST = [("torch.optim.Muon", FULL), (SCHEDULE_FREE, {}), ("torch.optim.Adafactor", {})]
CASES = [
    pytest.param(name, sections, marks=() if (name, sections) in FAST else pytest.mark.slow)
    for name in OPTIMIZERS
    for sections in ({}, FULL)
]


@pytest.mark.parametrize(("name", "sections"), CASES)
def test_a_killed_run_ends_as_an_undisturbed_one(
    name: str, sections: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Also one that is killed twice; evaluations come at steps that save and at others."""
    (full := tmp_path / "whole").mkdir()
    (stopped := tmp_path / "stopped").mkdir()
    sections = {"train": {"max_steps": 7}, **sections}
    run, _ = train(settings(name, folder, full, **sections), quiet=True)
    for step in (3, 6):
        killed(settings(name, folder, stopped, **sections), step)
    resumed, _ = train(settings(name, folder, stopped, **sections), quiet=True)
    assert resumed_steps(stopped / "run") == [2, 4]
    undisturbed = Undisturbed(full / "run", run)
    undisturbed.assert_same(resumed, stopped / "run")
    start = dict(tiny_weights(folder))
    trained = {n: p for n, p in run.state.trained_weights.items() if n in start}
    assert not trained or any(not torch.equal(p, start[n]) for n, p in trained.items())


def tiny_weights(folder: Path) -> dict[str, Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return {f"model.{name}": p for name, p in model.named_parameters()}


@pytest.mark.parametrize("sections", [{}, FULL], ids=["lora", "full"])
def test_averaged_weights_are_measured_sampled_saved_and_exported(
    sections: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    source = settings(SCHEDULE_FREE, folder, tmp_path, **sections)
    source["train"] |= {"learning_rate": 0.05, "schedule": "constant"}
    source["run"] |= {"save_hf": True, "samples": {"prompts": 1, "max_new_tokens": 4}}
    run, _ = train(source, quiet=True)
    trained = _logps(run)
    averaged = run.state.optimizer
    with evaluation_weights(averaged):
        wanted = _logps(run)
    assert torch.equal(_logps(run), trained)
    assert (wanted - trained).abs().max() > 1e-3
    restored = restore(tmp_path / "run")
    assert torch.equal(_logps(restored), wanted)
    held_out = run.evaluate().metrics["loss"]
    assert held_out == restored.evaluate().metrics["loss"] == run.evaluations[9]["loss"]
    for exported in ("model", "checkpoints/step-9/model"):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / exported)
        with torch.no_grad():
            result = oracle(model, torch.arange(3, 40))
        torch.testing.assert_close(result, wanted, rtol=0, atol=2e-5)
    assert torch.equal(_logps(run), trained)
    answers = [engine.ask("hi", max_new_tokens=8) for engine in (run, restored)]
    assert answers[0] == answers[1]


def _logps(run: Trainer) -> Tensor:
    with run.state.policy.eval().stock(), torch.no_grad():
        return oracle(run.state.policy.model, torch.arange(3, 40))


def test_the_average_is_that_of_the_paper() -> None:
    """x_t = (1 - 1/t) x_{t-1} + z_t / t and y_t = 0.9 x_t + 0.1 z_t, by SGD without momentum."""
    weight, rate, beta = nn.Parameter(torch.tensor([[1.0, 2.0]])), 0.1, 0.9
    section = train_section(
        optimizer="schedulefree.SGDScheduleFree", optimizer_settings={"momentum": beta}
    ).train
    kind = optimizer_class(section)
    assert kind is not None
    optimizer = kind.build([{"params": [weight], "lr": rate, "weight_decay": 0.0}], section)
    x = z = weight.detach().clone()
    for step in range(1, 5):
        weight.grad = torch.tensor([[0.3 * step, -0.1]])
        z = z - rate * weight.grad
        x = x + (z - x) / step
        optimizer.step()
        torch.testing.assert_close(weight.detach(), beta * x + (1 - beta) * z)
        with evaluation_weights(optimizer):
            torch.testing.assert_close(weight.detach(), x)


def test_an_optimizer_of_matrices_leaves_other_weights_to_adamw() -> None:
    policy = tiny("llama", dtype=torch.float32)
    optimizer = recipe_optimizer(
        train_section(optimizer="torch.optim.Muon", weight_decay=0.1, betas=(0.5, 0.6)), policy
    )
    assert isinstance(optimizer, CombinedOptimizer)
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, AdamW)
    names = {id(p): name for name, p in policy.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert by_muon == {n for n in names.values() if "_proj" in n} == set(hidden_matrices(policy))
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert all(group["betas"] == (0.5, 0.6) for group in adamw.param_groups)
    optimizer.param_groups[0]["lr"] = 0.5  # as a schedule does
    assert muon.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert muon.param_groups[0]["lr"] == 0.25


def test_a_combined_optimizer_makes_the_steps_of_its_parts() -> None:
    """Against both optimizers by themselves, which also continue from its saved state."""
    policies = [tiny("llama", dtype=torch.float32) for _ in range(3)]
    section = train_section(optimizer="torch.optim.Muon")
    combined = recipe_optimizer(section, policies[0])
    matrices = hidden_matrices(policies[1])
    others = [p for name, p in policies[1].named_parameters() if name not in matrices]
    separate = [
        torch.optim.Muon(list(matrices.values()), lr=0.1, weight_decay=0.0),
        torch.optim.AdamW(others, lr=0.1, weight_decay=0.0),
    ]
    continued = recipe_optimizer(section, policies[2])
    for step in range(4):
        for policy in policies:
            for i, p in enumerate(policy.parameters()):
                generator = torch.Generator().manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, generator=generator)
        if step == 2:
            policies[2].load_state_dict(policies[0].state_dict())
            continued.load_state_dict(copy.deepcopy(combined.state_dict()))
        for optimizer in [combined, *separate, *([continued] if step >= 2 else [])]:
            optimizer.step()
    for policy, near in ((policies[1], 1e-6), (policies[2], 0.0)):
        for ours, theirs in zip(policies[0].parameters(), policy.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


def test_a_plan_says_who_trains_what_and_what_it_does_not_know(
    folder: Path, tmp_path: Path
) -> None:
    from valence.config.load import load_recipe
    from valence.training.prepare import prepare

    def plan(**settings: Any) -> Any:
        source = recipe(folder, tmp_path, train=settings)
        return make_plan(prepare(load_recipe(source), training=True))

    muon, sgd, adamw = plan(optimizer="torch.optim.Muon"), plan(optimizer="torch.optim.SGD"), plan()
    shape = muon.shape
    assert 0 < shape.matrices < shape.trained
    text = "\n".join(describe(muon))
    assert f"{shape.matrices:,} weights" in text
    assert f"AdamW for the other {shape.trained - shape.matrices:,}" in text
    assert "not included" in text
    assert muon.memory.optimizer == 4 * shape.matrices + 8 * (shape.trained - shape.matrices)
    assert sgd.memory.optimizer == 0
    assert adamw.memory.optimizer == 8 * shape.trained
    assert not any(line.startswith("optimizer") for line in describe(adamw))
    assert "constant" in "\n".join(describe(plan(optimizer=SCHEDULE_FREE)))


CODE = {"broken": "import nothing_of_this_name\n", "users": """
import torch
class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * group["scale"] * p.grad.sign())
class NoRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
"""}  # fmt: skip


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, code in CODE.items():
        (tmp_path / f"{name}_optimizers.py").write_text(code)
        monkeypatch.delitem(sys.modules, f"{name}_optimizers", raising=False)


@pytest.mark.usefixtures("modules")
def test_an_optimizer_of_the_user_trains(folder: Path, tmp_path: Path) -> None:
    source = recipe(folder, tmp_path, "sft", train={"max_steps": 1, "learning_rate": 0.5})
    source["train"] |= {
        "optimizer": "users_optimizers:Sign",
        "optimizer_settings": {"scale": 0.5},
        "schedule": "constant",
        "warmup": 0,
    }
    run = valence.train(source, quiet=True)
    start = tiny_weights(folder)
    moves = {
        float(move)
        for name, p in run.state.trained_weights.items()
        for move in (p.detach() - start[name]).abs().flatten()
    }
    assert all(min(abs(move), abs(move - 0.25)) < 1e-5 for move in moves)
    assert any(abs(move - 0.25) < 1e-5 for move in moves)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("section", "code", "where", "fix"),
    [
        ({"optimizer": "torch.optim.Moun"}, "optimizer-not-found", "optimizer", "torch.optim.Muon"),
        ({"optimizer": "torch.optim.Foo"}, "optimizer-not-found", "optimizer", "use one of ASGD"),
        ({"optimizer": "no_such_module.A"}, "optimizer-not-found", "optimizer", "install"),
        ({"optimizer": "broken_optimizers.A"}, "optimizer-not-found", "optimizer", "module"),
        ({"optimizer": "torch.nn.Linear"}, "optimizer-not-found", "optimizer", "Optimizer"),
        ({"optimizer": "torch.optim.LBFGS"}, "optimizer-failed", "optimizer", "closure"),
        ({"optimizer": "torch.optim.SparseAdam"}, "optimizer-failed", "optimizer", "choose"),
        ({"optimizer": "users_optimizers.NoRate"}, "optimizer-unsupported", "optimizer", "rate"),
        (
            {"optimizer": "torch.optim.Muon", "optimizer_settings": {"momentun": 0.9}},
            "optimizer-setting",
            "optimizer_settings.momentun",
            "momentum",
        ),
        (
            {"optimizer_settings": {"lr": 0.1}},
            "optimizer-setting",
            "optimizer_settings.lr",
            "train.learning_rate",
        ),
        (
            {"optimizer": "torch.optim.SGD", "optimizer_settings": {"momentum": -1.0}},
            "optimizer-failed",
            "optimizer_settings",
            "settings",
        ),
        ({"optimizer": "torch.optim.SGD", "betas": (0.9, 0.99)}, "setting-no-effect", "betas", ""),
        (
            {"optimizer": "users_optimizers.Sign", "weight_decay": 0.1},
            "setting-no-effect",
            "weight_decay",
            "",
        ),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    section: dict[str, Any], code: str, where: str, fix: str
) -> None:
    with raises_error(code, where=f"train.{where}", fix=fix):
        check_optimizer(train_section(**section))


def test_online_training_has_no_averaged_weights() -> None:
    source = train_section(optimizer=SCHEDULE_FREE)
    online = source.model_copy(update={"reward": [object()]})
    check_optimizer(source)
    with raises_error("optimizer-unsupported", where="train.optimizer"):
        check_optimizer(online)


@pytest.mark.usefixtures("modules")
def test_a_run_folder_imports_no_optimizer(folder: Path, tmp_path: Path) -> None:
    source = recipe(folder, tmp_path, "sft", train={"max_steps": 1})
    source["train"]["optimizer"] = "users_optimizers.Sign"
    valence.train(source, quiet=True)
    (tmp_path / "users_optimizers.py").write_text("raise SystemExit('imported')")
    sys.modules.pop("users_optimizers", None)
    run = restore(tmp_path / "run")
    assert run.evaluate().metrics["loss"] > 0
    assert "users_optimizers" not in sys.modules
