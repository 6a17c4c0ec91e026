"""Charts of several runs: their data and axes, and one style per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.comparing import a_run, config, online_evaluation, read, thumbs
from valence.reports.comparable_runs import ComparedRun, trained_seconds
from valence.reports.comparison import comparison_page
from valence.reports.comparison_charts import (
    COLOURS,
    curves,
    curves_over_time,
    frontiers,
    line_style,
)


def test_curves_are_those_that_two_runs_share_and_that_vary(
    two: list[ComparedRun], tmp_path: Path
) -> None:
    third = a_run(
        tmp_path / "third", online_evaluation(0, 1.0, 0.0), online_evaluation(20, 2.0, 1.0)
    )
    runs = [*two, *read(third)]
    held_out, training = curves(runs)
    assert {"eval/loss", "eval/rewards/auc"} <= set(held_out)
    assert "eval/reward/mean" not in held_out
    assert set(training) == {"loss"}  # lr and lag are the same everywhere, the others only count
    assert [trace["x"] for trace in held_out["eval/loss"]["data"]] == [[0, 20], [0, 20]]


def test_charts_have_words_for_titles_and_a_note_where_sizes_do_not_compare(tmp_path: Path) -> None:
    evaluations = thumbs(0), thumbs(20, {"1": 2.0})
    runs = read(
        *(
            a_run(tmp_path / str(beta), *evaluations, settings=config(beta=beta))
            for beta in (0.1, 0.5)
        )
    )
    held_out, _ = curves(runs)
    assert held_out["eval/rewards/margins"]["note"].startswith("eval/rewards/margins")
    assert held_out["eval/rewards/margins"]["note"] != "eval/rewards/margins"
    assert held_out["eval/rewards/auc"]["note"] == "eval/rewards/auc"
    page = comparison_page(runs)
    assert "Margin, held out" in page
    assert "Accuracy and AUC: auc, held out" in page


def test_a_run_looks_the_same_in_every_chart_and_no_two_are_alike(tmp_path: Path) -> None:
    runs = read(
        *(
            a_run(tmp_path / f"run{i:02}", *([] if i == 1 else [thumbs(0), thumbs(20)]))
            for i in range(12)
        )
    )
    held_out, training = curves(runs)
    looks = {
        (trace["name"], trace["line"]["color"], trace["line"]["dash"])
        for figure in (*held_out.values(), *training.values())
        for trace in figure["data"]
    }
    assert len(looks) == 12
    assert len({line_style(i) for i in range(5 * len(COLOURS))}) == 5 * len(COLOURS)
    assert ("run02", *line_style(2)) in looks


def test_time_is_drawn_where_runs_take_different_times(tmp_path: Path) -> None:
    evaluations = thumbs(0), thumbs(20)
    same = read(
        a_run(tmp_path / "a", *evaluations), a_run(tmp_path / "b", *evaluations, seconds=2.1)
    )
    assert curves_over_time(same) == {}
    slower = read(tmp_path / "a", a_run(tmp_path / "c", *evaluations, seconds=30.0))
    lines = [trace["x"] for trace in curves_over_time(slower)["loss"]["data"]]
    assert lines == [[2.0, 4.0], [30.0, 60.0]]
    assert curves_over_time(slower)["eval/loss"]["data"][1]["x"] == [0.0, 60.0]


@pytest.mark.parametrize(
    ("seconds", "unit", "times"),
    [
        (59.0, "seconds", [59.0, 118.0]),
        (60.0, "minutes", [1.0, 2.0]),
        (3000.0, "minutes", [50.0, 100.0]),
        (5400.0, "hours", [1.5, 3.0]),
    ],
)
def test_the_unit_of_time_depends_on_the_length_of_the_longest_run(
    seconds: float, unit: str, times: list[float], tmp_path: Path
) -> None:
    evaluations = thumbs(0), thumbs(20)
    runs = read(
        a_run(tmp_path / "a", *evaluations), a_run(tmp_path / "b", *evaluations, seconds=seconds)
    )
    figure = curves_over_time(runs)["loss"]
    assert unit in figure["layout"]["xaxis"]["title"]["text"]
    assert figure["data"][1]["x"] == times


def test_seconds_of_rounds_are_part_of_training() -> None:
    log = [
        {"step": 0},
        {"step": 2, "seconds": 1.0, "rounds": 2, "seconds/rollout": 10.0, "seconds/reward": 1.0},
        {"step": 3, "seconds": 1.0, "rounds": 2, "seconds/evaluation": 50.0},
        {"step": 4, "eval/loss": 1.0},
    ]
    assert trained_seconds(log) == [0.0, 23.0, 24.0, None]


def test_the_frontier_joins_evaluations_of_online_runs(tmp_path: Path) -> None:
    runs = read(
        a_run(
            tmp_path / "x",
            online_evaluation(0, 0.1, 0.0),
            online_evaluation(10, 0.5, 2.0),
            online_evaluation(20, 0.4, 1.0),
        ),
        a_run(tmp_path / "y", thumbs(0), thumbs(20)),
    )
    result = frontiers(runs)
    _, figure = result["Reward against divergence"]
    [trace] = figure["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("x", [0, 2, 1], [0.1, 0.5, 0.4])
    assert trace["text"] == ["step 0", "step 10", "step 20"]
    _, figure = result["Margin against drift"]
    [trace] = figure["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("y", [0, 1], [0, 3])
    assert trace["line"]["color"] == line_style(1)[0]
