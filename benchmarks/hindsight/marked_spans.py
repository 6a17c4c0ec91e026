"""Does the signal show which tokens of an answer a message is about? On twenty answers, in which
the span that the message is about is marked by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.hindsight.answerer import Answerer, user_turn
from valence.data.hindsight import TeacherContext
from valence.statistics import auc, mean_interval
from valence.types import Chat

FILE = Path(__file__).with_name("marked_spans.json")
NEUTRAL = "OK."
VARIANTS = ("signal", "minus neutral", "minus others")
"""The signal; minus that of a neutral message; minus the mean signal of the other pairs' messages.
"""


@dataclass(frozen=True)
class MarkedAnswer:
    """An answer, the user's message about it, and the part of the answer that the message is about.

    span: occurs once in the answer. kind: what is wrong with it.
    """

    kind: str
    question: str
    answer: str
    span: str
    message: str

    def marks(self, tokenizer: PreTrainedTokenizerBase) -> list[bool]:
        """Whether each token of the answer has a character of the span."""
        start = self.answer.index(self.span)
        end = start + len(self.span)
        encoding = tokenizer(self.answer, add_special_tokens=False, return_offsets_mapping=True)
        return [first < end and last > start for first, last in encoding["offset_mapping"]]


def marked_answers() -> list[MarkedAnswer]:
    return [MarkedAnswer(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def marked_spans(
    model: Answerer, context: TeacherContext, answers: Sequence[MarkedAnswer]
) -> dict[str, Any]:
    """For each pair, the AUC of the negative signal for marked against unmarked tokens.

    The token that ends the answer is left out.
    """
    messages = [NEUTRAL, *(answer.message for answer in answers)]
    rows: list[dict[str, Any]] = []
    for i, answer in enumerate(answers):
        prompt = user_turn(answer.question)
        contexts = [context.prompt(prompt, message, None) for message in messages]
        chats = [prompt, *(chat for chat in contexts if isinstance(chat, Chat))]
        plain, neutral, *taught = model.logps(chats, [answer.answer] * len(chats))
        others = torch.stack([logps for j, logps in enumerate(taught) if j != i])
        signals = dict(
            zip(
                VARIANTS,
                (taught[i] - plain, taught[i] - neutral, taught[i] - others.mean(0)),
                strict=True,
            )
        )
        marks = torch.tensor(answer.marks(model.encoder.tokenizer))
        rows.append(
            {
                "kind": answer.kind,
                "span": answer.span,
                "tokens": [int(marks.sum()), len(marks)],
                "auc": {name: _auc(values[:-1], marks) for name, values in signals.items()},
                "marked": {name: float(v[:-1][marks].mean()) for name, v in signals.items()},
                "unmarked": {name: float(v[:-1][~marks].mean()) for name, v in signals.items()},
            }
        )
    return {"rows": rows}


def _auc(signal: torch.Tensor, marks: torch.Tensor) -> float:
    return auc((-signal[marks]).tolist(), (-signal[~marks]).tolist())


def print_marked_spans(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Print the AUC of each pair. Return the 95 % interval of the mean of each variant."""
    rows = record["rows"]
    print(f"{'AUC of -signal, marked tokens':40}" + "".join(f"{name:>15}" for name in VARIANTS))
    for row in rows:
        values = "".join(f"{row['auc'][name]:>15.2f}" for name in VARIANTS)
        print(f"{row['kind'] + ': ' + row['span'][:18]:40}{values}")
    intervals = {name: mean_interval([row["auc"][name] for row in rows]) for name in VARIANTS}
    for name, (low, high) in intervals.items():
        mean, marked, unmarked = (
            fmean(row["auc"][name] for row in rows),
            fmean(row["marked"][name] for row in rows),
            fmean(row["unmarked"][name] for row in rows),
        )
        print(
            f"{name}: AUC {mean:.2f} [{low:.2f}, {high:.2f}]; signal {marked:+.2f} at marked "
            f"tokens, {unmarked:+.2f} at others (nats)",
            flush=True,
        )
    return intervals
