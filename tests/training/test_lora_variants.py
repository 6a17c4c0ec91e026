"""Runs with variants of LoRA: killed and resumed, divided differently, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.test_oracle import oracle
from tests.training.resuming import Undisturbed, killed, resumed_steps, settings_for, train
from tests.training.test_invariance import TOLERANCE
from tests.training.test_run import logged

VARIANTS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "pissa_niter": {"init_lora_weights": "pissa_niter_2", "use_dora": True},
    "olora": {"init_lora_weights": "olora"},
    "mica": {"init_lora_weights": "mica"},
    "random": {"init_lora_weights": False},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [5, 7]},
    "rank_pattern": {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 3.0}},
    "layers": {"layers_to_transform": 0, "targets": ["q_proj", "down_proj"]},
}
FAST = ("pissa", "dora")
SOME = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


def settings(name: str, folder: Path, place: Path, **run: Any) -> dict[str, Any]:
    recipe = settings_for(folder, place)
    recipe["model"]["lora"] = {"rank": 2, **VARIANTS[name]}
    recipe["train"] |= {"max_steps": 7}
    recipe["run"] |= run
    return recipe


@pytest.mark.parametrize("name", SOME)
def test_a_killed_run_ends_as_an_undisturbed_one(name: str, folder: Path, tmp_path: Path) -> None:
    (full := tmp_path / "whole").mkdir()
    (stopped := tmp_path / "stopped").mkdir()
    run, _ = train(settings(name, folder, full), quiet=True)
    killed(settings(name, folder, stopped), 6)
    resumed, _ = train(settings(name, folder, stopped), quiet=True)
    assert resumed_steps(stopped / "run") == [4]
    Undisturbed(full / "run", run).assert_same(resumed, stopped / "run")


@pytest.mark.parametrize("name", SOME)
def test_micro_batches_change_nothing_and_rewards_start_at_zero(
    name: str, folder: Path, tmp_path: Path
) -> None:
    first = list[dict[str, Any]]()
    for tokens in (10_000, 40):
        (place := tmp_path / str(tokens)).mkdir()
        recipe = settings(name, folder, place, log_every=1)
        recipe["train"] |= {"micro_batch_tokens": tokens, "max_steps": 1}
        recipe |= {"data": recipe["data"] | {"eval": []}, "eval": {}}
        train(recipe, quiet=True)
        first.append(next(record for record in logged(place / "run") if "grad_norm" in record))
    once, divided = first
    assert divided["micro_batches"] > once["micro_batches"] == 1
    for metric in ("loss", "grad_norm", "kl"):
        assert once[metric] == pytest.approx(divided[metric], rel=TOLERANCE[torch.float32], abs=0)
    assert once["rewards/chosen"] == once["rewards/rejected"] == divided["rewards/chosen"] == 0
    assert once["grad_norm"] > 1e-4


@pytest.mark.parametrize("export", ["adapter", "merged"])
@pytest.mark.parametrize("name", SOME)
def test_an_exported_model_gives_the_policys_log_probabilities(
    name: str, export: str, folder: Path, tmp_path: Path
) -> None:
    recipe = settings(name, folder, tmp_path, export=export)
    recipe["train"] |= {"learning_rate": 0.05, "max_steps": 3}
    run, _ = train(recipe, quiet=True)
    with run.state.policy.eval().stock():
        trained = _logps(run.state.policy.model)
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert (trained - _logps(base)).abs().max() > 0.05
    exported = tmp_path / "run" / "model"
    loaded: Any = (
        PeftModel.from_pretrained(base, str(exported))
        if export == "adapter"
        else AutoModelForCausalLM.from_pretrained(exported)
    )
    torch.testing.assert_close(_logps(loaded), trained, rtol=0, atol=2e-5)


def _logps(model: Any) -> Tensor:
    with torch.no_grad():
        return oracle(model, torch.arange(3, 40))


def test_ranks_of_single_layers_are_those_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    """Single layers have the ranks of the pattern."""
    run, _ = train(settings("rank_pattern", folder, tmp_path), quiet=True)
    lora = run.prepared.recipe.model.lora
    assert lora is not None
    assert lora.rank_pattern == {"q_proj": 1}
    ranks = {
        name.rpartition(".q_proj")[1] or "other": weight.shape[0]
        for name, weight in run.state.trained_weights.items()
        if "lora_A" in name
    }
    assert ranks == {".q_proj": 1, "other": 2}
