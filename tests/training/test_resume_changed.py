"""The same command again after settings, rows or the model have changed: refused with the difference, or allowed by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.tiny import tiny_tokenizer
from tests.training.resuming import killed, records, settings, train, weights
from tests.training.test_run import ROWS, folder, written
from valence.config.learning_rates import LEARNING_RATES
from valence.errors import UserError
from valence.training import build
from valence.training.loop import Run
from valence.training.restore import restore
from valence.training.setup import Part

__all__ = ["folder", "settings"]


# Settings


@pytest.mark.parametrize(("section", "change", "said"), [
    ("train", {"learning_rate": 2e-3}, r"train\.learning_rate: 0\.001 -> 0\.002"),
    ("train", {"epochs": 1}, r"train\.epochs: 3\.?0? -> 1"),
    ("train", {"max_steps": 5}, r"train\.max_steps: null -> 5"),
    ("train", {"seed": 1}, r"train\.seed: 0 -> 1"),
    ("model", {"lora": {"rank": 4}}, r"model\.lora\.rank: 2 -> 4"),
    ("model", {"lora": None}, r"model\.lora"),
    ("loss", {"beta": 0.2}, r"loss\.beta: 0\.1 -> 0\.2"),
    ("eval", {"every": 3}, r"eval\.every: 2\.?0? -> 3"),
])  # fmt: skip
def test_a_changed_setting_is_refused_with_the_difference(
    section: str, change: dict[str, Any], said: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    killed(settings, 4)
    log = (tmp_path / "run/metrics.jsonl").read_bytes()
    settings[section] = {**settings.get(section, {}), **change}
    with pytest.raises(UserError, match=said) as error:
        train(settings)
    assert "--fresh" in str(error.value)
    assert "--allow" in str(error.value)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == log


def test_what_is_allowed_by_name_takes_effect_from_there_on(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["train"] |= {"schedule": "constant", "warmup": 0}
    killed(settings, 6)
    settings["train"]["learning_rate"] = 5e-4
    with pytest.raises(UserError, match="learning_rate"):
        train(settings, allow=["train.warmup", "data"])
    _, said = train(settings, allow=["train.learning_rate"])
    assert "with train.learning_rate: 0.001 -> 0.0005" in said
    assert [row["lr"] for row in records(tmp_path / "run") if row["step"]] == [1e-3] * 3 + [5e-4] * 3
    (entry,) = json.loads((tmp_path / "run/run.json").read_text())["taken_up"]
    assert (entry["step"], entry["with"]) == (4, ["train.learning_rate: 0.001 -> 0.0005"])


def test_automatic_settings_stay_what_they_were(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that would choose another type, and with another table of learning rates."""
    del settings["train"]["learning_rate"]
    settings["train"] |= {"schedule": "constant", "warmup": 0}
    killed(settings, 6)
    monkeypatch.setenv("VALENCE_DTYPE", "bfloat16")
    monkeypatch.setitem(LEARNING_RATES, "preference", replace(LEARNING_RATES["preference"], adapter=3.0))
    run, _ = train(settings)
    assert run.recipe.model.dtype == "float32"
    assert run.policy.causal.get_input_embeddings().weight.dtype == torch.float32
    assert {row["lr"] for row in records(tmp_path / "run") if row["step"]} == {1e-4}
    recorded = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert (recorded["model.dtype"], recorded["train.learning_rate"]) == ("float32", 1e-4)
    assert "dtype: float32" in (tmp_path / "run/config.yaml").read_text()


def test_a_name_to_allow_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    killed(settings, 6)
    with pytest.raises(UserError, match=r"there is no setting learning_rat\n.*train\.learning_rate"):
        train(settings, allow=["learning_rat"])


