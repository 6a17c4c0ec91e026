"""Judges measured against labels: agreement, biases, and what is refused."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import mannwhitneyu

from tests.command import command, command_error, place
from tests.errors import raises_error
from tests.evaluation.judge_server import JudgeServer, always_first, judge_server, longer, winners
from tests.evaluation.test_compare import REWARDS, SAMPLING, write_prompts
from tests.training.scoring import write
from valence.evaluation.calibration import calibrate, read_labels, require_agreement
from valence.evaluation.judges import LanguageModelJudge, RewardJudge
from valence.jobs.reward_rows import list_rewards
from valence.rewards.build import pair_calls, reward_of

__all__ = ["place"]

Rate = Callable[[Mapping[str, Any]], str]


@pytest.fixture
def folder(place: Path) -> Path:
    (place / "my_rewards.py").write_text(REWARDS)
    write_prompts()
    return place


def entry(server: JudgeServer, **settings: Any) -> str:
    return json.dumps({"judge": server.url, "retries": 0, "settings": {"model": "m", **settings}})


def reward_judge(spec: str) -> RewardJudge:
    return RewardJudge(reward_of(list_rewards([spec], None, ())))


def pair_judge(spec: str) -> LanguageModelJudge:
    return LanguageModelJudge(pair_calls(list_rewards([spec], None, ())[0], None))


def write_pairs(answers: Sequence[tuple[str, str]]) -> str:
    rows = [
        {"prompt": f"question {i}", "chosen": good, "rejected": bad}
        for i, (good, bad) in enumerate(answers)
    ]
    return write("pairs.jsonl", rows)


ANSWERS = [
    ("long good", "bad"),
    ("longer good", "bad"),
    ("ok", "much longer bad"),
    ("same", "even"),
]
"""Of these pairs, a judge of length agrees with two, and ties in one."""


def test_agreement_and_length_bias_on_pairs(folder: Path) -> None:
    labels = read_labels([write_pairs(ANSWERS)])
    for spec in (reward_judge("my_rewards:long"), None):
        with judge_server(longer) as server:
            judge = spec or pair_judge(entry(server))
            calibration = calibrate(judge, labels)
            judge.close()
        assert (calibration.num_labels, calibration.failed) == (4, 0)
        assert calibration.agreement.value == pytest.approx((1 + 1 + 0 + 0.5) / 4)
        assert calibration.agreement.low < 0.625 < calibration.agreement.high
        assert calibration.longer == {"labels": pytest.approx(2 / 3), "judge": 1.0}
        assert calibration.length_bias == pytest.approx(1 / 3)
        assert calibration.interval is not None


def test_a_judge_of_positions_agrees_by_chance(folder: Path) -> None:
    with judge_server(always_first) as server:
        judge = pair_judge(entry(server))
        calibration = calibrate(judge, read_labels([write_pairs(ANSWERS)]))
        judge.close()
    assert calibration.agreement.value == 0.5
    assert calibration.position is not None
    assert (calibration.position.first, calibration.position.consistent) == (1.0, 0.0)


def test_agreement_with_thumbs_is_the_auc(folder: Path) -> None:
    draw = random.Random(1)
    rows = [
        {"prompt": f"p{i}", "completion": "x" * draw.randrange(1, 30), "label": draw.random() < 0.4}
        for i in range(40)
    ]
    judge = reward_judge("my_rewards:long")
    calibration = calibrate(judge, read_labels([write("thumbs.jsonl", rows)]))
    judge.close()
    lengths = [
        [len(row["completion"]) for row in rows if row["label"] is up] for up in (True, False)
    ]
    expected = mannwhitneyu(*lengths).statistic / len(lengths[0]) / len(lengths[1])
    assert calibration.agreement.value == pytest.approx(expected)
    assert calibration.agreement.low < expected < calibration.agreement.high
    assert calibration.num_labels == 40
    assert calibration.longer is not None
    assert calibration.longer["judge"] == 1.0
    assert calibration.longer["labels"] == pytest.approx(
        sum(a > b for a in lengths[0] for b in lengths[1])
        / sum(a != b for a in lengths[0] for b in lengths[1])
    )


def test_the_length_bias_of_many_thumbs_is_that_of_all_of_them(folder: Path) -> None:
    rows = [
        {"prompt": f"{label} {i}", "completion": "a" * (1 + i % 5), "label": label}
        for label, count in ((True, 400), (False, 6000))
        for i in range(count)
    ]
    labels = read_labels([write("thumbs.jsonl", rows)])
    tracemalloc.start()
    calibration = calibrate(reward_judge("my_rewards:long"), labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lengths = [[len(c.text) for c, good in labels.thumbs if good is side] for side in (True, False)]
    shares = [up > down for up in lengths[0] for down in lengths[1] if up != down]
    assert calibration.longer is not None
    assert calibration.longer["judge"] == 1.0
    assert calibration.longer["labels"] == pytest.approx(sum(shares) / len(shares), abs=0.01)
    assert peak < 30e6  # 2.4 million pairs have 250 MB


def test_thumbs_on_one_prompt_are_pairs_for_a_judge_of_pairs(folder: Path) -> None:
    rows = [
        {"prompt": prompt, "completion": text, "label": label}
        for prompt, text, label in [
            ("p", "good one", True),
            ("p", "bad", False),
            ("p", "another bad one", False),
            ("q", "alone", True),
        ]
    ]
    with judge_server(longer) as server:
        judge = pair_judge(entry(server))
        calibration = calibrate(judge, read_labels([write("thumbs.jsonl", rows)]))
        judge.close()
        assert (calibration.num_labels, calibration.agreement.value) == (1, 1.0)
        judge = pair_judge(entry(server))
        with raises_error("labels-without-pairs"):
            calibrate(judge, read_labels([write("thumbs.jsonl", rows[3:])]))


def test_labels_of_collected_rows_are_read_as_text(folder: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3, 4]}
    rows = [
        {"prompt": turns, "completion": "good", "label": True, **tokens},
        {"prompt": turns, "completion": "bad", "label": False, **tokens},
    ]
    (label,) = read_labels([write("thumbs.jsonl", rows)]).paired()
    assert (label.candidate.text, label.baseline.text) == ("good", "bad")
    assert label.candidate.prompt == tuple(turns)


def test_verdicts_that_failed_are_left_out(folder: Path) -> None:
    def opinion(shown: Mapping[str, Any]) -> str:
        return "?" if "ok" in shown.values() else longer(shown)

    labels = read_labels([write_pairs(ANSWERS)])
    with judge_server(opinion) as server:
        judge = pair_judge(entry(server))
        calibration = calibrate(judge, labels)
        judge.close()
    assert (calibration.num_labels, calibration.failed) == (3, 1)
    assert calibration.agreement.value == pytest.approx(2.5 / 3)
    with judge_server(lambda shown: "?") as server, raises_error("judge-failures"):
        calibrate(pair_judge(entry(server)), labels)


def test_rows_without_a_label_are_mistakes(folder: Path) -> None:
    with raises_error("row-not-a-label", where="prompts.jsonl:1"):
        read_labels(["prompts.jsonl"])
    rows = [{"prompt": "p", "completion": "c", "label": True}]
    with raises_error("labels-one-sided"):
        calibrate(reward_judge("my_rewards:long"), read_labels([write("up.jsonl", rows)]))


def test_a_judge_below_the_agreement_is_refused_unless_allowed(folder: Path) -> None:
    calibration = calibrate(reward_judge("my_rewards:long"), read_labels([write_pairs(ANSWERS)]))
    require_agreement(calibration, 0.6, allow_below=False, setting="x")
    require_agreement(calibration, 0.7, allow_below=True, setting="x")
    with raises_error("judge-agreement-low", fix="--allow-below"):
        require_agreement(calibration, 0.7, allow_below=False, setting="--allow-below")


# In commands


def test_compare_measures_judges_before_models_answer(folder: Path) -> None:
    write_pairs(ANSWERS)
    with judge_server(lambda shown: winners("second")) as server:
        words = ("compare", "model", "model", *SAMPLING, "--judge", entry(server))
        error = command_error(*words, "--labels", "pairs.jsonl")
        assert error.code == "judge-agreement-low"
        assert not list(Path("comparison").glob("answers*"))
        assert command(*words, "--labels", "pairs.jsonl", "--allow-below") == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    (calibration,) = result["calibrations"]
    assert calibration["agreement"]["value"] == 0.5
    assert calibration["position"]["first"] == 0.0
    assert "Agreement with your labels" in Path("comparison/report.html").read_text()


def test_a_judge_without_labels_is_noted(folder: Path) -> None:
    with judge_server(longer) as server:
        words = ("compare", "model", "model", *SAMPLING, "--judge", entry(server))
        assert command(*words) == 0
        result = json.loads(Path("comparison/compare.json").read_text())
        assert len(result["notes"]) == 1
        labelled = entry(server, labels=write_pairs(ANSWERS), min_agreement=0.7)
        words = ("compare", "model", "model", *SAMPLING, "--judge", labelled)
        assert command_error(*words).code == "judge-agreement-low"


def grade(shown: Mapping[str, Any]) -> str:
    return json.dumps({"scores": {"quality": 1 + len(shown["answer"]) % 10}})


@pytest.mark.parametrize("better", [True, False])
def test_training_measures_its_judge_first(folder: Path, better: bool) -> None:
    answers = [("good", "bad"), ("more", "les")] if better else [("bad", "good"), ("les", "more")]
    with judge_server(grade) as server:
        settings = {"model": "m", "labels": write_pairs(answers)}
        judge: dict[str, Any] = {"judge": server.url, "settings": settings}
        recipe = {
            "method": "rloo",
            "model": {"name": "./model", "lora": {"rank": 2}},
            "data": {"train": "prompts.jsonl"},
            "reward": judge,
            "rollout": {"num_rollouts": 2, "max_new_tokens": 4},
            "train": {"batch_size": 2, "max_steps": 1},
            "run": {"dir": "runs/judged"},
        }
        Path("judged.yaml").write_text(json.dumps(recipe))
        assert command("check", "judged.yaml") == 0
        judge["settings"]["labels"] = "none.jsonl"
        Path("missing.yaml").write_text(json.dumps(recipe))
        error = command_error("check", "missing.yaml")
        assert error.code == "file-not-found"
        assert "(reward.0.settings.labels" in (error.where or "")
        if better:
            assert command("train", "judged.yaml") == 0
            assert "agreement with 2 labels" in Path("runs/judged/run.json").read_text()
            assert '"reward/m' in Path("runs/judged/metrics.jsonl").read_text()
        else:
            assert command_error("train", "judged.yaml").code == "judge-agreement-low"
            assert len(server.requests) == 4


def test_training_stops_at_the_cost_limit_and_a_larger_one_resumes(folder: Path) -> None:
    def grades(shown: Mapping[str, Any]) -> str:
        return json.dumps({"scores": {"brief": 1 + len(shown["answer"]) % 10, "kind": 5}})

    settings = {
        "model": "m",
        "criteria": {"brief": "Is it brief?", "kind": "Is it kind?"},
        "prices": [1000, 0],
        "max_cost": 0.5,
    }
    recipe: dict[str, Any] = {
        "method": "rloo",
        "model": {"name": "./model", "lora": {"rank": 2}},
        "data": {"train": "prompts.jsonl"},
        "rollout": {"num_rollouts": 2, "max_new_tokens": 4},
        "train": {"batch_size": 2, "max_steps": 4},
        "run": {"dir": "runs/judged"},
    }

    def write_recipe(server: JudgeServer, max_cost: float) -> None:
        entry = {"judge": server.url, "settings": {**settings, "max_cost": max_cost}}
        Path("judged.yaml").write_text(json.dumps({**recipe, "reward": entry}))

    with judge_server(grades) as server:
        write_recipe(server, 0.5)
        assert command_error("train", "judged.yaml").code == "judge-cost-limit"
        assert 5 <= len(server.requests) <= 5 + 8
        write_recipe(server, 50)
        assert command("train", "judged.yaml", "--allow", "reward") == 0
        contents = [json.dumps(shown) for shown in server.shown]
    assert len(contents) == len(set(contents))
    records = [
        json.loads(line) for line in Path("runs/judged/metrics.jsonl").read_text().splitlines()
    ]
    assert any("reward/m/brief" in record for record in records)
