"""The test of an A/B test: its error probability, its power, and its statistic computed again."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

from valence.apps.serve.sequential import (
    ALPHA,
    LOG_ODDS_RATIOS,
    MIN_VOTES,
    block_ends,
    log_e_values,
    rate_interval,
    sequential_test,
)


def votes(
    seed: int, num: int, rates: tuple[float, float], share: float = 0.5
) -> tuple[list[int], list[bool]]:
    """Sides and thumbs of random votes."""
    random = np.random.default_rng(seed)
    sides = (random.random(num) < share).astype(int)
    labels = random.random(num) < np.where(sides == 1, rates[1], rates[0])
    return sides.tolist(), labels.tolist()


def blocks(sides: list[int]) -> list[range]:
    """The blocks, vote by vote."""
    ranges, start = list[range](), 0
    for index in range(len(sides)):
        if len(set(sides[start : index + 1])) == 2:
            ranges.append(range(start, index + 1))
            start = index + 1
    return ranges


def e_values(sides: list[int], labels: list[bool]) -> list[tuple[float, float]]:
    """The e-values of A and B after each block, in a loop over votes and with exact products."""
    products = {(side, ratio): Fraction(1) for side in (0, 1) for ratio in LOG_ODDS_RATIOS}
    results = list[tuple[float, float]]()
    past = list[tuple[int, bool]]()
    for block in blocks(sides):
        rate = (sum(label for _, label in past) + 1) / (len(past) + 2)
        share = (sum(side for side, _ in past) + 1) / (len(past) + 2)
        for better, ratio in products:
            effect = ratio if better == 1 else -ratio
            odds = rate / (1 - rate)
            odds_of = (odds * math.exp(-effect * share), odds * math.exp(effect * (1 - share)))
            p_a, p_b = (Fraction(item / (1 + item)) for item in odds_of)
            num_b = sum(sides[index] for index in block)
            p_0 = ((len(block) - num_b) * p_a + num_b * p_b) / len(block)
            for index in block:
                p = p_b if sides[index] else p_a
                factor = p / p_0 if labels[index] else (1 - p) / (1 - p_0)
                products[better, ratio] *= factor
        past += [(sides[index], labels[index]) for index in block]
        a, b = (
            float(sum(products[side, ratio] for ratio in LOG_ODDS_RATIOS) / len(LOG_ODDS_RATIOS))
            for side in (0, 1)
        )
        results.append((a, b))
    return results


@pytest.mark.parametrize(("seed", "share"), [(0, 0.5), (1, 0.5), (2, 0.1), (3, 0.9)])
def test_the_statistic_agrees_with_an_independent_computation(seed: int, share: float) -> None:
    sides, labels = votes(seed, 80, (0.4, 0.7), share)
    side, label = np.array(sides), np.array(labels)
    ends = block_ends(side)
    assert ends.tolist() == [block[-1] for block in blocks(sides)]
    expected = e_values(sides, labels)
    means = np.exp(log_e_values(side, label, ends)).mean(1)
    for computed, exact in zip(means.T.tolist(), expected, strict=True):
        assert computed == pytest.approx(exact, rel=1e-9)
    assert sequential_test(sides, labels).e_values == pytest.approx(expected[-1], rel=1e-9)


@pytest.mark.parametrize("last", [[0, 1], [0, 0, 0, 1], [1, 1, 0]])
def test_the_expectation_of_a_block_is_at_most_one_where_no_side_is_better(last: list[int]) -> None:
    """Over all thumbs of one block, after some earlier votes, for rates of which B's is not higher
    (bets on B), or not lower (bets on A).
    """
    sides, labels = votes(4, 30, (0.5, 0.6))
    num = int(block_ends(np.array(sides))[-1]) + 1
    sides, labels = [*sides[:num], *last], labels[:num]
    ends = block_ends(np.array(sides))
    for rates in ((0.3, 0.3), (0.5, 0.5), (0.95, 0.95), (0.9, 0.2), (0.6, 0.5)):
        expectation = np.zeros((2, len(LOG_ODDS_RATIOS)))
        for thumbs in product((0, 1), repeat=len(last)):
            logs = log_e_values(np.array(sides), np.array([*labels, *thumbs]), ends)
            of_block = np.exp(logs[:, :, -1] - logs[:, :, -2])
            probability = math.prod(
                rates[side] if thumb else 1 - rates[side]
                for side, thumb in zip(last, thumbs, strict=True)
            )
            expectation += probability * of_block
        assert expectation[1].max() <= 1 + 1e-12
        if rates[0] == rates[1]:
            assert expectation[0].max() <= 1 + 1e-12
        else:
            assert expectation[0].max() > 1  # A is better, and the bets on it win


@pytest.mark.parametrize(("rate", "share"), [(0.5, 0.5), (0.8, 0.1), (0.02, 0.5)])
def test_without_a_difference_looking_at_every_vote_rarely_establishes_one(
    rate: float, share: float
) -> None:
    results = [sequential_test(*votes(seed, 1000, (rate, rate), share)) for seed in range(2000)]
    alarms = sum(result.better is not None for result in results)
    assert alarms / len(results) <= ALPHA


def test_a_side_that_is_a_little_worse_is_rarely_called_better() -> None:
    results = [sequential_test(*votes(seed, 500, (0.55, 0.5))).better for seed in range(1000)]
    assert results.count(1) / len(results) <= ALPHA / 2
    assert results.count(0) > results.count(1)


def test_a_rate_that_drifts_and_a_side_that_votes_less_raise_no_alarms() -> None:
    alarms = 0
    for seed in range(1000):
        random = np.random.default_rng(seed)
        num = 800
        sides = (random.random(num) < np.linspace(0.5, 0.2, num)).astype(int)
        labels = random.random(num) < np.linspace(0.2, 0.9, num)
        alarms += sequential_test(sides.tolist(), labels.tolist()).better is not None
    assert alarms / 1000 <= ALPHA


@pytest.mark.parametrize(
    ("rates", "share", "num"),
    [((0.5, 0.7), 0.5, 1000), ((0.7, 0.5), 0.5, 1000), ((0.6, 0.8), 0.1, 3000)],
)
def test_a_difference_is_established(rates: tuple[float, float], share: float, num: int) -> None:
    better = int(rates[1] > rates[0])
    results = [sequential_test(*votes(seed, num, rates, share)) for seed in range(200)]
    assert np.mean([result.better == better for result in results]) > 0.95
    assert not any(result.better == 1 - better for result in results)
    median = np.median([result.established_at or num for result in results])
    assert median < num / 2


def test_the_test_is_decided_at_the_first_vote_that_suffices() -> None:
    sides, labels = votes(5, 1000, (0.5, 0.8))
    end = sequential_test(sides, labels).established_at
    assert end is not None
    assert sequential_test(sides[:end], labels[:end]).better == 1
    assert sequential_test(sides[: end - 1], labels[: end - 1]).better is None
    # later votes that contradict it do not take it back
    contrary = [True, False] * 300
    later = sequential_test([*sides[:end], *[0, 1] * 300], [*labels[:end], *contrary])
    assert (later.better, later.established_at) == (1, end)
    assert later.e_values[1] < 1


def test_the_least_number_of_votes() -> None:
    num = 100
    result = sequential_test([0, 1] * num, [False, True] * num)
    assert result.better == 1
    assert result.established_at == 2 * MIN_VOTES
    for sides in ([], [0], [1, 1, 1]):
        empty = sequential_test(sides, [True] * len(sides))
        assert (empty.better, empty.e_values, empty.votes_left) == (None, (1.0, 1.0), None)


def test_the_estimate_of_further_votes_is_about_right() -> None:
    """In votes that repeat the same rates, so that the present rates are the true ones."""
    sides = [0, 1] * 2000
    up = {0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 11, 13, 15}  # of each 20: 5 of 10 for A, 8 of 10 for B
    labels = [index % 20 in up for index in range(len(sides))]
    established_at = sequential_test(sides, labels).established_at
    assert established_at is not None
    for part in (0.25, 0.5, 0.75):
        num = int(part * established_at) // 20 * 20
        left = sequential_test(sides[:num], labels[:num]).votes_left
        assert left is not None
        assert num + left == pytest.approx(established_at, rel=0.35)


def test_there_is_no_estimate_while_a_side_has_too_few_votes() -> None:
    labels = [True, True, False, True, True, False]
    for num_b, has_estimate in ((MIN_VOTES - 1, False), (MIN_VOTES, True)):
        sides = [0, 1] * num_b + [0] * 20
        result = sequential_test(sides, (labels * 10)[: len(sides)])
        assert result.better is None
        assert (result.votes_left is not None) == has_estimate


def test_equal_rates_have_no_estimate() -> None:
    result = sequential_test([0, 1] * 50, [True, True, False, False] * 25)
    assert (result.better, result.votes_left) == (None, None)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_interval_of_a_rate_holds_at_every_look(rate: float) -> None:
    misses = 0
    for seed in range(200):
        ups = np.cumsum(np.random.default_rng(seed).random(300) < rate)
        intervals = [rate_interval(int(ups[num - 1]), num) for num in range(5, 300, 5)]
        misses += not all(low <= rate <= high for low, high in intervals)
    assert misses / 200 <= ALPHA


def test_intervals_shrink_and_contain_the_rate() -> None:
    assert rate_interval(0, 0) == (0.0, 1.0)
    assert rate_interval(0, 20)[0] == 0.0
    assert rate_interval(20, 20)[1] == 1.0
    widths = list[float]()
    for num in (10, 100, 1000, 10_000):
        low, high = rate_interval(num // 2, num)
        assert low < 0.5 < high
        assert low == pytest.approx(1 - high)
        widths.append(high - low)
    assert all(later < earlier / 2 for earlier, later in pairwise(widths))
