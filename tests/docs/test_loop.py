"""The page about the loop, executed completely: people vote at both of its servers, and their votes
are split, trained on, compared, exported, served and trained on again, in one folder.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.docs.walk import MODEL, REWARDS, Line, Walk, place_model
from tests.programs import Program
from tests.serving.kit import events, rows
from valence.data.split import PromptSplit

PAGE = "docs/tasks/loop.md"
SPLIT = PromptSplit(0.2)
"""The rows that the recipe of the page holds out."""
QUESTIONS = [f"question {i}" for i in range(20)]
USERS = [f"user {i}" for i in range(12)]
CURL = "user-42"
"""The user of the page's requests."""


class LoopWalk(Walk):
    """The page without files of its readers but a model and a reward function. Where it starts a
    server, people ask questions and vote.
    """

    links: list[str]

    def _prepare(self, text: str) -> None:
        self.links = []
        place_model(MODEL)
        self._write("my_rewards.py", REWARDS)

    def _line(self, line: Line) -> None:
        if line.words[:1] == ["collect"]:
            self._collect(line)
            return
        if line.words[:1] == ["ab"]:
            self._vote_in_app(Path("ab.jsonl"), len(USERS) + 1)
        super()._line(line)
        if "served.jsonl" in line.words and line.words[:1] == ["serve"]:
            self._vote_in_app(Path("served.jsonl"), len(USERS))

    def _collect(self, line: Line) -> None:
        """Vote in the page until the reader stops the command."""
        printed = Path("printed by collect")
        program = Program(*line.words, "--port", "0", output=printed)
        self.servers["collect"] = program
        wait_until(lambda: printed.exists() and "stop with Ctrl-C" in printed.read_text())
        (link,) = re.findall(r"http://\S+", printed.read_text())
        base, _, token = link.partition("#token=")
        with httpx.Client(
            base_url=base, headers={"authorization": f"Bearer {token}"}, timeout=60
        ) as page:
            texts = {""}
            for i, question in enumerate(QUESTIONS):
                text = ""
                while text in texts:  # KTO pairs rows with different completions
                    body = {"messages": [{"role": "user", "content": question}]}
                    parts = events(page.post("api/answer", json=body))
                    text = "".join(part.get("text", "") for part in parts)
                    answer = parts[-1]["done"]
                texts.add(text)
                vote = {"answer": answer, "label": i % 3 > 0}
                assert page.post("api/rate", json=vote).json() == {"votes": i + 1}
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130, printed.read_text()
        del self.servers["collect"]
        self.done.append(line.text)

    def _vote_in_app(self, out: Path, total: int) -> None:
        """Votes of the app's users. The rows are written while the server runs."""
        base = f"http://127.0.0.1:{self.ports['8000']}"
        with httpx.Client(base_url=base, timeout=60) as app:
            for i, user in enumerate(USERS):
                body = {
                    "messages": [{"role": "user", "content": f"{out.stem} {i}"}],
                    "user": user,
                }
                answer = app.post("/v1/chat/completions", json=body).json()["id"]
                vote = {"id": answer, "label": i % 2 == 0, "user": user}
                assert app.post("/feedback", json=vote).status_code == 200
        wait_until(lambda: len(rows(out)) == total)


def wait_until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWalk]:
    monkeypatch.chdir(tmp_path)
    walk = LoopWalk(PAGE, monkeypatch)
    try:
        yield walk
    finally:
        walk.end()


def questions_of(path: str) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows(Path(path))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loop_runs_from_the_first_vote_to_the_second_model(walk: LoopWalk) -> None:
    walk.run()
    steps = [line.split()[1] for line in walk.done if line.startswith("valence ")]
    assert steps == [
        *("collect", "audit", "check", "train", "split", "compare", "export", "serve", "ab"),
        *("serve", "audit", "train"),
    ]
    # 1 collect: the votes of the page
    votes = {row["prompt"][0]["content"]: row["label"] for row in rows(Path("feedback.jsonl"))}
    assert votes == {question: i % 3 > 0 for i, question in enumerate(QUESTIONS)}
    # 3 train: on questions that are not held out, neither in this round nor in the next one
    held_out = questions_of("held_out.jsonl")
    assert held_out == {question for question in QUESTIONS if SPLIT.is_held_out(question)}
    assert num_trained("runs/first") == len(set(QUESTIONS) - held_out)
    # 4 compare: both models answered each held-out question
    compared = json.loads(Path("comparison/compare.json").read_text())
    compared_questions = {
        row["prompt"][0]["content"] for row in rows(Path("comparison/prompts.jsonl"))
    }
    assert compared_questions == held_out
    assert compared["prompts"] == len(compared_questions)
    assert compared["trained"] == {}
    assert compared["judges"][0]["win_rate"] is not None
    # 5 export: a model that transformers loads
    AutoModelForCausalLM.from_pretrained("exported")
    # 6 serve: both models answered users, and the page's vote has been counted
    tested = rows(Path("ab.jsonl"))
    assert {row["info"]["run"] for row in tested} == {MODEL, "runs/first"}
    assert {"Why is the sky blue?", "ab 0"} <= {row["prompt"][0]["content"] for row in tested}
    # 7 collect again: on the trained model, and train on all votes
    served = rows(Path("served.jsonl"))
    assert {row["info"]["run"] for row in served} == {"runs/first"}
    assert [row["label"] for row in served] == [i % 2 == 0 for i in range(len(USERS))]
    everything = [
        row["prompt"][0]["content"]
        for name in ("feedback.jsonl", "ab.jsonl", "served.jsonl")
        for row in rows(Path(name))
    ]
    trained = [question for question in everything if not SPLIT.is_held_out(question)]
    assert num_trained("runs/second") == len(trained) < len(everything)


def num_trained(run: str) -> int:
    """The number of rows that a run was trained on, of which it measures all if they are few."""
    return len(json.loads(Path(run, "eval/train.json").read_text())["rows"])
