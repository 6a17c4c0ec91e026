"""Does the model use the feedback at all? A test before training with a teacher.

The signal of a row is the mean over the tokens of its completion of log p_teacher - log p (nats).
If it is the same with the feedback of other rows, the teacher learns nothing from what was written
about this completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from valence.data.sampler import canonical_order
from valence.training.evaluate import evaluate
from valence.training.prepare import Corpus, Prepared
from valence.training.step import Objective
from valence.types import Judgement, TokenizedExample

MAX_ROWS = 32
MIN_ROWS = 8
NUM_SHUFFLES = 1
NUM_PERMUTATIONS = 10_000
LEVEL = 0.05


@dataclass(frozen=True)
class FeedbackTest:
    """The mean signal of rows with their own feedback and with that of other rows (nats per token),
    and the probability of so large a difference if the feedback had no effect.
    """

    rows: int
    signal: float
    shuffled_signal: float
    p: float

    @property
    def is_used(self) -> bool:
        return self.p < LEVEL

    def __str__(self) -> str:
        numbers = (
            f"the signal of the feedback is {self.signal:+.3f} nats per token, and "
            f"{self.shuffled_signal:+.3f} with the feedback of other rows ({self.rows} rows, "
            f"p = {self.p:.2g})"
        )
        if self.is_used:
            return f"this model uses the feedback: {numbers}"
        return (
            f"this model does not seem to use the feedback: {numbers}, so training on it may "
            "change nothing or do harm; use a larger model, another teacher.template, or more rows"
        )


def feedback_test(objective: Objective, prepared: Prepared, corpus: Corpus) -> FeedbackTest | None:
    """Test rows of a corpus with the current weights as teacher. None with too few rows.

    All processes of the objective's group call it. Draws no random numbers of PyTorch.
    """
    # at the start, all teachers have the weights of the policy; no value enters a cache
    objective = replace(objective, teacher=None, reference=None)
    encoder = prepared.encoder_for(objective.method)
    units: list[list[TokenizedExample]] = [[] for _ in range(1 + NUM_SHUFFLES)]
    order = canonical_order(corpus.units, prepared.recipe.train.seed, 0)
    units_of_rows = [corpus.units[i] for i in order[:MAX_ROWS]]
    examples = [corpus.examples[unit.id] for unit in units_of_rows]
    texts = [example.feedback if isinstance(example, Judgement) else "" for example in examples]
    for i, (unit, example) in enumerate(zip(units_of_rows, examples, strict=True)):
        others = [*texts[i + 1 :], *texts[:i]]
        others = [text for text in dict.fromkeys(others) if text != texts[i]][:NUM_SHUFFLES]
        row = [encoder.encode(replace(example, feedback=text)) for text in others]
        encoded = [result for result in row if isinstance(result, TokenizedExample)]
        if len(encoded) == NUM_SHUFFLES:
            for group, result in zip(units, [unit, *encoded], strict=True):
                group.append(result)
    if len(units[0]) < MIN_ROWS:
        return None
    signals = [_signals(objective, group, prepared) for group in units]
    differences = [s - fmean(others) for s, *others in zip(*signals, strict=True)]
    return FeedbackTest(
        len(units[0]), fmean(signals[0]), fmean(map(fmean, signals[1:])), _p_value(differences)
    )


def _signals(
    objective: Objective, units: Sequence[TokenizedExample], prepared: Prepared
) -> list[float]:
    rows = evaluate(objective, units, {}, prepared.tokenizer).rows
    return [row["reward"] for row in rows]


def _p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the hypothesis that each difference has either sign equally often."""
    values = np.array(differences)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (NUM_PERMUTATIONS, len(values)))
    extreme = np.abs(signs @ values) >= abs(values.sum()) * (1 - 1e-12)
    return float((extreme.sum() + 1) / (NUM_PERMUTATIONS + 1))
