"""A task of lm-eval on SmolLM2-135M-Instruct, compared with log-probabilities of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import command
from tests.evaluation.test_run_benchmarks import CHOICES, log_likelihoods

pytestmark = pytest.mark.real

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Norway": "Oslo"}
QUESTIONS = [
    {
        "question": f"What is the capital of {country}?",
        "choices": sorted(CAPITALS.values()),
        "answer": sorted(CAPITALS.values()).index(city),
    }
    for country, city in CAPITALS.items()
]


def test_the_log_likelihoods_are_those_of_transformers(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("tasks").mkdir()
    Path("tasks/cities.yaml").write_text(CHOICES)
    lines = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    Path("tasks/cities.jsonl").write_text(lines)
    words = ("--lm-eval-tasks", "cities", "--lm-eval-include", "tasks")
    assert command("compare", str(smollm2), str(smollm2), *words) == 0
    expected = log_likelihoods(str(smollm2), as_chat=True, questions=QUESTIONS)
    (path,) = Path("comparison/lm_eval").glob("baseline.*.json")
    samples = json.loads(path.read_text())["samples"]["cities"]
    for sample, logps in zip(samples, expected, strict=True):
        values = [value for value, _ in sample["filtered_resps"]]
        assert values == pytest.approx(logps, abs=2e-3)
    correct = [
        max(range(4), key=logps.__getitem__) == row["answer"]
        for row, logps in zip(QUESTIONS, expected, strict=True)
    ]
    (acc, _) = json.loads(Path("comparison/compare.json").read_text())["benchmarks"]
    assert acc["baseline"] == acc["candidate"] == pytest.approx(sum(correct) / 4)
    assert acc["baseline"] >= 0.5  # the model knows capitals
