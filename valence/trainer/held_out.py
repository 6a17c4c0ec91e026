"""Whether the held-out rows of a run are enough for a verdict."""

from __future__ import annotations

import numpy as np

from valence.reports.verdict import HOLD_OUT, NO_ROWS, few_rows, rows_needed
from valence.trainer.prepare import Prepared


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
        return few_rows(len(labels), rows_needed(share)) or None
    if units.has_kind("preference")[rows].any():
        return few_rows(len(rows), rows_needed(None)) or None
    return None
