"""The fixed point of online training, for problems with a closed-form solution.

Every step runs all possible answers to one prompt, weighted by their probability under the policy
(groups and pairs: by the product). Gradients are therefore expectations, without sampling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.plain import column, positional
from tests.units import ADVANTAGES, unit
from valence.batching.micro_batches import make_micro_batch
from valence.losses.average import counts, divisors
from valence.losses.modifiers import places
from valence.methods import METHODS
from valence.types import Kind, MicroBatch, PolicyOutput

LETTERS = 3
REWARD = {1: column(1.0, 0.2, 0.8), 2: column(0.9, 0.1, 0.4, 0.0, 1.2, 0.5, 0.3, 0.7, 1.0)}
"""Of all answers of one letter, and of two."""
REF = {1: column(0.2, 0.5, 0.3), 2: column(0.05, 0.2, 0.1, 0.15, 0.05, 0.1, 0.1, 0.2, 0.05)}
"""How likely the reference gives each."""


@dataclass(frozen=True)
class Policy:
    """A table of logits for every beginning, and of values: ``first[3]``, and ``second[3, 3]`` of
    answers of two letters.
    """

    first: Tensor
    second: Tensor | None
    values: Tensor

    @classmethod
    def start(cls, letters: int) -> Policy:
        """At the reference, where nothing is known of values."""
        shares = REF[letters].view(LETTERS, -1)
        first, second = (
            shares.sum(1).log(),
            (shares / shares.sum(1, keepdim=True)).log() if letters == 2 else None,
        )
        tables = [first, second, torch.zeros(1 + LETTERS * (letters - 1), dtype=torch.float64)]
        return cls(*(None if table is None else table.clone().requires_grad_() for table in tables))  # type: ignore[arg-type]

    @property
    def tables(self) -> list[Tensor]:
        return [table for table in (self.first, self.second, self.values) if table is not None]

    @property
    def logp(self) -> Tensor:
        """Of each letter of each answer: [A, n]."""
        if self.second is None:
            return self.first.log_softmax(0)[:, None]
        first, second = self.first.log_softmax(0), self.second.log_softmax(1)
        return torch.stack([first.repeat_interleave(LETTERS), second.flatten()], 1)

    @property
    def value(self) -> Tensor:
        """Before each letter of each answer: [A, n]."""
        answers = LETTERS if self.second is None else LETTERS**2
        return torch.stack(
            [
                self.values[:1].expand(answers),
                *([] if self.second is None else [self.values[1:].repeat_interleave(LETTERS)]),
            ],
            1,
        )

    @property
    def shares(self) -> Tensor:
        """Probability of each answer [A]."""
        return self.logp.detach().sum(1).exp()


@dataclass(frozen=True)
class Round:
    """Groups of answers, as one micro-batch in which each group is a unit (or each answer, where it
    has columns).
    """

    groups: Sequence[tuple[int, ...]]
    letters: int
    kind: Kind = "ranking"
    labels: tuple[bool, ...] | None = None
    soft: tuple[float, ...] | None = None

    @cached_property
    def arms(self) -> Tensor:
        return torch.tensor([a for group in self.groups for a in group])

    @cached_property
    def batch(self) -> MicroBatch:
        """Token ids have no effect: their log-probabilities replace them.

        No two answers share a beginning.
        """
        fresh = itertools.count(10)

        def ids() -> tuple[int, ...]:
            return tuple(next(fresh) for _ in range(self.letters))

        separate = (
            [(a,) for group in self.groups for a in group]
            if self.kind == "ranking"
            else self.groups
        )
        rows = [
            unit(
                f"{i}",
                self.kind,
                (5,),
                *(ids() for _ in group),
                label=self.labels[i] if self.labels else None,
                soft=self.soft[i] if self.soft else None,
            )
            for i, group in enumerate(separate)
        ]
        return make_micro_batch(rows)

    def rows(self, table: Tensor) -> Tensor:
        """Numbers of the answers' letters [A, n], where the micro-batch has its tokens [T]."""
        return torch.zeros(len(self.batch.tokens), dtype=table.dtype).index_put(
            (self.batch.scored,), self.read(table[self.arms])
        )

    def read(self, values: Tensor) -> Tensor:
        """Numbers of each sequence's letters [S, n], in the order in which the micro-batch reads
        them [N].
        """
        return values[self.batch.cpu_scored[1], places(self.batch)]


