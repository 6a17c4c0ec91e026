"""How long prompts and answers are, as counts in bins that a histogram draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valence.data.tokenized_dataset import TokenizedDataset

BINS = 24
"""Most bins of one histogram."""


def distributions(units: TokenizedDataset) -> dict[str, Any]:
    """Tokens of prompts and of answers, by class: ``{"prompt tokens": {"edges": [n + 1], "counts":
    {"all": [n]}}, ...}``. A bin counts the lengths from its edge to below the next one.
    """
    lengths, classes = units.of_answers("num_tokens"), units.answer_classes
    answers = {name: lengths[classes == name] for name in np.unique(classes).tolist()}
    found = {"prompt tokens": {"all": units.of_prompts("num_tokens")}, "answer tokens": answers}
    return {
        name: _binned(lengths)
        for name, lengths in found.items()
        if any(each.any() for each in lengths.values())
    }


def _binned(lengths: Mapping[str, NDArray[np.int32]]) -> dict[str, Any]:
    width = int(max(each.max() for each in lengths.values())) // BINS + 1
    last = max(int(each.max()) // width for each in lengths.values())
    counts = {
        name: np.bincount(each // width, minlength=last + 1).tolist()
        for name, each in sorted(lengths.items())
    }
    return {"edges": [place * width for place in range(last + 2)], "counts": counts}
