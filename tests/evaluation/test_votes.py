"""Votes of people as verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import command, command_error
from tests.errors import raises_error
from valence.apps.compare.votes import read_votes
from valence.apps.serve.chat import Answer
from valence.apps.serve.feedback import FeedbackStore, Winner
from valence.apps.serve.prompts import prompt_id
from valence.rollouts import Sampling
from valence.types import Completion

VOTES: list[tuple[str, str, str, Winner]] = [
    ("one", "ann", "first", "a"),
    ("one", "ben", "second", "a"),
    ("two", "ann", "second", "a"),
    ("two", "ben", "first", "tie"),
    ("three", "ann", "first", "both_bad"),
    ("four", "ann", "second", "a"),
]
"""Prompt, rater, model of the answer that was shown first, and the winner. For `second`: 0 and 1,
1 and 0.5, 0.5, and 1.
"""


def answer(id: str, model: str, prompt: str, text: str) -> Answer:
    turns: Any = ({"role": "user", "content": prompt},)
    return Answer(
        id=id,
        model=model,
        key=prompt_id(turns, ()),
        prompt=turns,
        tools=(),
        completion=Completion("p", (1,), (-1.0,), text, "eos"),
        prompt_ids=(1, 2),
        sampling=Sampling(),
        vocabulary="v",
    )


@pytest.fixture
def votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store = FeedbackStore(Path("comparison.jsonl"))
    for number, (prompt, rater, shown_first, winner) in enumerate(VOTES):
        texts = {"first": f"short {number}", "second": f"a longer answer {number}"}
        other = "second" if shown_first == "first" else "first"
        sides = [answer(f"{m}{number}", m, prompt, texts[m]) for m in (shown_first, other)]
        for side in sides:
            store.add(side)
        store.compare(sides[0], sides[1], winner, rater)
    store.close()
    return Path("comparison.jsonl")


def test_votes_on_a_prompt_count_as_their_mean(votes: Path) -> None:
    pairs, verdicts = read_votes(votes, "first", "runs/second")
    assert [pair.prompt for pair in pairs] == ["one", "two", "three", "four"]
    assert [verdict.preference for verdict in verdicts] == [0.5, 0.75, 0.5, 1.0]
    assert [pair.baseline.text for pair in pairs][:2] == ["short 0", "short 2"]
    assert all(pair.length_difference == 10 for pair in pairs)
    swapped = read_votes(Path("comparison.votes.jsonl"), "second", "first")[1]
    assert [verdict.preference for verdict in swapped] == [0.5, 0.25, 0.5, 0.0]


def test_people_are_a_judge_without_prompts(votes: Path) -> None:
    assert command("compare", "first", "second", "--votes", str(votes), "--at-least", "0.6") == 0
    result = json.loads(Path("comparison/compare.json").read_text())
    (judge,) = result["judges"]
    assert judge["judge"] == "people"
    assert judge["win_rate"]["value"] == pytest.approx((0.5 + 0.75 + 0.5 + 1) / 4)
    assert (judge["wins"], judge["ties"], judge["losses"]) == (2, 2, 0)
    assert result["prompts"] == 4
    assert not list(Path("comparison").glob("answers*"))


def test_votes_that_a_killed_server_has_not_written_to_its_file_count(votes: Path) -> None:
    sides = [answer(f"{m}9", m, "five", m) for m in ("first", "second")]
    store = FeedbackStore(votes)
    for side in sides:
        store.add(side)
    store.compare(sides[0], sides[1], "b", "ann")
    pending = Path("comparison.pending.jsonl")
    before = pending.read_bytes()
    store.close()
    lines = Path("comparison.votes.jsonl").read_bytes().splitlines(keepends=True)
    Path("comparison.votes.jsonl").write_bytes(b"".join(lines[:-1]))
    pending.write_bytes(before + b'{"source": "val')
    pairs, verdicts = read_votes(votes, "first", "second")
    assert [pair.prompt for pair in pairs][-1] == "five"
    assert [verdict.preference for verdict in verdicts] == [0.5, 0.75, 0.5, 1.0, 1.0]
    Path("comparison.votes.jsonl").write_bytes(b"".join(lines))  # killed before it removed them
    assert len(read_votes(votes, "first", "second")[0]) == 5


def test_answers_may_contain_any_line_separator(votes: Path) -> None:
    text = "one\u2028two\x85three\x1cfour"
    store = FeedbackStore(Path("others.jsonl"))
    sides = [answer(f"{m}0", m, "prompt", f"{text} {m}") for m in ("first", "second")]
    for side in sides:
        store.add(side)
    store.compare(sides[0], sides[1], "a", "ann")
    store.close()
    (pair,), _ = read_votes(Path("others.jsonl"), "first", "second")
    assert pair.baseline.text == f"{text} first"


def test_votes_on_other_models_or_other_files_are_refused(votes: Path) -> None:
    with raises_error("votes-missing"):
        read_votes(votes, "first", "third")
    Path("rows.votes.jsonl").write_text('{"prompt": "x"}\n')
    with raises_error("output-line-foreign", where="rows.votes.jsonl:1"):
        read_votes(Path("rows.votes.jsonl"), "first", "second")
    error = command_error("compare", "first", "second", "--votes", "none.jsonl")
    assert error.code == "file-not-readable"
