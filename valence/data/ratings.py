"""Decide whether a column called ``rating`` holds thumbs or scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from valence.data import values
from valence.data.detect import candidates_of
from valence.data.formats import FORMATS
from valence.errors import UserError

RATING = "rating"
OTHER_RATINGS = ("label", "score", "scores")
"""A rating is not read in a file that has one of these columns."""

Part = Literal["label", "score"]


def rated_format(row: Mapping[str, Any], keys: Mapping[str, str]) -> str | None:
    """The format of rated answers that this row has if its rating is the label; None when the
    rating is not read.
    """
    is_mapped = RATING in keys.values() or any(part in keys for part in OTHER_RATINGS)
    if row.get(RATING) is None or is_mapped:
        return None
    if any(row.get(part) is not None for part in OTHER_RATINGS):
        return None
    names = candidates_of(row, {**keys, "label": RATING})
    return names[0] if len(names) == 1 and "label" in FORMATS[names[0]].required else None


def part_of(ratings: Iterable[object], path: str) -> Part:
    """Whether the ratings of a file are labels: words, or only 1 and one of -1 and 0. Otherwise
    they are scores.

    Raises UserError if every rating is the same 0 or 1, which may be a thumb or the end of a scale.
    """
    numbers: set[float] = set()
    has_words = False
    for value in ratings:
        number = values.as_number(value)
        if number is not None:
            numbers.add(number)
        elif values.thumb(value) is not None:
            has_words = True
    if has_words:
        return "label"
    if numbers in ({0.0}, {1.0}):
        raise UserError(
            f"every rating is {min(numbers):g}, which may be a thumb or a score on a scale",
            code="rating-ambiguous",
            where=path,
            fix=f"set keys: {{label: {RATING}}} for thumbs, or keys: {{score: {RATING}}} for a "
            f"scale",
        )
    return "label" if numbers <= {-1.0, 1.0} or numbers <= {0.0, 1.0} else "score"