@pytest.mark.parametrize("change", [
    {"train": {"epochs": 4}}, {"train": {"epochs": 9, "max_steps": 12}},
    {"run": {"keep": 1, "save_every": 5, "max_time": "01:00:00", "max_failed_saves": 9, "save_hf": True}},
], ids=str)  # fmt: skip
def test_a_run_may_get_longer_and_be_saved_otherwise(change: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    if "max_steps" in change.get("train", {}):
        settings["train"]["max_steps"] = 9
    train(settings) if "train" in change else killed(settings, 4)
    for section, values in change.items():
        settings[section] = {**settings[section], **values}
    again, _ = train(settings)
    assert again.step == (12 if "train" in change else 9)
    steps = [row["step"] for row in records(tmp_path / "run")]
    assert steps == sorted(set(steps))
    assert steps[-1] == again.step


def test_a_longer_run_has_the_learning_rates_of_its_new_length(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["log_every"] = 1
    settings["train"]["warmup"] = 0
    settings["train"]["max_steps"] = 5
    train(settings)
    settings["train"]["max_steps"] = 9
    train(settings)
    rates = {row["step"]: row["lr"] for row in records(tmp_path / "run")[1:]}
    assert rates[5] == pytest.approx(1e-3 * (1 - 4 / 5))
    assert [rates[step] for step in (6, 9)] == pytest.approx([1e-3 * (1 - 5 / 9), 1e-3 * (1 - 8 / 9)])


def test_steps_of_another_size_go_on_where_the_data_was(settings: dict[str, Any], tmp_path: Path) -> None:
    """Twelve rows, three epochs: after four steps of four rows, four thirds of an epoch are done; then steps of two."""
    killed(settings, 6)
    settings["train"]["batch_size"] = 2
    run, _ = train(settings, allow=["train.batch_size"])
    assert run.counters.first == 4 - 8
    assert run.step == run.total_steps == 4 + 10  # of 18 steps of two rows, 8 were behind it
    assert run.counters.examples_seen == 36
    assert records(tmp_path / "run")[-1]["epoch"] == 3


def test_fewer_steps_than_were_done_are_refused(settings: dict[str, Any]) -> None:
    killed(settings, 9)
    settings["train"]["epochs"] = 1
    with pytest.raises(UserError, match="has done 8 steps, more than the 3"):
        train(settings, allow=["train.epochs"])


# Rows


def test_changed_rows_are_refused_with_the_difference(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 4)
    rows = [*ROWS[1:], {**ROWS[0], "completion": "another one"}, {**ROWS[0], "completion": "and one more"}]
    written(tmp_path / "train.jsonl", rows)
    said = r"data\.train: 12 rows then, 13 now: 2 are new, the first of them .*train\.jsonl:12, 1 are gone"
    with pytest.raises(UserError, match=said):
        train(settings)


def test_rows_in_another_order_are_the_same_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "whole")}})
    killed(settings, 4)
    written(tmp_path / "train.jsonl", ROWS[::-1])
    again, _ = train(settings)
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(whole).items())


