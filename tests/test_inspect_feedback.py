"""`valence inspect` of rows with feedback: what the teacher reads, and the signal of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import command as valence
from tests.command import command_error, place
from tests.errors import check_error
from valence.training.open_run import restore

__all__ = ["place"]

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "completion": f"answer {i * 7} {i}",
        "feedback": f"no, about {i}",
    }
    for i in range(12)
]


def tokens_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert valence("inspect", *words, "--row", "3", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_where_the_feedback_landed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = (place / "recipe.yaml").read_text().replace("method: kto", "method: hindsight")
    (place / "recipe.yaml").write_text(f"{recipe}teacher: {{weights: ema, rate: 0.5}}\n")

    monkeypatch.setenv("NO_COLOR", "1")
    assert valence("inspect", "recipe.yaml", "--row", "3", "--signal") == 0
    shown = capsys.readouterr().out
    for expected in ("prompt of the teacher", "no,·about·2", "signal of the teacher: mean"):
        assert expected in shown

    plain = tokens_of(capsys, "recipe.yaml")
    assert plain["feedback"] == "no, about 2"
    assert "no, about 2" in plain["teacher_prompt"]
    assert "no, about 2" not in plain["prompt"]
    assert plain["signal"] is None
    measured = tokens_of(capsys, "recipe.yaml", "--signal")
    [answer] = measured["answers"]
    assert "".join(piece["text"] for piece in answer).startswith("answer 14 2")
    for piece in answer:
        assert f"{piece['signal']:+.2f}" in shown
    num_tokens = sum(len(piece["ids"]) for piece in answer)
    total = sum(piece["signal"] for piece in answer)
    assert measured["signal"] == pytest.approx(total / num_tokens)

    assert valence("train", "recipe.yaml", "train.learning_rate=0.01", "eval.at_start=true") == 0
    facts = json.loads((place / "runs/first/run.json").read_text())
    assert facts["feedback_test"]["train"]["rows"] == 12
    assert "about" not in json.dumps(facts["feedback_test"])
    before, after = (
        json.loads((place / f"runs/first/eval/step-{step}.json").read_text())["rows"][2]["reward"]
        for step in (0, 3)
    )
    assert measured["signal"] == pytest.approx(before, abs=1e-5)
    capsys.readouterr()
    trained = tokens_of(capsys, "runs/first", "--signal")
    assert trained["signal"] == pytest.approx(after, abs=1e-5)
    assert "about" not in (place / "runs/first/model/README.md").read_text()

    trainer = restore(place / "runs/first")
    teacher = trainer.state.moving_teacher
    assert teacher is not None
    weights = trainer.state.trained_weights
    assert any(not torch.equal(p, weights[name]) for name, p in teacher.weights.items())


@pytest.mark.usefixtures("place")
def test_options_that_need_a_teacher() -> None:
    error = command_error("inspect", "recipe.yaml", "--signal")
    check_error(error, "option-unused", where="--signal", fix="hindsight")
    error = command_error("inspect", "recipe.yaml", "--step", "3")
    check_error(error, "option-unused", where="--step", fix="--signal")
