"""Counts of trained weights match the run, and operations per token match the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models import speed
from valence.models.build import build_policy, load_model
from valence.models.shape import Shape, shape_of, skeleton, skeleton_of
from valence.models.speed import Work

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


@pytest.mark.parametrize(
    "kind", ["llama", "llama-tied", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt"]
)
def test_operations_are_those_that_pytorch_counts(kind: str) -> None:
    """Of a forward and a backward pass over one sequence whose every token is scored.

    PyTorch counts attention as if every token saw every other.
    """
    tokens = 24
    model: Any = tiny(kind, dtype=torch.float32).train()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        logits = model(input_ids=torch.arange(tokens)[None], use_cache=False).logits
    forward = counted.get_total_flops()
    with FlopCounterMode(display=False) as counted:
        logits.sum().backward()
    result, work = shape_of(skeleton_of(model)), Work(tokens, tokens, tokens**2)
    assert speed.forward(result, work) == pytest.approx(forward, rel=0.03)
    assert speed.step(result, work) == pytest.approx(forward + counted.get_total_flops(), rel=0.03)


def test_experts_count_as_often_as_a_token_is_sent_to_one() -> None:
    few, many = (
        shape_of(skeleton_of(tiny("qwen3_moe", num_experts=n, num_experts_per_tok=2)))
        for n in (4, 8)
    )
    routers = few.layers * few.hidden * 4
    assert many.linear == few.linear + routers
    assert many.parameters > 1.4 * few.parameters
    assert few.inner == 2 * 16


def test_recomputation_and_passes_without_gradient_are_counted() -> None:
    result = shape_of(skeleton_of(tiny()))
    adapted = shape_of(skeleton_of(tiny()), lora=LORA)
    trained, measured = Work(100, 40, 2000), Work(50, 30, 900)
    ahead = speed.forward(result, trained)
    alone = speed.step(result, trained)
    assert alone == 3 * ahead
    assert speed.step(adapted, trained) == 2 * ahead
    assert speed.step(result, trained, measured, trained) == 4 * ahead + speed.forward(
        result, measured
    )
    decoder = speed.forward(result, Work(100, 0, 2000))
    assert speed.step(result, trained, checkpointing="full") == alone + decoder
    assert speed.step(result, trained, checkpointing="selective") == alone + decoder / 2


def test_the_rate_is_measured() -> None:
    small = speed.matmul_rate(torch.device("cpu"), torch.float32, 64, 64)
    assert 1e4 < small < 1e14  # operations a second, also of a machine that does much else