def loss_of(
    name: str,
    round: Round,
    policy: Policy,
    inputs: dict[str, Tensor],
    shared: dict[str, Tensor],
    likely: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """The expectation of a row's loss over what the policy itself would give. given: columns [S,
    n]; likely: of each group, where it was another policy that gave it.
    """
    loss, full = METHODS[name].loss, METHODS[name].resolve(settings)
    size = len(round.groups[0])
    likely = policy.shares[round.arms].view(-1, size).prod(1) if likely is None else likely
    weight = likely.repeat_interleave(size) * len(round.groups)
    batch = replace(
        round.batch,
        weight=weight,
        token_columns={key: round.read(values) for key, values in inputs.items()},
    )
    out = PolicyOutput(round.rows(policy.logp), value=round.rows(policy.value))
    ref = round.rows(Policy.start(round.letters).logp.detach())
    plain, view = loss.read(batch, out, ref, full, shared)
    names = loss.averages(full)
    return loss.total(plain, view, full, divisors(names, counts(names, [batch])))


def credit(name: str, round: Round, policy: Policy, **settings: Any) -> dict[str, Tensor]:
    """Columns [S, n] of a round that the policy has answered."""
    answers, n = len(round.arms), round.letters
    old, ref = policy.logp.detach()[round.arms], Policy.start(n).logp.detach()[round.arms]
    value = policy.value.detach()[round.arms]
    reward = REWARD[n][round.arms]
    reward_t = torch.zeros_like(old, dtype=reward.dtype)
    reward_t[:, -1] = reward
    known = {
        "reward": reward,
        "reward_t": reward_t.flatten(),
        "group": torch.arange(len(round.groups)).repeat_interleave(len(round.groups[0])),
        "owner": torch.arange(answers).repeat_interleave(n),
        "old_t": old.flatten(),
        "ref_t": ref.flatten(),
        "value_t": value.flatten(),
    }
    result = ADVANTAGES[name](*(known[read] for read in positional(ADVANTAGES[name])), **settings)
    columns: dict[str, Tensor] = {"adv": result} if isinstance(result, Tensor) else result
    return {key: values.view(answers, n) for key, values in columns.items()} | {
        "old": old,
        "value": value,
    }


def descend(step: Callable[[Policy], Tensor], letters: int, steps: int, lr: float) -> Tensor:
    """Shares [A] of the policy after steps of a rate that falls to 0."""
    policy = Policy.start(letters)
    optimizer = torch.optim.Adam(policy.tables, lr=lr, betas=(0.9, 0.9))
    for k in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - k / steps)
        optimizer.zero_grad()
        step(policy).backward()
        optimizer.step()
    return policy.shares


def groups_of(size: int, letters: int) -> Round:
    """All groups of this size that there are."""
    return Round(list(itertools.product(range(LETTERS**letters), repeat=size)), letters)


def tilted(letters: int, strength: float) -> Tensor:
    """ref * exp(R * strength), made a distribution: what maximises E[R] - KL/strength."""
    return (REF[letters].log() + REWARD[letters] * strength).softmax(0)


@pytest.mark.parametrize("letters", [1, 2])
@pytest.mark.parametrize(("name", "size"), [("rloo", 2), ("reinforce_pp", 1), ("ppo", 1)])
def test_with_the_divergence_in_the_reward_the_policy_is_the_tilted_reference(
    name: str, size: int, letters: int
) -> None:
    """pi = ref*exp(R/kl_beta), over whole answers; ppo learns its values along the way."""
    round = groups_of(size, letters)
    settings: dict[str, Any] = {"value": True} if name == "ppo" else {}

    def step(policy: Policy) -> Tensor:
        return loss_of(
            name, round, policy, credit(name, round, policy, kl_beta=0.5), {}, **settings
        )

    result = descend(step, letters, steps=200, lr=0.2)
    assert (result - tilted(letters, 2.0)).abs().max() < 2e-3
    assert (result - REF[letters]).abs().max() > 0.1


