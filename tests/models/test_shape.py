"""Counts of trained weights match the run, and operations per token match the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models.build import build_policy, load_model
from valence.models.shape import Shape, shape_of, skeleton, skeleton_of

LORA = SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear")


def saved(folder: Path, kind: str) -> str:
    tiny(kind, dtype=torch.float32).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def shape(name: str, **adapters: Any) -> Shape:
    return shape_of(skeleton(name), **adapters)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize(
    "lora", [None, LORA, SimpleNamespace(**vars(LORA) | {"targets": ["o_proj", "c_proj"]})]
)
def test_the_weights_that_train_are_those_of_the_run(kind: str, lora: Any, tmp_path: Path) -> None:
    name = saved(tmp_path, kind)
    if lora and lora.targets != "all-linear":
        lora = SimpleNamespace(
            **vars(lora) | {"targets": ["c_proj" if kind == "gpt2" else "o_proj"]}
        )
    engine = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=lora)
    result = shape(name, lora=lora)
    assert result.trained == sum(p.numel() for p in engine.parameters() if p.requires_grad)
    assert result.full is (lora is None)


def test_an_adapter_to_continue_is_counted_as_it_is(tmp_path: Path) -> None:
    name = saved(tmp_path / "model", "llama")
    engine = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=LORA)
    engine.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    other = SimpleNamespace(**vars(LORA) | {"rank": 8})
    assert (
        shape(name, lora=other, adapter=str(tmp_path / "adapter")).trained
        == shape(name, lora=LORA).trained
    )


def test_an_adapter_of_another_kind_is_refused_before_the_weights_are_loaded(
    tmp_path: Path,
) -> None:
    name = saved(tmp_path / "model", "llama")
    engine = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=LORA)
    engine.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    with raises_error("adapter-kind", where="model.adapter"):
        shape_of(skeleton(name, num_scores=1), adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize("config", [None, "{", "[]", '{"model_type": "none such"}'])
def test_a_folder_without_a_model_is_a_mistake_that_names_it(
    config: str | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for load in (skeleton, partial(load_model, dtype=torch.float32)):
        with raises_error("model-not-loadable", where="model") as raised:
            load(str(tmp_path))
        assert str(tmp_path) in raised.error.message


def test_experts_count_as_often_as_a_token_is_sent_to_one() -> None:
    few, many = (
        shape_of(skeleton_of(tiny("qwen3_moe", num_experts=n, num_experts_per_tok=2)))
        for n in (4, 8)
    )
    routers = few.layers * few.hidden * 4
    assert many.linear == few.linear + routers
    assert many.parameters > 1.4 * few.parameters
    assert few.inner == 2 * 16
