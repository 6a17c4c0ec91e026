"""Resuming after settings, rows or the model have changed: refused, or allowed by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.resuming import Undisturbed, facts, killed, records, train, weights
from tests.training.test_run import ROWS, written
from valence.lifecycle import models
from valence.lifecycle.restore import restore
from valence.methods.learning_rates import LEARNING_RATES
from valence.models.policy_model import PolicyModel
from valence.planning import plan
from valence.trainer import trainer

# Settings


@pytest.mark.parametrize(("section", "change", "difference"), [
    ("train", {"learning_rate": 2e-3}, "train.learning_rate: 0.001 -> 0.002"),
    ("train", {"epochs": 1}, "train.epochs: 3 -> 1"),
    ("train", {"max_steps": 5}, "train.max_steps: null -> 5"),
    ("train", {"seed": 1}, "train.seed: 0 -> 1"),
    ("model", {"lora": {"rank": 4}}, "model.lora.rank: 2 -> 4"),
    ("model", {"lora": None}, "model.lora"),
    ("loss", {"beta": 0.2}, "loss.beta: 0.1 -> 0.2"),
    ("eval", {"every": 3}, "eval.every: 2 -> 3"),
])  # fmt: skip
def test_a_changed_setting_is_refused_with_the_difference(
    section: str,
    change: dict[str, Any],
    difference: str,
    settings: dict[str, Any],
    killed_run: Path,
) -> None:
    log = (killed_run / "metrics.jsonl").read_bytes()
    settings[section] = {**settings.get(section, {}), **change}
    (name,) = [f"{section}.{key}" for key in change]
    with raises_error("run-differs", where=str(killed_run), fix=f'allow=["{name}') as raised:
        train(settings)
    assert difference in raised.error.message.replace(".0 ", " ")
    assert "fresh=True" in str(raised.error.fix)
    assert (killed_run / "metrics.jsonl").read_bytes() == log


def test_an_allowed_change_takes_effect_from_the_resumed_step_on(
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    settings["train"] |= {"schedule": "constant", "warmup": 0}
    killed(settings, 3)
    settings["train"]["learning_rate"] = 5e-4
    with raises_error("run-differs", fix='allow=["train.learning_rate"]'):
        train(settings, allow=["train.warmup", "data"])
    train(settings, allow=["train.learning_rate"])
    assert [row["lr"] for row in records(tmp_path / "run") if row["step"]] == [1e-3] + [5e-4] * 5
    (entry,) = facts(tmp_path / "run")["resumes"]
    assert (entry["step"], entry["with"]) == (2, ["train.learning_rate: 0.001 -> 0.0005"])


def test_automatic_settings_are_kept_on_resume(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that would choose another type, and with another table of learning rates."""
    del settings["train"]["learning_rate"]
    settings["train"] |= {"schedule": "constant", "warmup": 0}
    killed(settings, 3)
    monkeypatch.setenv("VALENCE_DTYPE", "bfloat16")
    monkeypatch.setitem(
        LEARNING_RATES, "preference", replace(LEARNING_RATES["preference"], adapter=3.0)
    )
    run, _ = train(settings)
    assert run.recipe.model.dtype == "float32"
    assert run.policy.causal.get_input_embeddings().weight.dtype == torch.float32
    assert {row["lr"] for row in records(tmp_path / "run") if row["step"]} == {1e-4}
    recorded = facts(tmp_path / "run")["settings"]
    assert (recorded["model.dtype"], recorded["train.learning_rate"]) == ("float32", 1e-4)
    assert "dtype: float32" in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.usefixtures("killed_run")
def test_an_unknown_name_to_allow_is_refused(settings: dict[str, Any]) -> None:
    with raises_error("allow-unknown-setting", where="allow", fix="train.learning_rate"):
        train(settings, allow=["learning_rat"])


