"""Runs whose recipe holds out a share of the training rows (data.eval: 0.3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.command import command, command_error
from tests.errors import check_error, raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.apps.compare.compare_models import count_trained
from valence.config.load import load_recipe
from valence.data.split import PromptSplit, prompt_key
from valence.training.prepare import Prepared, prepare

SPLIT = PromptSplit(0.3)
THUMBS = [
    {"prompt": f"question {i} ", "completion": f"answer {i} {k}", "label": k == 0}
    for i in range(16)
    for k in range(2)
]
NUM_HELD_OUT = sum(SPLIT.is_held_out(row["prompt"]) for row in THUMBS)
ONLINE = {"method": "grpo", "reward": "length", "rollout": {"max_new_tokens": 4}}
DEMONSTRATIONS = [{"prompt": f"question {i} ", "completion": f"good {i}"} for i in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", THUMBS)
    write("demonstrations.jsonl", DEMONSTRATIONS)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(model: str, **sections: Any) -> dict[str, Any]:
    data = {"train": "rows.jsonl", "eval": 0.3, "max_length": 64, **sections.pop("data", {})}
    return {
        "method": "kto",
        "model": {"name": model},
        "data": data,
        "train": {"batch_size": 4, "learning_rate": 1e-3, "epochs": 1},
        "run": {"dir": "run"},
        **sections,
    }


def prepared(recipe: dict[str, Any], rows: Any = None, *overrides: str) -> Prepared:
    in_memory = [name for name, value in (rows or {}).items() if value is not None]
    source = load_recipe(recipe, overrides, in_memory=in_memory)
    return prepare(source, rows=rows)


def prompts(run: Prepared, name: str) -> set[Any]:
    return {example.prompt for example in run.corpora[name].loaded.examples}


def test_no_prompt_is_on_both_sides(model: str) -> None:
    run = prepared(recipe(model))
    assert len(run.corpora["eval"].units) == NUM_HELD_OUT
    assert len(run.corpora["train"].units) == len(THUMBS) - NUM_HELD_OUT
    assert not {"rows_in_train", "prompts_in_train"} & run.corpora["eval"].audit.findings.keys()
    assert f"{NUM_HELD_OUT} of {len(THUMBS)} rows" in run.held_out


def test_rows_in_memory_are_divided_and_rows_to_evaluate_on_take_precedence(model: str) -> None:
    source = recipe(model, data={"train": []})
    assert prompts(prepared(source, {"train": THUMBS}), "eval") == prompts(
        prepared(recipe(model)), "eval"
    )
    run = prepared(source, {"train": THUMBS, "eval": THUMBS[:4]})
    assert len(run.corpora["train"].units) == len(THUMBS)
    assert len(run.corpora["eval"].units) == 4
    assert run.held_out == ""


def test_rows_of_mix_with_a_held_out_prompt_are_left_out_and_counted(model: str) -> None:
    mix = [{"method": "sft", "train": "demonstrations.jsonl"}]
    run = prepared(recipe(model, mix=mix))
    assert not prompts(run, "mix.0.train") & prompts(run, "eval")
    # prompts that data.train does not have are trained on, whatever their side
    assert {"question 16 ", "question 19 "} <= prompts(run, "mix.0.train")
    [file] = run.corpora["mix.0.train"].loaded.files
    assert (file.rows, sum(file.unused.values())) == (20, NUM_HELD_OUT // 2)


def test_prompts_of_an_online_run_are_divided(model: str) -> None:
    write("prompts.jsonl", [{"prompt": row["prompt"], "n": i} for i, row in enumerate(THUMBS)])
    run = prepared(recipe(model, **ONLINE, data={"train": "prompts.jsonl"}))
    assert len(run.corpora["eval"].units) == NUM_HELD_OUT
    assert not prompts(run, "train") & prompts(run, "eval")


def test_a_run_evaluates_on_the_rows_and_resumes(model: str) -> None:
    run = valence.train(recipe(model), quiet=True)
    assert len(run.evaluate().rows) == NUM_HELD_OUT
    assert valence.train(recipe(model), quiet=True).step == run.step
    write("rows.jsonl", [*THUMBS, {"prompt": "new ", "completion": "row", "label": True}])
    with raises_error("run-differs", fix="model.name"):
        valence.train(recipe(model), quiet=True)
    write("rows.jsonl", THUMBS)
    with raises_error("run-differs", fix="model.name"):
        valence.train(recipe(model), overrides=["data.eval=0.5"], quiet=True)


def test_the_share_may_be_an_argument(model: str) -> None:
    settings = {k: v for k, v in recipe(model).items() if k == "run"}
    run = valence.train(
        method="kto", model=model, train=THUMBS, eval=0.3, data={"max_length": 64},
        quiet=True, **settings,
    )  # fmt: skip
    assert len(run.evaluate().rows) == NUM_HELD_OUT
    assert run.recipe.data.eval == 0.3


def test_evaluate_measures_the_rows_held_out_of_a_recipe_and_of_a_run(model: str) -> None:
    Path("recipe.yaml").write_text(json.dumps(recipe(model)))
    for target in ("recipe.yaml", "run"):
        assert command("evaluate", target, "--out", "metrics.json") == 0
        assert len(json.loads(Path("metrics.json").read_text())["rows"]) == NUM_HELD_OUT
        valence.train("recipe.yaml", quiet=True)


def test_check_shows_how_many_rows_are_held_out(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(json.dumps(recipe(model)))
    assert command("check", "recipe.yaml") == 0
    assert f"{NUM_HELD_OUT} of {len(THUMBS)} rows" in capsys.readouterr().out


@pytest.mark.parametrize("is_held_out", [True, False])
def test_inspect_tells_that_a_row_is_held_out(
    model: str, is_held_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(json.dumps(recipe(model)))
    sides = [SPLIT.is_held_out(row["prompt"]) for row in THUMBS]
    row = str(sides.index(is_held_out) + 1)
    assert command("inspect", "recipe.yaml", "--stage", "example", "--row", row) == 0
    assert ("is held out" in capsys.readouterr().out) is is_held_out
    error = command_error("inspect", "recipe.yaml", "--list", "eval")
    check_error(error, "list-not-in-recipe", fix="--list train")


def test_prompts_that_are_held_out_are_not_sampled_to_train_on(model: str) -> None:
    write("prompts.jsonl", [{"prompt": row["prompt"]} for row in THUMBS[::2]])
    source = recipe(model, **ONLINE, data={"train": "prompts.jsonl"})
    Path("recipe.yaml").write_text(json.dumps(source))
    words = ("-n", "1", "--max-new-tokens", "2", "--out", "answers.jsonl", "--quiet")
    assert command("sample", "recipe.yaml", *words) == 0
    lines = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    sampled = {line["prompt"] for line in lines if "prompt" in line}
    assert sampled == {r["prompt"] for r in THUMBS if not SPLIT.is_held_out(r["prompt"])}


def test_prompts_that_are_held_out_do_not_count_as_trained_on(model: str) -> None:
    valence.train(recipe(model), quiet=True)
    keys = {prompt_key(row["prompt"]): SPLIT.is_held_out(row["prompt"]) for row in THUMBS}
    counts, notes = count_trained({"candidate": "run"}, keys, [])
    assert counts == {"candidate": sum(not is_held_out for is_held_out in keys.values())}
    assert not notes
