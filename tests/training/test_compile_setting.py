"""When the layers of a run are compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.load import load_recipe
from valence.models.reference import FrozenReference
from valence.training.models import build_models
from valence.training.prepare import prepare

ROWS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(6)
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, instant_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with a model, rows and a recipe."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        "method: dpo\nmodel: {name: ./model}\ndata: {train: rows.jsonl, max_length: 128}\n"
    )
    monkeypatch.chdir(tmp_path)


def compiled(*overrides: str, training: bool = True) -> tuple[bool, bool]:
    """Whether the policy and the reference are compiled."""
    prepared = prepare(load_recipe(Path("recipe.yaml"), [*overrides, "reference.cache=off"]))
    policy, reference = build_models(prepared, fills=training)
    assert isinstance(reference, FrozenReference)
    return policy.compiled, reference.engine.compiled


def test_policy_and_reference_are_compiled_alike() -> None:
    assert compiled("train.compile=on") == (True, True)


def test_only_models_that_train_are_compiled() -> None:
    assert compiled("train.compile=on", training=False) == (False, False)


def test_auto_compiles_runs_that_are_long_enough() -> None:
    long = f"train.max_steps={10**9}"
    assert compiled() == compiled(long, "train.compile=off") == (False, False)
    assert compiled(long) == (True, True)
    # the compiler would decide what is stored
    assert compiled(long, "train.checkpointing=selective_op") == (False, False)


def test_asked_for_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with raises_error("compile-unavailable", where="train.compile") as raised:
        compiled("train.compile=on")
    assert raised.error.message == "g++ is not installed"
    assert compiled(f"train.max_steps={10**9}") == (False, False)
