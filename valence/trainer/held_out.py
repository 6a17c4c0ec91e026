"""Whether the held-out rows of a run are enough for a verdict."""

from __future__ import annotations

import math

import numpy as np

from valence.reports.verdict import HOLD_OUT, NO_ROWS, few_rows, rows_needed
from valence.trainer.prepare import Prepared

MAX_SHARE = 0.5
"""The largest share of the rows that a warning advises to hold out."""


def held_out_warning(prepared: Prepared) -> str | None:
    """What to say before training if held-out rows are missing for a verdict; else None."""
    if "train" not in prepared.corpora:
        return None
    if "eval" not in prepared.corpora:
        return f"{NO_ROWS} {HOLD_OUT}"
    corpus = prepared.corpora["eval"]
    units, limit = corpus.units, prepared.recipe.eval.max_examples
    is_new = [str(origin) not in corpus.trained_origins for origin in units.origins[:limit]]
    rows = np.flatnonzero(is_new)
    if not len(rows):
        return "All held-out rows are also training rows, so they show nothing. " + HOLD_OUT
    labels = units.columns["label"][rows]
    labels = labels[labels >= 0]
    if len(labels):
        share = float(labels.mean())
        if share in (0.0, 1.0):
            name = "up" if share else "down"
            return f"All held-out rows are thumbs {name}, so there is nothing to compare them with."
        return _few(prepared, len(labels), rows_needed(share))
    if units.has_kind("preference")[rows].any():
        return _few(prepared, len(rows), rows_needed(None))
    return None


def _few(prepared: Prepared, num_rows: int, needed: int) -> str | None:
    """The warning if fewer rows are held out than are needed, with what to do about it."""
    if not (sentence := few_rows(num_rows, needed)):
        return None
    total = sum(len(prepared.corpora[name].units) for name in ("train", "eval"))
    share = math.ceil(10 * needed / total) / 10
    if share <= MAX_SHARE and prepared.recipe.data.split is not None:
        return f"{sentence} Set data.eval: {share:g}."
    return f"{sentence} Collect more rows: {needed} to measure, and others to train on."
