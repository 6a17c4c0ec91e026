"""Defaults of online runs that depend on the method and on what it costs to measure something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.training.online.recipes import logged, make, recipe, recipe_without_eval
from tests.training.resuming import killed, train, weights
from valence.config.load import load_recipe
from valence.config.needs import reads_reference
from valence.methods import ONLINE
from valence.methods.sample_builders import RolloutGroup
from valence.models.reference import AdapterDisabledReference, FrozenReference
from valence.rollouts import HFGenerator
from valence.types import Completion, Origin, TokenizedExample

POLICY_GRADIENTS = [name for name in ONLINE if ONLINE[name].loss.advantage is not None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def loaded(place: Path, method: str, **changes: Any) -> Any:
    return load_recipe(recipe(place, method, **changes))


# Passes over a round


@pytest.mark.parametrize("method", ["ppo", "grpo", "rejection", "online_dpo"])
def test_only_ppo_makes_several_passes_by_default(method: str, place: Path) -> None:
    result = loaded(place, method)
    passes = 4 if method == "ppo" else 1
    setting = result.settings["rollout.epochs"]
    assert result.recipe.rollout.num_epochs == setting.value == passes
    assert setting.is_default
    assert setting.origin == f"default of {method}"
    assert loaded(place, method, rollout={"epochs": None}).recipe.rollout.num_epochs == passes
    chosen = loaded(place, method, rollout={"epochs": 2}).settings["rollout.epochs"]
    assert (chosen.value, chosen.is_default) == (2, False)
    assert chosen.origin != setting.origin


def test_the_clip_of_ppo_acts_by_default(place: Path) -> None:
    """In a single step of a single pass the ratio is 1 everywhere."""
    train(
        recipe(place, "ppo", train={"max_steps": 4, "learning_rate": 0.05, "schedule": "constant"})
    )
    rows = [row for row in logged(place) if "kl/old" in row]
    assert [row["rounds"] for row in rows] == [1, 1, 1, 1]
    assert rows[0]["kl/old"] == pytest.approx(0, abs=1e-9)
    assert rows[-1]["kl/old"] > 1e-4
    assert rows[-1]["clipped"] > 0


# The reference


def test_the_divergence_is_measured_by_default_where_it_costs_no_second_model(place: Path) -> None:
    run, _ = train(recipe_without_eval(place, train={"max_steps": 1}), fresh=True)
    assert isinstance(run.reference, AdapterDisabledReference)
    assert "kl" in logged(place)[-1]
    run, _ = train(recipe(place, rollout={"measure_kl": False}, train={"max_steps": 1}), fresh=True)
    assert run.reference is None
    assert not any(name in ("kl", "eval/kl") for row in logged(place) for name in row)
    full = {"model": {"lora": None}, "train": {"max_steps": 1}}
    run, _ = train(recipe_without_eval(place, **full), fresh=True)
    assert run.reference is None
    assert "kl" not in logged(place)[-1]
    run, _ = train(recipe_without_eval(place, **full, rollout={"measure_kl": True}), fresh=True)
    assert isinstance(run.reference, FrozenReference)
    assert "kl" in logged(place)[-1]


@pytest.mark.parametrize(("method", "changes", "reads"), [
    ("grpo", {"model": {"lora": None}}, False),
    ("grpo", {"rollout": {"measure_kl": False}}, False),
    ("grpo", {"rollout": {"measure_kl": False}, "loss": {"kl_weight": 0.1}}, True),
    ("ppo", {"rollout": {"measure_kl": False}, "loss": {"kl_beta": 0.0}}, False),
    ("grpo", {"model": {"lora": None}, "loss": {"kl_weight": 0.1}}, True),
    ("grpo", {"model": {"lora": None}, "loss": {"humanline": [-0.5, 0.5]}}, True),
    ("rloo", {"model": {"lora": None}}, True), ("online_dpo", {"model": {"lora": None}}, True),
    ("rejection", {}, True), ("rejection", {"model": {"lora": None}}, False),
    ("rejection", {"rollout": {"measure_kl": False}}, False),
    ("grpo", {"model": {"lora": None}, "reference": {"model": "other"}}, True),
    ("grpo", {"reference": {"sync_every": 5}, "rollout": {"measure_kl": True}}, True),
])  # fmt: skip
def test_a_reference_is_loaded_where_it_is_read_or_asked_for(
    method: str, changes: dict[str, Any], reads: bool, place: Path
) -> None:
    assert reads_reference(loaded(place, method, **changes).recipe) is reads


@pytest.mark.parametrize("changes", [
    {"reference": {"sync_every": 5}}, {"model": {"lora": None}, "reference": {"sync_every": 5}},
    {"reference": {"model": "other"}, "rollout": {"measure_kl": False}},
])  # fmt: skip
def test_settings_of_a_reference_that_is_not_loaded_are_refused(
    changes: dict[str, Any], place: Path
) -> None:
    (setting,) = changes["reference"]
    with raises_error(
        "setting-no-effect",
        where=f"reference.{setting}",
        fix="rollout.measure_kl: true",
    ):
        loaded(place, "grpo", **changes)


# Truncated completions


def answered() -> list[RolloutGroup]:
    """Two groups of three completions each, of which one per group is truncated."""
    groups: list[RolloutGroup] = []
    for g in range(2):
        prompt = TokenizedExample(
            id=f"p{g}", origin=Origin("prompts.jsonl", 1 + g), kind="prompt", prompt_ids=(1, 2 + g),
            prompt_mask=(False, False), answers=(),
        )  # fmt: skip
        completions = tuple(
            Completion(
                prompt.id, (5 + i, 6, 7), (-1.0,) * 3, "", "length" if i == g else "eos", index=i
            )
            for i in range(3)
        )
        columns = ({"old": (-1.0,) * 3, "ref": (-1.5,) * 3, "value": (0.1, 0.2, 0.3)},) * 3
        groups.append(RolloutGroup(prompt, completions, (0.0, 1.0, 3.0), columns))
    return groups


def examples(place: Path, method: str, mask: bool) -> Sequence[TokenizedExample]:
    recipe_ = loaded(place, method, rollout={"mask_truncated": mask}).recipe
    makes = ONLINE[method].sample_builder
    assert makes is not None
    return makes(answered(), recipe_.rollout, recipe_.loss)


@pytest.mark.parametrize("method", POLICY_GRADIENTS)
def test_masked_completions_have_no_loss_mask_and_keep_their_place_in_the_statistics(
    method: str, place: Path
) -> None:
    """The advantages of all completions are the same with and without."""
    masked, plain = examples(place, method, True), examples(place, method, False)
    assert [item.answers[0].mask for item in plain] == [(True,) * 3] * 6
    assert [any(item.answers[0].mask) for item in masked] == [False, True, True, True, False, True]
    assert [item.answers[0].columns for item in masked] == [
        item.answers[0].columns for item in plain
    ]
    assert [item.answers[0].ids for item in masked] == [item.answers[0].ids for item in plain]


@pytest.mark.parametrize("method", ["grpo", "rejection"])
def test_the_default_depends_on_the_method(method: str, place: Path) -> None:
    setting = loaded(place, method).settings["rollout.mask_truncated"]
    assert setting.value is (method == "rejection")
    assert setting.is_default


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "gspo", "ppo"])
def test_a_masked_run_is_the_same_in_any_micro_batches_and_after_a_kill(
    method: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the completions are truncated, those of some prompts altogether."""
    plain = HFGenerator.generate

    def generate(self: HFGenerator, *args: Any, **options: Any) -> list[list[Completion]]:
        groups = plain(self, *args, **options)
        return [
            [
                replace(c, stop="length" if (i + sum(c.tokens)) % 2 or not k else "eos")
                for i, c in enumerate(actual)
            ]
            for k, actual in enumerate(groups)
        ]

    monkeypatch.setattr(HFGenerator, "generate", generate)
    more: dict[str, Any] = {
        "model": {"dtype": "float64"}, "rollout": {"mask_truncated": True, "epochs": 2},
        "data": {"eval": []}, "eval": {"every": 50.0},
    }  # fmt: skip

    def run_recipe(name: str, tokens: int) -> dict[str, Any]:
        options = {"micro_batch_tokens": tokens, "max_steps": 2}
        return recipe(place, method, **more, train=options, run={"dir": str(place / name)})

    train(run_recipe("small", 32))
    full, _ = train(run_recipe("large", 4096))
    for ours, theirs in zip(logged(place, "small"), logged(place, "large"), strict=True):
        for name in ours.keys() - {"micro_batches", "tokens", "tokens_seen", "waste"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), name
    killed(run_recipe("killed", 4096), 2)
    again, _ = train(run_recipe("killed", 4096))
    assert logged(place, "killed") == logged(place, "large")
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())
    unmasked = run_recipe("unmasked", 4096)
    unmasked["rollout"] |= {"mask_truncated": False}
    train(unmasked)
    assert logged(place, "unmasked")[0]["grad_norm"] != logged(place, "large")[0]["grad_norm"]


def test_completions_have_room_for_512_tokens_by_default(place: Path) -> None:
    changes: dict[str, Any] = {"data": {"max_length": 1024}}
    settings = recipe(place, **changes)
    del settings["rollout"]["max_new_tokens"]
    assert load_recipe(settings).recipe.rollout.max_new_tokens == 512
