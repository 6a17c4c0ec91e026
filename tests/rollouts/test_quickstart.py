"""The rule behind the thumbs of the quickstart, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

import examples.quickstart
from examples.quickstart.judge import MAX_WORDS, judge
from examples.quickstart.make_feedback import write_judged
from valence.types import Chat, Completion

FOLDER = Path(examples.quickstart.__file__).parent


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("question", "answer", "up", "reason"),
    [
        (
            "What is the capital of Canada? Keep it short.",
            "The capital of Canada is Ottawa.",
            True,
            "short",
        ),
        (
            "How do I keep bread fresh?",
            "Store the loaf in a paper bag; breads dry out in the fridge.",
            True,
            "short",
        ),
        ("How do I decline?", 'You could say, "I must decline, but thank you."', True, "short"),
        ("What is a haiku?", "A haiku has three lines", False, "sentence"),
        ("What is a haiku?", "Japanese haiku.", False, "too little"),
        ("What is a haiku?", "", False, "too little"),
        ("What is a haiku?", "I am happy to help with that.", False, "ignores"),
        (
            "Why do cats purr? Keep it short.",
            "A short answer is one that is kept in two sentences.",
            False,
            "ignores",
        ),
        ("Why do cats purr loudly?", "Why do cats purr loudly, cats purr.", False, "restates"),
        (
            "Why do cats purr?",
            "Cats purr when they rest, and cats purr when they eat.",
            False,
            "repeats",
        ),
        (
            "Why do cats purr?",
            "Cats purr. " + " ".join(f"reason{i}" for i in range(MAX_WORDS)) + ".",
            False,
            "rambles",
        ),
    ],
)
def test_the_rule(question: str, answer: str, up: bool, reason: str) -> None:
    verdict = judge(question, answer, finished=True)
    assert verdict[0] is up
    assert reason in verdict[1]


def test_a_cut_off_answer_is_a_thumbs_down() -> None:
    assert judge(
        "Why do cats purr?", "Cats purr to calm themselves and their kittens.", finished=True
    )[0]
    assert not judge(
        "Why do cats purr?", "Cats purr to calm themselves and their kittens.", finished=False
    )[0]


def test_the_limit_is_inclusive() -> None:
    words = "cats purr " + " ".join(f"w{i}" for i in range(MAX_WORDS - 2))
    assert judge("Why do cats purr?", words + ".", finished=True)[0]
    assert not judge("Why do cats purr?", words + " more.", finished=True)[0]


@pytest.mark.parametrize("name", ["feedback.jsonl", "held_out.jsonl"])
def test_every_shipped_thumb_is_what_the_rule_says(name: str) -> None:
    for row in read(name):
        question, answer = row["prompt"][-1]["content"], row["completion"][0]["content"]
        assert judge(question, answer, finished=True)[0] is row["label"], (question, answer)


def test_held_out_prompts_are_held_out() -> None:
    train = {row["prompt"][0]["content"] for row in read("prompts.jsonl")}
    held_out = {row["prompt"][0]["content"] for row in read("held_out_prompts.jsonl")}
    assert len(held_out) >= 80
    assert not train & held_out
    assert {row["prompt"][0]["content"] for row in read("feedback.jsonl")} <= train
    assert {row["prompt"][0]["content"] for row in read("held_out.jsonl")} <= held_out


def answer(text: str, stop: Literal["eos", "length"] = "eos") -> Completion:
    return Completion(prompt_id="", tokens=(1,), logps=(-1.0,), text=text, stop=stop)


def test_cut_off_answers_become_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(({"role": "user", "content": "Why do cats purr?"},))
    texts = (
        answer("Cats purr to calm themselves."),
        answer("Cats purr and", "length"),
        answer("No."),
    )
    write_judged(tmp_path / "rows.jsonl", [(chat, a) for a in texts])
    rows = [
        json.loads(line)
        for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [
        (texts[0].text, True),
        ("No.", False),
    ]
    assert "1 cut-off" in capsys.readouterr().out
