"""The recipes of the repository: each loads, with the real table of methods and with the data next
to it. Those for large models fit the GPUs that they name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.large_models import SHAPES, plan_large, use_gpus
from valence.config.load import load_recipe
from valence.config.needs import method_in
from valence.methods import METHODS, ONLINE, Method
from valence.models.memory import Split
from valence.training.plan import Plan

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(path)
    assert loaded.recipe.run.dir == f"runs/{path.stem}"
    Path("config.yaml").write_text(loaded.to_yaml())
    assert load_recipe("config.yaml").recipe == loaded.recipe


def test_every_kind_of_rows_has_a_recipe():
    used = [method_in(load_recipe(path, training=False).recipe) for path in RECIPES]
    assert {method.kind for method in used} == {
        method.kind for method in (*METHODS.values(), *ONLINE.values())
    }


def teacher_for(method: Method) -> dict[str, Any]:
    """The section that distillation needs too."""
    needs_model = method.loss.needs_teacher and method.loss.data != "feedback"
    return {"teacher": {"model": "some/teacher"}} if needs_model else {}


@pytest.mark.parametrize("name", ONLINE)
def test_a_method_loads_with_nothing_but_a_model_prompts_and_a_reward(name: str):
    rows = str(Path(__file__).parents[2] / "examples" / "quickstart" / "prompts.jsonl")
    settings = {
        "method": name,
        "model": {"name": "some/model"},
        "data": {"train": rows},
        "reward": "vader",
        **teacher_for(ONLINE[name]),
    }
    loaded = load_recipe(settings)
    assert loaded.recipe.loss.keys() >= ONLINE[name].loss.settings.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_loads_with_nothing_but_a_model_and_rows(name: str):
    rows = str(Path(__file__).parents[2] / "examples" / "quickstart" / "feedback.jsonl")
    settings = {
        "method": name,
        "model": {"name": "some/model"},
        "data": {"train": rows},
        **teacher_for(METHODS[name]),
    }
    loaded = load_recipe(settings)
    assert loaded.recipe.loss.keys() == METHODS[name].loss.settings.keys()


def test_the_guide_tells_of_every_recipe_and_of_no_other():
    page = (ROOT / "docs/train/methods.md").read_text(encoding="utf-8")
    table = page.partition("\n## Recipes\n")[2]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(names) == [path.stem for path in RECIPES]


# Recipes for large models: planned for 80 GB, with the shape of the model and rows of the shape of
# the hub's, and no weights.

HBM = 80e9
Plans = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Plans of a recipe for different numbers of GPUs with 80 GB."""
    use_gpus(monkeypatch, HBM)

    def make(name: str, gpus: int, *overrides: str) -> Plan:
        return plan_large(ROOT / "recipes" / f"{name}.yaml", gpus, tmp_path, *overrides)

    return make


def gigabytes(result: Plan, tokens: int) -> float:
    return result.memory.total(tokens) / 1e9


@pytest.mark.parametrize(
    ("name", "gpus", "split", "tokens", "predicted"),
    [
        ("llama_8b_lora", 1, Split(), 32768, 35.4),
        ("llama_8b_full", 8, Split(8), 8192, 46.5),
        ("llama_70b", 64, Split(8, 8), 8192, 56.0),
        ("qwen_7b_grpo", 1, Split(), 32768, 33.9),
    ],
)
def test_a_recipe_for_a_large_model_fits_the_gpus_that_it_names(
    planned: Plans, name: str, gpus: int, split: Split, tokens: int, predicted: float
):
    result = planned(name, gpus)
    model = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe.model
    assert result.shape.parameters == SHAPES[model.name][2]
    assert result.split == split
    assert result.micro_batch_tokens == tokens  # what the recipe says, or what it would find
    assert gigabytes(result, tokens) == pytest.approx(predicted, abs=0.1)  # as in the guide
    assert predicted < 0.8 * HBM / 1e9


@pytest.mark.slow
def test_what_the_recipes_say_of_other_machines(planned: Plans):
    assert gigabytes(planned("llama_8b_lora", 1), 4096) == pytest.approx(21.3, abs=0.1)
    assert gigabytes(planned("llama_8b_lora", 1, "train.checkpointing=off"), 4096) == pytest.approx(
        49.4, abs=0.1
    )
    assert gigabytes(planned("llama_8b_full", 4), 8192) == pytest.approx(66.6, abs=0.1)
    assert gigabytes(planned("llama_8b_full", 1), 8192) > HBM / 1e9  # nothing to split over
    without_tensor = planned("llama_70b", 64, "parallel.tensor=1")
    assert gigabytes(without_tensor, 8192) > HBM / 1e9
    assert gigabytes(planned("llama_70b", 32), 8192) > 0.95 * HBM / 1e9
    adapter = planned(
        "llama_70b", 8, "model.lora={rank: 16}", "parallel.tensor=1", "train.learning_rate=1.0e-5"
    )
    assert gigabytes(adapter, 8192) == pytest.approx(45.0, abs=0.1)
