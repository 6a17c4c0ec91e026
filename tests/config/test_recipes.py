"""The recipes that the repository ships: each loads, with the real table of methods and with the data beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from valence.config.load import load_recipe
from valence.training.methods import METHODS, ONLINE, method_in, method_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_anywhere(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(path, method_of=method_of)
    assert loaded.recipe.run.dir == f"runs/{path.stem}"
    Path("config.yaml").write_text(loaded.to_yaml())
    assert load_recipe("config.yaml", method_of=method_of).recipe == loaded.recipe


def test_every_kind_of_rows_has_a_recipe():
    used = [method_in(load_recipe(path, method_of=method_of, training=False).recipe) for path in RECIPES]
    assert {method.kind for method in used} == {method.kind for method in (*METHODS.values(), *ONLINE.values())}


@pytest.mark.parametrize("name", ONLINE)
def test_a_method_loads_with_nothing_but_a_model_prompts_and_a_reward(name: str):
    rows = str(Path(__file__).parents[2] / "examples" / "quickstart" / "prompts.jsonl")
    given = {"method": name, "model": {"name": "some/model"}, "data": {"train": rows}, "reward": "vader"}
    loaded = load_recipe(given, method_of=method_of)
    assert loaded.recipe.loss.keys() >= ONLINE[name].loss.settings.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_loads_with_nothing_but_a_model_and_rows(name: str):
    rows = str(Path(__file__).parents[2] / "examples" / "quickstart" / "feedback.jsonl")
    loaded = load_recipe({"method": name, "model": {"name": "some/model"}, "data": {"train": rows}}, method_of=method_of)
    assert loaded.recipe.loss.keys() == METHODS[name].loss.settings.keys()