def test_values_are_those_of_the_policy() -> None:
    """Where the policy stands still, each is the reward that is expected from there."""
    round, policy = groups_of(1, 2), Policy.start(2)
    optimizer = torch.optim.Adam([policy.values], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        inputs = credit("ppo", round, policy)
        loss_of("ppo", round, policy, inputs, {}, value=True).backward()
        optimizer.step()
    shares, rewards = REF[2].view(LETTERS, -1), REWARD[2].view(LETTERS, -1)
    wanted = [(shares * rewards).sum(), *((shares * rewards).sum(1) / shares.sum(1))]
    assert policy.values.tolist() == pytest.approx([float(w) for w in wanted], abs=1e-3)


@pytest.mark.parametrize("size", [2, 3])
def test_with_k2_in_the_loss_it_is_too_by_the_part_of_the_reward_that_a_group_sees(
    size: int,
) -> None:
    """dr_grpo: of G answers each is in its own mean, so that of its reward (1 - 1/G) counts."""
    separate = (with_k2(groups_of(size, 1)) - tilted(1, (1 - 1 / size) / 0.5)).abs().max()
    assert separate < 1e-3


def test_k2_of_a_letter_does_not_see_the_divergence_of_those_that_follow() -> None:
    """So that of longer answers the first letters move too far: the second ones are right, given
    the first.
    """
    result, wanted = with_k2(groups_of(2, 2)).view(LETTERS, -1), tilted(2, 1.0).view(LETTERS, -1)
    inputs, right = (shares / shares.sum(1, keepdim=True) for shares in (result, wanted))
    assert (inputs - right).abs().max() < 2e-3
    first = (
        REF[2].view(LETTERS, -1).sum(1).log() + (right * REWARD[2].view(LETTERS, -1)).sum(1)
    ).softmax(0)
    assert (result.sum(1) - first).abs().max() < 2e-3
    assert (result.sum(1) - wanted.sum(1)).abs().max() > 0.01


def with_k2(round: Round) -> Tensor:
    def step(policy: Policy) -> Tensor:
        return loss_of(
            "dr_grpo",
            round,
            policy,
            credit("dr_grpo", round, policy),
            {},
            kl_weight=0.5,
            kl_estimator="k2",
        )

    return descend(step, round.letters, steps=150, lr=0.2)


def test_with_k3_in_the_loss_the_policy_is_another() -> None:
    """pi = kl_weight*ref/(lambda - R), lambda such that it adds up to 1."""
    round, beta = groups_of(2, 1), 0.3

    def step(policy: Policy) -> Tensor:
        return loss_of(
            "dr_grpo", round, policy, credit("dr_grpo", round, policy), {}, kl_weight=beta
        )

    result, observed = descend(step, 1, steps=150, lr=0.2), REWARD[1] / 2
    low, high = float(observed.max()), float(observed.max()) + beta
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if float((beta * REF[1] / (middle - observed)).sum()) > 1
            else (low, middle)
        )
    assert (result - beta * REF[1] / (low - observed)).abs().max() < 1e-3
    assert (result - tilted(1, 0.5 / beta)).abs().max() > 0.01


