"""What a run will take is said before it, and how much of it runs at once is chosen by what is free."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.models import tiny
from tests.tiny import tiny_tokenizer
from valence.api import build_run
from valence.checkpoint import store
from valence.config.load import load_recipe
from valence.engine import speed
from valence.errors import UserError
from valence.training import plan
from valence.training.methods import method_of
from valence.training.plan import LEAST, MARGIN, MOST, Plan, describe, make_plan
from valence.training.restore import restore
from valence.training.setup import prepare

WORDS = "one two three four five six seven eight nine ten"
ROWS = [{"prompt": f"question {i} ", "completion": f"answer {WORDS[: 4 * i]}", "label": i % 2} for i in range(12)]
GIVEN = {"train": ROWS, "eval": None}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A recipe of a model folder."""
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(tmp_path / "model")
    return {
        "method": "kto",
        "model": {"name": str(tmp_path / "model")},
        "train": {"batch_size": 4},
        "run": {"dir": str(tmp_path / "run")},
    }


def planned(recipe: dict[str, Any], *overrides: str) -> Plan:
    return make_plan(prepare(load_recipe(recipe, overrides, method_of=method_of, in_memory=["train"]), given=GIVEN))


def test_as_many_tokens_run_at_once_as_fit_and_are_of_use(recipe: dict[str, Any]) -> None:
    found = planned(recipe)
    assert found.free is not None
    most = MOST["cpu"]
    assert replace(found, free=None).micro_batch_tokens == replace(found, free=2**50).micro_batch_tokens == most
    assert replace(found, free=1).micro_batch_tokens == LEAST
    just = int(found.memory.total(most) / MARGIN) + 1
    assert replace(found, free=just).micro_batch_tokens == most
    assert replace(found, free=just - 100).micro_batch_tokens == most // 2


def test_a_number_in_the_recipe_is_taken(recipe: dict[str, Any]) -> None:
    found = planned(recipe, "train.micro_batch_tokens=77")
    assert replace(found, free=1).micro_batch_tokens == found.micro_batch_tokens == 77


def test_the_number_is_written_down_and_kept(recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that is taken up, and by one that is brought back, whatever is free then."""
    run = build_run(recipe, given=GIVEN, quiet=True)
    most = MOST["cpu"]
    assert run.budget.at(0, "training") == run.facts["micro_batch_tokens"][0][2] == most
    run.counters.step = 1
    run.save()
    monkeypatch.setattr(plan, "free_memory", lambda _: 1)
    again = build_run(recipe | {"run": {"dir": str(tmp_path / "again")}}, given=GIVEN, quiet=True)
    assert again.budget.at(0, "training") == LEAST
    again.load_state_dict(store.load(tmp_path / "run/checkpoints/step-1"))
    assert again.budget.at(0, "training") == most
    assert restore(tmp_path / "run", quiet=True).budget.at(1, "evaluation") == most
    taken_up = build_run(recipe, given=GIVEN, quiet=True)
    assert taken_up.step == 1
    assert taken_up.budget.at(1, "training") == most


def test_of_own_answers_the_prompts_are_counted(recipe: dict[str, Any]) -> None:
    own = recipe | {"method": "grpo", "reward": "exact_match", "rollout": {"num_rollouts": 3, "max_new_tokens": 8}}
    given = {"train": [{"prompt": f"question {i}", "answer": "x"} for i in range(12)], "eval": None}
    prepared = prepare(load_recipe(own, (), method_of=method_of, in_memory=["train"]), given=given)
    assert "steps: 3 (3 per epoch of 12 prompts)" in describe(make_plan(prepared))


def test_what_a_run_takes_is_said_before_it(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    found = planned(recipe, "train.epochs=2")
    said = "\n".join(describe(found))
    assert "steps: 6 (3 per epoch of 12 judgements)" in said
    assert f"{MOST['cpu']:,} at once (auto)" in said
    assert "all of which train" in said
    assert "memory: about 0." in said
    assert "time: about" in said
    assert "more memory than is free" not in said
    assert "more memory than is free: 0.00 GB" in "\n".join(describe(replace(found, free=1)))
    console = Console(file=io.StringIO(), width=200)
    build_run(recipe, given=GIVEN, console=console)
    assert "time: about" in console.file.getvalue()  # type: ignore[attr-defined]


def test_time_follows_the_work(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    kto = planned(recipe).seconds()
    assert planned(recipe | {"method": "apo_zero_unpaired"}).seconds() < kto  # which has no mismatched rows
    assert planned(recipe, "train.checkpointing=full").seconds() > kto
    assert planned(recipe, "train.batch_size=12").seconds() > 2 * kto
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 2e9)
    assert planned(recipe).seconds() == pytest.approx(kto / 2)


def test_later_epochs_take_less_where_the_reference_is_kept(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda *_: 1e9)
    kept, computed = (planned(recipe, f"reference.cache={cache}", "train.epochs=3") for cache in ("auto", "off"))
    assert kept.seconds() == computed.seconds() == computed.seconds(again=True)
    assert kept.seconds(again=True) < kept.seconds()
    assert computed.total_seconds == 9 * computed.seconds()
    assert kept.total_seconds == 3 * kept.seconds() + 6 * kept.seconds(again=True)


@pytest.mark.parametrize(("override", "what"), [
    ("train.checkpointing=offloaded", "nothing to offload to"), ("model.lora={targets: [no_such]}", "no layer"),
])  # fmt: skip
def test_what_cannot_be_done_is_found_before_a_weight_is_loaded(override: str, what: str, recipe: dict[str, Any]) -> None:
    (Path(recipe["model"]["name"]) / "model.safetensors").unlink()
    with pytest.raises(UserError, match=what):
        planned(recipe, override)
