"""The page for a start, executed completely: the feedback that comes with Valence is audited,
trained on and compared, people vote at both of the page's servers, and their votes are trained on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.docs.blocks import ROOT
from tests.docs.walk import MODEL, Line, Walk, place_model
from tests.programs import Program
from tests.serving.kit import events, rows
from valence.data.split import PromptSplit

PAGE = "docs/start.md"
CLONE = ("pyproject.toml", "README.md", "LICENSE", "valence", "recipes", "docs", "examples")
SPLIT = PromptSplit(0.4)
"""The rows that the recipe of the page holds out."""
QUESTIONS = [f"question {i}" for i in range(20)]
USERS = [f"user {i}" for i in range(12)]


class LoopWalk(Walk):
    """The page in a copy of the repository, without files of its readers but a model. Where it
    starts a server, people ask questions and vote.
    """

    def _prepare(self, text: str) -> None:
        place_model(MODEL)
        sources = " ".join(shlex.quote(f"{ROOT}/{name}") for name in CLONE)
        subprocess.run(f"cp -r {sources} .", shell=True, check=True)

    def _line(self, line: Line) -> None:
        if line.words[:1] == ["collect"]:
            self._collect(line)
            return
        if line.words[:2] == ["report", "ab.jsonl"]:
            self._vote_in_app(Path("ab.jsonl"))
        super()._line(line)

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

    def _vote_in_app(self, out: Path) -> None:
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
        wait_until(lambda: len(rows(out)) == len(USERS))


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
    return {question(row) for row in rows(Path(path))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_runs_from_an_installation_to_the_second_model(walk: LoopWalk) -> None:
    walk.run()
    steps = [line.split()[1] for line in walk.done if line.startswith("valence ")]
    assert steps == [
        *("doctor", "audit", "init", "check", "train", "sample", "split", "compare"),
        *("export", "serve", "report", "collect", "audit", "train", "report"),
        *("init", "check", "inspect", "train", "train", "report"),
    ]
    # Install: the installed package works without the repository
    elsewhere = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    subprocess.run([".venv/bin/valence", "doctor"], env=elsewhere, check=True)
    # Train: on questions that are not held out, neither in this round nor in the next one
    held_out = questions_of("held_out.jsonl")
    shipped = rows(Path("feedback.jsonl"))
    assert held_out == {q for q in questions_of("feedback.jsonl") if SPLIT.is_held_out(q)}
    assert num_trained("runs/first") == sum(question(row) not in held_out for row in shipped)
    # Compare: both models answered each held-out question
    compared = json.loads(Path("comparison/compare.json").read_text())
    assert questions_of("comparison/prompts.jsonl") == held_out
    assert compared["prompts"] == len(held_out)
    assert compared["trained"] == {}
    assert compared["judges"][0]["win_rate"] is not None
    # Ship: a model that transformers loads, and votes on both models
    AutoModelForCausalLM.from_pretrained("exported")
    assert {row["info"]["run"] for row in rows(Path("ab.jsonl"))} == {MODEL, "runs/first"}
    # Collect again: the votes of the page, and train on all votes
    votes = {question(row): row["label"] for row in rows(Path("more.jsonl"))}
    assert votes == {question: i % 3 > 0 for i, question in enumerate(QUESTIONS)}
    everything = [
        question(row)
        for name in ("feedback.jsonl", "ab.jsonl", "more.jsonl")
        for row in rows(Path(name))
    ]
    trained = [question for question in everything if not SPLIT.is_held_out(question)]
    assert len(trained) < len(everything)
    assert num_trained("runs/second") == len(trained)
    # More feedback: half of the same rows
    assert num_trained("runs/half") == num_trained("runs/first") // 2


def question(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"]


def num_trained(run: str) -> int:
    """The number of rows that a run was trained on, of which it measures all if they are few."""
    return len(json.loads(Path(run, "eval/train.json").read_text())["rows"])
