"""The statistics of a sweep, against values worked out by hand or with scipy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from scipy import stats as scipy_stats

from tests.reports.comparing import a_run, thumbs
from valence.apps.sweep.results import (
    Difference,
    candidates,
    compute_results,
    conclusions,
    difference,
    table_rows,
    write_sweep_page,
)
from valence.apps.sweep.state import SweepState, Trial
from valence.reports.run_record import RunRecord
from valence.reports.verdict import run_verdict
from valence.statistics import student_interval


def test_a_difference_by_hand() -> None:
    """Differences 0.1, 0.2 and 0.3: mean 0.2, deviation 0.1, and 4.302653 for 2 degrees."""
    one, other = {0: 0.8, 1: 0.9, 2: 0.7}, {0: 0.7, 1: 0.7, 2: 0.4}
    half = 4.3026527 * 0.1 / 3**0.5
    result = difference(one, other, 1, 1)
    assert result.mean == pytest.approx(0.2)
    assert result.low == pytest.approx(0.2 - half, abs=1e-7)
    assert result.high == pytest.approx(0.2 + half, abs=1e-7)
    assert result.exceeds_noise is False
    assert student_interval([0.1, 0.2, 0.3]) == pytest.approx((result.low, result.high))
    lower_is_better = difference(one, other, -1, 1)
    assert lower_is_better.mean == pytest.approx(-0.2)
    assert lower_is_better.high == pytest.approx(half - 0.2, abs=1e-7)


def test_seeds_are_paired() -> None:
    """The noise that both share does not count; unpaired, the difference would be lost in it."""
    one, other = {0: 0.60, 1: 0.90, 2: 0.30}, {0: 0.589, 1: 0.890, 2: 0.291}
    assert difference(one, other, 1, 1).exceeds_noise is True
    shuffled = {0: 0.291, 1: 0.589, 2: 0.890}
    assert difference(one, shuffled, 1, 1).exceeds_noise is False


def test_several_comparisons_hold_together() -> None:
    one, other = {0: 0.60, 1: 0.90, 2: 0.30}, {0: 0.58, 1: 0.86, 2: 0.27}
    single, several = difference(one, other, 1, 1), difference(one, other, 1, 8)
    assert single.exceeds_noise is True
    assert several.exceeds_noise is False
    half = scipy_stats.t.ppf(1 - 0.05 / 8 / 2, 2) * 0.01 / 3**0.5
    assert several.high == pytest.approx(0.03 + half)


def test_noise_that_cannot_be_estimated_is_unknown() -> None:
    assert difference({0: 0.8}, {0: 0.7}, 1, 1) == Difference(pytest.approx(0.1), None, None)
    assert difference({0: 0.8, 1: 0.9}, {0: 0.7, 1: 0.8}, 1, 1).exceeds_noise is None
    assert difference({0: 0.8, 1: 0.9}, {0: 0.8, 1: 0.9}, 1, 1).exceeds_noise is False


VALUES = {
    0.03: (0.70, 0.71, 0.70),
    0.1: (0.80, 0.81, 0.83),
    0.3: (0.81, 0.80, 0.84),
    1.0: (0.60, 0.62, 0.61),
}


def state_of(
    folder: Path, values: dict[float, tuple[float | None, ...]], **more: Any
) -> SweepState:
    """A state with a trial for each value; None is one that failed. The recipe has 0.1."""
    state = SweepState(folder)
    state.objective, state.sign = "rewards/auc", more.pop("sign", 1)
    state.trials = [
        Trial(
            name=f"beta={beta},seed={seed}",
            values={"loss.beta": beta},
            seed=seed,
            overrides=[],
            is_default=beta == 0.1,
            state="failed" if value is None else "done",
            value=value,
            step=6,
            test=None if value is None or "test" not in more else value - 0.1,
        )
        for beta, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    for trial in state.trials:
        state.run_dir(trial).mkdir(parents=True)
    return state


def test_configurations_are_compared_with_the_best(tmp_path: Path) -> None:
    state = state_of(tmp_path, VALUES)
    assert [c.label for c in candidates(state)] == ["beta=0.3", "beta=0.1", "beta=0.03", "beta=1.0"]
    results = compute_results(state)
    assert (results["best"], results["comparisons"]) == ("beta=0.3", 6)
    rows = {row["label"]: row for row in results["configurations"]}
    assert rows["beta=0.3"]["behind_best"] is None
    assert rows["beta=0.1"]["behind_best"]["exceeds_noise"] is False
    assert rows["beta=1.0"]["behind_best"]["exceeds_noise"] is True
    assert rows["beta=0.1"]["mean"] == pytest.approx(0.8133333)
    assert rows["beta=0.1"]["deviation"] == pytest.approx(0.0152753, abs=1e-6)
    expected = [a - b for a, b in zip(VALUES[0.3], VALUES[0.1], strict=True)]
    interval = scipy_stats.t.interval(1 - 0.05 / 6, 2, sum(expected) / 3, scipy_stats.sem(expected))
    behind = rows["beta=0.1"]["behind_best"]
    assert (behind["low"], behind["high"]) == pytest.approx(interval)
    json.dumps(results, allow_nan=False)


def test_equal_configurations_rarely_differ_by_more_than_noise(tmp_path: Path) -> None:
    """The best of 20 is chosen by the values that it is compared by."""
    num_alarms = 0
    for number in range(200):
        draw = random.Random(number)
        state = SweepState(tmp_path)
        state.objective, state.sign = "reward/mean", 1
        state.trials = [
            Trial(f"{x},{seed}", {"x": x}, seed, [], state="done", value=draw.gauss(0, 1))
            for x in range(20)
            for seed in range(5)
        ]
        rows = compute_results(state)["configurations"]
        num_alarms += any(row["behind_best"]["exceeds_noise"] for row in rows[1:])
    assert num_alarms <= 10


def test_smaller_is_better(tmp_path: Path) -> None:
    results = compute_results(state_of(tmp_path, VALUES, sign=-1))
    assert results["best"] == "beta=1.0"
    assert all(
        row["behind_best"]["mean"] > 0 for row in results["configurations"] if row["behind_best"]
    )


def test_the_recipe_wins_a_tie(tmp_path: Path) -> None:
    results = compute_results(state_of(tmp_path, {0.03: (0.8,), 0.1: (0.8,), 0.3: (0.7,)}))
    assert results["best"] == "beta=0.1"


def test_configurations_with_failed_seeds_are_not_ranked(tmp_path: Path) -> None:
    values = {0.03: (0.70, 0.71, 0.70), 0.3: (0.99, 0.99, None), 0.1: (0.6, 0.6, 0.6)}
    state = state_of(tmp_path, values)
    results = compute_results(state)
    assert results["best"] == "beta=0.03"
    last = results["configurations"][-1]
    assert (last["label"], last["mean"], last["behind_best"]) == ("beta=0.3", None, None)
    assert "seed 2" in last["note"]
    assert results["failed"] == [{"trial": "beta=0.3,seed=2", "reason": ""}]


def test_without_results_nothing_is_best(tmp_path: Path) -> None:
    results = compute_results(state_of(tmp_path, {0.03: (None,), 0.1: (None,)}))
    assert results["best"] is None
    assert len(results["conclusions"]) == 1


def test_test_rows_confirm_the_best_against_the_recipe(tmp_path: Path) -> None:
    state = state_of(tmp_path, VALUES, test=True)
    test = compute_results(state)["test"]
    assert test["best"] == pytest.approx(sum(VALUES[0.3]) / 3 - 0.1)
    assert test["recipe"] == pytest.approx(sum(VALUES[0.1]) / 3 - 0.1)
    differences = [a - b for a, b in zip(VALUES[0.3], VALUES[0.1], strict=True)]
    assert (test["difference"]["low"], test["difference"]["high"]) == pytest.approx(
        student_interval(differences)
    )


def test_test_rows_of_other_seeds_are_not_compared(tmp_path: Path) -> None:
    state = state_of(tmp_path, VALUES, test=True)
    for trial in state.trials:
        if trial.seed == 0 or (trial.seed == 1) == (trial.values["loss.beta"] == 0.3):
            trial.test = None
    test = compute_results(state)["test"]
    assert test == {"best": pytest.approx(VALUES[0.3][2] - 0.1)}


def test_conclusions_name_what_is_known(tmp_path: Path) -> None:
    state = state_of(tmp_path / "three", VALUES)
    text = " ".join(conclusions(state, candidates(state)))
    assert "beta=0.3" in text
    assert "within seed noise" in text
    assert "data.test" in text
    one = state_of(tmp_path / "one", {beta: values[:1] for beta, values in VALUES.items()})
    text = " ".join(conclusions(one, candidates(one)))
    assert "--seeds" in text
    assert "unknown" in text


@pytest.mark.parametrize(("state", "sign"), [("improved", 1), ("unclear", 0), ("worse", -1)])
def test_a_best_configuration_that_does_not_improve_the_model_is_named(
    tmp_path: Path, state: str, sign: int
) -> None:
    sweep = state_of(tmp_path, VALUES)
    rewards = {str(i): sign * (-1) ** i + i / 100 for i in range(1, 25)}  # even rows are good
    run = a_run(sweep.run_dir(candidates(sweep)[0].trials[0]), thumbs(0), thumbs(20, rewards))
    verdict, results = run_verdict(RunRecord.read(run)), compute_results(sweep)
    assert results["held_out_interval"] == {
        "low": verdict.low,
        "high": verdict.high,
        "rows": 24,
        "no_change": 0.5,
        "verdict": state,
    }
    warns = any("before training" in sentence for sentence in results["conclusions"])
    assert warns == (state != "improved")


def test_the_page_shows_everything_escaped(tmp_path: Path) -> None:
    state = state_of(tmp_path, VALUES)
    state.trials[0].state, state.trials[0].reason = "failed", "<script>alert(1)</script>"
    write_sweep_page(state)
    page = (tmp_path / "sweep.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    for trial in state.trials:
        assert trial.name in page
    header, rows = table_rows(state)
    assert header[:2] == ["beta", "rewards/auc"]
    assert len(rows) == 4
    assert all(len(row) == len(header) for row in rows)
