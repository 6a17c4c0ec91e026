"""Memory is predicted from the shape of the model: what trains is counted as the run would make it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import tiny
from valence.engine.memory import Memory, predict, skeleton
from valence.engine.models import build_policy, load_model
from valence.errors import UserError

LORA = SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear")


def saved(folder: Path, kind: str) -> str:
    tiny(kind, dtype=torch.float32).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def predicted(name: str, **changes: Any) -> Memory:
    settings = {"width": 4, "lora": None, "tokens": 100, "frozen_copy": False, "checkpointing": False}
    return predict(skeleton(name), **(settings | changes))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("lora", [None, LORA, SimpleNamespace(**vars(LORA) | {"targets": ["o_proj", "c_proj"]})])
def test_the_weights_that_train_are_those_of_the_run(kind: str, lora: Any, tmp_path: Path) -> None:
    name = saved(tmp_path, kind)
    if lora and lora.targets != "all-linear":
        lora = SimpleNamespace(**vars(lora) | {"targets": ["c_proj" if kind == "gpt2" else "o_proj"]})
    engine = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=lora)
    counted = sum(p.numel() for p in engine.parameters() if p.requires_grad)
    assert predicted(name, lora=lora).trained == counted


def test_an_adapter_to_continue_is_counted_as_it_is(tmp_path: Path) -> None:
    name = saved(tmp_path / "model", "llama")
    made = build_policy(load_model(name, dtype=torch.float32), dtype=torch.float32, lora=LORA)
    made.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    other = SimpleNamespace(**vars(LORA) | {"rank": 8})
    assert predicted(name, lora=other, adapter=str(tmp_path / "adapter")).trained == predicted(name, lora=LORA).trained


def test_a_copy_of_masters_is_as_large_as_they_are(tmp_path: Path) -> None:
    found = predicted(saved(tmp_path, "llama"), width=2, frozen_copy=True)
    assert found.reference == found.weights == 4 * found.parameters


@pytest.mark.parametrize("config", [None, "{", "[]", '{"model_type": "none such"}'])
def test_a_folder_without_a_model_is_a_mistake_that_names_it(config: str | None, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=f"cannot load the model '{tmp_path}'"):
        skeleton(str(tmp_path))
    with pytest.raises(UserError, match=f"cannot load the model '{tmp_path}'"):
        load_model(str(tmp_path), dtype=torch.float32)
