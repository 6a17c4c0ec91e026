"""A program that votes until it is killed, and says which votes were confirmed."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from valence.apps.serve import feedback
from valence.apps.serve.chat import Answer
from valence.apps.serve.feedback import FeedbackStore
from valence.rollouts import Sampling
from valence.types import Completion


def answer(id: str) -> Answer:
    """An answer without a model."""
    return Answer(
        id=id,
        key="",
        model="tiny",
        vocabulary="v",
        prompt=({"role": "user", "content": f"question {id}"},),
        tools=(),
        prompt_ids=(1, 2),
        completion=Completion("", (3, 4), (-0.5, -0.25), f"answer {id}", "eos"),
        sampling=Sampling(),
    )


def label_of(number: int) -> bool:
    return number % 3 == 0


def main(out: str, start: str) -> None:
    feedback.WRITE_SECONDS = 0.001
    feedback.IDLE_RATIO = 0
    store = FeedbackStore(Path(out))
    print("open", flush=True)
    for number in count(int(start)):
        voted = answer(str(number))
        store.add(voted)
        store.rate(voted, "anna", label=not label_of(number))
        store.rate(voted, "anna", label=label_of(number))
        print(number, flush=True)
