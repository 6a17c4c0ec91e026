"""A complete run on a simulated CUDA device equals that on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import valence
from tests.simulated_cuda import CUDA, simulated_device
from tests.tiny import tiny_tokenizer
from tests.training.online import recipes
from tests.training.test_run import recipe
from valence.training.open_run import restore

LORA = {"lora": {"rank": 4}}
SHORT = {"epochs": 1}


def judge(place: Path) -> str:
    """The folder of a reward model."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(place / "model", num_labels=1)
    )
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(place / "judge")
    tiny_tokenizer().save_pretrained(place / "judge")
    return str(place / "judge")


RUNS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "kto, adapter": lambda model, place: recipe(
        model, place, model=LORA, train=SHORT, run={"samples": {"prompts": 2, "max_new_tokens": 4}}
    ),
    "kto, adapter in bfloat16": lambda model, place: recipe(
        model, place, model=LORA | {"dtype": "bfloat16"}, train=SHORT
    ),
    "dpo": lambda model, place: recipe(model, place, "dpo", train=SHORT),
    "grpo": lambda _, place: recipes.recipe(
        place, train={"max_steps": 2}, reward=[{"reward": judge(place)}]
    ),
    "ppo": lambda _, place: recipes.recipe(place, "ppo", train={"max_steps": 3}),
}
OFFLOADED = "kto, adapter in bfloat16"
"""Its layers run again there, with what they begin from in the host's memory."""


FAST = "dpo"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in RUNS],
)
def test_a_run_on_a_device_is_that_on_the_host(name: str, folder: Path, tmp_path: Path) -> None:
    recipes.make(tmp_path)
    settings = RUNS[name](folder, tmp_path)
    there = settings | {"run": settings["run"] | {"dir": str(tmp_path / "there")}}
    if name == OFFLOADED:
        there["train"] = settings["train"] | {"checkpointing": "offloaded"}
    valence.train(settings, quiet=True)
    with simulated_device() as waits:
        run = valence.train(there, quiet=True)
        assert run.policy.device == CUDA
        assert sum(line.startswith("step.py:optimizer_step:") for line in waits) == run.step
        assert restore(tmp_path / "there").policy.device == CUDA
    result, wanted = (recipes.logged(tmp_path, name) for name in ("there", "run"))
    assert [row.keys() for row in result] == [row.keys() for row in wanted]
    for row, other in zip(result, wanted, strict=True):
        row.pop("rewards/auc", None)  # ranks what at first is rounding alone
        close = {"rel": 0.05, "abs": 0.05} if "bfloat16" in name else {"rel": 1e-3, "abs": 1e-4}
        assert row == {key: pytest.approx(other[key], **close) for key in row}
