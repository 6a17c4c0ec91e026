"""The selection of rows of an evaluation to read, and of rows that contradict their label."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.reports.synthetic import online_rows, pair_rows, thumbs_rows
from valence.reports.rows import (
    NONE,
    groups,
    margin,
    moved,
    per_token,
    rewards_by_class,
    row_lists,
    source,
    surprise,
    value,
    verdict,
    worth,
)

Json = dict[str, Any]


def test_thumbs_surprise_by_their_distance_from_the_midpoint_of_the_classes() -> None:
    # means 1 and 0, midpoint 0.5
    rewards = (
        (True, 3.0),
        (True, -1.0),
        (False, -2.0),
        (False, 2.0),
    )
    rows: list[Json] = [
        {"id": str(i), "label": label, "reward": reward}
        for i, (label, reward) in enumerate(rewards)
    ]
    assert [(row["id"], result) for row, result in surprise(rows)] == [
        ("1", 1.5),
        ("3", 1.5),
        ("0", -2.5),
        ("2", -2.5),
    ]


def test_a_constant_added_to_every_reward_changes_no_surprise() -> None:
    rows = thumbs_rows(1.0, 60)
    lifted = [row | {"reward": row["reward"] + 7.0} for row in rows]
    assert [row["id"] for row, _ in surprise(lifted)] == [row["id"] for row, _ in surprise(rows)]


@pytest.mark.parametrize("seed", range(4))
def test_wrong_verdicts_are_the_most_surprising_ones(seed: int) -> None:
    flipped = set(random.Random(seed).sample(range(200), 10))
    first = surprise(thumbs_rows(1.0, 200, seed, flipped))[:20]
    assert len({int(row["id"], 16) for row, _ in first} & flipped) >= 9


@pytest.mark.parametrize("seed", range(4))
def test_pairs_the_wrong_way_round_are_the_most_surprising_ones(seed: int) -> None:
    flipped = set(random.Random(seed).sample(range(200), 10))
    rows = pair_rows(1.0, 200, seed)
    for i in flipped:
        row = rows[i]
        rows[i] = row | {
            f"reward_{a}": row[f"reward_{b}"]
            for a, b in (("chosen", "rejected"), ("rejected", "chosen"))
        }
    first = surprise(rows)[:20]
    # their spread is nearly as large as the gap
    assert len({int(row["id"], 16) for row, _ in first} & flipped) >= 6
    assert [result for _, result in first] == sorted(
        (-m for row in rows if (m := margin(row)) is not None), reverse=True
    )[:20]


def test_scores_surprise_by_the_distance_of_their_ranks() -> None:
    rows: list[Json] = [
        {"id": str(i), "scores": [i / 10], "target": t} for i, t in enumerate((5.0, 2.0, 3.0, 1.0))
    ]
    assert [(row["id"], result) for row, result in surprise(rows)] == [
        ("0", 1.0),
        ("3", 1.0),
        ("1", 0.0),
        ("2", 0.0),
    ]


def test_several_answers_surprise_by_their_worst_inversion() -> None:
    right = {"id": "right", "reward_0": 2.0, "reward_1": 1.0, "reward_2": 0.0, "target": [3, 2, 1]}
    wrong = {"id": "wrong", "reward_0": 2.0, "reward_1": 0.0, "reward_2": 5.0, "target": [3, 2, 1]}
    tied = {"id": "tied", "reward_0": 2.0, "reward_1": 1.0, "target": [1, 1]}
    lacking = {"id": "lacking", "reward_0": "nan", "reward_1": 1.0, "target": [1, 2]}
    assert [(row["id"], result) for row, result in surprise([right, tied, lacking, wrong])] == [
        ("wrong", 5.0),
        ("right", -1.0),
    ]


def test_demonstrations_surprise_by_nats_a_token() -> None:
    rows: list[Json] = [
        {"id": "long", "logp": -100.0, "tokens": 100},
        {"id": "odd", "logp": -30.0, "tokens": 10},
    ]
    assert [(row["id"], result) for row, result in surprise(rows)] == [("odd", 3.0), ("long", 1.0)]


def test_sampled_answers_and_rows_without_metrics_have_no_surprise() -> None:
    assert surprise(online_rows(1.0, 5)) == []
    bare: list[Json] = [
        {},
        {"label": True},
        {"label": None, "reward": "nan"},
        {"chosen": "a", "reward_chosen": 1.0},
        {"label": [1], "reward": 1.0},
        {"logp": -3.0, "tokens": 0},
        {"target": "x", "reward": 1.0},
        {"reward": 1.0, "target": math.nan},
    ]
    assert surprise(bare) == []
    assert row_lists([*bare, {"reward_0": 1.0}], bare, 5)[0].title == "Best"


def test_rows_are_ordered_by_the_change_of_their_reward() -> None:
    before: list[Json] = [
        {"id": "a", "reward": 1.0},
        {"id": "b", "reward": 0.0},
        {"id": "gone", "reward": 9.0},
    ]
    after: list[Json] = [
        {"id": "b", "reward": 0.5},
        {"id": "a", "reward": -2.0},
        {"id": "new", "reward": 9.0},
        {"reward": 3.0},
    ]
    assert [(row["id"], change) for row, change in moved(after, before)] == [
        ("a", -3.0),
        ("b", 0.5),
    ]
    several = (
        [{"id": "c", "reward_0": 1.0, "reward_1": 2.0}],
        [{"id": "c", "reward_0": 1.5, "reward_1": 0.0}],
    )
    assert moved(*several) == [(several[0][0], 2.0)]


def test_lists_of_each_kind() -> None:
    def titles(after: list[Json], before: list[Json] | None = None) -> list[str]:
        return [row_list.title for row_list in row_lists(after, before, 20)]

    thumbs = thumbs_rows(1.0, 60, 0, {3, 8})
    named = ["Most surprising", "Most moved", "Largest reward", "Smallest reward"]
    assert titles(thumbs, thumbs_rows(0.0, 60)) == named
    agreed = [{"label": up, "reward": 2.0 * up - 1, "id": str(up)} for up in (True, False)]
    first = row_lists(agreed, agreed, 20)[0]
    assert (first.title, first.rows, first.note) == ("Most surprising", [], NONE)
    assert titles(pair_rows(1.0, 60), pair_rows(0.0, 60)) == [
        "Most surprising",
        "Most moved",
        "Best",
    ]
    assert titles(online_rows(1.0, 60), online_rows(0.0, 60)) == ["Best", "Worst", "Longest"]
    assert titles([{"logp": -3.0, "tokens": 2}, {"logp": -3.0, "tokens": 3}]) == [
        "Most surprising",
        "Best",
    ]
    assert titles([]) == []
    best = next(
        row_list for row_list in row_lists(thumbs, None, 5) if row_list.title == "Largest reward"
    )
    assert [result for _, result in best.rows] == sorted(
        (row["reward"] for row in thumbs), reverse=True
    )[:5]
    surprising = row_lists(thumbs, None, 60)[0].rows
    assert 2 <= len(surprising) < 30  # what the model agrees with is left out
    assert min(result for _, result in surprising) > 0


def test_the_value_of_a_row() -> None:
    assert worth({"reward": 2.0, "label": True}) == 2.0
    assert worth({"scores": [1.0, 3.0]}) == 2.0
    assert worth({"reward_chosen": 2.0, "reward_rejected": 3.5, "chosen": ""}) == -1.5
    assert worth({"logp": -6.0, "tokens": 3}) == -2.0
    assert worth({"logp": -6.0, "tokens": 3, "stop": "end", "error": "no score"}) is None
    assert worth({"reward": "inf", "label": True}) is None
    assert value({"scores": ["nan", 4.0]}) == 4.0
    assert per_token({"logp_chosen": -6.0, "tokens_chosen": 4}, "_chosen") == -1.5
    assert [verdict({"label": label}) for label in (True, 0, None, "up", [])] == [
        True,
        False,
        None,
        None,
        None,
    ]


def test_answers_are_distinguished_by_class_and_side() -> None:
    rows: list[Json] = [
        {"label": False, "reward": -1.0},
        {"label": True, "reward": 1.0},
        {"label": True, "reward": "nan"},
    ]
    assert list(rewards_by_class(rows).items()) == [("thumbs up", [1.0]), ("thumbs down", [-1.0])]
    pairs: list[Json] = [{"label": None, "reward_chosen": 2.0, "reward_rejected": -2.0}]
    assert rewards_by_class(pairs) == {"chosen": [2.0], "rejected": [-2.0]}
    assert [side for _, side in groups(pairs)["rejected"]] == ["_rejected"]
    assert rewards_by_class([]) == {}
    assert source({"origin": "a/b.jsonl:12"}) == "a/b.jsonl"
    assert source({"source": "named", "origin": "a.jsonl:1"}) == "named"
