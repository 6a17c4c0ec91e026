"""Advantages of the tokens of a round's answers, compared with Python numbers."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from tests.golden.plain import column, positional
from tests.units import ADVANTAGES
from valence.losses import LOSSES
from valence.losses.advantage import adapted, gae


@dataclass(frozen=True)
class Sampled:
    """A completion: its prompt, its reward, log-probabilities and value of each token, and what
    the last tokens of earlier turns have earned of the reward, by position.
    """

    group: int
    reward: float
    old: tuple[float, ...]
    ref: tuple[float, ...]
    value: tuple[float, ...]
    earned: Mapping[int, float] = field(default_factory=dict[int, float])

    def at(self, t: int) -> float:
        """The reward at a token."""
        last = self.reward - sum(self.earned.values()) if t == len(self.old) - 1 else 0.0
        return last + self.earned.get(t, 0.0)


def drawn(lengths: Sequence[int], groups: Sequence[int], seed: int = 0) -> list[Sampled]:
    draw = random.Random(seed)
    return [
        Sampled(
            group,
            draw.gauss(0, 1),
            *(tuple(draw.gauss(-1, 0.5) for _ in range(n)) for _ in range(3)),
        )
        for n, group in zip(lengths, groups, strict=True)
    ]


ROUND = drawn([4, 1, 7, 3, 2, 5, 1], [0, 5, 0, 0, 5, 2, 0])
TURNS = [replace(a, earned={1: 0.7, 4: -2.0} if len(a.old) == 7 else {}) for a in ROUND]


def tensors(answers: Sequence[Sampled]) -> dict[str, torch.Tensor]:
    settings: dict[str, torch.Tensor] = {
        f"{name}_t": column(*(x for a in answers for x in getattr(a, name)))
        for name in ("old", "ref", "value")
    }
    owner = [i for i, a in enumerate(answers) for _ in a.old]
    return settings | {
        "reward": column(*(a.reward for a in answers)),
        "reward_t": column(*(a.at(t) for a in answers for t in range(len(a.old)))),
        "group": torch.tensor([a.group for a in answers], dtype=torch.long),
        "owner": torch.tensor(owner, dtype=torch.long),
    }


def credit(name: str, answers: Sequence[Sampled], **settings: Any) -> list[float]:
    inputs, fn = tensors(answers), ADVANTAGES[name]
    result = fn(*(inputs[read] for read in positional(fn)), **settings)
    return (result["adv"] if isinstance(result, dict) else result).tolist()


def k1(answer: Sampled, start: int = 0) -> float:
    return sum(o - r for o, r in zip(answer.old[start:], answer.ref[start:], strict=True))


def standardised(values: Sequence[float]) -> list[float]:
    return [(v - fmean(values)) / (pstdev(values) + 1e-4) for v in values]


def compared(name: str, answers: Sequence[Sampled], kl_beta: float) -> list[float]:
    results: list[float] = []
    for i, a in enumerate(answers):
        peers = [b for b in answers if b.group == a.group]
        others = [
            b.reward - kl_beta * k1(b)
            for j, b in enumerate(answers)
            if b.group == a.group and i != j
        ]
        rewards = [b.reward for b in peers]
        match name:
            case "dr_grpo":
                adv = a.reward - fmean(rewards)
            case "rloo":
                adv = a.reward - kl_beta * k1(a) - fmean(others) if others else 0.0
            case _:
                adv = (a.reward - fmean(rewards)) / (stdev(rewards) + 1e-4) if others else 0.0
        results += [adv] * len(a.old)
    return results


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "dr_grpo", "rloo"])
def test_answers_compared_with_those_to_the_same_prompt(name: str) -> None:
    settings = {"kl_beta": 0.3} if name == "rloo" else {}
    assert credit(name, ROUND, **settings) == pytest.approx(
        compared(name, ROUND, 0.3), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("answers", [ROUND, TURNS], ids=["whole", "turns"])
@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_reward_to_go(kl_beta: float, answers: Sequence[Sampled]) -> None:
    plain = [
        sum(a.at(i) for i in range(t, len(a.old))) - kl_beta * k1(a, t)
        for a in answers
        for t in range(len(a.old))
    ]
    assert credit("reinforce_pp", answers, kl_beta=kl_beta) == pytest.approx(
        standardised(plain), rel=1e-9
    )


def estimates(answer: Sampled, kl_beta: float, gamma: float, lam: float) -> list[float]:
    """A_t by its definition, a sum over all later tokens."""
    last = len(answer.old) - 1
    after = [*answer.value[1:], 0.0]
    spent = [kl_beta * (o - r) for o, r in zip(answer.old, answer.ref, strict=True)]
    gained = [answer.at(t) - cost for t, cost in enumerate(spent)]
    delta = [gained[t] + gamma * after[t] - answer.value[t] for t in range(last + 1)]
    return [
        sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, last + 1))
        for t in range(last + 1)
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("kl_beta", [0.0, 0.2])
@pytest.mark.parametrize("answers", [ROUND, TURNS], ids=["whole", "turns"])
def test_generalised_advantages(
    gamma: float, lam: float, kl_beta: float, answers: Sequence[Sampled]
) -> None:
    inputs = tensors(answers)
    result = gae(
        *(inputs[name] for name in positional(gae)), kl_beta=kl_beta, gamma=gamma, gae_lambda=lam
    )
    plain = [adv for a in answers for adv in estimates(a, kl_beta, gamma, lam)]
    assert result["adv"].tolist() == pytest.approx(standardised(plain), rel=1e-9)
    returns = [adv + v for adv, v in zip(plain, (v for a in answers for v in a.value), strict=True)]
    assert result["return"].tolist() == pytest.approx(returns, rel=1e-9)


def test_advantages_by_hand() -> None:
    """R = 2 at the last token, V = (0.5, 1, 3), gamma = lambda = 0.5, no cost of divergence.

    d = (0.5*1 - 0.5, 0.5*3 - 1, 2 - 3) = (0, 0.5, -1); A_2 = -1, A_1 = 0.5 - 0.25 = 0.25,
    A_0 = 0.25*0.25 = 0.0625; G = A + V = (0.5625, 1.25, 2).
    """
    inputs = tensors([Sampled(0, 2.0, (-1.0,) * 3, (-1.0,) * 3, (0.5, 1.0, 3.0))])
    result = gae(*(inputs[name] for name in positional(gae)), gamma=0.5, gae_lambda=0.5)
    assert result["return"].tolist() == pytest.approx([0.5625, 1.25, 2.0], rel=1e-12)
    assert result["adv"].tolist() == pytest.approx(standardised([0.0625, 0.25, -1.0]), rel=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_returns_have_the_reward_as_fixed_point(lam: float) -> None:
    """Values that are set to their returns again and again converge to the outcome reward, whether
    a completion was truncated or ended by itself: its value is that of its tokens, nothing follows.
    """
    rewards = (1.0, -0.5)
    answers = [
        Sampled(i, r, (-1.0,) * n, (-1.0,) * n, (0.0,) * n)
        for i, (r, n) in enumerate(zip(rewards, (6, 3), strict=True))
    ]
    inputs = tensors(answers)
    for _ in range(200):
        inputs["value_t"] = gae(
            *(inputs[name] for name in positional(gae)), kl_beta=0.0, gae_lambda=lam
        )["return"]
    assert inputs["value_t"].tolist() == pytest.approx([1.0] * 6 + [-0.5] * 3, abs=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_exactly_no_advantage(name: str) -> None:
    """Where policy and reference agree and values know nothing, also in groups of one; 0.1 is a
    number that sums round.
    """
    same = [Sampled(g, 0.1, (-1.0,) * 3, (-1.0,) * 3, (0.0,) * 3) for g in (0, 0, 0, 1, 1, 1, 2)]
    settings = {"gae_lambda": 1.0} if name == "ppo" else {}
    assert credit(name, same, **settings) == [0.0] * 21


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_answer_alone_is_finite_and_none_is_nothing(name: str) -> None:
    (alone,) = credit(name, [Sampled(0, 3.0, (-1.0,), (-2.0,), (0.5,))])
    assert alone == 0.0
    assert credit(name, []) == []


@pytest.mark.parametrize("name", ADVANTAGES)
def test_credit_does_not_depend_on_the_order_of_answers(name: str) -> None:
    order = [3, 6, 0, 5, 1, 4, 2]
    starts = [sum(len(a.old) for a in ROUND[:i]) for i in range(len(ROUND))]
    result, moved = credit(name, ROUND), credit(name, [ROUND[i] for i in order])
    wanted = [adv for i in order for adv in result[starts[i] : starts[i] + len(ROUND[i].old)]]
    assert moved == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (6.0, 0.1),
        (3.0, 0.1 * (1 - 0.2 * 0.05)),
        (6.6, 0.1 * (1 + 0.1 * 0.05)),
        (60.0, 0.1 * (1 + 0.2 * 0.05)),
    ],
)
def test_the_cost_of_divergence_is_steered_to_a_target(kl: float, wanted: float) -> None:
    assert adapted(0.1, kl, target=6.0, horizon=10_000.0, count=500) == pytest.approx(
        wanted, rel=1e-12
    )


def test_the_cost_of_divergence_settles_where_the_divergence_is_the_target() -> None:
    """Of a policy whose divergence is 1/kl_beta."""
    kl_beta = 2.0
    for _ in range(4000):
        kl_beta = adapted(kl_beta, 1 / kl_beta, target=5.0, horizon=100.0, count=2)
    assert kl_beta == pytest.approx(0.2, rel=1e-6)


def test_every_online_method_has_a_loss_and_their_settings_do_not_collide() -> None:
    assert ADVANTAGES.keys() <= LOSSES.keys()
    for name, fn in ADVANTAGES.items():
        actual = {
            p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY
        }
        assert not actual & LOSSES[name].settings.keys()
    assert math.isfinite(sum(credit("ppo", ROUND)))
