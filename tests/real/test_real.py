"""KTO and DPO on real ratings with a real model: SmolLM2-135M-Instruct on the sets of 300 rows,
for a few steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import valence
from valence.config.load import load_recipe
from valence.training.prepare import prepare
from valence.training.trainer import Trainer
from valence.types import TokenizedExample

pytestmark = pytest.mark.real

FORMATS = {"kto": "judged_messages", "dpo": "sharegpt_preference"}
STEPS = 2


@dataclass(frozen=True)
class Trained:
    """A finished run over a few rows, which are also what it was evaluated on."""

    run: Trainer
    folder: Path

    @property
    def log(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    @property
    def units(self) -> tuple[TokenizedExample, ...]:
        return self.run.prepared.corpora["eval"].units


def recipe(method: str, model: Path, **sections: Any) -> dict[str, Any]:
    return {"method": method, "model": {"name": str(model), "lora": {"rank": 8}}, **sections}


def few(method: str, real_sets: Path) -> list[dict[str, Any]]:
    """The two shortest rows of each class, or the two shortest pairs, as they stand in the file."""
    rows = sorted(
        json.loads((real_sets / f"{method}_en_demo.json").read_text()),
        key=lambda row: len(str(row)),
    )
    if method == "dpo":
        return rows[:2]
    return [
        row for label in (True, False) for row in [row for row in rows if row["label"] is label][:2]
    ]


@pytest.fixture(scope="module", params=["kto", "dpo"])
def trained(
    request: pytest.FixtureRequest, smollm2: Path, real_sets: Path, tmp_path_factory: Any
) -> Iterator[Trained]:
    method = request.param
    rows = few(method, real_sets)
    folder = tmp_path_factory.mktemp(method) / "run"
    settings = recipe(
        method,
        smollm2,
        data={"max_length": 256},
        train={
            "batch_size": len(rows),
            "epochs": STEPS,
            "learning_rate": 2e-3,
            "schedule": "constant",
            "warmup": 0.0,
        },
        # the first step measures these rows before any update
        eval={
            "every": STEPS,
            "at_start": False,
        },
        run={"dir": str(folder)},
    )
    yield Trained(valence.train(settings, train=rows, eval=rows, quiet=True), folder)
    rmtree(folder)  # half a gigabyte


@pytest.mark.parametrize("method", FORMATS)
def test_all_rows_of_the_set_are_read_in_their_own_format(
    method: str, smollm2: Path, real_sets: Path
) -> None:
    path = str(real_sets / f"{method}_en_demo.json")
    data = {"train": [{"path": path}], "max_length": 8192}
    corpus = prepare(load_recipe(recipe(method, smollm2, data=data))).corpora["train"]
    assert [(f.path, f.format) for f in corpus.loaded.files] == [(path, FORMATS[method])]
    assert len(corpus.units) == 300
    assert not corpus.loaded.bad
    if method == "kto":
        assert sum(unit.label is True for unit in corpus.units) == 150
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for unit in corpus.units:
        assert tokenizer.decode(unit.prompt_ids).endswith("<|im_start|>assistant\n")
        for answer in unit.answers:
            assert tokenizer.decode(answer.ids).endswith("<|im_end|>")
            assert all(answer.mask)


def test_the_implicit_reward_starts_at_zero_and_moves_apart(trained: Trained) -> None:
    log = trained.log
    assert [record["step"] for record in log] == list(range(1, STEPS + 1))
    assert all(
        math.isfinite(record["loss"]) and 0 < record["grad_norm"] < float("inf") for record in log
    )
    start, end = log[0], log[-1]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert start[name] == 0, name
    assert start.get("kl/raw", 0) == 0
    assert end["eval/loss"] < start["loss"]
    assert end["eval/rewards/margins"] > 0.1


def test_transformers_loads_the_policy_that_was_trained(trained: Trained) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained.folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / "model")
    assert tokenizer.chat_template == trained.run.prepared.tokenizer.chat_template
    rows = json.loads((trained.folder / f"eval/step-{STEPS}.json").read_text())["rows"]
    for unit, row in zip(trained.units, rows, strict=True):
        names = ("logp",) if len(unit.answers) == 1 else ("logp_chosen", "logp_rejected")
        for name, answer in zip(names, unit.answers, strict=True):
            assert log_likelihood(model, unit.prompt_ids, answer.ids) == pytest.approx(
                row[name], rel=1e-4, abs=1e-3
            )
            assert abs(row[name] - row[name.replace("logp", "ref")]) > 0.1, (
                "the adapter must matter for this to say anything"
            )


@torch.no_grad()
def log_likelihood(model: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Natural log of the probability of an answer, from the model's own logits."""
    tokens = torch.tensor([[*prompt, *answer]])
    logps = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logps.gather(1, tokens[0, len(prompt) :, None]).sum().item()
