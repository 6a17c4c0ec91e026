"""Outputs of models for a step's rows, from their logits or scores, one sequence at a time, as
Python numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from tests.models.test_scores import reward_model
from tests.tiny_models import tiny
from tests.units import units
from valence.models.build import build_policy, build_reference
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference
from valence.models.values import add_values
from valence.types import Kind, TokenizedCompletion, TokenizedExample

Of = Literal["tokens", "values", "scores", "levels"]
"""The outputs: log-probabilities of tokens by two language models, the same with a value head, two
attributes by a reward model, or these with thresholds of levels.
"""
LEVELS = 5
STEP = 1e-4
"""Distance of the weights at which a loss is computed for its derivative."""


Logps = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ModelOutputs:
    """Of each token that is read: its log-probability under policy, reference and teacher (the
    reference after the prompt of the teacher), the policy's log sum_v p_v^2, and what its value
    head says before it; and the log-probabilities of the entire vocabulary in its place, under
    policy and teacher. Of the answer: what a reward model scores
    each attribute with, and its thresholds.
    """

    logp: tuple[float, ...] = ()
    ref: tuple[float, ...] = ()
    log_sum_sq: tuple[float, ...] = ()
    critic: tuple[float, ...] = ()
    score: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()
    teacher: tuple[float, ...] = ()
    all_logps: Logps = ()
    all_teacher_logps: Logps = ()

    @property
    def n(self) -> int:
        return len(self.logp)


@dataclass(frozen=True)
class Models:
    """Those that disagree, such that z0 is above zero, and a direction (of length 1) in the
    policy's weights.
    """

    policy: PolicyModel
    reference: FrozenReference | None
    direction: tuple[Tensor, ...]

    def slope(self) -> float:
        """Derivative of the policy's outputs along the direction."""
        parts = zip(self.policy.parameters(), self.direction, strict=True)
        return sum(float((p.grad * v).sum()) for p, v in parts if p.grad is not None)

    @torch.no_grad()
    def move(self, distance: float) -> None:
        for p, v in zip(self.policy.parameters(), self.direction, strict=True):
            p.add_(distance * v)


@cache
def models(of: Of) -> Models:
    reference = None
    if of in ("tokens", "values"):
        policy = build_policy(tiny("gpt2", seed=3), dtype=torch.float64)
        if of == "values":
            add_values(policy, trunk="shared")
            torch.nn.init.normal_(
                _head(policy).weight, std=0.3, generator=torch.Generator().manual_seed(4)
            )
        reference = build_reference(
            policy, fresh_adapter=False, model=tiny("gpt2", seed=8), name="another"
        )
        assert isinstance(reference, FrozenReference)
    else:
        policy = build_policy(
            reward_model("gpt2"), dtype=torch.float64, levels=LEVELS if of == "levels" else None
        )
    assert policy.packs, (
        "the packed layout was found wrong: its one-by-one stand-in would hide this here"
    )
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in policy.parameters()]
    length = math.sqrt(sum(float(v.square().sum()) for v in drawn))
    return Models(policy, reference, tuple(v / length for v in drawn))


@cache
def rows(kind: Kind) -> list[TokenizedExample]:
    """Rows of which some tokens are not read: inside some answers, and (of demonstrations) all but
    an earlier turn. Their numbers are the same in 24 bits. Those to be scored give two attributes,
    one, or none.
    """
    return [_varied(row, i) for i, row in enumerate(units(kind))]


def _varied(row: TokenizedExample, i: int) -> TokenizedExample:
    answers = tuple(
        TokenizedCompletion(a.ids, tuple(t != 1 or i % 2 == 0 for t in range(len(a.ids))))
        for a in row.answers
    )
    earlier = row.kind == "demonstration" and i % 3 == 0
    prompt_mask = tuple(earlier and t > 0 for t in range(len(row.prompt_ids)))
    if row.kind == "scored":
        row = replace(
            row,
            scores=(math.nan if i == 4 else i % 5 / 4, math.nan if i % 2 == 0 else (i + 1) % 4 / 4),
        )
    return replace(
        row, prompt_mask=prompt_mask, answers=answers, soft=None if row.soft is None else 0.75
    )


@cache
def sampled(known: tuple[str, ...]) -> list[TokenizedExample]:
    """Rankings with what was known of their tokens when they were sampled, near to what the policy
    says of them now; and what would be seen in any number that is made of a token that is not to be
    read.
    """
    draw = random.Random(11)

    def column(name: str, message: ModelOutputs, mask: tuple[bool, ...]) -> tuple[float, ...]:
        here, spread = {"old": (message.logp, 0.3), "sampler": (message.logp, 0.4)}.get(
            name, ((0.0,) * message.n, 1.0)
        )
        values = iter([x + draw.gauss(0, spread) for x in here])
        return tuple(next(values) if read else 1e6 for read in mask)

    def with_columns(a: TokenizedCompletion, message: ModelOutputs) -> TokenizedCompletion:
        return replace(a, columns=tuple((name, column(name, message, a.mask)) for name in known))

    result = zip(rows("ranking"), measured("ranking", 0.0, "tokens"), strict=True)
    return [
        replace(row, answers=tuple(map(with_columns, row.answers, message)))
        for row, message in result
    ]


