"""``valence.train`` from keyword arguments, and the run that it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import valence
from tests.command import ROWS, place
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.config.arguments import recipe_from_arguments
from valence.errors import UserError
from valence.types import Chat

__all__ = ["place"]

SETTINGS: dict[str, Any] = {
    "data": {"max_length": 128},
    "loss": {"beta": 0.2},
    "train.batch_size": 5,
    "train.epochs": 1,
    "run.dir": "runs/python",
    "run.samples.prompts": 0,
}


def test_rows_a_name_and_a_method_are_enough(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = valence.train(method="kto", model="./model", train=ROWS, **SETTINGS)
    assert (run.recipe.method, run.recipe.loss["beta"], run.recipe.train.batch_size, run.step) == (
        "kto",
        0.2,
        5,
        2,
    )
    assert run.model_dir == Path("runs/python/model")
    AutoModelForCausalLM.from_pretrained(run.model_dir)
    assert run.report.is_file()
    shown = capsys.readouterr().out
    assert all(
        str(path) in shown for path in (run.model_dir, run.report, run.directory / "metrics.jsonl")
    )
    assert [record["step"] for record in run.history] == [1, 2]
    assert isinstance(run.history[0]["loss"], float)
    for part in ("method='kto'", "steps=2/2", "loss=", "folder='runs/python'"):
        assert part in repr(run)

    answer = run.ask("question 1", max_new_tokens=5)
    assert answer == run.ask([{"role": "user", "content": "question 1"}], max_new_tokens=5)
    (again,) = run.sample([Chat(({"role": "user", "content": "question 1"},))], _greedy())
    assert answer == again[0].text

    assert valence.train(method="kto", model="./model", train=ROWS, quiet=True, **SETTINGS).finished
    changed = {"train.weight_decay": 0.1}
    with raises_error("run-differs", fix="train.weight_decay"):
        valence.train(method="kto", model="./model", train=ROWS, **SETTINGS, **changed)
    fresh = valence.train(
        method="kto",
        model="./model",
        train=ROWS,
        fresh=True,
        quiet=True,
        **SETTINGS,
        **changed,
    )
    assert not fresh.finished
    assert fresh.recipe.train.weight_decay == 0.1
    capsys.readouterr()
    valence.train(
        method="kto", model="./model", train=ROWS, allow=list(changed), quiet=True, **SETTINGS
    )
    assert capsys.readouterr().out == ""


def _greedy() -> Any:
    from valence.rollouts.protocol import Sampling

    return Sampling(temperature=0.0, max_new_tokens=5, seed=0)


def test_a_loaded_model_replaces_the_name(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("./model")
    run = valence.train(method="kto", model=model, train=ROWS, quiet=True, **SETTINGS)
    assert run.recipe.model.name == "./model"
    unnamed = tiny(vocab_size=len(tiny_tokenizer()), layers=1, dtype=torch.float32)
    with raises_error("tokenizer-unknown", where="model"):
        valence.train(method="kto", model=unnamed, train=ROWS, fresh=True, quiet=True, **SETTINGS)
    run = valence.train(
        method="kto",
        model=unnamed,
        tokenizer=tiny_tokenizer(),
        train=ROWS,
        fresh=True,
        quiet=True,
        **SETTINGS,
    )
    assert run.step == 2
    assert run.ask("question 1", max_new_tokens=2) is not None


def test_a_file_with_other_columns_is_a_section(place: Path) -> None:
    text = (place / "rows.jsonl").read_text().replace('"completion"', '"reply text"')
    (place / "renamed.jsonl").write_text(text)
    section = {"path": "renamed.jsonl", "keys": {"completion": "reply text"}}
    run = valence.train(method="kto", model="./model", train=section, quiet=True, **SETTINGS)
    assert run.step == 2
    assert run.recipe.data.train[0].keys == section["keys"]


def test_text_is_continued_where_the_run_trains_on_text(place: Path) -> None:
    rows = [
        {"prompt": f"question {i} ", "completion": f"answer {i}", "label": i % 2 == 0}
        for i in range(6)
    ]
    run = valence.train(
        method="kto", model="./model", train=rows, quiet=True, **SETTINGS, **{"data.as_chat": False}
    )
    (texts,) = run.sample(["question 1 "], _greedy())
    assert run.ask("question 1 ", max_new_tokens=5) == texts[0].text


def test_arguments_win_over_the_recipe_and_overrides_over_both(place: Path) -> None:
    for recipe in (
        "recipe.yaml",
        {"method": "kto", "model": {"name": "./model"}, "train": {"batch_size": 3, "seed": 1}},
    ):
        settings = {
            "train": {"batch_size": 4, "seed": 2},
            "run.dir": Path("runs/three"),
            "loss": {"beta": 0.3},
        }
        source, overrides = recipe_from_arguments(recipe, ["train.seed=3"], settings)
        from valence.config.load import load_recipe

        result = load_recipe(source, overrides, in_memory=["train"]).recipe
        assert (
            result.train.batch_size,
            result.train.seed,
            result.run.dir,
            result.loss["beta"],
        ) == (
            4,
            3,
            "runs/three",
            0.3,
        )
        assert result.model.name == "./model"


@pytest.mark.parametrize(("settings", "code", "where", "fix"), [
    ({"lerning_rate": 1}, "setting-unknown", "lerning_rate", ""),
    ({"train.lerning_rate": 1}, "setting-unknown", "train.lerning_rate", "learning_rate"),
    ({"loss": {"betta": 1}}, "setting-unknown", "loss.betta", "beta"),
    ({"train.batch_size": "many"}, "setting-type", "train.batch_size", ""),
    ({"data": {"max_length": object()}}, "setting-type", "data.max_length", ""),
    ({"train": {"batch_size": 4}}, "train-data-missing", "data.train", ""),
])  # fmt: skip
def test_settings_have_the_errors_of_a_recipe(
    settings: dict[str, Any], code: str, where: str, fix: str, place: Path
) -> None:
    with raises_error(code, where=where, fix=fix):
        valence.train(method="kto", model="./model", **settings)
    with pytest.raises(UserError):
        valence.train("recipe.yaml", **({"model": "./model"} | settings | {"train.sed": 1}))
    assert not Path("runs").exists()


OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)


@pytest.mark.parametrize(("arguments", "setting", "names"), [
    ({"data": {"eval": "rows.jsonl"}, "eval": 0.2}, "data.eval", "data eval"),
    ({"data": {"eval": [{"path": "rows.jsonl"}]}, "eval": ROWS}, "data.eval", "data eval"),
    ({"data": {"eval": 0.1}, "eval": {"path": "rows.jsonl"}}, "data.eval", "data eval"),
    ({"data": {"train": "rows.jsonl"}, "train": ROWS}, "data.train", "data train"),
    ({"data": {"train": "rows.jsonl"}, "train": "rows.jsonl"}, "data.train", "data train"),
    ({"data": "rows.jsonl", "train": ROWS}, "data.train", "data train"),
    ({"data.eval": 0.1, "eval": 0.2}, "data.eval", "data.eval eval"),
    ({"data.train.0.limit": 2, "train": ROWS}, "data.train", "data.train.0.limit train"),
    ({"train": ROWS, "overrides": ["data.train=rows.jsonl"]}, "data.train", "train overrides"),
    ({"train": "rows.jsonl", "overrides": ["data.train.0.limit=2"]}, "data.train", "overrides"),
    ({"train": {"seed": 1}, "train.seed": 1}, "train.seed", "train train.seed"),
    ({"eval": {"every": 1}, "eval.every": 1}, "eval.every", "eval eval.every"),
    ({"loss": {"beta": 0.1}, "loss.beta": 0.1}, "loss.beta", "loss loss.beta"),
    ({"model": "./model", "model.name": "./model"}, "model.name", "model model.name"),
    ({"model": {"name": "./model"}, "model.name": "x"}, "model.name", "model model.name"),
    ({"model": torch.nn.Linear(1, 1), "model.name": "x"}, "model.name", "model model.name"),
    ({"model": {"name": "./model", "tokenizer": "./model"}, "tokenizer": tiny_tokenizer()},
     "model.tokenizer", "model tokenizer"),
    ({"reference.model": "./model", "reference": torch.nn.Linear(1, 1)},
     "reference.model", "reference.model reference"),
    ({"train": {"optimizer": "adamw"}, "optimizer": OPTIMIZER}, "train.optimizer", "optimizer"),
    ({"train.schedule": "cosine", "scheduler": lambda optimizer: optimizer}, "train.schedule",
     "train.schedule scheduler"),
])  # fmt: skip
def test_two_arguments_for_one_setting_are_an_error(
    arguments: dict[str, Any], setting: str, names: str, place: Path
) -> None:
    for recipe in (None, "recipe.yaml"):
        with raises_error("argument-duplicate", where=setting) as raised:
            valence.train(recipe, **({"method": "kto"} | arguments))
        assert all(f" {name} " in f" {raised.error.fix} " for name in names.split())


def test_arguments_for_parts_of_a_section_are_added(place: Path) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "data"}
    run = valence.train(
        "recipe.yaml",
        overrides=["data.eval=[]", "train.epochs=2"],
        model={"name": "./model", "lora": {"rank": 3}},
        train=ROWS,
        data={"max_length": 100},
        quiet=True,
        **settings,
        **{"model.lora.dropout": 0.1, "data.stratify": False, "train.optimizer": "adamw"},
    )
    recipe = run.recipe
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.dropout) == (3, 0.1)
    assert (recipe.data.max_length, recipe.train.epochs, recipe.data.eval) == (100, 2, [])


def test_each_call_has_a_new_folder_unless_one_is_named(place: Path) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "run.dir"}
    options: dict[str, Any] = {"model": "./model", "train": ROWS, "quiet": True, **settings}
    folders = [valence.train(method="kto", **options).directory for _ in range(2)]
    assert folders == [Path("runs/kto"), Path("runs/kto-2")]
    recipe = {"method": "kto", "run": {"dir": "runs/kto"}}
    assert valence.train(recipe, **options).directory == Path("runs/kto")  # it is finished
    assert not Path("runs/kto-3").exists()


def test_errors_name_arguments_and_no_options(place: Path) -> None:
    options: dict[str, Any] = {"method": "kto", "model": "./model", "quiet": True, **SETTINGS}
    valence.train(train=ROWS, **options)
    changed = {"train.learning_rate": 1e-4, "train.weight_decay": 0.1}
    names = 'allow=["train.learning_rate", "train.weight_decay"]; or start'
    with raises_error("run-differs", fix=names) as raised:
        valence.train(train=ROWS, **options, **changed)
    assert "fresh=True" in (raised.error.fix or "")
    assert "--" not in str(raised.error)
    run = valence.train(train=ROWS, **options, **changed, allow=list(changed))
    assert run.finished or run.step
    with raises_error("allow-unknown-setting", where="allow"):
        valence.train(train=ROWS, **options, allow=["data.trian"])


def test_hints_name_arguments_and_no_options(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"method": "kto", "model": "./model", "train": ROWS, **SETTINGS}
    valence.train(**options)
    capsys.readouterr()
    assert valence.train(**options).finished
    hint, _ = capsys.readouterr().out.split("loading", 1)
    assert "fresh=True" in hint
    assert "--fresh" not in hint
    recipe = {"method": "kto", "model": "./model", "data": {"train": "rows.jsonl"}}
    with raises_error("run-differs", fix="allow=[") as raised:
        valence.build_run(recipe, ["run.dir=runs/python", "train.batch_size=5"], quiet=True)
    assert "fresh=True" in (raised.error.fix or "")
    assert "--" not in str(raised.error)


def test_a_save_that_fails_after_an_error_names_arguments(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise UserError("no space", code="checkpoint-not-saved", fix="start over with --fresh")

    def interrupt(run: Any, record: Any) -> None:
        monkeypatch.setattr(valence.Run, "save", fail)
        raise RuntimeError("a callback failed")

    options: dict[str, Any] = {"method": "kto", "model": "./model", "train": ROWS, **SETTINGS}
    with pytest.raises(RuntimeError):
        valence.train(callbacks=[interrupt], **options)
    message = capsys.readouterr().out.partition("could not be saved either")[2]
    assert "fresh=True" in message
    assert "--fresh" not in message


def test_warnings_of_a_run_name_arguments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"method": "kto", "model": "./model", "data": {"train": "rows.jsonl"}}
    run = valence.build_run(recipe, ["run.dir=runs/loop", "train.max_skipped=1"], quiet=True)
    capsys.readouterr()
    run.messages.warn("start over with --fresh, or accept it with --allow data.train")
    expected = 'start over with fresh=True, or accept it with allow=["data.train"]'
    assert expected in capsys.readouterr().err.replace("\n", " ")
    assert run.folder.facts["warnings"] == [expected]
    for parameter in run.policy.parameters():
        parameter.data.fill_(float("nan"))
    with raises_error("loss-not-finite", fix="fresh=True"):
        run.fit()
    run.close()


@pytest.mark.parametrize(("method", "rows"), [("kto", ROWS), ("sft", ROWS)])
def test_a_training_loop_of_the_user_makes_the_same_steps(
    place: Path, method: str, rows: Any
) -> None:
    recipe: dict[str, Any] = {
        "method": method,
        "model": {"name": "./model"},
        "data": {"train": "rows.jsonl", "max_length": 128},
        "train": {"batch_size": 4, "learning_rate": 1e-2, "schedule": "constant", "epochs": 2}
        | {"warmup": 0, "clip_norm": None, "optimizer": "torch.optim.SGD"},
    }
    if method == "sft":
        recipe["data"]["convert"] = "chosen_to_demonstrations"
    expected = valence.train(recipe, quiet=True, **{"run.dir": "runs/expected"})

    run = valence.build_run(recipe, ["run.dir=runs/loop"], quiet=True)
    optimizer = torch.optim.SGD(run.policy.parameters(), lr=1e-2)
    losses: list[float] = []
    for batch in run.batches():
        losses.append(float(run.loss_and_gradient(batch)))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert run.step == expected.step > 1
    assert losses == [record["loss"] for record in expected.history]
    for name, weight in expected.policy.state_dict().items():
        assert torch.equal(run.policy.state_dict()[name], weight), name


def test_a_loop_with_an_own_loss_term(place: Path) -> None:
    """The loss of sft from the log-probabilities themselves."""
    recipe = place / "recipe.yaml"
    words = "method=sft", "data.convert=chosen_to_demonstrations", "data.eval=[]"
    run = valence.build_run(recipe, [*words, "run.dir=runs/term"], quiet=True)
    batch = next(run.batches())
    loss = run.loss_and_gradient(batch)
    gradient = [p.grad.clone() for p in run.policy.parameters() if p.grad is not None]
    for p in run.policy.parameters():
        p.grad = None
    parts = valence.make_micro_batches(batch.examples, 64, run.policy.device)
    assert len(parts) > 1
    num_tokens = sum(int(part.loss_mask.sum()) for part in parts)
    total = 0.0
    for part in parts:
        logps = run.policy(part).logp[part.scored]
        term = -logps.sum() / num_tokens
        term.backward()
        total += float(term)
    run.close()
    assert total == pytest.approx(float(loss), rel=1e-5)
    actual = [p.grad for p in run.policy.parameters() if p.grad is not None]
    for one, other in zip(actual, gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
