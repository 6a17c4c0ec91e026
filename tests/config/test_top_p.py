"""Sampling from a part of the vocabulary (rollout.top_p below 1): which methods allow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from valence.config.load import load_recipe
from valence.errors import UserError
from valence.losses.advantage import CREDITS
from valence.training.methods import ONLINE, method_of


def load(method: str, folder: Path, *overrides: str) -> float:
    (folder / "prompts.jsonl").write_text("")
    recipe = {
        "method": method, "model": {"name": "some/model"}, "reward": "length",
        "data": {"train": str(folder / "prompts.jsonl")}, "rollout": {"num_rollouts": 4},
    }  # fmt: skip
    return load_recipe(recipe, overrides, method_of=method_of).recipe.rollout.top_p


@pytest.mark.parametrize("method", CREDITS)
@pytest.mark.parametrize("correction", ["2.0", "null"])
def test_methods_with_a_ratio_of_probabilities_sample_from_the_whole_vocabulary(
    method: str, correction: str, tmp_path: Path
) -> None:
    """With or without the correction: no weight brings back tokens that are never drawn."""
    with pytest.raises(UserError) as caught:
        load(method, tmp_path, "rollout.top_p=0.9", f"loss.correction={correction}")
    assert "rollout.top_p" in f"{caught.value.where} {caught.value.what}"
    assert method in caught.value.what
    assert "online_dpo" in f"{caught.value.what} {caught.value.fix}"
    assert load(method, tmp_path, f"loss.correction={correction}") == 1


@pytest.mark.parametrize("method", sorted(ONLINE.keys() - CREDITS.keys()))
def test_methods_that_learn_from_completions_as_data_may_sample_from_a_part(method: str, tmp_path: Path) -> None:
    assert load(method, tmp_path, "rollout.top_p=0.9") == 0.9
