"""Charts of the report: curves, bands, the time of a step, histograms, calibration."""

import json
import math
import re

import pytest

from tests.reports.hostile import Page, charts
from tests.reports.synthetic import write_run
from valence.reports.charts import (
    MAX_BARS,
    MAX_POINTS,
    by_length,
    by_source,
    calibration,
    curves,
    reward_histograms,
)
from valence.reports.diagnostics import diagnose
from valence.reports.page import seconds_per_step, write_page
from valence.reports.rows import bands_of
from valence.reports.run_record import RunRecord


def test_values_that_are_not_finite_are_gaps_in_the_curve_and_a_warning(tmp_path):
    losses = ("0.5", '"nan"', "NaN", "0.4")
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert curves(RunRecord.read(tmp_path))["Learning"]["Loss"]["data"][0]["y"] == [
        0.5,
        None,
        None,
        0.4,
    ]
    [warning] = [sign for sign in diagnose(RunRecord.read(tmp_path)) if sign.name == "not finite"]
    assert re.findall(r"\d+", warning.message) == ["2", "2"]
    assert warning.message in Page(write_page(tmp_path)).text


def test_charts_hold_known_metrics_together_and_any_other_that_varies(run_dir):
    result = curves(RunRecord.read(run_dir))
    named = [t.get("name") for t in result["Learning"]["Rewards by class"]["data"]]
    # each with the band of the evaluations' rows
    assert named == [
        "chosen",
        None,
        "rejected",
        None,
    ]
    margin = result["Learning"]["Margin"]["data"]
    assert [(t["name"], t["x"][:3]) for t in margin] == [
        ("margins", [1, 2, 3]),
        ("margins, held out", [20, 40, 60]),
    ]
    assert {"padding", "auc"} == set(result["More"])
    assert "Divergence from the reference" not in result["Learning"]  # kl is kto's reference point


@pytest.mark.parametrize("kind", ["thumbs", "pairs", "own"])
def test_every_chart_is_one_that_plotly_knows(tmp_path, kind):
    from plotly.graph_objects import Figure

    result = charts(Page(write_page(write_run(tmp_path, kind))))
    assert len(result) > 12
    for chart in result.values():
        # raises for a name or a value that it does not know
        Figure(data=chart["data"], layout=chart["layout"])


def test_reward_and_kl_of_online_runs_have_charts(tmp_path):
    result = curves(RunRecord.read(write_run(tmp_path, "own")))
    reward = result["Learning"]["Reward of sampled answers"]
    assert [t.get("fill") for t in reward["data"]] == [None, "toself", None]
    assert "band" in reward["note"]
    assert result["Learning"]["Divergence from the reference"]["data"][0]["name"] == "kl"
    assert "Drift on mismatched answers" not in result["Learning"]


def test_a_band_goes_from_a_tenth_to_nine_tenths_of_the_rows():
    rows = [{"label": True, "reward": float(i)} for i in range(11)] + [
        {"label": False, "reward": -2.0}
    ]
    assert bands_of(rows) == {"chosen": (1.0, 9.0), "rejected": (-2.0, -2.0)}
    pairs = [{"reward_chosen": float(i), "reward_rejected": -1.0} for i in range(11)]
    assert bands_of(pairs) == {
        "chosen": (1.0, 9.0),
        "rejected": (-1.0, -1.0),
        "margins": (2.0, 10.0),
    }


def test_the_times_of_all_phases_are_stacked_completely(tmp_path):
    run = RunRecord.read(write_run(tmp_path, "own", steps=130, times=3))
    traces = {t["name"].split(" ")[0]: t for t in curves(run)["Machine"]["Time"]["data"]}
    assert set(traces) == {"training", "rollout", "reward", "measuring", "evaluation"}
    assert len(traces["training"]["x"]) <= MAX_BARS
    assert sum(traces["training"]["y"]) == pytest.approx(260)
    assert sum(traces["evaluation"]["y"]) == pytest.approx(12)


def test_seconds_of_a_record_are_means_over_its_rounds(tmp_path):
    """Ten rounds since the record before: a mean of 3 seconds each."""
    log = [
        {"step": 10 * i, "rounds": 10 * i, "seconds": 5.0, "seconds/rollout": 3.0}
        for i in range(1, 4)
    ]
    log.append({"step": 35, "rounds": 30, "seconds": 2.5})
    assert seconds_per_step(log[:3]) == 3.5
    assert seconds_per_step(log) == pytest.approx(72.5 / 25)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    traces = curves(RunRecord.read(tmp_path))["Machine"]["Time"]["data"]
    assert {t["name"]: t["y"] for t in traces} == {
        "training (18s)": [5.0, 5.0, 5.0, 2.5],
        "rollout (1m30s)": [30.0, 30.0, 30.0, 0.0],
    }


