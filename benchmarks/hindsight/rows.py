"""Questions, logged answers and the rows that each method trains on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.hindsight.user import ACCEPTED, message, verdict

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
NUM_TUNING = 40
MAX_ANSWER_WORDS = 60
"""Longer logged answers are left out, so that a run takes minutes on a laptop."""

Split = Literal["tuning", "training", "held-out"]
Arm = Literal["hindsight", "shuffled", "kto", "sft"]


@dataclass(frozen=True)
class LoggedAnswer:
    """An answer of the model before training, and what the user thinks of it."""

    question: str
    answer: str
    kind: str


def _read(name: str) -> list[dict[str, Any]]:
    lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def questions(split: Split) -> list[str]:
    """The questions of a split. No question is in two of them."""
    if split == "held-out":
        return [row["prompt"][-1]["content"] for row in _read("held_out_prompts.jsonl")]
    every = [row["prompt"][-1]["content"] for row in _read("prompts.jsonl")]
    random.Random(0).shuffle(every)
    return every[:NUM_TUNING] if split == "tuning" else every[NUM_TUNING:]


def logged_answers(split: Split, limit: int | None = None) -> list[LoggedAnswer]:
    """The quickstart's answers to the questions of a split, which the model sampled at temperature
    0.6, without the longest ones.
    """
    question_texts = set(questions(split))
    answers: list[LoggedAnswer] = []
    for row in _read("held_out.jsonl" if split == "held-out" else "feedback.jsonl"):
        question, answer = row["prompt"][-1]["content"], row["completion"][0]["content"]
        if question in question_texts and len(answer.split()) <= MAX_ANSWER_WORDS:
            answers.append(LoggedAnswer(question, answer, verdict(question, answer)))
    random.Random(0).shuffle(answers)
    return answers[:limit]


def messages(
    answers: Sequence[LoggedAnswer], seed: int, *, shuffled: bool
) -> list[tuple[str, str]]:
    """The user's message about each answer, and its kind. shuffled: about another answer."""
    rng = random.Random(seed)
    topics = questions("training")
    written = [message(answer.kind, topics, rng) for answer in answers]
    if shuffled:
        rng.shuffle(written)
    return written


def training_rows(arm: Arm, answers: Sequence[LoggedAnswer], seed: int) -> list[dict[str, Any]]:
    """The rows of a method: answers with messages and without labels, or with labels alone."""
    written = messages(answers, seed, shuffled=arm == "shuffled")
    rows: list[dict[str, Any]] = []
    for answer, (text, _) in zip(answers, written, strict=True):
        row = {
            "prompt": [{"role": "user", "content": answer.question}],
            "completion": [{"role": "assistant", "content": answer.answer}],
        }
        is_accepted = answer.kind == ACCEPTED
        if arm == "kto":
            rows.append(row | {"label": is_accepted})
        elif arm == "sft":
            if is_accepted:
                rows.append(row)
        else:
            rows.append(row | {"feedback": text})
    return rows
