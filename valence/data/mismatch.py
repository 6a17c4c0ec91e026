"""KTO's mismatched sequences: each prompt of a step behind which another example's completion is put, to estimate z0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from valence.errors import UserError
from valence.types import Answer, Encoded

Pairing = Literal["next", "previous", "reversed"]


def mismatch(step: Sequence[Encoded], following: Iterable[Encoded] = (), *, max_length: int) -> list[Encoded]:
    """One mismatched unit for every unit of a step given in canonical order.

    The partner is the next unit, cyclically, whose prompt and completion both differ and whose completion fits behind the
    prompt; if none fits, the next that differs, cut on the right but never to nothing; if the step holds none that differs,
    the first such of ``following`` (the epoch's later examples). Raises UserError when nothing at all differs.
    """
    later: list[Encoded] | None = None
    found: list[Encoded] = []
    for i, unit in enumerate(step):
        partner = _partner(unit, (step[(i + k) % len(step)] for k in range(1, len(step))), max_length)
        if partner is None:
            later = list(following) if later is None else later
            partner = _partner(unit, later, max_length)
        if partner is None:
            raise UserError(
                "no other example has both another prompt and another completion",
                code="kl-pairs-missing",
                where=str(unit.origin),
                fix="KTO needs at least two distinct prompts with distinct completions; apo_zero_unpaired does not",
            )
        found.append(_behind(unit, partner.answers[0], max_length))
    return found


def mismatch_groups(step: Sequence[Encoded], group: int, pairing: Pairing, *, max_length: int) -> list[Encoded]:
    """Mismatched units as published systems pair them: inside runs of ``group`` units in step order, cyclically."""
    found: list[Encoded] = []
    for start in range(0, len(step), group):
        run = step[start : start + group]
        size = len(run)
        partner = {
            "next": lambda i, size=size: (i + 1) % size,
            "previous": lambda i, size=size: (i - 1) % size,
            "reversed": lambda i, size=size: size - 1 - i,
        }[pairing]
        found += [_behind(unit, run[partner(i)].answers[0], max_length) for i, unit in enumerate(run)]
    return found


def _partner(unit: Encoded, others: Iterable[Encoded], max_length: int) -> Encoded | None:
    own = unit.answers[0].ids
    room = max_length - len(unit.prompt_ids)
    differs = (o for o in others if o.prompt_ids != unit.prompt_ids and o.answers[0].ids != own)
    first = None
    for other in differs:
        if len(other.answers[0].ids) <= room:
            return other
        first = first or other
    return first


def _behind(unit: Encoded, answer: Answer, max_length: int) -> Encoded:
    room = max(1, max_length - len(unit.prompt_ids))
    cut = Answer(answer.ids[:room], answer.mask[:room], answer.complete and len(answer.ids) <= room)
    return replace(unit, prompt_mask=(False,) * len(unit.prompt_ids), answers=(cut,))
