"""What a reward model learns of single answers: for each unit its targets, one for each
attribute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from valence.data.tokenized_dataset import TokenizedDataset
from valence.errors import UserError
from valence.types import TokenizedExample

ONE = ("reward",)
"""Name of what is scored where there is nothing but a label or a score."""


def attribute_names(units: Sequence[TokenizedExample]) -> tuple[str, ...]:
    """Those of all units, or ONE when they have none."""
    return tuple(sorted({name for unit in units for name, _ in unit.attributes})) or ONE


def verdict(units: Sequence[TokenizedExample], order: Sequence[str]) -> str:
    """The first in ``order`` (label, score, attributes) that all units are judged by.

    Raises UserError at a unit that lacks what most have, when there is none.
    """
    for kind in order:
        if all(_has_target(unit, kind) for unit in units):
            return kind
    best = max(order, key=lambda kind: sum(_has_target(unit, kind) for unit in units))
    raise _lacks(next(unit for unit in units if not _has_target(unit, best)), best)


def with_targets(units: TokenizedDataset, kind: str, names: Sequence[str]) -> TokenizedDataset:
    """The same units with targets in the place of their scores: their label (1 up, 0 down), score,
    or attributes, of which one that a unit lacks is NaN.

    names: of the attributes, in their order. Raises UserError at a unit that has no such verdict,
    or an attribute without a name.
    """
    odd = next((unit for unit in units if not _has_target(unit, kind)), None)
    if odd is not None:
        raise _lacks(odd, kind)
    return units.with_scores([_targets(unit, kind, names) for unit in units])


def _lacks(unit: TokenizedExample, kind: str) -> UserError:
    column = {"label": "a label", "score": "a score", "attributes": "attributes"}[kind]
    return UserError(
        f"the row does not have {column}, but this run trains on the {kind} of every row",
        code="row-target-missing",
        where=str(unit.origin),
        fix=f"add {column} to the row, remove the row, or train on a rating that all rows have "
        "(method: pointwise with loss.verdict: label, score or attributes)",
    )


def _has_target(unit: TokenizedExample, kind: str) -> bool:
    return {
        "label": unit.label is not None,
        "score": bool(unit.scores),
        "attributes": bool(unit.attributes),
    }[kind]


def _targets(unit: TokenizedExample, kind: str, names: Sequence[str]) -> tuple[float, ...]:
    if kind == "label":
        return (float(bool(unit.label)),)
    if kind == "score":
        return unit.scores
    attributes = dict(unit.attributes)
    unknown = sorted(attributes.keys() - set(names))
    if unknown:
        raise UserError(
            f"the row has the attribute {unknown[0]!r}, which is not in model.attributes",
            code="row-attribute-unknown",
            where=str(unit.origin),
            fix=f"remove it, rename it to one of {', '.join(names)}, or for a new run, add it to "
            "model.attributes",
        )
    return tuple(attributes.get(name, math.nan) for name in names)


def check_range(
    units: Sequence[TokenizedExample],
    low: float,
    high: float,
    integers_only: bool,
    message: str,
    fix: str,
) -> None:
    """Raises UserError at the first unit with a target that is not from ``low`` to ``high`` (and a
    whole number, if asked).
    """
    for unit in units:
        for target in unit.scores:
            fits = math.isnan(target) or (
                low <= target <= high and (not integers_only or target == int(target))
            )
            if not fits:
                raise UserError(
                    f"the row is rated {target:g}, but {message}",
                    code="row-target-range",
                    where=str(unit.origin),
                    fix=fix,
                )