@cache
def measured(kind: Kind, distance: float, of: Of) -> list[list[ModelOutputs]]:
    """Of every answer of every row, with the policy's weights moved along the direction."""
    say = _outputs if of in ("tokens", "values") else _scored
    models(of).move(distance)
    results = [
        [
            _with_teacher(say(row.prompt_ids + a.ids, row.prompt_mask + a.mask, of), row, a, of)
            for a in row.answers
        ]
        for row in rows(kind)
    ]
    models(of).move(-distance)
    return results


@cache
def crossed(kind: Kind, i: int, j: int) -> ModelOutputs:
    """The answer of row j after the prompt of row i."""
    prompt, answer = rows(kind)[i].prompt_ids, rows(kind)[j].answers[0]
    return _outputs(prompt + answer.ids, (False,) * len(prompt) + answer.mask, "tokens")


def _outputs(ids: tuple[int, ...], mask: tuple[bool, ...], of: Of) -> ModelOutputs:
    read = [t for t, flag in enumerate(mask) if flag]
    both = models(of)
    assert both.reference is not None
    ours, theirs = (_log_softmax(engine, ids) for engine in (both.policy, both.reference.engine))
    logp, ref = (tuple(result[t - 1][ids[t]] for t in read) for result in (ours, theirs))
    values = _values(both.policy, ids) if of == "values" else []
    spread = tuple(math.log(sum(math.exp(2 * v) for v in ours[t - 1])) for t in read)
    return ModelOutputs(
        logp,
        ref,
        spread,
        tuple(values[t - 1] for t in read) if values else (),
        all_logps=tuple(tuple(ours[t - 1]) for t in read),
        all_teacher_logps=tuple(tuple(theirs[t - 1]) for t in read),
    )


def _with_teacher(
    outputs: ModelOutputs, row: TokenizedExample, answer: TokenizedCompletion, of: Of
) -> ModelOutputs:
    """The teacher is the reference, which reads the prompt of the teacher if there is one."""
    if of != "tokens":
        return outputs
    if not row.teacher_ids:
        return replace(outputs, teacher=outputs.ref)
    mask = (False,) * len(row.teacher_ids) + answer.mask
    read = _outputs(row.teacher_ids + answer.ids, mask, "tokens")
    return replace(outputs, teacher=read.ref, all_teacher_logps=read.all_teacher_logps)


def _head(policy: PolicyModel) -> torch.nn.Linear:
    assert policy.critic is not None
    return policy.critic.head


@torch.no_grad()
def _values(policy: PolicyModel, ids: Sequence[int]) -> list[float]:
    """Values of the value head [n], one per hidden state."""
    with policy.stock():
        states = (
            policy.causal.transformer(input_ids=torch.tensor([ids]), use_cache=False)
            .last_hidden_state[0]
            .tolist()
        )
    (weight,), bias = _head(policy).weight.tolist(), _head(policy).bias.item()
    return [sum(w * h for w, h in zip(weight, state, strict=True)) + bias for state in states]


def _scored(ids: tuple[int, ...], mask: tuple[bool, ...], of: Of) -> ModelOutputs:
    del mask  # a score is read at the last token, whether a loss of tokens would read it or not
    policy = models(of).policy
    (score,) = _logits(policy, ids)
    cuts: list[float] = [] if of == "scores" else policy.cuts.tolist()  # type: ignore[union-attr]
    return ModelOutputs(
        score=tuple(score),
        thresholds=tuple(accumulate(cuts, lambda theta, gap: theta + math.log1p(math.exp(gap)))),
    )


@torch.no_grad()
def _logits(engine: PolicyModel, ids: Sequence[int]) -> list[list[float]]:
    """[n, V] of a language model, [1, A] of a reward model."""
    with engine.stock():
        logits = engine.causal(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits.view(-1, logits.shape[-1]).tolist()


def _log_softmax(engine: PolicyModel, ids: Sequence[int]) -> list[list[float]]:
    results: list[list[float]] = []
    for row in _logits(engine, ids):
        top = max(row)
        norm = top + math.log(sum(math.exp(v - top) for v in row))
        results.append([v - norm for v in row])
    return results


def slope(loss: Callable[[Any], float], at: Callable[[float], Any]) -> float:
    """Derivative along the direction by central differences, exact to the fourth order."""
    one, two = ((loss(at(k * STEP)) - loss(at(-k * STEP))) / (2 * k * STEP) for k in (1, 2))
    return (4 * one - two) / 3
