"""What judgements are judged by: a label, a score, attributes.

All rows that are trained on together share one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from valence.errors import UserError
from valence.types import Judgement

VERDICTS = {"label": "a label", "score": "a score", "attributes": "attributes"}
"""Field of a Judgement -> what messages call it."""


def verdicts(judgement: Judgement) -> list[str]:
    """The fields that it is judged by."""
    given = {
        "label": judgement.label is not None,
        "score": judgement.score is not None,
        "attributes": bool(judgement.attributes),
    }
    return [name for name in VERDICTS if given[name]]


def shared_verdicts(
    judgements: Iterable[Judgement], among: Sequence[str] = tuple(VERDICTS)
) -> list[str]:
    """Those of ``among`` that every judgement has.

    Raises UserError at the first that leaves none.
    """
    shared = list(among)
    for judgement in judgements:
        own = verdicts(judgement)
        before, shared = shared, [name for name in shared if name in own]
        if not shared:
            raise UserError(
                f"the row has {_named(own)}, and {_named(before)} is what the rows before it share",
                code="rows-rated-differently",
                where=str(judgement.origin),
                fix="train on rows that are all judged alike: by a label, by a score or by "
                "attributes; leave out the others",
            )
    return shared


def _named(names: Sequence[str]) -> str:
    return " and ".join(VERDICTS[name] for name in names) or "no verdict"
