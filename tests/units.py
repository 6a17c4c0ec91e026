"""Tokenized examples without a tokenizer or files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.tiny_models import tiny
from valence.distributed.process_group import SingleProcess
from valence.losses import LOSSES
from valence.methods import method_of
from valence.models.build import build_policy, build_reference
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.models.values import add_values
from valence.training.step import Objective
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample


def answer(ids: tuple[int, ...]) -> TokenizedCompletion:
    return TokenizedCompletion(ids, (True,) * len(ids))


def unit(
    name: str,
    kind: Kind,
    prompt: tuple[int, ...],
    *answers: tuple[int, ...],
    label: bool | None = None,
    weight: float = 1.0,
    margin: float = 0.0,
    **more: Any,
) -> TokenizedExample:
    return TokenizedExample(
        id=name,
        origin=Origin("made.jsonl", 1),
        kind=kind,
        prompt_ids=prompt,
        prompt_mask=(False,) * len(prompt),
        answers=tuple(answer(a) for a in answers),
        label=label,
        weight=weight,
        margin=margin,
        **more,
    )


def units(kind: Kind, count: int = 9, seed: int = 0) -> list[TokenizedExample]:
    """Units of uneven lengths, classes, weights, margins, soft labels and scores."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 97) for _ in range(draw.randint(low, high)))

    def answers() -> Iterator[tuple[int, ...]]:
        """Of a pair, those of every other example share tokens, as a corrected answer does."""
        yield (first := ids(1, 12))
        for _ in range(sides - 1):
            other = ids(1, 12)
            is_edited = kind == "preference" and len(first) + len(other) > 14
            yield (*first[: len(first) // 2], *other[len(first) // 2 :]) if is_edited else other

    sides = {"preference": 2, "ranking": 3}.get(kind, 1)
    return [
        unit(
            f"row{i}",
            kind,
            ids(1, 9),
            *answers(),
            label=(i % 3 != 0) if kind == "judgement" else None,
            weight=[1.0, 0.5, 2.0, 0.0][i % 4],
            margin=0.25 * (i % 2) if kind == "preference" else 0.0,
            soft=0.7 if kind == "preference" and i % 4 == 2 else None,
            scores=tuple(draw.choice([0.0, 0.5, 2.0]) for _ in range(sides))
            if kind == "ranking"
            else (),
            teacher_ids=ids(2, 14) if kind == "feedback" else (),
        )
        for i in range(count)
    ]


ADVANTAGES = {name: row.advantage for name, row in LOSSES.items() if row.advantage is not None}
"""The advantage function of each built-in method."""
SAMPLED = ("adv", "old", "return", "sampler", "value")
"""What is known of the tokens of answers that were sampled, in a recipe with a reward."""


def sampled(
    count: int = 9, seed: int = 0, known: Sequence[str] = SAMPLED
) -> list[TokenizedExample]:
    """Units of one answer each, of uneven lengths and weights, with these columns."""
    draw = random.Random(seed)

    def column(name: str, n: int) -> tuple[float, ...]:
        return tuple(
            -4.5 + draw.gauss(0, 0.5) if name in ("old", "sampler") else draw.gauss(0, 1)
            for _ in range(n)
        )

    results: list[TokenizedExample] = []
    for ranking in units("ranking", -(-count // 3), seed):
        for i, answer in enumerate(ranking.answers):
            columns = tuple((name, column(name, len(answer.ids))) for name in known)
            one = replace(answer, columns=columns)
            results.append(
                replace(
                    ranking,
                    id=f"{ranking.id}.{i}",
                    answers=(one,),
                    scores=ranking.scores[i : i + 1],
                )
            )
    return results[:count]


def policy_with_values(**changes: Any) -> tuple[PolicyModel, Reference]:
    """The two with a value head on the policy, which is not 0."""
    policy, reference = policy_and_reference(**changes)
    add_values(policy, trunk="shared")
    assert policy.critic is not None
    torch.nn.init.normal_(
        policy.critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(3)
    )
    return policy, reference


def policy_and_reference(
    architecture: str = "llama", **changes: Any
) -> tuple[PolicyModel, Reference]:
    """Two different random models in float64, so that policy and reference disagree."""
    model, other = (tiny(architecture, seed=seed, layers=1, **changes) for seed in (0, 5))
    policy = build_policy(model, dtype=torch.float64)
    reference = build_reference(policy, fresh_adapter=False, model=other, name="another")
    return policy, reference


def models_for(name: str) -> tuple[PolicyModel, Reference | None]:
    """What a row of the table of losses is run with: policy and reference, or a reward model."""
    from tests.models.test_scores import reward_model

    loss = method_of(name).loss
    if not loss.is_reward_model:
        return policy_and_reference()
    levels = 5 if "levels" in loss.settings else None
    model = reward_model(attributes=2 if name == "pointwise" else 1)
    return build_policy(model, dtype=torch.float64, levels=levels), None


def units_for(name: str, count: int = 9, seed: int = 0) -> list[TokenizedExample]:
    """Units that a row of the table of losses reads; a reward model's with targets, of which some
    may be missing.
    """
    result = units(method_of(name).loss.data, count, seed)
    if method_of(name).loss.data != "scored":
        return result
    if name == "ordinal":
        return [replace(unit, scores=(float(1 + i % 5),)) for i, unit in enumerate(result)]
    return [
        replace(unit, scores=(float(i % 2), 0.3 * (i % 4) if i % 3 else math.nan))
        for i, unit in enumerate(result)
    ]


def objective(
    name: str,
    policy: PolicyModel,
    reference: Reference | None,
    *,
    budget: int = 10_000,
    max_length: int = 64,
    **settings: Any,
) -> Objective:
    method = method_of(name)
    return Objective(
        method,
        method.resolve(settings),
        policy,
        reference if method.needs_reference else None,
        SingleProcess(),
        budget,
        max_length,
        teacher=reference if method.loss.needs_teacher else None,
    )
