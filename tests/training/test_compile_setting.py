"""When the layers of a run are compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.load import load_recipe
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference
from valence.training import models as building
from valence.training import plan
from valence.training.models import build_models
from valence.training.prepare import prepare

ROWS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(6)
]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PolicyModel]:
    """The engines that were compiled (only noted here: the compiler takes its time)."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        "method: dpo\nmodel: {name: ./model}\ndata: {train: rows.jsonl, max_length: 128}\n"
    )
    monkeypatch.chdir(tmp_path)
    for module in (building, plan):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    results: list[PolicyModel] = []

    def note(engine: PolicyModel) -> None:
        engine.compiled_layers = list(engine.causal.model.layers)
        results.append(engine)

    monkeypatch.setattr(building, "compile_layers", note)
    return results


def build(*overrides: str, training: bool = True) -> list[PolicyModel]:
    """The policy and the reference's engine."""
    prepared = prepare(load_recipe(Path("recipe.yaml"), [*overrides, "reference.cache=off"]))
    policy, reference = build_models(prepared, fills=training)
    assert isinstance(reference, FrozenReference)
    return [policy, reference.engine]


def test_policy_and_reference_are_compiled_alike(compiled: list[PolicyModel]) -> None:
    assert build("train.compile=on") == compiled


def test_only_models_that_train_are_compiled(compiled: list[PolicyModel]) -> None:
    build("train.compile=on", training=False)
    assert compiled == []


def test_auto_compiles_runs_that_are_long_enough(
    compiled: list[PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    build("train.compile=off")
    assert compiled == []
    monkeypatch.setitem(plan.MIN_OPERATIONS_TO_COMPILE, "cpu", 1.0)
    assert build() == compiled
    assert len(compiled) == 2
    build("train.checkpointing=selective_op")  # the compiler would decide what is stored
    assert len(compiled) == 2


def test_asked_for_without_a_compiler_is_an_error(
    compiled: list[PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (building, plan):
        monkeypatch.setattr(module, "why_not", lambda device: "there is no C++ compiler")
    with raises_error("compile-unavailable", where="train.compile") as raised:
        build("train.compile=on")
    assert raised.error.message == "there is no C++ compiler"
    build()
    assert compiled == []
