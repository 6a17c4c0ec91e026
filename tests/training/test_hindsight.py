"""Training on what users wrote about answers: the teacher, its state, and what may go wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.training.resuming import killed, records, train, weights
from tests.training.test_mix import run_of, written
from tests.training.test_run import recipe
from valence.models.cache import CachedReference
from valence.training.evaluate import Evaluation
from valence.training.feedback_test import FeedbackTest, _p_value, feedback_test
from valence.training.trainer import Trainer

ROWS = [
    {
        "prompt": f"question {i} ",
        "completion": f"answer {i} {i}",
        "feedback": f"no, {i * 7} please",
        "label": [None, True, False][i % 3],
    }
    for i in range(12)
]


def hindsight(tmp_path: Path, folder: str = "run", **sections: Any) -> Trainer:
    rows = written(tmp_path / "feedback.jsonl", ROWS)
    base: dict[str, Any] = {
        "method": "hindsight",
        "data": {"train": [{"path": rows}], "max_length": 400},
        "model": {"name": "tiny", "lora": {"rank": 2}},
    }
    return run_of(tmp_path, folder, **(base | sections))


def metrics(run: Trainer, name: str) -> list[float]:
    return [record[name] for record in run.history if name in record]


def test_all_teachers_are_equal_before_the_first_step_and_differ_afterwards(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for kind in ("initial", "ema", "live"):
        run = hindsight(tmp_path, kind, teacher={"weights": kind})
        run.fit()
        losses[kind] = metrics(run, "loss")
        assert run.state.moving_teacher is None or kind == "ema"
        assert metrics(run, "signal/size")[0] > 0.01
    assert losses["initial"][0] == pytest.approx(losses["ema"][0], rel=1e-5)
    assert losses["initial"][0] == pytest.approx(losses["live"][0], rel=1e-5)
    last = {kind: round(values[-1], 7) for kind, values in losses.items()}
    assert len(set(last.values())) == 3, last


def test_the_moving_average_follows_the_policy(tmp_path: Path) -> None:
    run = hindsight(tmp_path, teacher={"weights": "ema", "rate": 0.25})
    average = copy.deepcopy(weights(run))
    teacher = run.state.moving_teacher
    assert teacher is not None
    for name in average:
        torch.testing.assert_close(teacher.weights[name], average[name])
    run._prepare_step()
    run._train_step()
    average = {name: torch.lerp(average[name], p, 0.25) for name, p in weights(run).items()}
    for name in average:
        torch.testing.assert_close(teacher.weights[name], average[name])
    with_copies = sum(p.numel() for p in teacher.engine.parameters() if p.requires_grad)
    assert with_copies == 0
    frozen = {id(p) for p in run.policy.parameters() if not p.requires_grad}
    shared = [p for p in teacher.engine.parameters() if id(p) in frozen]
    assert len(shared) == len(frozen)  # one model in memory, and two adapters


@pytest.mark.parametrize("kind", ["ema", "live", "initial"])
def test_a_killed_run_ends_as_an_undisturbed_one(folder: Path, tmp_path: Path, kind: str) -> None:
    rows = written(tmp_path / "feedback.jsonl", ROWS)
    runs: list[Trainer] = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        settings = recipe(folder, tmp_path / name, model={"lora": {"rank": 2}})
        settings |= {"method": "hindsight", "teacher": {"weights": kind}}
        settings["data"] |= {"train": [{"path": rows}], "eval": [{"path": rows}]}
        settings["data"] |= {"max_length": 400}
        settings["train"] |= {"epochs": 3, "batch_size": 4}
        settings["run"] |= {"save_every": 2}
        if name == "killed":
            killed(settings, 5)
        runs.append(train(settings)[0])
    undisturbed, resumed = runs
    assert undisturbed.step == resumed.step == 9
    for name, p in weights(undisturbed).items():
        assert torch.equal(p, weights(resumed)[name]), name
    if kind == "ema":
        one, other = (run.state.moving_teacher for run in runs)
        assert one is not None
        assert other is not None
        for name, p in one.weights.items():
            assert torch.equal(p, other.weights[name]), name
    assert records(undisturbed.directory) == records(resumed.directory)


def test_the_teacher_reads_cached_values(tmp_path: Path) -> None:
    run = hindsight(tmp_path, train={"batch_size": 4, "learning_rate": 1e-2, "epochs": 2})
    run.fit()
    assert isinstance(run.reference, CachedReference)
    assert (run.reference.misses, run.reference.hits) == (12, 12)


def test_labels_and_feedback_in_one_step(tmp_path: Path) -> None:
    labels = [row for row in ROWS if row["label"] is not None]
    part = {"method": "kto", "train": written(tmp_path / "labels.jsonl", labels), "weight": 0.5}
    run = hindsight(tmp_path, mix=[part])
    run.fit()
    assert metrics(run, "kto/loss")
    assert metrics(run, "signal/mean")
    other = run_of(
        tmp_path,
        "reversed",
        data={"train": [{"path": part["train"]}], "max_length": 400},
        mix=[{"method": "hindsight", "train": written(tmp_path / "feedback.jsonl", ROWS)}],
        teacher={"weights": "ema"},
    )
    other.fit()
    assert metrics(other, "hindsight/signal/mean")
    assert other.state.moving_teacher is not None


def test_settings_of_the_teacher_that_have_no_effect_or_conflict(tmp_path: Path) -> None:
    with raises_error("setting-no-effect", where="teacher.rate", fix="teacher.weights: ema"):
        hindsight(tmp_path, teacher={"rate": 0.1})
    with raises_error("setting-no-effect", where="train.stop_on_collapse"):
        hindsight(tmp_path, method="sft", train={"stop_on_collapse": False})
    with raises_error("setting-no-effect", where="teacher", fix="hindsight"):
        run_of(tmp_path, teacher={"weights": "live"})
    with raises_error("setting-conflict", where="teacher.template"):
        hindsight(tmp_path, teacher={"template": "without the field"})
    with raises_error("setting-conflict", where="teacher.weights", fix="parallel.shard: off"):
        hindsight(tmp_path, teacher={"weights": "ema"}, parallel={"shard": "full"})


def test_the_test_of_the_feedback_runs_before_training_and_changes_nothing(tmp_path: Path) -> None:
    run = hindsight(tmp_path)
    before, random = copy.deepcopy(weights(run)), torch.get_rng_state()
    [corpus] = run.prepared.corpora.values()
    result = feedback_test(run.state.objective, run.prepared, corpus)
    assert result is not None
    assert result.rows == 12
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, before[name]) for name, p in weights(run).items())
    again = feedback_test(run.state.objective, run.prepared, corpus)
    assert again == result
    assert isinstance(run.reference, CachedReference)
    assert run.reference.misses == 0


def test_the_signal_of_a_row_is_the_mean_of_its_tokens(tmp_path: Path) -> None:
    run = hindsight(tmp_path, train={"batch_size": 4, "micro_batch_tokens": 500})
    [corpus] = run.prepared.corpora.values()
    units = list(corpus.units)
    signals = run.state.objective.token_signals(units)
    rows = run.evaluate(name="train").rows
    for unit, values, row in zip(units, signals, rows, strict=True):
        assert len(values) == row["tokens"] == sum(unit.answers[0].mask)
        assert sum(values) / len(values) == pytest.approx(row["reward"], abs=1e-5)
    assert run.policy.training


def test_a_collapse_in_training_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hindsight(tmp_path, teacher={"weights": "live"})
    for step in range(8):
        record = {"step": step, "signal/mean": -0.1, "signal/size": 0.2, "entropy": 2.0}
        run._warn_of_anomalies(record | {"logps/token": -1.0 - 0.2 * step})
    shown = " ".join("".join(capsys.readouterr()).split())
    assert shown.count("became much less likely") == 1
    assert "teacher.weights: initial" in shown


def test_a_policy_that_collapses_ends_its_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out completions become less likely from the third of six steps on."""
    plain = Trainer.evaluate

    def evaluate(self: Trainer, *args: Any, **options: Any) -> Evaluation:
        evaluation = plain(self, *args, **options)
        change = 3.0 if self.step >= 3 else 0.0
        worse = evaluation.metrics["logps/token"] - change
        size = evaluation.metrics["signal/size"] + change
        metrics = evaluation.metrics | {"logps/token": worse, "signal/size": size}
        return replace(evaluation, metrics=metrics)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    rows = written(tmp_path / "feedback.jsonl", ROWS)
    settings = recipe(folder, tmp_path, model={"lora": {"rank": 2}})
    settings |= {"method": "hindsight", "eval": {"every": 1}}
    settings["data"] = {"train": rows, "eval": rows, "max_length": 400}
    settings["run"] |= {"keep_best": {"metric": "eval/signal/size"}, "save_every": 100}
    ended, shown = train(settings)
    assert ended.step == 3
    assert "train.stop_on_collapse" in ended.ended_early
    assert "training ended at step 3 of 6" in shown
    best = ended.state.best.step
    assert best is not None
    assert best < 3
    assert (tmp_path / f"run/checkpoints/step-{best}").is_dir()
    settings["train"]["stop_on_collapse"] = False
    longer, _ = train(settings, allow=["train.stop_on_collapse"])
    assert (longer.step, longer.ended_early) == (6, "")


def test_feedback_that_all_rows_share_cannot_be_tested(tmp_path: Path) -> None:
    rows = [row | {"feedback": "no"} for row in ROWS]
    path = written(tmp_path / "same.jsonl", rows)
    run = hindsight(tmp_path, data={"train": [{"path": path}], "max_length": 400})
    [corpus] = run.prepared.corpora.values()
    assert feedback_test(run.state.objective, run.prepared, corpus) is None


@pytest.mark.parametrize(
    ("differences", "low", "high"),
    [([0.3, 0.2, 0.25, 0.31, 0.4, 0.22, 0.3, 0.35], 0.0, 0.02), ([0.3, -0.3] * 6, 0.9, 1.0)],
)
def test_the_probability_of_a_difference(differences: list[float], low: float, high: float) -> None:
    """Eight of equal sign: 2 of 256 assignments of signs are as extreme."""
    assert low <= _p_value(differences) <= high
    assert FeedbackTest(8, -0.1, -0.1, _p_value(differences)).is_used is (high < 0.05)
