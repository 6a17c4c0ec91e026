"""A round in one program, and the same round in three: sampled, judged, trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.online.recipes import PROMPTS, VOWELS, logged, make, recipe_without_eval
from tests.training.resuming import train
from valence.jobs.reward_rows import score_by_reward
from valence.jobs.sample_rows import sample_rows
from valence.options import SampleOptions, ScoreOptions
from valence.training.rounds import seed_of

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {"convert": "scores_to_rankings"}, {}),
    "rloo": ("rloo", {"convert": "scores_to_rankings"}, {"loss": {"kl_beta": 0.0}}),
    "rejection": (
        "sft",
        {"convert": "best_to_demonstrations", "top_n": 2, "mask_truncated": False},
        {"rollout": {"top_n": 2, "mask_truncated": False}},
    ),
    "online_dpo": ("dpo", {"convert": "scores_to_pairs"}, {}),
}
"""Online method: the one on stored answers, its data section, and what else the online recipe
says.
"""


@pytest.mark.parametrize(
    "method",
    [
        "rejection",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "rloo", "online_dpo")),
    ],
)
def test_a_round_gives_the_same_numbers_in_one_program_as_in_three(
    method: str, tmp_path: Path
) -> None:
    make(tmp_path)
    stored, data, more = CASES[method]
    actual = {"model": {"dtype": "float64"}, "train": {"batch_size": len(PROMPTS), "max_steps": 1}}
    online = recipe_without_eval(tmp_path, method, **actual, **more)
    run, _ = train(online)
    assert run.prepared.sampler is not None
    first = [PROMPTS[i] for i in run.prepared.sampler.epoch(0)]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first))

    offline = {"model": online["model"], "train": online["train"] | {"batch_size": 100}} | {
        "method": stored,
        "data": {"train": str(tmp_path / "scored.jsonl"), "max_length": 128, **data},
        "run": {"dir": str(tmp_path / "offline")},
    }
    (tmp_path / "start.yaml").write_text(yaml.safe_dump(offline))
    answers, scored = tmp_path / "answers.jsonl", tmp_path / "scored.jsonl"
    sampling: dict[str, Any] = {"n": 4, "max_new_tokens": 6, "seed": seed_of(0, "rollout", 0, 0)}
    options = SampleOptions(**sampling, data=[str(tmp_path / "first.jsonl")], out=answers)
    sample_rows(str(tmp_path / "start.yaml"), options)
    score_by_reward(None, ScoreOptions(reward=[VOWELS], data=[str(answers)], out=scored))
    again, _ = train(offline)
    ours, theirs = logged(tmp_path)[0], logged(tmp_path, "offline")[0]
    assert ours["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name
    assert again.step == 1