def test_the_time_of_a_step_has_every_phase_in_it():
    log = [
        {"step": 0, "seconds/evaluation": 9.0},
        {"step": 2, "seconds": 3.0},
        {"step": 4, "seconds": 3.0, "seconds/saving": 2.0},
    ]
    assert seconds_per_step(log) == 2.0
    assert seconds_per_step([]) is None
    assert seconds_per_step([{"step": 1, "loss": 1.0}, {"step": 2, "seconds": "nan"}]) is None


def test_a_long_run_is_drawn_as_means_of_neighbouring_steps_between_their_extremes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "loss": {i % 2}}}\n' for i in range(4 * MAX_POINTS))
    )
    band, line = curves(RunRecord.read(tmp_path))["Learning"]["Loss"]["data"]
    assert len(line["x"]) == MAX_POINTS
    assert set(line["y"]) == {0.5}
    assert line["x"][0] == 2
    assert band["y"] == [0] * MAX_POINTS + [1] * MAX_POINTS


def test_rewards_are_shown_by_length_and_by_source():
    rows = [
        {
            "label": True,
            "reward": float(n),
            "tokens": n,
            "origin": f"{'a' if n < 3 else 'b'}.jsonl:{n}",
        }
        for n in range(8)
    ]
    held = by_length(rows)
    assert list(held) == ["0 to 1 tokens", "2 to 3 tokens", "4 to 5 tokens", "6 to 7 tokens"]
    assert held["2 to 3 tokens"] == {"thumbs up": [2.0, 3.0]}
    assert {name: len(result["thumbs up"]) for name, result in by_source(rows).items()} == {
        "b.jsonl": 5,
        "a.jsonl": 3,
    }
    ends = (
        "_of_a_name_that_is_longer_than_what_is_shown.jsonl"  # the same end: none of them is lost
    )
    far = [{**row, "source": f"{'a' if i < 3 else 'b'}{ends}"} for i, row in enumerate(rows)]
    assert {name: len(result["thumbs up"]) for name, result in by_source(far).items()} == {
        f"b{ends}": 5,
        f"a{ends}": 3,
    }


def test_histograms_count_every_row_once_and_leave_out_a_start_without_rewards(tmp_path):
    run = RunRecord.read(write_run(tmp_path, "thumbs"))
    result = reward_histograms(run.first, run.last)
    assert set(result) == {"By class", "By length of the answer", "By source"}
    assert {sum(sum(t["y"]) for t in figure["data"]) for figure in result.values()} == {60}
    actual = RunRecord.read(write_run(tmp_path / "own", "own"))
    assert {
        "By class",
        "By length of the answer, step 0",
        "By length of the answer, step 60",
    } <= set(reward_histograms(actual.first, actual.last))


def test_calibration_is_the_share_that_came_true_in_bins_of_equally_many_rows():
    rows = [{"label": i % 4 == 0, "reward": -1.0 - i / 1000} for i in range(20)]
    rows += [{"label": i % 4 != 0, "reward": 1.0 + i / 1000} for i in range(20)]
    dots = calibration(rows)["data"][1]
    assert dots["y"] == [0.2, 0.3, 0.7, 0.8]  # of the tens in the order of the rewards
    assert dots["x"][0] == pytest.approx(1 / (1 + math.exp(1.0145)), rel=1e-3)
    assert dots["text"] == ["10 rows"] * 4
    pairs = [
        {
            "reward_chosen": 0.1 * i,
            "reward_rejected": 0.1 * i - (1 + i / 1000) * (1 if i % 5 else -1),
        }
        for i in range(40)
    ]
    assert calibration(pairs)["data"][1]["y"] == [0.8] * 4
    assert calibration(rows[:15]) is None


def test_lengths_of_the_data_are_drawn_and_not_tabled(tmp_path):
    page = Page(write_page(write_run(tmp_path, "thumbs")))
    assert "prompt tokens" in page.text
    assert "edges" not in page.text
    drawn = [
        c
        for c in charts(page).values()
        if c["layout"].get("xaxis", {}).get("title", {}).get("text") == "tokens"
    ]
    assert [[t["name"] for t in c["data"]] for c in drawn] == [["all"], ["up", "down"]]
    assert drawn[0]["data"][0]["y"] == [30, 90, 40, 20, 15, 5]
