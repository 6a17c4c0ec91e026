"""What the tokens of a round's answers are worth, against plain Python numbers."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from tests.golden.plain import column, positional
from valence.losses import LOSSES
from valence.losses.advantage import CREDITS, adapted, gae


@dataclass(frozen=True)
class Sampled:
    """An answer: the prompt it is to, its reward, whether it ended by itself; of each token what was said of it."""

    group: int
    reward: float
    finished: bool
    old: tuple[float, ...]
    ref: tuple[float, ...]
    value: tuple[float, ...]


def drawn(lengths: Sequence[int], groups: Sequence[int], seed: int = 0) -> list[Sampled]:
    draw = random.Random(seed)
    return [
        Sampled(group, draw.gauss(0, 1), i % 3 != 1, *(tuple(draw.gauss(-1, 0.5) for _ in range(n)) for _ in range(3)))
        for i, (n, group) in enumerate(zip(lengths, groups, strict=True))
    ]


ROUND = drawn([4, 1, 7, 3, 2, 5, 1], [0, 5, 0, 0, 5, 2, 0])


def tensors(answers: Sequence[Sampled]) -> dict[str, torch.Tensor]:
    given: dict[str, torch.Tensor] = {
        f"{name}_t": column(*(x for a in answers for x in getattr(a, name))) for name in ("old", "ref", "value")
    }
    owner = [i for i, a in enumerate(answers) for _ in a.old]
    return given | {
        "reward": column(*(a.reward for a in answers)), "group": torch.tensor([a.group for a in answers], dtype=torch.long),
        "owner": torch.tensor(owner, dtype=torch.long),
        "finished": torch.tensor([a.finished for a in answers], dtype=torch.bool),
    }  # fmt: skip


def credit(name: str, answers: Sequence[Sampled], **settings: Any) -> list[float]:
    given, fn = tensors(answers), CREDITS[name]
    found = fn(*(given[read] for read in positional(fn)), **settings)
    return (found["adv"] if isinstance(found, dict) else found).tolist()


def k1(answer: Sampled, start: int = 0) -> float:
    return sum(o - r for o, r in zip(answer.old[start:], answer.ref[start:], strict=True))


def standardised(values: Sequence[float]) -> list[float]:
    return [(v - fmean(values)) / (pstdev(values) + 1e-4) for v in values]


def compared(name: str, answers: Sequence[Sampled], kl_beta: float) -> list[float]:
    found: list[float] = []
    for i, a in enumerate(answers):
        peers = [b for b in answers if b.group == a.group]
        others = [b.reward - kl_beta * k1(b) for j, b in enumerate(answers) if b.group == a.group and i != j]
        rewards = [b.reward for b in peers]
        match name:
            case "dr_grpo":
                adv = a.reward - fmean(rewards)
            case "rloo":
                adv = a.reward - kl_beta * k1(a) - fmean(others) if others else 0.0
            case _:
                adv = (a.reward - fmean(rewards)) / (stdev(rewards) + 1e-4) if others else 0.0
        found += [adv] * len(a.old)
    return found


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "dr_grpo", "rloo"])
def test_answers_compared_with_those_to_the_same_prompt(name: str) -> None:
    settings = {"kl_beta": 0.3} if name == "rloo" else {}
    assert credit(name, ROUND, **settings) == pytest.approx(compared(name, ROUND, 0.3), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_reward_to_go(kl_beta: float) -> None:
    plain = [a.reward - kl_beta * k1(a, t) for a in ROUND for t in range(len(a.old))]
    assert credit("reinforce_pp", ROUND, kl_beta=kl_beta) == pytest.approx(standardised(plain), rel=1e-9)


def estimates(answer: Sampled, kl_beta: float, gamma: float, lam: float) -> list[float]:
    """A_t by its definition, a sum over all later tokens."""
    last = len(answer.old) - 1
    after = [*answer.value[1:], 0.0 if answer.finished else answer.value[last]]
    gained = [-kl_beta * (o - r) for o, r in zip(answer.old, answer.ref, strict=True)]
    gained[last] += answer.reward
    delta = [gained[t] + gamma * after[t] - answer.value[t] for t in range(last + 1)]
    return [sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, last + 1)) for t in range(last + 1)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("kl_beta", [0.0, 0.2])
def test_generalised_advantages(gamma: float, lam: float, kl_beta: float) -> None:
    given = tensors(ROUND)
    found = gae(*(given[name] for name in positional(gae)), kl_beta=kl_beta, gamma=gamma, gae_lambda=lam)
    plain = [adv for a in ROUND for adv in estimates(a, kl_beta, gamma, lam)]
    assert found["adv"].tolist() == pytest.approx(standardised(plain), rel=1e-9)
    returns = [adv + v for adv, v in zip(plain, (v for a in ROUND for v in a.value), strict=True)]
    assert found["return"].tolist() == pytest.approx(returns, rel=1e-9)


def test_an_answer_that_ended_has_nothing_behind_it_and_one_that_was_cut_has() -> None:
    """With lambda 1 and no cost of divergence the return is what is still to come: the reward, and the value where it was cut."""
    ended, cut = (Sampled(0, 2.0, finished, (-1.0,) * 3, (-1.0,) * 3, (0.1, 0.2, 0.4)) for finished in (True, False))
    given = tensors([ended, cut])
    found = gae(*(given[name] for name in positional(gae)), gae_lambda=1.0)
    assert found["return"].tolist() == pytest.approx([2.0, 2.0, 2.0, 2.4, 2.4, 2.4])


@pytest.mark.parametrize("name", CREDITS)
def test_equal_rewards_have_exactly_no_advantage(name: str) -> None:
    """Where policy and reference agree and values know nothing, also in groups of one; 0.1 is a number that sums round."""
    same = [Sampled(g, 0.1, True, (-1.0,) * 3, (-1.0,) * 3, (0.0,) * 3) for g in (0, 0, 0, 1, 1, 1, 2)]
    settings = {"gae_lambda": 1.0} if name == "ppo" else {}
    assert credit(name, same, **settings) == [0.0] * 21


@pytest.mark.parametrize("name", CREDITS)
def test_an_answer_alone_is_finite_and_none_is_nothing(name: str) -> None:
    (alone,) = credit(name, [Sampled(0, 3.0, False, (-1.0,), (-2.0,), (0.5,))])
    assert alone == 0.0
    assert credit(name, []) == []


@pytest.mark.parametrize("name", CREDITS)
def test_credit_does_not_depend_on_the_order_of_answers(name: str) -> None:
    order = [3, 6, 0, 5, 1, 4, 2]
    starts = [sum(len(a.old) for a in ROUND[:i]) for i in range(len(ROUND))]
    found, moved = credit(name, ROUND), credit(name, [ROUND[i] for i in order])
    wanted = [adv for i in order for adv in found[starts[i] : starts[i] + len(ROUND[i].old)]]
    assert moved == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("kl", "wanted"), [(6.0, 0.1), (3.0, 0.1 * (1 - 0.2 * 0.05)), (6.6, 0.1 * (1 + 0.1 * 0.05)), (60.0, 0.1 * (1 + 0.2 * 0.05))]
)
def test_the_cost_of_divergence_is_steered_to_a_target(kl: float, wanted: float) -> None:
    assert adapted(0.1, kl, target=6.0, horizon=10_000.0, count=500) == pytest.approx(wanted, rel=1e-12)


def test_the_cost_of_divergence_settles_where_the_divergence_is_the_target() -> None:
    """Of a policy whose divergence is 1/kl_beta."""
    kl_beta = 2.0
    for _ in range(4000):
        kl_beta = adapted(kl_beta, 1 / kl_beta, target=5.0, horizon=100.0, count=2)
    assert kl_beta == pytest.approx(0.2, rel=1e-6)


def test_every_method_of_own_answers_has_a_loss_and_its_settings_do_not_collide() -> None:
    assert CREDITS.keys() <= LOSSES.keys()
    for name, fn in CREDITS.items():
        own = {p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert not own & LOSSES[name].settings.keys()
    assert math.isfinite(sum(credit("ppo", ROUND)))