def test_a_finished_run_may_get_longer(
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    shutil.copytree(undisturbed.path, tmp_path / "run")
    settings["train"]["epochs"] = 4
    run, _ = train(settings)
    assert run.step == 12
    steps = [row["step"] for row in records(tmp_path / "run")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12


def test_a_run_may_be_saved_otherwise(
    settings: dict[str, Any],
    killed_run: Path,
    undisturbed: Undisturbed,
) -> None:
    settings["run"] |= {
        "keep": 1,
        "save_every": 5,
        "max_time": "01:00:00",
        "max_failed_saves": 9,
        "save_hf": True,
    }
    run, _ = train(settings)
    undisturbed.assert_same(run, killed_run)


def test_a_longer_run_has_the_learning_rates_of_its_new_length(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["run"]["log_every"] = 1
    settings["train"] |= {"warmup": 0, "max_steps": 2}
    del settings["data"]["eval"], settings["eval"]
    train(settings)
    settings["train"]["max_steps"] = 4
    train(settings)
    rates = [row["lr"] for row in records(tmp_path / "run")]
    assert rates == pytest.approx([1e-3 * (1 - done) for done in (0 / 2, 1 / 2, 2 / 4, 3 / 4)])


def test_a_different_batch_size_resumes_at_the_same_row(
    settings: dict[str, Any],
    killed_run: Path,
) -> None:
    """Twelve rows, three epochs: after four steps of four rows, four thirds of an epoch are done;
    then steps of two.
    """
    settings["train"]["batch_size"] = 2
    run, _ = train(settings, allow=["train.batch_size"])
    assert run.state.counters.first == 4 - 8
    assert run.step == run.total_steps == 4 + 10  # of 18 steps of two rows, 8 were behind it
    assert run.state.counters.examples_seen == 36
    assert records(killed_run)[-1]["epoch"] == 3


def test_fewer_steps_than_were_done_are_refused(settings: dict[str, Any], killed_run: Path) -> None:
    settings["train"]["epochs"] = 1
    with raises_error("run-beyond-steps", where=str(killed_run), fix="train.epochs"):
        train(settings, allow=["train.epochs"])


# Rows


@pytest.mark.usefixtures("killed_run")
def test_changed_rows_are_refused_with_the_difference(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    rows = [
        *ROWS[1:],
        {**ROWS[0], "completion": "another one"},
        {**ROWS[0], "completion": "and one more"},
    ]
    written(tmp_path / "train.jsonl", rows)
    with raises_error(
        "run-differs",
        where=str(tmp_path / "run"),
        fix='"data.train"',
    ) as raised:
        train(settings)
    line = raised.error.message.splitlines()[-1]
    assert re.match(
        r" *data\.train: 12 .* 13 .* 2 .*train\.jsonl:12.* 1 ",
        line,
    ), "then, now, new and where, gone"


@pytest.mark.usefixtures("killed_run")
@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        ([*ROWS, ROWS[0], ROWS[3]], r" 12 .* 14 .* 2 .*train\.jsonl:13$"),
        ([*ROWS[1:]], r" 12 .* 11 .* 1 \D*$"),
    ],
    ids=["appended again", "one less"],
)
def test_repeated_rows_count_as_often_as_they_occur(
    rows: list[dict[str, Any]], difference: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    written(tmp_path / "train.jsonl", rows)
    with raises_error("run-differs", fix='"data.train"') as raised:
        train(settings)
    assert re.search(difference, raised.error.message.splitlines()[-1])


@pytest.mark.usefixtures("killed_run")
@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        ([*ROWS, *({**row, "completion": "a new one"} for row in ROWS[:10])], r" 12 .* 22 .* 10 "),
        ([*ROWS[:-1], *ROWS[:2]], r" 12 .* 13 \D*$"),
        ([*ROWS[:-1], {**ROWS[0], "completion": "another"}], r" 12 .* 12 \D*$"),
    ],
    ids=["appended", "replaced by more", "replaced by as many"],
)
def test_changed_rows_are_described_after_a_kill_before_the_next_checkpoint(
    rows: list[dict[str, Any]], difference: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The checkpoint then has other rows than the last start."""
    written(tmp_path / "train.jsonl", rows)
    settings["run"]["save_every"] = 50
    killed(settings, 6, allow=["data.train"])
    train(settings)
    changes = facts(tmp_path / "run")["resumes"][-1]["with"]
    (entry,) = (change for change in changes if change.startswith("data.train: "))
    assert re.search(difference, entry)
    assert "order" not in entry


def test_the_same_rows_elsewhere_and_in_another_order_are_the_same_rows(
    settings: dict[str, Any], tmp_path: Path, killed_run: Path, undisturbed: Undisturbed
) -> None:
    (tmp_path / "train.jsonl").unlink()
    settings["data"]["train"] = [{"path": written(tmp_path / "moved.jsonl", ROWS[::-1])}]
    run, _ = train(settings)
    undisturbed.assert_same(run, killed_run)


def spy_on_steps(
    monkeypatch: pytest.MonkeyPatch,
    note: Callable[[list[Any], list[Any]], None],
) -> None:
    """note: called before each step with its units, and those of the recipe's other methods."""
    step = trainer.optimizer_step

    def spied(
        objective: Any,
        optimizer: Any,
        units: Any,
        following: Any,
        clip: Any,
        shares: Any,
        **options: Any,
    ) -> Any:
        note(list(units), [unit for share in shares for unit in share.examples])
        return step(objective, optimizer, units, following, clip, shares, **options)

    monkeypatch.setattr(trainer, "optimizer_step", spied)


@pytest.mark.usefixtures("killed_run")
def test_none_of_the_new_rows_is_skipped(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{**row, "completion": f"new {i} {i}"} for i, row in enumerate(ROWS)]
    written(tmp_path / "train.jsonl", rows)
    ids: list[str] = []
    spy_on_steps(monkeypatch, lambda units, _: ids.extend(unit.id for unit in units))
    run, _ = train(settings, allow=["data.train"])
    assert (run.step, run.state.counters.first) == (13, 4)
    assert len(ids) == 36
    assert len(set(ids)) == 12
    assert all(ids.count(name) == 3 for name in ids)


@pytest.mark.parametrize(
    "changed",
    ["mix.0.train", pytest.param("data.train", marks=pytest.mark.slow)],
)
def test_rows_of_a_mix_begin_where_they_changed(
    changed: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list of rows by itself: new ones from their beginning, the others where they were."""
    shown = tmp_path / "shown.jsonl"
    settings["mix"] = [{"method": "sft", "train": [{"path": str(shown)}], "batch_size": 2}]
    written(shown, [{"prompt": f"ask {i} ", "completion": f"good {i}"} for i in range(7)])
    ids: list[str] = []
    spy_on_steps(monkeypatch, lambda _, mixed: ids.extend(unit.id for unit in mixed))
    killed(settings, 6)
    name = shown if changed.startswith("mix") else tmp_path / "train.jsonl"
    assert len(set(ids[: 2 * 4 - 1])) == 7  # an epoch in four steps
    old = set(ids)
    new = [{"prompt": f"new {i} ", "completion": f"better {i}"} for i in range(7)]
    written(
        name,
        new
        if changed.startswith("mix")
        else [{**row, "completion": f"new {i} {i}"} for i, row in enumerate(ROWS)],
    )
    ids.clear()
    run, _ = train(settings, allow=[changed])
    if changed.startswith("mix"):
        assert (run.state.counters.first, run.state.counters.firsts, run.step) == (
            0,
            {"mix.0.train": 4},
            9,
        )
    else:
        assert (run.state.counters.first, run.state.counters.firsts, run.step) == (
            4,
            {"mix.0.train": 0},
            13,
        )
    assert len(set(ids[:7])) == 7  # the next epoch of the old ones, or the first of the new
    assert set(ids).isdisjoint(old) is changed.startswith("mix")


def test_rows_that_are_no_longer_there_are_noticed(
    settings: dict[str, Any],
    killed_run: Path,
) -> None:
    del settings["data"]["eval"], settings["eval"]
    with raises_error(
        "run-differs",
        where=str(killed_run),
        fix='allow=["data", "eval"]',
    ) as raised:
        train(settings)
    assert "data.eval: 5 " in raised.error.message


def test_held_out_rows_in_another_order_are_others(
    settings: dict[str, Any],
    tmp_path: Path,
    killed_run: Path,
) -> None:
    """Of which eval.max_examples takes the first."""
    written(tmp_path / "eval.jsonl", ROWS[:5][::-1])
    with raises_error("run-differs", where=str(killed_run), fix='"data.eval"'):
        train(settings)


def test_samples_of_removed_prompts_are_omitted_with_a_warning(
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    settings["run"]["samples"] = {"prompts": 3, "max_new_tokens": 2}
    killed(settings, 6)
    written(tmp_path / "eval.jsonl", ROWS[2:7])
    train(settings, allow=["data.eval"])
    assert [
        re.findall(
            r"\d+",
            warning,
        )
        for warning in facts(tmp_path / "run")["warnings"]
    ] == [["2", "3"]]
    (saved,) = json.loads((tmp_path / "run/samples.json").read_text())
    assert saved["prompt"] == "question 2"
    assert {"before", "after"} <= saved.keys()


# Models and optimizers


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"rank": 2}, None])
def test_compiled_layers_are_no_part_of_the_model(
    lora: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of compiled layers is opened without them, and goes on without them when that is
    allowed.
    """
    for module in (models, plan):
        monkeypatch.setattr(module, "why_not", lambda device: None)

    def compile_none(engine: PolicyModel) -> None:  # real programs take time
        engine.compiled_layers = list(engine.causal.model.layers)

    monkeypatch.setattr(models, "compile_layers", compile_none)
    settings["model"]["lora"] = lora
    settings["train"]["compile"] = "on"
    killed(settings, 4)
    settings["train"]["compile"] = "off"
    with raises_error("run-differs", fix='allow=["train.compile"]'):
        train(settings)
    train(settings, allow=["train.compile"])
    compiled = {**settings, "run": {**settings["run"], "dir": str(tmp_path / "compiled")}}
    compiled["train"] = {**settings["train"], "compile": "on"}
    run, _ = train(compiled)
    assert run.policy.compiled
    opened = restore(tmp_path / "compiled")
    assert not opened.policy.compiled
    assert all(torch.equal(p, weights(opened)[name]) for name, p in weights(run).items())


@pytest.mark.parametrize(("lora", "code", "where"), [
    ({"rank": 2}, "base-model-changed", "checkpoint"),
    (None, "reference-changed", "model.name"),
], ids=["adapter", "all weights"])  # fmt: skip
def test_another_model_in_the_same_place_is_noticed(
    lora: Any, code: str, where: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Under an adapter the frozen weights, else the reference."""
    place = tmp_path / "model"
    tiny_tokenizer().save_pretrained(place)
    tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32).save_pretrained(place)
    settings["model"] = {"name": str(place), "lora": lora}
    killed(settings, 4)
    tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32, seed=5).save_pretrained(
        place,
    )
    with raises_error(code, where=where):
        train(settings)


def test_a_model_object_that_was_trained_is_not_begun_with_again(settings: dict[str, Any]) -> None:
    settings["run"]["save_every"] = 100
    del settings["model"]["lora"]
    model = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    killed(settings, 4, model=model)
    with raises_error("model-changed", where="model"):
        train(settings, model=model)
    again = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    assert train(settings, model=again)[0].step == 9


def test_another_optimizer_is_refused(settings: dict[str, Any]) -> None:
    killed(settings, 3, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    with raises_error("optimizer-changed", where="checkpoint"):
        train(settings)
