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
    lengths, classes = units.answer_column("num_tokens"), units.answer_classes
    answers = {name: lengths[classes == name] for name in np.unique(classes).tolist()}
    tables = {"prompt tokens": {"all": units.prompt_column("num_tokens")}, "answer tokens": answers}
    return {
        name: _binned(table)
        for name, table in tables.items()
        if any(values.any() for values in table.values())
    }


def _binned(lengths: Mapping[str, NDArray[np.int32]]) -> dict[str, Any]:
    longest = int(max(values.max() for values in lengths.values()))
    width = longest // BINS + 1
    last = longest // width
    counts = {
        name: np.bincount(values // width, minlength=last + 1).tolist()
        for name, values in sorted(lengths.items())
    }
    return {"edges": [place * width for place in range(last + 2)], "counts": counts}
