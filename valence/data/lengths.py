"""How long prompts and answers are, as counts in bins that a histogram draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from valence.types import TokenizedExample

BINS = 24
"""Most bins of one histogram."""


def distributions(units: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Tokens of prompts and of answers, by class: ``{"prompt tokens": {"edges": [n + 1], "counts":
    {"all": [n]}}, ...}``. A bin counts the lengths from its edge to below the next one.
    """
    answers: dict[str, list[int]] = {}
    for unit in units:
        for name, answer in zip(_classes(unit), unit.answers, strict=True):
            answers.setdefault(name, []).append(len(answer.ids))
    found = {
        "prompt tokens": {"all": [len(unit.prompt_ids) for unit in units]},
        "answer tokens": answers,
    }
    return {
        name: _binned(lengths) for name, lengths in found.items() if any(map(any, lengths.values()))
    }


def _classes(unit: TokenizedExample) -> tuple[str, ...]:
    if unit.kind == "preference":
        return "chosen", "rejected"
    if unit.kind == "judgement" and unit.label is not None:
        return ("up" if unit.label else "down",)
    return ("all",) * len(unit.answers)


def _binned(lengths: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    width = max(max(each) for each in lengths.values()) // BINS + 1
    places = {name: Counter(length // width for length in each) for name, each in lengths.items()}
    last = max(max(each) for each in places.values())
    counts = {
        name: [each[place] for place in range(last + 1)] for name, each in sorted(places.items())
    }
    return {"edges": [place * width for place in range(last + 2)], "counts": counts}
