"""Settings that a recipe leaves to the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from valence.config.load import LoadedRecipe, load_recipe
from valence.methods import METHODS, ONLINE
from valence.methods.learning_rates import LEARNING_RATES
from valence.models.dtypes import automatic_dtype
from valence.targets import with_dtype
from valence.training.resume import with_recorded


def loaded(method: str = "kto", online: bool = False, **sections: Any) -> LoadedRecipe:
    reward = {"reward": "exact_match"} if online else {}
    recipe = {"method": method, "model": {"name": "m"}, **reward, **sections}
    return load_recipe(recipe, training=False)


@pytest.mark.parametrize(
    ("method", "online", "full", "adapter"),
    [
        ("sft", False, 1e-5, 2e-4),
        ("dft", False, 1e-5, 2e-4),
        ("rejection", True, 1e-5, 2e-4),
        ("kto", False, 1e-6, 1e-4),
        ("dpo", False, 1e-6, 1e-4),
        ("simpo", False, 1e-6, 1e-4),
        ("online_kto", True, 1e-6, 1e-4),
        ("orpo", False, 8e-6, 1e-4),
        ("online_orpo", True, 8e-6, 1e-4),
        ("grpo", False, 1e-6, 1e-5),
        ("grpo", True, 1e-6, 1e-5),
        ("ppo", True, 1e-6, 1e-5),
        ("bradley_terry", False, 1e-5, 1e-4),
        ("pointwise", False, 1e-5, 1e-4),
    ],
)
def test_the_learning_rate_follows_from_method_and_weights(
    method: str, online: bool, full: float, adapter: float
) -> None:
    for model, rate, weights in (
        ({}, full, "all weights"),
        ({"lora": {}}, adapter, "adapter"),
        ({"adapter": "a"}, adapter, "adapter"),
    ):
        result = loaded(method, online, model={"name": "m", **model})
        setting = result.settings["train.learning_rate"]
        assert result.recipe.train.learning_rate == setting.value == rate
        assert setting.is_automatic
        assert method in setting.origin
        assert weights in setting.origin


def test_every_method_has_learning_rates_and_all_of_them_a_source() -> None:
    used = [method.learning_rates for method in (*METHODS.values(), *ONLINE.values())]
    assert {rates.methods for rates in used} == {rates.methods for rates in LEARNING_RATES.values()}
    for rates in LEARNING_RATES.values():
        assert 0 < rates.full < rates.adapter
        assert rates.full_source
        assert rates.adapter_source


def test_a_learning_rate_of_the_recipe_stays(tmp_path: Path) -> None:
    result = loaded(train={"learning_rate": 3e-4})
    assert result.recipe.train.learning_rate == 3e-4
    assert not result.settings["train.learning_rate"].is_automatic
    assert loaded(train={"learning_rate": "auto"}).recipe.train.learning_rate == 1e-6
    written = tmp_path / "config.yaml"
    written.write_text(loaded().to_yaml())
    again = load_recipe(written, ["model.lora={}"], training=False)
    assert again.recipe.train.learning_rate == 1e-6  # of a run, whatever the table says by now


@pytest.mark.parametrize(
    ("cuda", "narrow", "chosen"),
    [
        (True, True, "bfloat16"),
        (True, False, "float32"),
        (False, True, "bfloat16"),
        (False, False, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_multiplies_it(
    cuda: bool, narrow: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VALENCE_DTYPE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: narrow)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: narrow)
    assert automatic_dtype()[0] == chosen
    result = with_dtype(loaded())
    assert result.recipe.model.dtype == result.settings["model.dtype"].value == chosen
    assert result.settings["model.dtype"].is_automatic
    assert (
        with_dtype(loaded(model={"name": "m", "dtype": "float64"})).recipe.model.dtype == "float64"
    )


def test_the_environment_may_choose_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_DTYPE", "bfloat16")
    assert with_dtype(loaded()).recipe.model.dtype == "bfloat16"
    monkeypatch.setenv("VALENCE_DTYPE", "float16")
    with raises_error("environment-variable-invalid", where="VALENCE_DTYPE", fix="bfloat16"):
        with_dtype(loaded())


def test_what_a_run_recorded_replaces_automatic_settings_only() -> None:
    recorded = {"model.dtype": "bfloat16", "train.learning_rate": 1e-5, "train.seed": 3}
    again = with_recorded(with_dtype(loaded()), recorded)
    assert (
        again.recipe.model.dtype,
        again.recipe.train.learning_rate,
        again.recipe.train.seed,
    ) == ("bfloat16", 1e-5, 0)
    named = with_recorded(
        loaded(model={"name": "m", "dtype": "float32"}, train={"learning_rate": 1e-3}), recorded
    )
    assert (named.recipe.model.dtype, named.recipe.train.learning_rate) == ("float32", 1e-3)
