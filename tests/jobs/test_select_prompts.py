"""Selections of prompts to label next: order, file, and rejected input."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import command, command_error, place
from tests.errors import check_error
from tests.jobs.test_audit_labels import BAD, GOOD, thumbs, write
from valence.apps.feedback.select_prompts import Selection, farthest_first, select_prompts
from valence.apps.serve.prompts import PromptQueue
from valence.options import SelectOptions

__all__ = ["place"]


def select(
    files: list[str], num: int = 100, rated: str = "rated.jsonl"
) -> tuple[Selection, list[Any]]:
    out = Path("next.jsonl")
    options = SelectOptions(rated=[rated], model="model", out=out, num=num)
    result = select_prompts(files, options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    out.unlink()
    return result, rows


def answers() -> list[dict[str, Any]]:
    """Unlabelled answers: clearly good and bad ones, and mixed ones at 0, 5, 10 and 15."""
    generator = random.Random(5)
    rows: list[dict[str, Any]] = []
    for i in range(20):
        num_good = 3 if i % 5 == 0 else 6 if i % 2 else 0
        words = [*generator.choices(GOOD, k=num_good), *generator.choices(BAD, k=6 - num_good)]
        generator.shuffle(words)
        rows.append({"prompt": f"new {i}", "completion": " ".join(words)})
    return rows


def clean() -> list[dict[str, Any]]:
    return [row | {"label": row["completion"].split()[0] in GOOD} for row in thumbs()]


def test_prompts_come_first_whose_answers_the_classifier_is_least_sure_of(place: Path) -> None:
    write("rated.jsonl", clean())
    result, rows = select([write("answers.jsonl", answers())])
    assert (result.order, result.prompts, result.selected) == ("margin", 20, 20)
    assert result.auc is not None
    assert result.auc > 0.9
    doubts = [row["info"]["select"]["uncertainty"] for row in rows]
    assert doubts == sorted(doubts, reverse=True)
    first = {row["prompt"] for row in rows[:8]}
    # by chance 1.6 of the first eight are mixed
    assert len(first & {"new 0", "new 5", "new 10", "new 15"}) >= 3
    assert [row["info"]["select"]["rank"] for row in rows] == list(range(1, 21))


def test_prompts_alone_come_in_the_order_of_their_distance(place: Path) -> None:
    write("rated.jsonl", thumbs())
    prompts = [{"prompt": "question 3"}, {"prompt": "question 3"}, {"prompt": "question 77"}]
    prompts += [{"prompt": [{"role": "user", "content": "The capital of France is a world!"}]}]
    result, rows = select([write("prompts.jsonl", prompts)])
    assert (result.order, result.auc, result.prompts) == ("diversity", None, 2)
    assert sum(result.left_out.values()) == 2  # question 3 is rated
    assert [row["prompt"] for row in rows] == [prompts[3]["prompt"], "question 77"]


def test_the_farthest_is_first() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(30, 3)
    order = farthest_first(vectors, 4, 10)
    known = list(range(4))
    for chosen in order:
        distances = [
            min(float((vectors[4 + i] - vectors[j]).norm()) for j in known) for i in range(26)
        ]
        assert distances[chosen] == max(distances)
        known.append(4 + chosen)
    assert sorted(farthest_first(torch.zeros(6, 2), 0, 99)) == list(range(6))


def test_a_classifier_that_cannot_tell_labels_apart_does_not_choose(place: Path) -> None:
    generator = random.Random(3)
    write("rated.jsonl", [row | {"label": generator.random() < 0.5} for row in thumbs()])
    result, rows = select([write("answers.jsonl", answers())], num=5)
    assert (result.order, result.selected, result.prompts) == ("diversity", 5, 20)
    assert result.interval is not None
    assert result.interval[0] <= 0.5
    assert all("uncertainty" not in row["info"]["select"] for row in rows)


def test_both_sides_of_pairs_are_labelled(place: Path) -> None:
    good, bad = (
        [row["completion"] for row in clean() if row["label"] is label] for label in (True, False)
    )
    pairs = [
        {"prompt": f"question {i}", "chosen": chosen, "rejected": rejected}
        for i, (chosen, rejected) in enumerate(zip(good, bad, strict=False))
    ]
    result, _ = select([write("answers.jsonl", answers())], rated=write("pairs.jsonl", pairs))
    assert result.auc is not None
    assert result.auc > 0.9


def test_the_file_is_a_queue_of_prompts(place: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "<b>two</b>"}]
    prompts = [{"prompt": "one"}, {"prompt": chat, "tools": tools}]
    words = ("--rated", write("rated.jsonl", thumbs()), "--model", "model", "--out", "next.jsonl")
    assert command("select", write("prompts.jsonl", prompts), *words) == 0
    queue = PromptQueue(["next.jsonl"])
    turns = [[dict(turn) for turn in prompt.messages] for prompt in queue.prompts]
    assert sorted(turns, key=len) == [[{"role": "user", "content": "one"}], chat]
    assert {len(prompt.tools) for prompt in queue.prompts} == {0, 1}


def test_mistakes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rated, prompts = write("rated.jsonl", thumbs()), write("prompts.jsonl", [{"prompt": "a"}])
    out = ("--model", "model", "--out", "next.jsonl")
    few = write("few.jsonl", thumbs()[:6])
    same = write("same.jsonl", [{"prompt": row["prompt"]} for row in thumbs()])
    unlabelled = write("answers.jsonl", answers())
    for words, code in (
        ((prompts, "--rated", prompts, *out), "no-rated-rows"),
        ((same, "--rated", rated, *out), "no-candidates"),
        ((rated, "--rated", rated, *out), "no-candidates"),
        ((unlabelled, "--rated", few, *out), "too-few-labels"),
        ((prompts, "--rated", rated, "--model", "model", "--out", prompts), "output-is-input"),
        ((prompts, "--rated", rated, "--model", "model", "--out", few), "path-exists"),
        ((prompts, "--rated", rated, "--model", "model", "--out", "a.csv"), "output-not-jsonl"),
        (("absent.jsonl", "--rated", rated, *out), "file-not-found"),
    ):
        check_error(command_error("select", *words), code)
    assert not Path("next.jsonl").exists()
    capsys.readouterr()
    assert command("select", prompts, "--rated", rated, *out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["selected"]) == ("done", 1)
    assert command("select", prompts, "--rated", rated, *out, "--json") == 2
    assert json.loads(capsys.readouterr().out)["code"] == "path-exists"