@pytest.mark.parametrize(
    "name",
    ["grpo", "gspo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dapo", "cispo"))],
)
def test_divided_by_the_spread_rewards_are_ranks_of_pairs(name: str) -> None:
    """In a group of two the better answer has an advantage of nearly 1/sqrt(2), however much better
    it is. With k2 in the loss kl_weight*log(pi/ref) is, but for a constant, the expected advantage
    of an answer, which depends on pi itself.
    """
    round, beta = groups_of(2, 1), 0.5

    def step(policy: Policy) -> Tensor:
        return loss_of(
            name, round, policy, credit(name, round, policy), {}, kl_weight=beta, kl_estimator="k2"
        )

    result = descend(step, 1, steps=400, lr=0.1).tolist()
    rewards = REWARD[1].tolist()

    def advantage(a: float, b: float) -> float:
        return (a - b) / 2 / (abs(a - b) / math.sqrt(2) + 1e-4)

    expected = [
        sum(p * advantage(a, b) for p, b in zip(result, rewards, strict=True)) for a in rewards
    ]
    levels = [
        beta * math.log(p / q) - e
        for p, q, e in zip(result, REF[1].tolist(), expected, strict=True)
    ]
    assert max(levels) - min(levels) < 2e-3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_without_a_divergence_only_the_best_answer_is_left(name: str) -> None:
    round = groups_of(2, 2)

    def step(policy: Policy) -> Tensor:
        return loss_of(name, round, policy, credit(name, round, policy), {})

    result = descend(step, 2, steps=150, lr=0.3)
    assert result[int(REWARD[2].argmax())] > 0.99


@pytest.mark.parametrize("n", [2, 4])
def test_a_round_of_rejection_ends_at_the_law_of_the_best_of_n(n: int) -> None:
    """P(R <= r)^n - P(R < r)^n of the policy that answered, once the best ones are imitated to the
    end.
    """
    best = [
        max(group, key=lambda a: float(REWARD[1][a]))
        for group in itertools.product(range(LETTERS), repeat=n)
    ]
    likely = column(
        *(
            math.prod(REF[1][list(group)].tolist())
            for group in itertools.product(range(LETTERS), repeat=n)
        )
    )
    round = Round([(a,) for a in best], 1, "demonstration")

    def step(policy: Policy) -> Tensor:
        # the answers stay those of the policy that it was
        return loss_of("sft", round, policy, {}, {}, likely)

    order = REWARD[1].argsort()
    reached = torch.cat([column(0.0), REF[1][order].cumsum(0)]) ** n
    law = torch.empty(LETTERS, dtype=torch.float64).index_copy(0, order, reached.diff())
    assert (descend(step, 1, steps=150, lr=0.2) - law).abs().max() < 1e-3


def test_online_dpo_ends_where_the_verdicts_say() -> None:
    """Pairs that the policy has sampled: ref*exp(R/beta) where a verdict is right with probability
    s(R_w - R_l); and for two answers whose verdict is always the same, a share e of them taken for
    wrong, odds ((1-e)/e)^(1/beta) times the reference's.
    """
    pairs = [(a, b) for a in range(LETTERS) for b in range(LETTERS) if a != b]
    soft = tuple(float(torch.sigmoid(REWARD[1][a] - REWARD[1][b])) for a, b in pairs)
    judged, certain = Round(pairs, 1, "preference", soft=soft), Round([(0, 1)], 1, "preference")
    result = descend(
        lambda policy: loss_of("dpo", judged, policy, {}, {}, beta=0.5), 1, steps=150, lr=0.2
    )
    assert (result - tilted(1, 2.0)).abs().max() < 1e-3
    two = descend(
        lambda policy: loss_of("dpo", certain, policy, {}, {}, beta=0.5, label_smoothing=0.2),
        1,
        steps=150,
        lr=0.2,
    )
    assert float(two[0] / two[1]) == pytest.approx(float(REF[1][0] / REF[1][1]) * 4.0**2, rel=1e-3)


def test_online_kto_leaves_desirable_answers_alone() -> None:
    """Its gradient never changes sign: all probability goes to answers above the threshold."""
    labels = tuple(bool(r > 0.5) for r in REWARD[1])
    round = Round([(a,) for a in range(LETTERS)], 1, "judgement", labels=labels)

    def step(policy: Policy) -> Tensor:
        kl = (policy.shares * (policy.shares / REF[1]).log()).sum().clamp(min=0)
        return loss_of("kto", round, policy, {}, {"z0": kl.expand(LETTERS)})

    result = descend(step, 1, steps=200, lr=0.3)
    assert float(result[list(labels)].sum()) > 0.99
