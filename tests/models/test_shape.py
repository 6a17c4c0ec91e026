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
from valence.models.shape import Shape, shape_of, skeleton

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


def test_matrices_are_counted_by_what_they_read_and_write() -> None:
    """Two layers of 4 heads that share 2 keys of size 8."""
    result = shape_of(tiny("llama"))
    hidden, keys, inner = 32, 16, tiny("llama").config.intermediate_size
    layer = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner)
    assert (result.keys, result.operands) == (keys, 2 * layer)
    assert result.matrix == hidden * inner


def test_experts_count_as_often_as_a_token_is_sent_to_one() -> None:
    few, many = (shape_of(tiny("qwen3_moe", num_experts=n, num_experts_per_tok=2)) for n in (4, 8))
    assert many.operands == few.operands + few.layers * 4  # outputs of the routers
    assert many.parameters > 1.4 * few.parameters


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_loaded_policy_has_the_counts_of_its_plan(lora: Any, tmp_path: Path) -> None:
    name = saved(tmp_path, "llama")
    engine = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=lora)
    assert shape_of(engine.causal, lora=lora) == shape(name, lora=lora)
