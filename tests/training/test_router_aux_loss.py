"""The setting train.router_aux_loss in complete runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny

ROWS = [
    {"prompt": f"tell of {n}", "chosen": f"{n} is wet", "rejected": "no"}
    for n in ("rain", "snow", "wind", "hail")
]


def make_recipe(place: Path, name: str, **train: Any) -> dict[str, Any]:
    """A recipe for pairs, with the folder of a model of this architecture."""
    tokenizer = tiny_tokenizer()
    model = tiny(name, vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.save_pretrained(place / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(place / "model")
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "method": "dpo",
        "model": {"name": str(place / "model"), "dtype": "float32", "lora": {"rank": 2}},
        "data": {"train": [str(place / "pairs.jsonl")], "max_length": 128},
        "train": {"batch_size": 2, "max_steps": 2, "learning_rate": 1e-2, **train},
        "run": {"dir": str(place / "run")},
    }


def records(place: Path) -> list[dict[str, Any]]:
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize("weight", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_the_log_has_it_without_its_weight(weight: float, tmp_path: Path) -> None:
    valence.train(make_recipe(tmp_path, "qwen3_moe", router_aux_loss=weight), quiet=True)
    first, second = records(tmp_path)
    assert ("router_aux_loss" in first) == ("router_aux_loss" in second) == (weight > 0)
    base = first["loss"] - weight * first.get("router_aux_loss", 0.0)
    assert base == pytest.approx(0.6931472, abs=1e-5)  # dpo's loss before the first update


def test_a_dense_model_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with raises_error("router-missing", where="train.router_aux_loss"):
        valence.train(make_recipe(tmp_path, "llama", router_aux_loss=0.01), quiet=True)


@pytest.mark.parametrize(
    ("train", "parallel", "where"),
    [
        ({"compile": "on"}, {}, "train.compile"),
        ({}, {"shard": "full"}, "train.router_aux_loss"),
        ({}, {"tensor": 2}, "train.router_aux_loss"),
    ],
    ids=["compiled", "sharded", "tensor parallel"],
)
def test_a_model_without_router_logits_is_an_error(
    train: dict[str, Any], parallel: dict[str, Any], where: str, tmp_path: Path
) -> None:
    settings = make_recipe(tmp_path, "qwen3_moe", router_aux_loss=0.01, **train) | {
        "parallel": parallel
    }
    with raises_error("setting-conflict", where=where):
        valence.train(settings, quiet=True)


@pytest.mark.slow
@pytest.mark.usefixtures("instant_compiler")
def test_layers_are_not_compiled_by_default(tmp_path: Path) -> None:
    long: dict[str, Any] = {"max_steps": 10**9}
    for router_aux_loss in (0.01, 0.0):
        settings = make_recipe(tmp_path, "qwen3_moe", router_aux_loss=router_aux_loss, **long)
        run = valence.build_run(settings, quiet=True)
        run.close()
        assert run.policy.compiled == (router_aux_loss == 0)
