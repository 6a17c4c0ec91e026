"""Rows are scored by a model, an adapter, a reward model, a recipe or a run, each with its own
reference and reward.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import valence
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.scoring import FILES, read, score
from valence.config.schema import LoraSettings
from valence.models.adapters import with_adapter
from valence.models.build import load_model

RECIPE = (
    "method: apo_zero_unpaired\n"
    "model: {name: ./model, lora: {rank: 2, dropout: 0.3}}\n"
    "loss: {beta: 0.4}\n"
    "data: {train: judgement.jsonl, max_length: 128}\n"
    "train: {batch_size: 5, learning_rate: 1e-2, epochs: 2}\n"
    "run: {dir: run, export: adapter}\n"
)


def answers(name: str) -> list[dict[str, float]]:
    return [answer for line in read(name) for answer in line["valence"]["answers"]]


def test_a_run_is_scored_with_its_weights_and_its_reference(place: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    run = valence.train("recipe.yaml", quiet=True)
    score("judgement.jsonl", target="run", out="run.jsonl")
    rewards = [row["reward"] for row in run.evaluate(FILES["judgement"]).rows]
    assert [answer["reward"] for answer in answers("run.jsonl")] == pytest.approx(rewards, abs=1e-4)
    assert any(rewards)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*packed sequences")
        score(
            "judgement.jsonl",
            target="run/model",
            out="adapter.jsonl",
            overrides=["reference.model=./model"],
            beta=0.4,
        )
    score(
        "judgement.jsonl",
        target="run/model",
        out="narrow.jsonl",
        overrides=["model.dtype=bfloat16"],
    )
    close = pytest.approx([a["logp"] for a in answers("adapter.jsonl")], abs=2.0)
    assert [a["logp"] for a in answers("narrow.jsonl")] == close
    assert [answer["reward"] for answer in answers("adapter.jsonl")] == pytest.approx(
        rewards, abs=1e-4
    )
    score("judgement.jsonl", target="model", out="model.jsonl")
    assert [answer["logp"] for answer in answers("model.jsonl")] == pytest.approx(
        [a["ref"] for a in answers("run.jsonl")], abs=1e-4
    )
    score(
        "judgement.jsonl", target="run", out="against.jsonl", overrides=["reference.model=./other"]
    )
    assert answers("against.jsonl")[0]["ref"] != answers("run.jsonl")[0]["ref"]


def test_a_recipe_says_what_the_call_leaves_open(place: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE + "reference: {model: ./other}\n")
    score("judgement.jsonl", target="recipe.yaml", out="recipe.jsonl")
    score("judgement.jsonl", out="plain.jsonl", overrides=["reference.model=./other"], beta=0.4)
    assert answers("recipe.jsonl") == answers("plain.jsonl")
    assert json.loads(Path("recipe.jsonl.about.json").read_text())["max_length"] == 128
    assert not Path("run").exists()


@pytest.mark.parametrize("named", [("reward",), ("clear", "kind")])
def test_a_reward_model_scores_answers(named: tuple[str, ...], place: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        "model", num_labels=len(named), id2label=dict(enumerate(named))
    )
    config.update({"reward_mean": [0.5] * len(named), "reward_std": [2.0] * len(named)})
    model: Any = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained("judge")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained("judge")
    score("preference.jsonl", "judgement.jsonl", target="judge")
    lines = read()
    assert [len(line["valence"]["answers"]) for line in lines] == [2] * 4 + [1] * 5
    for line in lines[:4]:
        for answer in line["valence"]["answers"]:
            texts = zip(
                ("user", "assistant"), (line["prompt"], line[answer["answer"]]), strict=True
            )
            turns = [{"role": role, "content": text} for role, text in texts]
            ids = tokenizer(
                tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
            ).input_ids
            expected = model(torch.tensor([ids])).logits[0].tolist()
            result = (
                [answer["score"]] if len(named) == 1 else [answer["score"][name] for name in named]
            )
            assert result == pytest.approx(expected, abs=1e-4)
            scaled = (
                [answer["normalised"]]
                if len(named) == 1
                else [answer["normalised"][name] for name in named]
            )
            assert scaled == pytest.approx([(value - 0.5) / 2 for value in expected], abs=1e-4)
    with raises_error("reference-unused", where="reference.model"):
        score(
            "preference.jsonl", target="judge", out="2.jsonl", overrides=["reference.model=./model"]
        )


def test_a_reward_model_is_scored_as_a_run_and_as_what_it_wrote(place: Path) -> None:
    Path("recipe.yaml").write_text(
        "method: pointwise\n"
        "model: {name: ./model}\n"
        "data: {train: judgement.jsonl}\n"
        "train: {batch_size: 5, learning_rate: 1e-2, epochs: 2}\n"
        "run: {dir: run}\n"
    )
    with raises_error("reward-model-untrained", where="model.name"):
        score("judgement.jsonl", target="recipe.yaml")
    valence.train("recipe.yaml", quiet=True)
    score("judgement.jsonl", target="run", out="run.jsonl")
    score("judgement.jsonl", target="run/model", out="model.jsonl")
    assert [a["score"] for a in answers("run.jsonl")] == pytest.approx(
        [a["score"] for a in answers("model.jsonl")], abs=1e-4
    )
    scaled = torch.tensor([a["normalised"] for a in answers("model.jsonl")])
    assert scaled.mean().item() == pytest.approx(0, abs=1e-3)
    assert scaled.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_an_adapter_of_a_reward_model_is_refused(place: Path) -> None:
    scores = load_model("model", dtype=torch.float32, attributes=("good",))
    with_adapter(scores, LoraSettings(rank=2), None).save_pretrained("adapter")  # type: ignore[operator]
    with raises_error("adapter-kind", where="model.adapter", fix="merged reward model"):
        score("scored.jsonl", target="adapter")


@pytest.mark.parametrize(("method", "loss"), [
    ("simpo", "beta: 2.5"),
    pytest.param("ipo", "tau: 0.3", marks=pytest.mark.slow),
    pytest.param("dpo_norm", "beta: 3.0", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_is_scored_with_the_reward_that_it_trains(
    method: str, loss: str, place: Path
) -> None:
    Path("recipe.yaml").write_text(
        f"method: {method}\n"
        "model: {name: ./model}\n"
        f"loss: {{{loss}}}\n"
        "data: {train: preference.jsonl}\n"
        "train: {batch_size: 4, learning_rate: 1e-2, max_steps: 2}\n"
        "run: {dir: run}\n"
    )
    run = valence.train("recipe.yaml", quiet=True)
    score("preference.jsonl", target="run")
    rewards = [
        row[f"reward_{side}"]
        for row in run.evaluate(FILES["preference"]).rows
        for side in ("chosen", "rejected")
    ]
    assert [answer["reward"] for answer in answers("out.jsonl")] == pytest.approx(rewards, abs=1e-4)
    assert min(map(abs, rewards)) > 1e-3
    facts = json.loads(Path("out.jsonl.about.json").read_text())
    assert [f"{name}: {facts[name]}" for name in ("beta", "tau") if name in facts] == [loss]
    with raises_error("beta-unused", where="--beta"):
        score("preference.jsonl", target="run", out="2.jsonl", beta=0.1)


def test_a_reference_of_other_tokens_is_refused(place: Path) -> None:
    tokenizer = tiny_tokenizer(chatml_tokens=False)
    tokenizer.save_pretrained("other")
    with raises_error("tokenizer-mismatch", where="reference.model: ./other"):
        score("scored.jsonl", overrides=["reference.model=./other"])


def test_a_table_of_positions_is_not_overrun(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny("gpt2", vocab_size=len(tokenizer), dtype=torch.float32).save_pretrained("gpt2")  # type: ignore[operator]
    tokenizer.save_pretrained("gpt2")
    with raises_error("max-length-too-large", where="data.max_length", fix="--max-length 256"):
        score("scored.jsonl", target="gpt2")
    score("scored.jsonl", target="gpt2", overrides=["data.max_length=256"])
    with raises_error("max-length-too-large", where="data.max_length", fix="--max-length 256"):
        score("scored.jsonl", out="2.jsonl", overrides=["reference.model=gpt2"])