def test_none_of_the_new_rows_is_skipped(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(settings, 6)
    rows = [{**row, "completion": f"new {i} {i}"} for i, row in enumerate(ROWS)]
    written(tmp_path / "train.jsonl", rows)
    seen: list[str] = []
    step = Run._update

    def spied(run: Run) -> Any:
        assert run.sampler is not None
        ours, _ = run.sampler.step(run.step - run.counters.first)
        seen.extend(run.sampler.units[i].id for i in ours)
        return step(run)

    monkeypatch.setattr(Run, "_update", spied)
    again, said = train(settings, allow=["data.train"])
    assert "all of the rows are trained on from step 4 on" in said
    assert (again.step, again.counters.first) == (13, 4)
    assert len(seen) == 36
    assert len(set(seen)) == 12
    assert all(seen.count(name) == 3 for name in seen)


@pytest.mark.parametrize("changed", ["mix.0.train", "data.train"])
def test_rows_of_a_mix_begin_where_they_changed(
    changed: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list of rows by itself: new ones from their beginning, the others where they were."""
    shown = tmp_path / "shown.jsonl"
    settings["mix"] = [{"method": "sft", "train": [{"path": str(shown)}], "batch_size": 2}]
    written(shown, [{"prompt": f"ask {i} ", "completion": f"good {i}"} for i in range(7)])
    seen: list[int] = []
    share = Run._share

    def spied(run: Run, part: Part, objective: Any) -> Any:
        found = share(run, part, objective)
        seen.extend(part.sampler.units.index(unit) for unit in found.units)
        return found

    monkeypatch.setattr(Run, "_share", spied)
    killed(settings, 6)
    before, name = seen[: 2 * 4 - 1], shown if changed.startswith("mix") else tmp_path / "train.jsonl"
    assert sorted(before) == list(range(7))  # an epoch in four steps
    new = [{"prompt": f"new {i} ", "completion": f"better {i}"} for i in range(7)]
    written(name, new if changed.startswith("mix") else [{**row, "completion": f"new {i} {i}"} for i, row in enumerate(ROWS)])
    seen.clear()
    run, _ = train(settings, allow=[changed])
    if changed.startswith("mix"):
        assert (run.counters.first, run.counters.firsts, run.step) == (0, {"mix.0.train": 4}, 9)
    else:
        assert (run.counters.first, run.counters.firsts, run.step) == (4, {"mix.0.train": 0}, 13)
    assert sorted(seen[:7]) == list(range(7))  # the next epoch of the old ones, or the first of the new


def test_rows_that_are_no_longer_there_are_noticed(settings: dict[str, Any]) -> None:
    killed(settings, 6)
    del settings["data"]["eval"], settings["eval"]
    with pytest.raises(UserError, match=r"data\.eval: 5 rows then, none now"):
        train(settings)


def test_the_same_rows_elsewhere_are_the_same_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    killed(settings, 6)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    settings["data"]["train"] = [{"path": str(tmp_path / "moved.jsonl")}]
    assert train(settings)[0].step == 9


def test_held_out_rows_in_another_order_are_others(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of which eval.max_examples takes the first."""
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[:5][::-1])
    with pytest.raises(UserError, match="the same ones in another order"):
        train(settings)


def test_answers_to_prompts_that_are_gone_are_told_of(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["run"]["samples"] = {"prompts": 3, "max_new_tokens": 2}
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[2:7])
    _, said = train(settings, allow=["data.eval"])
    assert "2 of 3 prompts that were answered before training are gone" in said
    (kept,) = json.loads((tmp_path / "run/samples.json").read_text())
    assert kept["prompt"] == "question 2"
    assert {"before", "after"} <= kept.keys()


# Models and optimizers


@pytest.mark.parametrize("lora", [{"rank": 2}, None])
def test_compiled_layers_are_no_part_of_the_model(
    lora: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of compiled layers is opened without them, and goes on without them when that is allowed."""
    monkeypatch.setattr(build, "why_not", lambda device: None)
    monkeypatch.setattr(build, "compile_layers", lambda engine: setattr(engine, "compiled", True))  # noted, as they take time
    settings["model"]["lora"] = lora
    settings["train"]["compile"] = "on"
    killed(settings, 4)
    settings["train"]["compile"] = "off"
    with pytest.raises(UserError, match=r"train\.compile"):
        train(settings)
    train(settings, allow=["train.compile"])
    compiled = {**settings, "run": {**settings["run"], "dir": str(tmp_path / "compiled")}}
    compiled["train"] = {**settings["train"], "compile": "on"}
    run, _ = train(compiled)
    assert run.policy.compiled
    opened = restore(tmp_path / "compiled")
    assert not opened.policy.compiled
    assert all(torch.equal(p, weights(opened)[name]) for name, p in weights(run).items())


def test_another_model_in_the_same_place_is_noticed(folder: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    """Under an adapter the frozen weights, else what the policy is compared with."""
    for lora in ({"rank": 2}, None):
        place = tmp_path / f"model{bool(lora)}"
        tiny_tokenizer().save_pretrained(place)
        tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32).save_pretrained(place)
        run = {**settings["run"], "dir": str(tmp_path / f"run{bool(lora)}")}
        mine = {**settings, "model": {"name": str(place), "lora": lora}, "run": run}
        killed(mine, 4)
        tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32, seed=5).save_pretrained(place)
        with pytest.raises(
            UserError, match="frozen weights under the adapter have changed|is another model than the run began with"
        ):
            train(mine)


def test_a_model_object_that_was_trained_is_not_begun_with_again(settings: dict[str, Any]) -> None:
    settings["run"]["save_every"] = 100
    del settings["model"]["lora"]
    model = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    killed(settings, 4, model=model)
    with pytest.raises(UserError, match="not as it was when this run began"):
        train(settings, model=model)
    again = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    assert train(settings, model=again)[0].step == 9


def test_another_optimizer_is_refused_in_words(settings: dict[str, Any]) -> None:
    killed(settings, 6, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    with pytest.raises(UserError, match="another optimizer or schedule"):
        train(settings)
