"""Resuming after settings, rows or the model have changed: refused, or allowed by name."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import command
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.resuming import (
    Undisturbed,
    facts,
    killed,
    records,
    resumed_steps,
    train,
    weights,
)
from tests.training.test_run import ROWS, written
from valence.methods.learning_rates import LEARNING_RATES
from valence.training.open_run import restore
from valence.training.track import Counters

# Settings


@pytest.mark.parametrize(("section", "change", "difference"), [
    ("train", {"learning_rate": 2e-3}, "train.learning_rate: 0.001 -> 0.002"),
    ("train", {"max_steps": 5}, "train.max_steps: null -> 5"),
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


@pytest.mark.parametrize(("section", "change", "difference"), [
    ("train", {"batch_size": 2}, "train.batch_size: 4 -> 2"),
    ("train", {"drop_last": True}, "train.drop_last: false -> true"),
    ("train", {"seed": 1}, "train.seed: 0 -> 1"),
    ("train", {"epochs": 1}, "train.epochs: 3 -> 1"),
    ("data", {"stratify": True}, "data.stratify: false -> true"),
])  # fmt: skip
def test_other_batches_are_refused_also_if_they_are_allowed(
    section: str,
    change: dict[str, Any],
    difference: str,
    settings: dict[str, Any],
    killed_run: Path,
) -> None:
    log = (killed_run / "metrics.jsonl").read_bytes()
    settings[section] |= change
    fix = (
        f"undo the change of {difference.partition(':')[0]}, which cannot be allowed; or start a "
        f"new run from the model of this one: run `valence export {killed_run} FOLDER`, and set "
        "model.name: FOLDER, and another run.dir"
    )
    with raises_error("run-differs", where=f"run.dir: {killed_run}", fix=fix) as raised:
        train(settings, allow=[section])
    assert difference in raised.error.message.replace(".0 ", " ") + " "
    assert (killed_run / "metrics.jsonl").read_bytes() == log


def test_more_epochs_are_refused_with_the_number_of_steps(
    settings: dict[str, Any], killed_run: Path
) -> None:
    settings["train"]["epochs"] = 4
    with raises_error("run-differs", where=str(killed_run), fix="train.max_steps: 12 ") as raised:
        train(settings, allow=["train.epochs"])
    assert "train.epochs: 3.0 -> 4.0" in raised.error.message
    settings["train"]["max_steps"] = 12
    assert train(settings)[0].step == 12
    assert resumed_steps(killed_run) == [4]


@pytest.mark.parametrize("change", [{"batch_size": 1}, {"rows": 6}, None])
def test_other_batches_and_rows_of_a_mix_are_refused(
    change: dict[str, int] | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    shown = tmp_path / "shown.jsonl"
    rows = [{"prompt": f"ask {i} ", "completion": f"good {i}"} for i in range(7)]
    mix = [{"method": "sft", "train": [{"path": str(shown)}], "batch_size": 2}]
    written(shown, rows)
    killed(settings | {"mix": mix}, 3)
    name = "mix.0.train"
    if change is None:
        mix = []
    elif "rows" in change:
        written(shown, rows[: change["rows"]])
    else:
        name, mix = "mix.0.batch_size", [mix[0] | change]
    with raises_error("run-differs", where=str(tmp_path / "run"), fix="model.name") as raised:
        train(settings | {"mix": mix}, allow=["mix"])
    assert f"{name}: " in raised.error.message


@pytest.mark.parametrize(
    ("run", "saved_step", "setting"),
    [
        ({}, 9, "model.name: {run}/model"),
        ({"save_hf": True}, 4, "model.name: {run}/checkpoints/step-4/model"),
        (
            {"save_hf": True, "export": "adapter"},
            4,
            "model.adapter: {run}/checkpoints/step-4/model",
        ),
        ({}, 4, "model.name: FOLDER"),
    ],
    ids=["finished", "saved model", "saved adapter", "exported"],
)
def test_a_new_run_from_the_model_has_other_batches(
    run: dict[str, Any], saved_step: int, setting: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["run"] |= run
    if saved_step == 9:
        train(settings)
    else:
        killed(settings, saved_step + 2)
    settings["train"] |= {"batch_size": 2, "epochs": 1}
    setting = setting.format(run=tmp_path / "run")
    with raises_error("run-differs", fix=f"set {setting}") as raised:
        train(settings)
    model = setting.partition(": ")[2]
    if model == "FOLDER":
        export = re.search(r"`valence (export .*) FOLDER`", raised.error.fix or "")
        assert export is not None
        model = str(tmp_path / "exported")
        assert command(*export[1].split(), model) == 0
    is_adapter = setting.startswith("model.adapter")
    settings["model"] |= {"adapter": model, "lora": None} if is_adapter else {"name": model}
    settings["run"]["dir"] = str(tmp_path / "new")
    new, _ = train(settings)
    assert new.step == 6
    (last,) = (row for row in records(tmp_path / "run") if row["step"] == saved_step)
    start = records(tmp_path / "new")[0]
    assert start["eval/logps/chosen"] == pytest.approx(last["eval/logps/chosen"], rel=1e-6)


@pytest.mark.parametrize(
    ("first", "firsts"), [(0, {}), (0, {"mix.0.train": 0}), (2, {}), (0, {"mix.0.train": 3})]
)
def test_a_state_of_an_older_version_is_resumed_if_its_rows_began_at_the_first_step(
    first: int,
    firsts: dict[str, int],
    settings: dict[str, Any],
    tmp_path: Path,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        older = {"first": first, "firsts": firsts}
        patch.setattr(Counters, "state_dict", lambda counters: asdict(counters) | older)
        killed(settings, 6)
    path = tmp_path / "run"
    assert restore(path).step == 4
    if first or any(firsts.values()):
        with raises_error("run-differs", where=f"run.dir: {path}", fix="valence export"):
            train(settings, allow=["train"])
        return
    run, _ = train(settings)
    undisturbed.assert_same(run, path)


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
    settings["train"]["max_steps"] = 12
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


def test_fewer_steps_than_were_done_are_refused(settings: dict[str, Any], killed_run: Path) -> None:
    settings["train"]["max_steps"] = 3
    with raises_error("run-beyond-steps", where=str(killed_run), fix="train.max_steps"):
        train(settings, allow=["train.max_steps"])


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
        fix="model.name",
    ) as raised:
        train(settings, allow=["data"])
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
    with raises_error("run-differs", fix="model.name") as raised:
        train(settings)
    assert re.search(difference, raised.error.message.splitlines()[-1])


@pytest.mark.usefixtures("killed_run")
@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        ([*ROWS[:5], *({**row, "completion": "a new one"} for row in ROWS[:3])], r" 5 .* 8 .* 3 "),
        ([*ROWS[:4], *ROWS[:2]], r" 5 .* 6 \D*$"),
        ([*ROWS[:4], {**ROWS[0], "completion": "another"}], r" 5 .* 5 \D*$"),
    ],
    ids=["appended", "replaced by more", "replaced by as many"],
)
def test_changed_rows_are_described_after_a_kill_before_the_next_checkpoint(
    rows: list[dict[str, Any]], difference: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The checkpoint then has other rows than the last start."""
    written(tmp_path / "eval.jsonl", rows)
    settings["run"]["save_every"] = 50
    killed(settings, 6, allow=["data.eval"])
    train(settings)
    changes = facts(tmp_path / "run")["resumes"][-1]["with"]
    (entry,) = (change for change in changes if change.startswith("data.eval: "))
    assert re.search(difference, entry)
    assert "order" not in entry


def test_the_same_rows_elsewhere_and_in_another_order_are_the_same_rows(
    settings: dict[str, Any], tmp_path: Path, killed_run: Path, undisturbed: Undisturbed
) -> None:
    (tmp_path / "train.jsonl").unlink()
    settings["data"]["train"] = [{"path": written(tmp_path / "moved.jsonl", ROWS[::-1])}]
    run, _ = train(settings)
    undisturbed.assert_same(run, killed_run)


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
@pytest.mark.usefixtures("instant_compiler")
@pytest.mark.parametrize("lora", [{"rank": 2}, None])
def test_compiled_layers_are_no_part_of_the_model(
    lora: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A run of compiled layers is opened without them, and goes on without them when that is
    allowed.
    """
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
