"""Comparison of several runs: their selection, the data that is read, marked differences, and rows
on which they disagree.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.reports.comparing import a_run, config, online_evaluation, read, thumbs
from valence.reports.comparable_runs import ComparedRun, find_runs, shortest_labels
from valence.reports.comparison import (
    BEST,
    MAX_DISAGREEMENTS,
    MAX_TEXT,
    comparison_page,
    direction,
    disagreements,
    gaps,
    results,
    settings,
    summary,
)

# Which runs


def test_runs_are_found_once_in_the_order_given_and_by_name_within_a_folder(tmp_path: Path) -> None:
    for name in ("runs/b", "runs/a", "c"):
        a_run(tmp_path / name)
    result = find_runs([tmp_path / "c", tmp_path / "runs", tmp_path / "runs/../c"])
    assert [line.path.name for line in result] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("name", "code"),
    [("nowhere", "run-not-found"), ("file", "path-is-file"), ("empty", "run-not-found")],
)
def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with raises_error(code, where=str(tmp_path / name)):
        find_runs([tmp_path / name])


def test_labels_are_the_shortest_that_tell_runs_apart() -> None:
    paths = [Path("/runs/kto/seed/0"), Path("/runs/dpo/seed/0"), Path("/runs/dpo/seed/1")]
    assert shortest_labels(paths) == ["kto/seed/0", "dpo/seed/0", "1"]
    assert shortest_labels([Path("/x"), Path("/y/x")]) == ["//x", "y/x"]


# Tables


def test_the_summary_marks_the_best_of_each_column_by_its_direction(two: list[ComparedRun]) -> None:
    part = summary(two)
    cells = [dict(zip(part.header, row, strict=True)) for row in part.rows]
    assert [row["run"] for row in cells] == ["first", "second"]
    assert cells[0]["steps"] == "20"
    assert (cells[0]["tokens"], cells[0]["time"], cells[0]["state"]) == ("20,000", "1m05s", "done")
    assert [row["eval/loss"] for row in cells] == ["0.4", f"{BEST} 0.2"]
    assert [row["eval/rewards/auc"] for row in cells] == ["0.7", f"{BEST} 0.8"]
    assert [row["eval/rewards/margins"] for row in cells] == [f"{BEST} 1", "0.4"]


def test_a_number_whose_direction_is_not_known_is_not_marked(two: list[ComparedRun]) -> None:
    [part] = results(two)
    lines = {row[0]: row[1:] for row in part.rows}
    assert lines["grad"] == ["1", "2"]
    assert lines["rewards/auc"] == ["0.7", f"{BEST} 0.8"]


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("loss", -1),
        ("sft/loss", -1),
        ("rewards/auc", 1),
        ("rewards/pearson/clarity", 1),
        ("rewards/brier", -1),
        ("reward/mean", 1),
        ("reward/std", 0),
        ("kl", 0),
        ("grad_norm", 0),
        ("rewards/chosen", 0),
        ("value/loss", -1),
    ],
)
def test_directions(name: str, sign: int) -> None:
    assert direction(name) == sign


def test_metrics_on_different_scales_are_named_and_not_marked(tmp_path: Path) -> None:
    runs = read(
        a_run(tmp_path / "one", thumbs(20)),
        a_run(
            tmp_path / "two",
            thumbs(20, None, **{"loss": 0.1, "rewards/auc": 0.9}),
            settings=config(beta=0.5),
        ),
    )
    part = summary(runs)
    cells = [dict(zip(part.header, row, strict=True)) for row in part.rows]
    assert cells[1]["eval/loss"] == "0.1"
    assert cells[1]["eval/rewards/auc"] == f"{BEST} 0.9"
    [separate] = [note for note in part.notes if "eval/" in note]
    assert re.findall(r"eval/[\w/]+", separate) == ["eval/rewards/margins", "eval/loss"]


def test_rewards_that_are_not_the_same_are_not_ranked(tmp_path: Path) -> None:
    def marks(reward: str) -> bool:
        places = (tmp_path / reward / "x", tmp_path / reward / "y")
        runs = read(
            a_run(places[0], online_evaluation(20, 1.0, 2.0)),
            a_run(places[1], online_evaluation(20, 2.0, 2.0), settings=config(reward=reward)),
        )
        return any(BEST in cell for row in summary(runs).rows for cell in row)

    assert marks("vader")
    assert not marks("exact_match")


def test_with_different_held_out_rows_metrics_are_shown_without_marks(
    tmp_path: Path,
) -> None:
    other = thumbs(20, {"a": 0.1, "z": 0.2}, **{"rewards/auc": 0.9})
    runs = read(a_run(tmp_path / "one", thumbs(20)), a_run(tmp_path / "two", other))
    assert gaps(read(tmp_path / "one")) == []
    assert all(fact in gaps(runs)[0] for fact in ("one 3", "two 2", "; 1 "))
    assert not any(
        BEST in cell
        for part in (summary(runs), *results(runs))
        for row in part.rows
        for cell in row
    )


@pytest.mark.parametrize(("other", "best"), [("abc", True), ("def", False)])
def test_the_best_on_test_rows_is_marked_where_they_are_the_same(
    other: str, best: bool, tmp_path: Path
) -> None:
    for name, digest, auc in (("one", "abc", 0.6), ("two", other, 0.7)):
        run = a_run(tmp_path / name, thumbs(20), rows={"data.test": {"rows": 3, "digest": digest}})
        (run / "eval" / "test.json").write_text(
            json.dumps(thumbs(20, None, **{"rewards/auc": auc}))
        )
    part = results(read(tmp_path / "one", tmp_path / "two"))[-1]
    assert next(row for row in part.rows if row[0] == "rewards/auc")[2] == (
        f"{BEST} 0.7" if best else "0.7"
    )
    # What the mark means, or why there is none.
    assert any(BEST in note for note in part.notes) is best
    assert len(part.notes) == 1


def test_only_settings_that_differ_are_shown_with_digests_and_versions(tmp_path: Path) -> None:
    def rows(digest: str) -> dict[str, Any]:
        return {"data.train": {"rows": 9, "digest": digest}}

    runs = read(
        a_run(tmp_path / "one", rows=rows("abc")),
        a_run(
            tmp_path / "two",
            rows=rows("def"),
            versions={"valence": "0.1.0", "torch": "2.14"},
            settings=config(train="more.jsonl"),
        ),
        a_run(tmp_path / "three", rows=rows("abc"), settings='{"method": "dpo"}'),
    )
    part = settings(runs)
    lines = {row[0]: row[1:] for row in part.rows}
    assert lines["data.train.0.path"] == ["rows.jsonl", "more.jsonl", ""]
    assert lines["method"] == ["kto", "kto", "dpo"]
    assert lines["model.lora.alpha"] == ["null", "null", ""]
    assert lines["rows.data.train.digest"] == ["abc", "def", "abc"]
    assert lines["versions.torch"] == ["2.13", "2.14", "2.13"]
    assert not {"versions.valence", "rows.data.train.rows"} & set(lines)


def test_settings_that_are_the_same_have_no_line(tmp_path: Path) -> None:
    part = settings(read(a_run(tmp_path / "one"), a_run(tmp_path / "two")))
    assert part.rows == [["none", "", ""]]


def test_missing_metrics_are_named_and_the_others_are_compared(tmp_path: Path) -> None:
    full = a_run(tmp_path / "whole", thumbs(0), thumbs(20))
    killed = a_run(tmp_path / "killed", thumbs(0), status="running", total_steps=50)
    torn = a_run(tmp_path / "torn", thumbs(20))
    with (torn / "metrics.jsonl").open("a") as log:
        log.write('{"step": 21, "lo')
    (torn / "config.yaml").write_text("- [")
    (torn / "eval/step-20.json").write_text("{")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text(config())
    nan = a_run(tmp_path / "nan", thumbs(20, loss="nan"))
    runs = read(full, killed, torn, bare, nan)
    messages = gaps(runs)
    for run, *facts in (
        ("killed", "step 20", "50"),
        ("torn", "step 20"),  # whose rows are not there
        ("torn", "config.yaml could"),
        ("torn", "metrics.jsonl:4"),
        ("torn", "step-20.json"),
        ("bare", "run.json"),
        ("nan", "eval/loss is nan"),
    ):
        assert any(
            message.startswith(f"{run}: ") and all(fact in message for fact in facts)
            for message in messages
        ), (run, facts)
    by_run = Counter(message.partition(":")[0] for message in messages)
    assert by_run["bare"] == 3  # no run.json, no log, no evaluation
    assert by_run["torn"] == 5  # also that its settings are not compared
    assert by_run["whole"] == 0
    assert len(messages) == by_run["bare"] + by_run["torn"] + by_run["killed"] + by_run["nan"] + 2
    steps, untrained = messages[-2:]
    assert "(0, 20)" in steps
    cells = [dict(zip(summary(runs).header, row, strict=True)) for row in summary(runs).rows]
    # The trained ones are level, and do not win over one that was not measured after training.
    assert untrained not in gaps(read(full, nan))
    assert [row["eval/rewards/auc"] for row in cells] == ["0.7", "0.5", "0.7", "", "0.7"]
    assert cells[4]["eval/loss"] == "nan"
    assert cells[1]["steps"] == "20 of 50"
    assert "none" in str(settings(runs).rows[0])  # the settings that are not known do not differ
    assert comparison_page(runs).startswith("<!")


# Rows


def test_rows_that_runs_place_differently_come_first(two: list[ComparedRun]) -> None:
    result = disagreements(two)
    assert [item.origin for item in result] == [
        "held_out.jsonl:1",
        "held_out.jsonl:2",
        "held_out.jsonl:3",
    ]
    assert result[0].places == {"first": (0.0, 0.1), "second": (1.0, 0.9)}
    assert result[0].texts == {"prompt": "Ask a", "completion": "Yes."}
    assert result[0].answers == {}


def test_ranks_are_within_a_run_and_ties_count_half(
    tmp_path: Path,
) -> None:
    runs = read(
        a_run(tmp_path / "one", thumbs(20, {"a": 0.1, "b": 0.2, "c": 0.2})),
        a_run(tmp_path / "two", thumbs(20, {"c": 30.0, "a": -5.0, "b": 30.0, "d": 99.0})),
    )
    result = disagreements(runs)
    # both give a the smallest reward
    assert [item.origin for item in result] == [
        "held_out.jsonl:2",
        "held_out.jsonl:3",
    ]
    assert [item.places for item in result] == [{"one": (0.75, 0.2), "two": (0.5, 30.0)}] * 2


def test_completions_of_each_run_are_shown_truncated(tmp_path: Path) -> None:
    runs = read(
        a_run(tmp_path / "x", online_evaluation(20, 1.0, 0.0, "Short.")),
        a_run(tmp_path / "y", online_evaluation(20, 0.0, 0.0, "w" * (MAX_TEXT + 7))),
    )
    first = disagreements(runs)[0]
    assert first.answers == {
        "x": "Short.",
        "y": f"{'w' * MAX_TEXT}\N{HORIZONTAL ELLIPSIS} (7 more characters)",
    }
    assert first.texts == {"prompt": "Ask"}


def test_of_pairs_the_gap_counts_and_of_several_answers_each(tmp_path: Path) -> None:
    def evaluation(one: float, other: float) -> dict[str, Any]:
        pairs = [
            {
                "id": "p",
                "chosen": "c",
                "rejected": "r",
                "reward_chosen": one,
                "reward_rejected": 1.0,
                "prompt": "Pair",
            },
            {
                "id": "q",
                "chosen": "c",
                "rejected": "r",
                "reward_chosen": 3.0,
                "reward_rejected": 0.0,
                "prompt": "Pair",
            },
            {
                "id": "s",
                "reward_0": other,
                "reward_1": 5.0,
                "completion_0": "zero",
                "completion_1": "one",
                "prompt": "Several",
            },
        ]
        return {"step": 20, "metrics": {"loss": 1.0}, "rows": pairs}

    runs = read(
        a_run(tmp_path / "x", evaluation(2.0, 4.0)), a_run(tmp_path / "y", evaluation(9.0, -4.0))
    )
    by_reward = {disagreement.places["x"][1]: disagreement for disagreement in disagreements(runs)}
    assert by_reward[1.0].places["y"][1] == 8.0
    assert by_reward[4.0].texts == {"prompt": "Several", "completion 0": "zero"}


def test_no_more_rows_than_can_be_read(tmp_path: Path) -> None:
    several = {str(i): math.sin(i) for i in range(100)}
    runs = read(
        a_run(tmp_path / "x", thumbs(20, several)),
        a_run(tmp_path / "y", thumbs(20, {id: -reward for id, reward in several.items()})),
    )
    assert len(disagreements(runs)) == MAX_DISAGREEMENTS
