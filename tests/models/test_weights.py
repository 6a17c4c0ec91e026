"""Damaged weights are errors that name the weight, in every place that loads a model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import valence
from tests.command import command_error, place
from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models.adapters import with_adapter
from valence.models.build import load_model
from valence.models.stream import CannotStreamError, build_without_weights

__all__ = ["place"]

Weights = dict[str, Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


def rewrite(folder: Path, change: Callable[[Weights], Weights], name: str = "model") -> None:
    path = folder / f"{name}.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def changed(key: str, value: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {key: value(weights[key])}


def poked(value: float) -> Callable[[Tensor], Tensor]:
    def poke(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.view(-1)[-1] = value
        return weight

    return poke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model: Any = tiny(layers=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def without(key: str) -> Callable[[Weights], Weights]:
    return lambda weights: {k: v for k, v in weights.items() if k != key}


def load(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), dtype=torch.float32, **options)


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
DAMAGE: dict[str, tuple[str, str, Callable[[Weights], Weights]]] = {
    "a weight is deleted": ("model-incomplete", Q, without(Q)),
    "the head is deleted": ("model-incomplete", HEAD, without(HEAD)),
    "all names have a prefix": (
        "model-incomplete",
        HEAD,
        lambda w: {f"base_model.model.{k}": v for k, v in w.items()},
    ),
    "another shape": ("weight-shape", Q, changed(Q, lambda w: w[:, :-2].contiguous())),
    "integers": ("weights-integer", Q, changed(Q, lambda w: (100 * w).to(torch.int8))),
    "a norm of integers": ("weights-integer", NORM, changed(NORM, lambda w: w.to(torch.uint8))),
    "NaN in a matrix": ("weights-not-finite", Q, changed(Q, poked(math.nan))),
    "infinity in a norm": ("weights-not-finite", NORM, changed(NORM, poked(math.inf))),
    "NaN in an embedding": ("weights-not-finite", EMBEDDING, changed(EMBEDDING, poked(math.nan))),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_damaged_weight_is_named(folder: Path, case: str, device: str | None) -> None:
    code, key, damage = DAMAGE[case]
    rewrite(folder, damage)
    with raises_error(code, where=str(folder)) as raised:
        load(folder, device=device)
    assert key in raised.error.message


def test_a_model_without_damage_has_the_stored_weights(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    for key, weight in load(folder).state_dict().items():
        assert torch.equal(weight, stored[key])


def test_a_shard_that_the_index_lacks_is_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {"a.safetensors": [Q], "b.safetensors": [key for key in weights if key != Q]}
    for name, keys in names.items():
        save_file({key: weights[key] for key in keys}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(names["b.safetensors"], "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_error("model-incomplete", where=str(folder)):
        load(folder)


def test_a_tied_head_may_be_absent(tmp_path: Path) -> None:
    model: Any = tiny(layers=1, dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    load(tmp_path)


def test_a_new_head_for_scores_is_zero_and_a_damaged_one_is_an_error(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = load(folder, attributes=["quality"])
    assert not model.score.weight.any()
    assert not [warning for warning in recwarn if "does not use" in str(warning.message)]
    model.save_pretrained(tmp_path / "scores")
    rewrite(tmp_path / "scores", changed("score.weight", poked(math.nan)))
    with raises_error("weights-not-finite", where="scores"):
        load(tmp_path / "scores", attributes=["quality"])


def test_a_weight_that_the_model_lacks_is_a_warning(folder: Path) -> None:
    rewrite(folder, lambda weights: weights | {"model.layers.7.foo.weight": torch.zeros(2)})
    with pytest.warns(UserWarning, match=r"model\.layers\.7\.foo\.weight"):
        load(folder)


def test_integer_buffers_are_no_weights(folder: Path) -> None:
    rewrite(folder, lambda w: w | {"model.layers.0.self_attn.bias": torch.ones(2).bool()})
    with pytest.warns(UserWarning, match="does not use"):
        load(folder)


@pytest.mark.parametrize("case", ["integers", "NaN in a matrix"])
def test_weights_read_in_shards_are_checked(folder: Path, case: str) -> None:
    code, key, damage = DAMAGE[case]
    rewrite(folder, damage)
    cpu = torch.device("cpu")
    with raises_error(code) as raised:
        model, weights = build_without_weights(str(folder), dtype=torch.float32, device=cpu)
        weights.load(model, cpu)
    assert key in raised.error.message


def as_bin(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


@pytest.mark.parametrize("case", ["a weight is deleted", "integers", "NaN in a matrix"])
@pytest.mark.parametrize("options", [{}, {"device": "meta"}, {"quantize": True}])
def test_weights_in_other_files_are_checked(
    folder: Path, case: str, options: dict[str, Any]
) -> None:
    code, key, damage = DAMAGE[case]
    rewrite(folder, damage)
    as_bin(folder)
    with raises_error(code, where=str(folder)) as raised:
        load(folder, **options)
    assert key in raised.error.message


EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "code", "key", "value"),
    [
        ("qwen3_moe", "weights-integer", EXPERT, lambda w: (9 * w).to(torch.int8)),
        ("qwen3_moe", "weights-not-finite", EXPERT, poked(math.nan)),
        ("deepseek_v3", "weights-integer", BIAS, lambda w: w.int()),
        ("deepseek_v3", "weights-not-finite", BIAS, poked(math.nan)),
    ],
)
@pytest.mark.parametrize("device", [None, "meta"])
def test_joined_experts_and_their_biases_are_checked(
    tmp_path: Path,
    name: str,
    code: str,
    key: str,
    value: Callable[[Tensor], Tensor],
    device: str | None,
) -> None:
    settings = {"first_k_dense_replace": 0} if name == "deepseek_v3" else {}
    model: Any = tiny(name, layers=1, dtype=torch.float32, **settings)
    model.save_pretrained(tmp_path)
    load(tmp_path, device=device)
    rewrite(tmp_path, changed(key, value))
    with raises_error(code, where=str(tmp_path)):
        load(tmp_path, device=device)


def test_infinite_masks_are_no_damage(tmp_path: Path) -> None:
    model: Any = tiny("deepseek_v3", layers=1, dtype=torch.float32, first_k_dense_replace=0)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, changed(BIAS, poked(-math.inf)))
    for device in (None, "meta"):
        load(tmp_path, device=device)


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_value_that_is_infinite_in_the_type_of_the_model_is_an_error(
    folder: Path, device: str | None
) -> None:
    rewrite(folder, changed(NORM, lambda w: w.double() * 1e300))
    with raises_error("weights-not-finite") as raised:
        load(folder, device=device)
    assert NORM in raised.error.message


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_weight_that_two_files_have_with_other_values_is_an_error(
    folder: Path, device: str | None
) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(weights, "b.safetensors") | {Q: "a.safetensors"}
    for value in (weights[Q], weights[Q] + 1):
        save_file({Q: weights[Q]}, folder / "a.safetensors", metadata={"format": "pt"})
        save_file(weights | {Q: value}, folder / "b.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if value is weights[Q]:
            load(folder, device=device)
    with raises_error("weight-ambiguous", where=str(folder)) as raised:
        load(folder, device=device)
    assert Q in raised.error.message


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_reward_model_without_its_head_is_incomplete(
    folder: Path, tmp_path: Path, device: str | None
) -> None:
    """A new head would give all completions the score 0."""
    load(folder, attributes=["quality"]).save_pretrained(tmp_path / "scores")
    rewrite(tmp_path / "scores", without("score.weight"))
    with raises_error("model-incomplete", where="scores") as raised:
        load(tmp_path / "scores", attributes=["quality"], device=device)
    assert "score.weight" in raised.error.message


def test_a_new_head_of_a_model_read_in_shards_is_zero(folder: Path, tmp_path: Path) -> None:
    def build(name: str) -> Any:
        cpu, options = torch.device("cpu"), {"dtype": torch.float32, "attributes": ["quality"]}
        return build_without_weights(str(tmp_path / name), device=cpu, **options)[0]

    assert not build("model").score.weight.any()
    load(folder, attributes=["quality"]).save_pretrained(tmp_path / "scores")
    rewrite(tmp_path / "scores", without("score.weight"))
    with pytest.raises(CannotStreamError, match=r"score\.weight"):
        build("scores")


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("code", "damage"),
    [
        ("model-incomplete", without(A)),
        ("model-incomplete", lambda w: {f"module.{k}": v for k, v in w.items()}),
        ("weights-not-finite", changed(A, poked(math.nan))),
        ("weights-integer", changed(A, lambda w: (9 * w).to(torch.int8))),
        ("weight-shape", changed(A, lambda w: w[:1].contiguous())),
    ],
)
def test_a_damaged_adapter_is_an_error(
    folder: Path, tmp_path: Path, code: str, damage: Callable[[Weights], Weights]
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(load(folder), config).save_pretrained(str(tmp_path / "adapter"))
    with_adapter(load(folder), None, str(tmp_path / "adapter"))
    rewrite(tmp_path / "adapter", damage, "adapter_model")
    with raises_error(code, where="adapter"):
        with_adapter(load(folder), None, str(tmp_path / "adapter"))


@pytest.mark.parametrize("words", [("check",), ("train",)])
@pytest.mark.parametrize("case", ["a weight is deleted", "NaN in a matrix"])
def test_check_and_train_end_with_the_same_error(
    place: Path, words: tuple[str, ...], case: str
) -> None:
    code, key, damage = DAMAGE[case]
    rewrite(place / "model", damage)
    error = command_error(*words, "recipe.yaml")
    assert error.code == code
    assert key in error.message
    assert "model.name" in str(error.where)


def test_an_adapter_is_checked_under_its_setting(place: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(load(place / "model"), config).save_pretrained("adapter")
    rewrite(place / "adapter", without(A), "adapter_model")
    for name in ("check", "train"):
        error = command_error(name, "recipe.yaml", "model.adapter=./adapter", "model.lora=null")
        assert error.code == "model-incomplete"
        assert "model.adapter" in str(error.where)


def test_a_model_object_is_checked(place: Path) -> None:
    model = load(place / "model")
    with torch.no_grad():
        model.get_parameter(Q)[0, 0] = math.nan
    for options in ({"model": model}, {"reference": model}):
        with raises_error("weights-not-finite", where=next(iter(options))) as raised:
            valence.train("recipe.yaml", quiet=True, **options)
        assert Q in raised.error.message


def test_the_reference_model_is_checked_under_its_setting(place: Path) -> None:
    shutil.copytree("model", "reference")
    rewrite(place / "reference", DAMAGE["NaN in a matrix"][2])
    for name in ("check", "train"):
        error = command_error(name, "recipe.yaml", "reference.model=./reference")
        assert error.code == "weights-not-finite"
        assert "reference.model" in str(error.where)
