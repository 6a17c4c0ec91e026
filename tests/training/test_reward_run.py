"""A reward model from rows to a folder: trained by a recipe, evaluated, exported, and loaded by
transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.test_run import without_weights
from valence import cli
from valence.config.load import load_recipe
from valence.training.models import build_models
from valence.training.open_run import restore
from valence.training.plan import make_plan
from valence.training.prepare import prepare

FILMS = [
    {
        "prompt": f"film {i} ",
        "completion": f"{'good' if i % 2 else 'bad'} {i % 5}",
        "label": bool(i % 2),
    }
    for i in range(16)
]
STARS = [
    {"prompt": f"film {i} ", "completion": " ".join(["good"] * (1 + i % 4)), "score": 1 + i % 4}
    for i in range(16)
]
PAIRS = [
    {"prompt": f"question {i} ", "chosen": f"good {i}", "rejected": f"bad {i} {i}"}
    for i in range(16)
]
ASPECTS = [
    {**row, "scores": {"help": i % 3, "number": i % 5} if i % 2 else {"help": 1}, "label": None}
    for i, row in enumerate(FILMS)
]
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str]] = {
    "pairs": ("bradley_terry", PAIRS, {"center_coef": 0.01}, "rewards/accuracies"),
    "thumbs": ("pointwise", FILMS, {}, "rewards/auc"),
    "stars": ("ordinal", STARS, {"levels": 4}, "rewards/spearman"),
    "scores": ("pointwise", STARS, {"error": "squared"}, "rewards/pearson"),
    "attributes": ("pointwise", ASPECTS, {"error": "huber"}, "rewards/pearson/1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def recipe(folder: Path, tmp_path: Path, case: str, **model: Any) -> dict[str, Any]:
    method, rows, loss, _ = CASES[case]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows)
    )
    return {
        "method": method, "model": {"name": str(folder), **model}, "loss": loss,
        "data": {"train": str(path), "eval": str(path), "max_length": 64},
        "train": {"batch_size": 8, "learning_rate": 1e-2, "epochs": 10, "micro_batch_tokens": 200},
        "eval": {"every": 1000}, "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip


@pytest.mark.parametrize("case", ["pairs", "stars", *(
    pytest.param(case, marks=pytest.mark.slow) for case in ("thumbs", "scores", "attributes")
)])  # fmt: skip
def test_it_learns_and_stock_transformers_reads_the_same_scores(
    case: str, folder: Path, tmp_path: Path
) -> None:
    lora = {"lora": {"rank": 4}} if case == "stars" else {}
    run = valence.train(recipe(folder, tmp_path, case, **lora), quiet=True)
    before, after = (run.evaluations[step] for step in sorted(run.evaluations))
    assert after["loss"] < before["loss"]
    number = CASES[case][3]
    assert after[number] > 0.6
    assert after[number] >= before.get(number, 0.0)
    written = tmp_path / "run" / "model"
    stock = AutoModelForSequenceClassification.from_pretrained(written).eval()
    tokenizer = AutoTokenizer.from_pretrained(written)
    units = run.prepared.corpora["eval"].units[:4]
    sides = [(unit, answer) for unit in units for answer in unit.answers]
    texts = [tokenizer.decode([*unit.prompt_ids, *answer.ids]) for unit, answer in sides]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert [int(n) for n in inputs["attention_mask"].sum(1)] == [
        len(u.prompt_ids) + len(a.ids) for u, a in sides
    ]
    with torch.no_grad():
        result = stock(**inputs).logits
    rows = run.evaluate().rows[:4]
    names = ("_chosen", "_rejected") if case == "pairs" else ("",)
    actual = [
        row[f"scores{n}"] if f"scores{n}" in row else [row[f"reward{n}"]]
        for row in rows
        for n in names
    ]
    torch.testing.assert_close(result, torch.tensor(actual), rtol=1e-4, atol=1e-4)
    config = json.loads((written / "config.json").read_text())
    assert len(config["reward_mean"]) == len(config["reward_std"]) == result.shape[1]
    assert list(config["id2label"].values()) == (
        ["help", "number"] if case == "attributes" else ["reward"]
    )
    assert (config["reward_thresholds"] is not None) is (case == "stars")


def test_the_plan_counts_the_head_that_is_there(folder: Path, tmp_path: Path) -> None:
    source = load_recipe(recipe(folder, tmp_path, "attributes"))
    plan = make_plan(prepare(source))
    policy, _ = build_models(prepare(source))
    assert (
        plan.shape.parameters == plan.shape.trained == sum(p.numel() for p in policy.parameters())
    )
    assert plan.shape.vocabulary == 2


def test_a_restored_run_evaluates_and_exports_the_same(folder: Path, tmp_path: Path) -> None:
    """Also by the command, which needs the training rows for it."""
    settings = recipe(folder, tmp_path, "stars")
    settings["train"] = {"batch_size": 8, "max_steps": 1}
    run = valence.train(settings, quiet=True)
    again = restore(tmp_path / "run", overrides=["data.train=[]"])
    assert again.evaluate().metrics == pytest.approx(run.evaluate().metrics, rel=1e-5)
    runner = CliRunner().invoke(cli.app, ["export", str(tmp_path / "run"), str(tmp_path / "copy")])
    assert runner.exit_code == 0, runner.output
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (
            tmp_path / "run" / "model" / name
        ).read_bytes()
    shutil.rmtree(tmp_path / "copy")


BOTH = [
    {**row, "scores": {"help": i % 3, "number": i % 5}, "score": i % 4}
    for i, row in enumerate(FILMS)
]


@pytest.mark.parametrize(("loss", "verdict", "names"), [
    ({}, "label", ["reward"]),
    pytest.param({"error": "squared"}, "score", ["reward"], marks=pytest.mark.slow),
    ({"error": "squared", "verdict": "attributes"}, "attributes", ["help", "number"]),
])  # fmt: skip
def test_one_verdict_is_learnt_of_rows_that_have_several(
    loss: dict[str, Any],
    verdict: str,
    names: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CASES, "both", ("pointwise", BOTH, loss, ""))
    settings = recipe(folder, tmp_path, "both")
    settings["train"] = {"batch_size": 8, "max_steps": 1}
    run = valence.train(settings, quiet=True)
    assert run.recipe.loss["verdict"] == verdict
    assert run.recipe.model.attributes == names
    assert all(len(unit.scores) == len(names) for unit in run.prepared.corpora["eval"].units)
    assert run.evaluate(BOTH).metrics == pytest.approx(run.evaluate().metrics)
    with raises_error("row-target-missing", where=":1", fix="loss.verdict") as raised:
        run.evaluate(
            [
                {
                    "prompt": "a ",
                    "completion": "b",
                    **({"score": 1.0} if verdict == "label" else {"label": True}),
                }
            ]
        )
    assert re.search(rf"\b{verdict}\b", raised.error.message)
    again = restore(tmp_path / "run", overrides=["data.train=[]"])
    assert again.evaluate().metrics == pytest.approx(run.evaluate().metrics, rel=1e-5)


@pytest.mark.parametrize(("case", "changes", "code", "where", "fix"), [
    ("pairs", {"model": {"name": "x", "attributes": ["help", "safety"]}},
     "attributes-unused", "model.attributes", ""),
    ("stars", {"loss": {"levels": 3}}, "row-target-range", "rows.jsonl:4", "loss.levels"),
    ("scores", {"loss": {}}, "row-target-range", "rows.jsonl:2", "loss.error"),
    ("thumbs", {"run": {"dir": "x", "export": "adapter"},
                "model": {"name": "x", "lora": {"rank": 2}}},
     "setting-conflict", "run.export", ""),
    ("thumbs", {"run": {"dir": "x", "samples": {"prompts": 1}}},
     "setting-conflict", "run.samples", ""),
    ("attributes", {"model": {"name": "x", "attributes": ["help"]}},
     "row-attribute-unknown", "rows.jsonl:2", "help"),
])  # fmt: skip
def test_mistakes_are_named_before_a_model_is_loaded(
    case: str,
    changes: dict[str, Any],
    code: str,
    where: str,
    fix: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    folder = without_weights(folder, tmp_path / "model")
    settings = recipe(folder, tmp_path, case)
    for section, values in changes.items():
        settings[section] = (settings[section] | values if values else {}) | (
            {"name": str(folder)} if section == "model" else {}
        )
    settings["run"]["dir"] = str(tmp_path / "run")
    with raises_error(code, where=where, fix=fix):
        valence.train(settings, quiet=True)
