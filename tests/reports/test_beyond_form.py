"""A verdict of "improved" needs more than the length and the form of the answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from valence.reports.verdict import Verdict, held_out_verdict, rows_needed
from valence.statistics import MIN_CLASS_ROWS

SEEDS = range(20)
NUM_ROWS = 120
Row = dict[str, Any]


def text_of(length: int) -> str:
    return " ".join(["word"] * length)


def draw(seed: int, num_rows: int = NUM_ROWS) -> tuple[list[int], list[float], random.Random]:
    """Lengths of answers, their quality, and the generator that drew both."""
    generator = random.Random(seed)
    lengths = [generator.randint(5, 80) for _ in range(num_rows)]
    return lengths, [generator.gauss(0, 1) for _ in lengths], generator


def thumbs(labels: list[bool], rewards: list[float], lengths: list[int]) -> list[Row]:
    return [
        {"id": str(i), "prompt": f"question {i}", "completion": text_of(length),
         "tokens": length, "label": label, "reward": reward}
        for i, (label, reward, length) in enumerate(zip(labels, rewards, lengths, strict=True))
    ]  # fmt: skip


def scores(targets: list[float], rewards: list[float], lengths: list[int]) -> list[Row]:
    rows = thumbs([True] * len(targets), rewards, lengths)
    return [{**row, "label": None, "target": n} for row, n in zip(rows, targets, strict=True)]


def pairs(better: list[float], rewards: list[float], lengths: list[int]) -> list[Row]:
    """Pairs of two neighbours, of which the one that is better was chosen."""
    rows: list[Row] = []
    for i in range(0, len(better), 2):
        sides = {"chosen": i, "rejected": i + 1}
        if better[i] < better[i + 1]:
            sides = {"chosen": i + 1, "rejected": i}
        row: Row = {"id": str(i), "prompt": f"question {i}"}
        for side, n in sides.items():
            row |= {side: text_of(lengths[n]), f"tokens_{side}": lengths[n]}
            row[f"reward_{side}"] = rewards[n]
        rows.append(row)
    return rows


def verdict_of(rows: list[Row]) -> Verdict:
    return held_out_verdict(None, {"rows": rows})


def shorter_is_liked(lengths: list[int]) -> list[bool]:
    return [length < 43 for length in lengths]


def often_shorter_is_liked(lengths: list[int], generator: random.Random) -> list[bool]:
    return [length + generator.gauss(0, 20) < 43 for length in lengths]


def a_random_model(seed: int) -> list[Row]:
    lengths, noise, generator = draw(seed)
    return thumbs(often_shorter_is_liked(lengths, generator), noise, lengths)


def a_model_of_length(seed: int) -> list[Row]:
    """What a random model of two layers learns from such labels."""
    lengths, noise, generator = draw(seed)
    rewards = [-length / 20 + item for length, item in zip(lengths, noise, strict=True)]
    return thumbs(often_shorter_is_liked(lengths, generator), rewards, lengths)


def labels_of_length(seed: int) -> list[Row]:
    """Labels that follow length alone, and a model that follows it closely."""
    lengths, noise, _ = draw(seed)
    rewards = [-length / 10 + item for length, item in zip(lengths, noise, strict=True)]
    return thumbs(shorter_is_liked(lengths), rewards, lengths)


def shuffled_labels(seed: int) -> list[Row]:
    lengths, quality, generator = draw(seed)
    labels = [item > 0 for item in quality]
    generator.shuffle(labels)
    rewards = [item - length / 20 for item, length in zip(quality, lengths, strict=True)]
    return thumbs(labels, rewards, lengths)


def pairs_of_length(seed: int) -> list[Row]:
    lengths, noise, generator = draw(seed, 2 * NUM_ROWS)
    better = [generator.gauss(0, 15) - length for length in lengths]
    rewards = [-length / 10 + item for length, item in zip(lengths, noise, strict=True)]
    return pairs(better, rewards, lengths)


def pairs_at_random(seed: int) -> list[Row]:
    lengths, noise, generator = draw(seed, 2 * NUM_ROWS)
    return pairs([generator.gauss(0, 15) - length for length in lengths], noise, lengths)


def scores_of_length(seed: int) -> list[Row]:
    lengths, noise, generator = draw(seed)
    targets = [generator.gauss(0, 15) - length for length in lengths]
    rewards = [-length / 10 + item for length, item in zip(lengths, noise, strict=True)]
    return scores(targets, rewards, lengths)


@pytest.mark.parametrize(
    "make",
    [a_random_model, a_model_of_length, labels_of_length, shuffled_labels, pairs_of_length,
     pairs_at_random, scores_of_length],
)  # fmt: skip
def test_length_alone_and_chance_are_never_an_improvement(
    make: Callable[[int], list[Row]],
) -> None:
    states = [verdict_of(make(seed)).state for seed in SEEDS]
    assert "improved" not in states
    if make in (a_model_of_length, labels_of_length, pairs_of_length, scores_of_length):
        assert states.count("form") >= 16  # it does rank the rows, as length does


@pytest.mark.parametrize("label_follows_length", [False, True])
def test_a_gain_that_has_nothing_to_do_with_length_is_an_improvement(
    label_follows_length: bool,
) -> None:
    states: list[str] = []
    for seed in SEEDS:
        # where form alone ranks well, more rows are needed to show that the model ranks better
        lengths, quality, generator = draw(seed, NUM_ROWS * (2 if label_follows_length else 1))
        weight = 1 / 20 if label_follows_length else 0.0
        wanted = [item - weight * (n - 42) for item, n in zip(quality, lengths, strict=True)]
        rewards = [item + generator.gauss(0, 0.7) for item in wanted]
        states.append(verdict_of(thumbs([item > 0 for item in wanted], rewards, lengths)).state)
    assert states.count("improved") >= 16


def test_a_gain_of_pairs_that_has_nothing_to_do_with_length_is_an_improvement() -> None:
    states: list[str] = []
    for seed in SEEDS:
        lengths, quality, generator = draw(seed, 2 * NUM_ROWS)
        rewards = [item + generator.gauss(0, 0.7) for item in quality]
        states.append(verdict_of(pairs(quality, rewards, lengths)).state)
    assert states.count("improved") >= 16


def test_a_gain_of_scores_that_has_nothing_to_do_with_length_is_an_improvement() -> None:
    states: list[str] = []
    for seed in SEEDS:
        lengths, quality, generator = draw(seed)
        rewards = [item + generator.gauss(0, 0.7) for item in quality]
        states.append(verdict_of(scores(quality, rewards, lengths)).state)
    assert states.count("improved") >= 16


@pytest.mark.parametrize("seed", SEEDS)
def test_an_improvement_ranks_better_than_form_alone(seed: int) -> None:
    """The sentence never says "Improved" next to an interval that includes no difference."""
    lengths, quality, generator = draw(seed)
    wanted = [item - (n - 42) / 10 for item, n in zip(quality, lengths, strict=True)]
    rewards = [item + generator.gauss(0, 0.7) for item in wanted]
    result = verdict_of(thumbs([item > 0 for item in wanted], rewards, lengths))
    low = int(result.sentence.split("points, 95 % interval ")[1].split(" ")[0])
    assert result.state != "improved" or low >= 0


def test_the_sentence_has_what_form_alone_reaches() -> None:
    result = verdict_of(labels_of_length(0))
    assert result.state == "form"
    assert "form" in result.headline
    assert "Improved" not in result.headline
    alone = int(result.sentence.split("form alone reach ")[1].split(" %")[0])
    assert alone >= 95


def test_the_rewards_before_training_are_no_improvement() -> None:
    """A reward model that ranks well before training and equally well after it."""
    lengths, quality, generator = draw(0)
    rewards = [item + generator.gauss(0, 0.3) for item in quality]
    rows = thumbs([item > 0 for item in quality], rewards, lengths)
    assert verdict_of(rows).state == "improved"
    assert held_out_verdict({"rows": rows}, {"rows": rows}).state == "unclear"


def test_few_rows_are_no_improvement() -> None:
    num_ups = MIN_CLASS_ROWS - 1
    labels = [True] * num_ups + [False] * 40
    rewards = [1.0 + 0.01 * i if label else -1.0 for i, label in enumerate(labels)]
    result = verdict_of(thumbs(labels, rewards, [20 + i % 7 for i in range(len(labels))]))
    assert result.state == "unclear"
    assert str(rows_needed(num_ups / len(labels))) in result.sentence


def test_the_rows_that_a_verdict_needs_find_seven_of_ten_in_four_of_five_evaluations() -> None:
    """Simulated: scores of two normal classes of which 70 % of all comparisons are right."""
    generator = random.Random(0)
    for share in (0.5, 0.2):
        needed, num_detected, trials = rows_needed(share), 0, 200
        num_ups = round(share * needed)
        for _ in range(trials):
            ups = [generator.gauss(0.7416, 1) for _ in range(num_ups)]  # sqrt(2) * 0.5244
            downs = [generator.gauss(0, 1) for _ in range(needed - num_ups)]
            rows = [
                {"id": str(i), "label": i < num_ups, "reward": reward}
                for i, reward in enumerate([*ups, *downs])
            ]
            num_detected += verdict_of(rows).state == "improved"
        assert 0.7 <= num_detected / trials <= 0.92
    assert rows_needed(None) == 47
