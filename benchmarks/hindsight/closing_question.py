"""Does the model learn a format that only the messages mention? Every message asks that the answer
end with a question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.hindsight.answerer import Answerer, user_turn
from benchmarks.hindsight.rows import LoggedAnswer
from benchmarks.hindsight.training import Record, steps_of
from valence.data.hindsight import TeacherContext
from valence.statistics import mean_interval
from valence.types import Chat

MESSAGES = (
    "Please end with a question.",
    "Please end your answer with a question to me.",
    "Ask me something at the end.",
    "I would like a question at the end of your answer.",
    "Your last sentence should be a question.",
    "Finish with a question so that we can keep talking.",
    "Can you close with a question next time?",
    "A question at the end, please.",
    "Always end on a question.",
    "The answer is missing a closing question.",
)
MAX_NEW_TOKENS = 128


def question_rows(answers: Sequence[LoggedAnswer], seed: int) -> list[Record]:
    """Answers with messages that ask for a closing question."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [{"role": "user", "content": answer.question}],
            "completion": [{"role": "assistant", "content": answer.answer}],
            "feedback": rng.choice(MESSAGES),
        }
        for answer in answers
    ]


def closing_question_of(answer: str) -> str | None:
    """The last sentence of an answer, without quotation marks, if it is a question."""
    sentence = re.split(r"(?<=[.!?:])\s+|\n", answer.strip())[-1].strip("\"'\u201c\u201d\u2019)* ")
    return sentence if sentence.endswith("?") else None


def closing_question(
    model: Path,
    context: TeacherContext,
    recipe_in: Callable[[Path], Record],
    rows: Sequence[Record],
    question_texts: Sequence[str],
) -> Record:
    """Answers to other questions: of the model, of its teacher, of the model when it is asked in
    the prompt, and of the model after training on the rows.

    recipe_in: the recipe, for a folder with train.jsonl.
    """
    rng = random.Random(0)
    written = [rng.choice(MESSAGES) for _ in question_texts]
    prompts = [user_turn(question) for question in question_texts]
    contexts = [
        context.prompt(prompt, text, None) for prompt, text in zip(prompts, written, strict=True)
    ]
    requests = [
        user_turn(f"{question}\n\n{text}")
        for question, text in zip(question_texts, written, strict=True)
    ]
    answerer = Answerer(model)
    record: dict[str, Any] = {
        "before": _answers(answerer, prompts),
        "teacher": _answers(answerer, [chat for chat in contexts if isinstance(chat, Chat)]),
        "asked": _answers(answerer, requests),
    }
    del answerer
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        steps = steps_of(recipe_in(folder), rows, folder)
        record["after"] = _answers(Answerer(folder / "run" / "model"), prompts)
    record["signal"] = [step["signal/mean"] for step in steps]
    return record


def _answers(answerer: Answerer, prompts: Sequence[Chat]) -> Record:
    """Answers to the prompts. questions: whether each ends with a question that is no part of its
    prompt. copies: the share that end with a question that is.
    """
    answers = answerer.answers(prompts, max_new_tokens=MAX_NEW_TOKENS)
    closing = [closing_question_of(text) if is_finished else None for text, is_finished in answers]
    is_copy = [
        question is not None and question.lower() in str(prompt.messages[-1]["content"]).lower()
        for question, prompt in zip(closing, prompts, strict=True)
    ]
    return {
        "copies": fmean(is_copy),
        "questions": [
            question is not None and not copy
            for question, copy in zip(closing, is_copy, strict=True)
        ],
        "unfinished": fmean(not is_finished for _, is_finished in answers),
        "words": fmean(len(text.split()) for text, _ in answers),
        "answers": [text for text, _ in answers],
    }


def print_closing_question(record: Record) -> tuple[float, float]:
    """Print the shares. Return the 95 % interval of the gain by training, paired over questions."""
    names = f"{'end with a question':>21}{'with a copy':>13}{'unfinished':>12}{'words':>8}"
    print(f"{'answers':12}{names}")
    for name in ("before", "teacher", "asked", "after"):
        values = record[name]
        print(
            f"{name:12}{fmean(values['questions']):>21.2f}{values['copies']:>13.2f}"
            f"{values['unfinished']:>12.2f}{values['words']:>8.0f}"
        )
    first, *_, last = record["signal"]
    print(f"signal {first:+.3f} in the first step, {last:+.3f} in the last")
    before, after = record["before"]["questions"], record["after"]["questions"]
    gains = [float(new) - float(old) for old, new in zip(before, after, strict=True)]
    low, high = mean_interval(gains)
    print(f"after - before: {fmean(gains):+.3f} [{low:+.3f}, {high:+.3f}]", flush=True)
    return low, high
