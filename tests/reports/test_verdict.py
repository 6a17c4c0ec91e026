"""The verdict of a report: its state, its number and its interval, for every kind of held-out
rows.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from valence.reports.verdict import Verdict, held_out_verdict, win_rate_verdict
from valence.statistics import auc, auc_interval, mean_interval

Rows = Sequence[dict[str, Any]]


def verdict_of(last: Rows | None, first: Rows | None = None) -> Verdict:
    """The verdict of a run with these rows in its last evaluation, and in its first one if there
    was another.
    """
    after = None if last is None else {"rows": list(last)}
    return held_out_verdict(after if first is None else {"rows": list(first)}, after)


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def thumbs(ups: Sequence[float], downs: Sequence[float]) -> Rows:
    rated = [(True, reward) for reward in ups] + [(False, reward) for reward in downs]
    return [
        {"id": str(i), "label": label, "reward": reward} for i, (label, reward) in enumerate(rated)
    ]


def pairs(margins: Sequence[float]) -> Rows:
    return [
        {"id": str(i), "reward_chosen": item, "reward_rejected": 0.0}
        for i, item in enumerate(margins)
    ]


def completions(rewards: Sequence[float]) -> Rows:
    return [{"id": str(i), "stop": "eos", "reward": item} for i, item in enumerate(rewards)]


def demonstrations(logps: Sequence[float]) -> Rows:
    return [{"id": str(i), "logp": item * 10, "tokens": 10} for i, item in enumerate(logps)]


def test_thumbs_are_compared_with_chance() -> None:
    up, down = [i / 40 + 0.5 for i in range(40)], [i / 40 for i in range(40)]
    result = verdict_of(thumbs(up, down))
    assert result.state == "improved"
    assert result.baseline == 0.5
    assert result.value == pytest.approx(
        sum((a > b) + (a == b) / 2 for a in up for b in down) / 1600
    )
    assert verdict_of(thumbs(down, up)).state == "worse"
    assert verdict_of(thumbs([0.1, 0.3], [0.2, 0.25])).state == "unclear"


def test_training_rows_have_no_verdict() -> None:
    new, trained = thumbs([0.1] * 30, [0.2] * 30), thumbs([1.0] * 90, [-1.0] * 90)
    trained = [{**row, "id": f"t{row['id']}", "in_train": True} for row in trained]
    assert verdict_of(trained, trained).state == "unmeasured"
    for first in (None, [*trained, *thumbs([0.0] * 30, [0.0] * 30)]):
        result = verdict_of([*trained, *new], first)
        expected = verdict_of(new, first and first[len(trained) :])
        assert (result.state, result.value, result.count) == ("worse", expected.value, 60)
        assert {"180", "240"} <= set(numbers(result.sentence))


def test_thumbs_are_compared_with_the_first_evaluation() -> None:
    """A reward model may rank better than chance before it is trained."""
    good = thumbs([1.0] * 30 + [-1.0] * 3, [-1.0] * 30 + [1.0] * 3)
    assert verdict_of(good).state == "improved"
    assert verdict_of(good, good).state == "unclear"


def test_the_sentence_has_the_numbers_in_percent() -> None:
    good = thumbs([1.0] * 30 + [-1.0] * 10, [-1.0] * 40)
    result = verdict_of(good)
    assert (result.value, result.low, result.high) == (0.875, *auc_interval(0.875, 40, 40))
    assert numbers(result.sentence) == ["88", "95", "77", "93", "50", "0.88", "80"]
    measured = verdict_of(good, thumbs([1.0] * 20 + [-1.0] * 20, [-1.0] * 40))
    assert measured.baseline == 0.75
    assert numbers(measured.sentence)[-1] == "75"
    assert verdict_of(pairs([1.0] * 80 + [-1.0] * 20)).sentence.count("80") == 1


def test_a_start_at_the_reference_differs_from_a_measured_start() -> None:
    """Where all rewards are 0, half of the comparisons are right whatever the data."""
    good, even = thumbs([1.0] * 5, [-1.0] * 5), thumbs([1.0, -1.0] * 2, [1.0, -1.0] * 2)
    by_definition, by_chance = (
        verdict_of(good, thumbs([0.0] * 5, [0.0] * 5)),
        verdict_of(good, even),
    )
    assert by_definition.baseline == by_chance.baseline == 0.5
    assert "reference" in by_definition.sentence
    assert "reference" not in by_chance.sentence
    assert "reference" in verdict_of(thumbs([0.0] * 5, [0.0] * 5)).sentence
    zero_head = [{**row, "reward": None, "scores": [0.0]} for row in even]
    assert "reference" not in verdict_of(good, zero_head).sentence


def test_the_advice_names_answers_only_where_there_are_some() -> None:
    rows = thumbs([1.0] * 5, [-1.0] * 5)
    setting = "run.samples.prompts"
    assert setting in verdict_of(rows).advice
    last = {"rows": rows}
    assert setting not in held_out_verdict(last, last, has_answers=True).advice
    actual = verdict_of(completions([1.0, 2.0]), completions([0.0, 0.0]))
    assert actual.state == "improved"
    assert setting not in actual.advice  # its held-out rows are answers
    is_reward_model = [{**row, "scores": [row["reward"]], "reward": None} for row in rows]
    assert verdict_of(is_reward_model).state == "improved"
    assert setting not in verdict_of(is_reward_model).advice  # a reward model gives no answers


def test_pairs() -> None:
    result = verdict_of(pairs([1.0] * 80 + [-1.0] * 20), pairs([0.0] * 100))
    assert (result.state, result.value, result.baseline, result.count) == (
        "improved",
        0.8,
        0.5,
        100,
    )
    assert verdict_of(pairs([1.0, 1.0, -1.0])).state == "unclear"
    assert verdict_of(pairs([-1.0] * 50)).state == "worse"


def test_rewards_of_completions_are_paired_by_prompt() -> None:
    before = [0.0, 5.0, 10.0, 15.0]
    result = verdict_of(
        completions([item + 0.5 + 0.01 * i for i, item in enumerate(before)]), completions(before)
    )
    assert result.state == "improved"
    assert result.value == pytest.approx(0.515)
    assert verdict_of(completions([1.0, 4.0, 11.0, 14.0]), completions(before)).state == "unclear"


def test_demonstrations_are_paired_by_row() -> None:
    result = verdict_of(demonstrations([-1.0, -2.1, -3.0]), demonstrations([-2.0, -3.0, -4.0]))
    assert result.state == "improved"
    assert result.value == pytest.approx((1.0 + 0.9 + 1.0) / 3)


def test_scores_are_compared_by_rank() -> None:
    rows = [{"id": str(i), "target": float(i), "reward": float(i) + (i % 3)} for i in range(30)]
    assert verdict_of(rows).state == "improved"
    assert verdict_of([{**row, "reward": -row["reward"]} for row in rows]).state == "worse"


@pytest.mark.parametrize("rows", [None, [], thumbs([1.0], [0.0]), demonstrations([-1.0, -2.0])])
def test_runs_without_measurements_have_no_verdict(rows: Rows | None) -> None:
    result = verdict_of(rows)
    assert (result.state, result.value) == ("unmeasured", None)
    assert result.headline


@pytest.mark.parametrize(("shift", "ups", "downs"), [(0.0, 10, 15), (1.5, 37, 50), (2.5, 8, 8)])
def test_the_interval_of_an_auc_covers_the_true_value(shift: float, ups: int, downs: int) -> None:
    """95 % nominally; simulated with normal scores, whose AUC is Phi(shift / sqrt(2))."""
    draw = random.Random(0)
    true = 0.5 * (1 + math.erf(shift / 2))
    hits = 0
    for _ in range(600):
        value = auc(
            [draw.gauss(shift, 1) for _ in range(ups)], [draw.gauss(0, 1) for _ in range(downs)]
        )
        low, high = auc_interval(value, ups, downs)
        hits += low <= true <= high
    assert 0.93 < hits / 600 < 0.99


def test_intervals_of_extreme_values() -> None:
    low, high = auc_interval(1.0, 4, 4)
    assert (low < 0.7, high) == (True, pytest.approx(1.0))
    assert auc_interval(0.3, 20, 20) == pytest.approx(
        tuple(1 - item for item in reversed(auc_interval(0.7, 20, 20)))
    )
    assert auc([1.0, 2.0, 2.0], [2.0, 0.0]) == pytest.approx((0 + 1 + 0.5 + 1 + 0.5 + 1) / 6)
    assert mean_interval([1.0, 3.0]) == pytest.approx((2 - 1.959964, 2 + 1.959964))


def test_rows_that_are_also_trained_on_are_left_out() -> None:
    good, bad = thumbs([1.0] * 30, [-1.0] * 30), thumbs([-1.0] * 30, [1.0] * 30)
    trained = [{**row, "in_train": True} for row in good]
    result = verdict_of([*trained, *bad])
    assert (result.state, result.count) == ("worse", len(bad))
    assert str(len(trained)) in result.sentence
    assert verdict_of(trained).state == "unmeasured"


def rate(value: float, error: float) -> dict[str, float]:
    return {"value": value, "low": value - error, "high": value + error}


@pytest.mark.parametrize(
    ("win_rate", "controlled", "state"),
    [
        (0.7, 0.65, "improved"),
        (0.7, 0.52, "form"),
        (0.7, 0.3, "form"),
        (0.55, 0.7, "unclear"),
        (0.3, 0.35, "worse"),
        (0.3, 0.5, "form"),
    ],
)
def test_a_better_candidate_wins_also_with_answers_of_equal_length(
    win_rate: float, controlled: float, state: str
) -> None:
    judge = {"judge": "rule", "win_rate": rate(win_rate, 0.1), "wins": 7, "ties": 1, "losses": 2}
    result = win_rate_verdict({**judge, "length_controlled": rate(controlled, 0.1)})
    assert result is not None
    assert (result.state, result.count) == (state, 10)
    assert {f"{100 * win_rate:.0f}", f"{100 * controlled:.0f}"} <= set(numbers(result.sentence))
    assert win_rate_verdict({**judge, "length_controlled": None}) is None
