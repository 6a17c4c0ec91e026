"""The report of a run that learns from feedback: the signal of its rows, and its warnings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.reports.synthetic import text, write_run
from tests.reports.test_card import FACTS
from tests.reports.test_signs import ended, logged, only
from valence.reports.card import model_card
from valence.reports.diagnostics import OTHER_MODEL, Advice, CollapseDetector, diagnose
from valence.reports.page import render_report, report_markdown
from valence.reports.rows import signal_lists
from valence.reports.run_record import RunRecord
from valence.reports.verdict import outputs, run_verdict

Json = dict[str, Any]
SENTENCE = "this model does not seem to use the feedback: p = 0.4"
TEST = {"train": {"rows": 12, "p": 0.4, "is_used": False, "sentence": SENTENCE}}


def feedback_rows(scale: float, count: int = 30) -> list[Json]:
    """Rows whose signal is ``scale`` times that of the start."""
    rng = random.Random(0)
    return [
        {
            "id": f"{i:06x}",
            "origin": f"comments.jsonl:{i + 1}",
            "label": [None, True, False][i % 3],
            "reward": scale * rng.gauss(-0.1 if i % 5 else 0.0, 0.05 if i % 5 else 0.01),
            "logp": -60.0,
            "tokens": 40,
            "prompt": f"Question {i}?",
            "completion": text(rng, 40),
            "feedback": f"comment {i}",
        }
        for i in range(count)
    ]


def measured(step: int, scale: float) -> Json:
    return {
        "step": step,
        "metrics": {"logps/token": -1.5, "signal/mean": -0.1 * scale, "signal/size": 0.3 * scale},
        "rows": feedback_rows(scale),
    }


def record(step: int, steps: int = 60) -> Json:
    at = step / steps
    metrics = {
        "logps/token": -1.5 - 0.05 * at,
        "signal/mean": -0.1 * (1 - at / 2),
        "signal/size": 0.3 * (1 - at / 2),
    }
    held_out = {f"eval/{name}": value for name, value in metrics.items()} if step % 20 == 0 else {}
    training = metrics | {"entropy": 1.4, "loss": -0.1} if step else {}
    return {"step": step} | training | held_out


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    folder = write_run(tmp_path / "run", "thumbs")
    (folder / "config.yaml").write_text(
        "method: hindsight\nteacher: {weights: live}\nmodel: {name: org/tiny}\n"
        "data: {train: [{path: comments.jsonl}]}\n"
    )
    (folder / "audit.json").unlink()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record(step)) + "\n" for step in range(61))
    )
    for path in (folder / "eval").iterdir():
        step = 60 if path.stem == "train" else int(path.stem.removeprefix("step-"))
        path.write_text(json.dumps(measured(step, 1 - step / 120)))
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "feedback_test": TEST}))
    return RunRecord.read(folder)


def test_the_report_shows_the_signal_of_each_row_and_the_test_before_training(
    run: RunRecord,
) -> None:
    assert diagnose(run) == []
    markdown, page = report_markdown(run), render_report(run)
    for report in (markdown, page):
        assert SENTENCE in report
        assert "mean signal" in report
    assert "| held-out rows | step 0 | step 60 |" in markdown
    for expected in ("Smallest signal", "Feedback that says nothing", "comment 7", ">Feedback<"):
        assert expected in page
    assert "reward 0" not in page
    assert "calibrat" not in page.partition("plotly")[0]


def test_without_held_out_rows_the_report_shows_training_rows(run: RunRecord) -> None:
    markdown = report_markdown(replace(run, first=None, last=None))
    assert "| training rows | step 60 |" in markdown


def test_rows_are_listed_by_their_signal_before_training() -> None:
    before, after = feedback_rows(1.0), feedback_rows(-1.0)
    lists = {group.title: group.rows for group in signal_lists(after, before, 5)}
    signals = sorted(row["reward"] for row in before)
    assert [score for _, score in lists["Smallest signal"]] == signals[:5]
    assert all(row in after for row, _ in lists["Smallest signal"])
    weak = [abs(score) for _, score in lists["Feedback that says nothing"]]
    assert weak == sorted(map(abs, signals))[: len(weak)]
    assert max(weak) < 0.02


def test_a_surer_policy_is_no_collapse_with_another_model_as_teacher() -> None:
    records = [
        {"step": k, "entropy": 3.0 if k < 5 else 0.5, "signal/mean": -0.3, "signal/size": 0.4}
        for k in range(20)
    ]
    for teacher, names in (("initial", ["low entropy"]), (OTHER_MODEL, [])):
        detector = CollapseDetector(Advice("distill", (), teacher=teacher))
        shown = [diagnosis.name for record in records for diagnosis in detector.observe(record)]
        assert shown == names


def test_a_signal_is_no_evidence_of_better_answers(run: RunRecord) -> None:
    verdict = run_verdict(run)
    assert verdict.state == "unmeasured"
    assert "did not write" in verdict.sentence
    assert "0.0" in verdict.sentence
    assert any(verdict.text in line for line in outputs(run.path))


def test_feedback_without_signal_is_a_warning(run: RunRecord) -> None:
    assert run.first is not None
    rows = [{**row, "reward": row["reward"] / 20} for row in run.first["rows"]]
    assert only(replace(run, first={**run.first, "rows": rows})).name == "weak signal"
    later = replace(run, first={**run.first, "step": 20, "rows": rows})
    assert diagnose(later) == []  # a fixed teacher's signal shrinks in training


@pytest.mark.parametrize(("after", "is_drift"), [("a" * 30, True), ("a" * 80, False), ("", True)])
def test_sampled_answers_that_change_their_length(
    run: RunRecord, after: str, is_drift: bool
) -> None:
    samples = tuple({"prompt": str(i), "before": "b" * 100, "after": after} for i in range(4))
    findings = diagnose(replace(run, samples=samples))
    assert [diagnosis.name for diagnosis in findings] == (["length drift"] if is_drift else [])
    assert diagnose(replace(run, samples=samples[:3])) == []


COLLAPSES: dict[str, Callable[[Json, float], Json]] = {
    "held-out completions less likely": lambda record, at: (
        {"eval/logps/token": -1.5 - 0.5 * at} if "eval/logps/token" in record else {}
    ),
    "training completions less likely": lambda record, at: (
        {"logps/token": -1.5 - 0.5 * at} if "logps/token" in record else {}
    ),
    "growing signal of training completions": lambda record, at: (
        {"signal/size": 0.3 + 0.6 * at} if "signal/size" in record else {}
    ),
    "low entropy": lambda record, at: {"entropy": 1.4 - at} if "entropy" in record else {},
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_found_and_the_advice_fits_the_teacher(run: RunRecord, name: str) -> None:
    collapsed = logged(run, COLLAPSES[name])
    diagnosis = only(collapsed)
    assert diagnosis.name == name
    assert "teacher.weights: initial" in diagnosis.advice
    fixed = replace(collapsed, config={**run.config, "teacher": {"weights": "initial"}})
    assert "teacher.weights" not in only(fixed).advice


def test_completions_may_become_less_likely_by_what_the_feedback_asks_for(run: RunRecord) -> None:
    def complain(record: Json, at: float) -> Json:
        changes = {"logps/token": -1.5 - 0.5 * at, "signal/mean": -0.4}
        return {name: value for name, value in changes.items() if name in record}

    assert diagnose(logged(run, complain)) == []


def test_a_resumed_detector_reports_what_an_undisturbed_one_does() -> None:
    def change(step: int) -> Json:
        return record(step) | {"entropy": 1.4 - step / 60}

    undisturbed, resumed = (CollapseDetector(Advice("hindsight", teacher="live")) for _ in range(2))
    findings = [undisturbed.observe(change(step)) for step in range(61)]
    assert sum(map(len, findings)) == 1
    for step in range(61):
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = CollapseDetector(Advice("hindsight", teacher="live"))
        resumed.load_state_dict(state)
        assert resumed.observe(change(step)) == findings[step]


def test_labels_are_no_measure_of_a_signal(run: RunRecord) -> None:
    moved = ended(run, lambda row: {"reward": 0.5 if row["label"] else row["reward"]})
    assert diagnose(moved) == []


def test_the_model_card_has_the_test_and_no_feedback() -> None:
    card = model_card(replace(FACTS, feedback_test=TEST))
    assert SENTENCE in card
    used = {"train": {**TEST["train"], "is_used": True}}
    assert SENTENCE not in model_card(replace(FACTS, feedback_test=used))


def test_a_teacher_that_is_another_model_reads_no_feedback(run: RunRecord) -> None:
    config = {**run.config, "method": "distill", "teacher": {"model": "org/large"}}
    rows = [{**row, "reward": 0.0} for row in feedback_rows(1.0)]
    run = replace(run, config=config, first={**measured(0, 1.0), "rows": rows})
    run = replace(run, facts={k: v for k, v in run.facts.items() if k != "feedback_test"})
    assert diagnose(run) == []
    assert "Signal of the teacher" in report_markdown(run)
    page = render_report(run).partition("plotly")[0]
    assert ">Teacher<" in page
    assert "Feedback" not in page
