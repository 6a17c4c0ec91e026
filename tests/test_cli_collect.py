"""`valence collect`: what it refuses before the model is loaded, and that it serves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.arch.source import ROOT
from tests.command import command_error
from tests.errors import check_error
from tests.programs import Program
from tests.serving.kit import events, rows, save_model, saved_model
from valence import cli
from valence.apps.serve.app import DEFECT
from valence.apps.serve.feedback import FeedbackStore
from valence.cli import collect


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from valence import cli
sys.argv = ["valence", "collect", "--help"]
try:
    cli.main()
finally:
    assert not {"torch", "transformers", "fastapi", "uvicorn"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    error = command_error("collect", "model")
    check_error(error, "library-missing", where="collect", fix="valence-align[serve]")
    assert name in error.message


REFUSED: list[tuple[list[str], str, str]] = [
    (["--rater", "anna", "--rater", "anna"], "rater-duplicate", "--rater"),
    (["--rater", " "], "rater-name-invalid", "--rater"),
    (["--rater", "a\nb"], "rater-name-invalid", "--rater"),
    (["--rater", "\udcff"], "rater-name-invalid", "--rater"),
    (["--rater", "anna", "--no-token"], "option-conflict", "--no-token"),
    (["--no-token", "--host", "0.0.0.0"], "server-token-missing", "--host"),
    (["--max-new-tokens", "10000000"], "sampling-value", "max_new_tokens"),
    (["--prompts", "none.jsonl"], "file-not-found", "none.jsonl"),
    (["--prompts", "empty.jsonl"], "file-empty", "empty.jsonl"),
    (["no-model"], "models-identical", "no-model"),
    (["./no-model"], "models-identical", "./no-model"),
    (["--out", "feedback.csv"], "output-not-jsonl", "feedback.csv"),
    (["--out", "none/feedback.jsonl"], "path-invalid-output", "none"),
    (["--out", "foreign.jsonl"], "output-foreign", "foreign.jsonl"),
]


@pytest.mark.parametrize(("words", "code", "where"), REFUSED)
def test_mistakes_are_found_before_the_model_is_loaded(
    words: list[str], code: str, where: str
) -> None:
    Path("empty.jsonl").touch()
    Path("foreign.jsonl").write_text("{}\n")
    error = command_error("collect", "no-model", "--port", "0", *words)
    check_error(error, code, where=where)
    assert "--token-env" not in (error.fix or "")


def test_a_port_that_is_used_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        check_error(command_error("collect", "no-model", "--port", port), "server-cannot-listen")


def test_a_model_that_cannot_be_loaded_leaves_no_lock() -> None:
    for _ in range(2):
        error = command_error("collect", "no-model", "--port", "0")
        assert error.code != "output-locked"
    assert not list(Path().glob(".feedback*"))


@contextmanager
def collecting(
    *words: str, main: Callable[[], None] = cli.main
) -> Iterator[tuple[Program, dict[str, str], Path]]:
    """The command as it runs, the links of its raters, and the file of what it prints."""
    message = Path("said")
    message.unlink(missing_ok=True)
    program = Program(
        "collect", saved_model().name, "--port", "0", *words, output=message, main=main
    )
    try:
        until = time.monotonic() + 60
        while "stop with Ctrl-C" not in (message.read_text() if message.exists() else ""):
            assert program.poll() is None, message.read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        result = re.findall(r"^(?:(.*): )?(http://\S+)$", message.read_text(), re.MULTILINE)
        yield program, dict(result), message
    finally:
        with suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGKILL)
        program.process.join()


def post(link: str, path: str, body: Any, **options: Any) -> httpx.Response:
    base, _, token = link.partition("#token=")
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(f"{base}{path}", json=body, headers=headers, timeout=60, **options)


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped() -> None:
    words = ("--rater", "anna <b>", "--rater", "ben", "--max-new-tokens", "8")
    with collecting(*words) as (program, links, message):
        assert list(links) == ["anna <b>", "ben"]
        id = events(post(links["ben"], "api/answer", HELLO))[-1]["done"]
        assert post(links["ben"], "api/rate", {"answer": id, "label": True}).json() == {"votes": 1}
        assert httpx.get(links["ben"]).status_code == 200
        base = links["ben"].partition("#")[0]
        assert httpx.get(base, headers={"host": "evil.example"}).status_code == 421
        os.kill(program.pid, signal.SIGINT)
        program.process.join(60)
        assert program.poll() == 130
        shown = message.read_text()
    assert "1 vote in feedback.jsonl" in shown
    tokens = {link.partition("#token=")[2] for link in links.values()}
    assert all(shown.count(token) == 1 for token in tokens)
    assert [row["label"] for row in rows(Path("feedback.jsonl"))] == [True]
    written = "".join(path.read_text() for path in Path().glob("feedback*"))
    assert not any(text in written for text in (*tokens, "anna", "ben"))


@pytest.mark.slow
def test_a_signal_during_an_answer_ends_the_command_with_all_votes_written() -> None:
    with collecting("--max-new-tokens", "8") as (program, links, message):
        (link,) = links.values()
        id = events(post(link, "api/answer", HELLO))[-1]["done"]
        post(link, "api/rate", {"answer": id, "label": True})
        base, _, token = link.partition("#token=")
        body = {**HELLO, "max_tokens": 200, "stream": True, "temperature": 2.0}
        headers = {"authorization": f"Bearer {token}"}
        started = time.monotonic()
        with httpx.stream(
            "POST", f"{base}v1/chat/completions", json=body, headers=headers, timeout=60
        ) as response:
            next(response.iter_lines())
            os.kill(program.pid, signal.SIGTERM)
        program.process.join(60)
        assert time.monotonic() - started < 20
        assert program.poll() == -signal.SIGTERM
        assert "Traceback" not in message.read_text()
    assert len(rows(Path("feedback.jsonl"))) == 1
    assert not Path("feedback.pending.jsonl").exists()


@pytest.mark.slow
def test_two_models_are_compared_and_their_wins_are_printed(tmp_path: Path) -> None:
    rival = str(save_model(tmp_path / "rival"))
    words = (rival, "data.max_length=256", "--rater", "anna", "--max-new-tokens", "8")
    with collecting(*words) as (program, links, printed):
        assert len(links) == 2
        assert "anna" in links
        models = {"rival", Path(saved_model().name).name}
        for winner in ("a", "a", "tie"):
            id = events(post(links["anna"], "api/answer", HELLO))[-1]["done"]
            vote = {"comparison": id, "winner": winner}
            assert set(post(links["anna"], "api/compare", vote).json()["models"]) == models
        os.kill(program.pid, signal.SIGINT)
        program.process.join(60)
        *_, last = printed.read_text().splitlines()
    wins = dict(re.findall(r"(\S+) won (\d)", last))
    assert set(wins) == models
    assert sum(map(int, wins.values())) == 2
    assert last.endswith("1 equally good, 0 both bad")


@pytest.mark.parametrize(
    ("target", "rival", "step", "expected"),
    [
        ("runs/a", None, None, ["a"]),
        ("runs/a", "runs/b", "3", ["a", "b"]),
        ("a/model", "b/model", None, ["a/model", "b/model"]),
        ("runs/a", "runs/a", "3", ["runs/a (step 3)", "runs/a"]),
    ],
)
def test_models_are_distinguished_by_name(
    target: str, rival: str | None, step: str | None, expected: list[str]
) -> None:
    assert collect.model_names(target, rival, step) == expected


def collect_with_defect() -> None:
    """The command, with a defect in the recording of votes."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken \x1b")

    FeedbackStore.rate = fail  # type: ignore[method-assign]
    cli.main()


@pytest.mark.slow
def test_defects_are_printed_once_with_their_traceback() -> None:
    with collecting("--max-new-tokens", "8", main=collect_with_defect) as (_, links, message):
        (link,) = links.values()
        id = events(post(link, "api/answer", HELLO))[-1]["done"]
        response = post(link, "api/rate", {"answer": id, "label": True})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == DEFECT
        assert post(link, "api/answer", HELLO).status_code == 200
        shown = message.read_text()
    assert (
        shown.count("Traceback") == shown.count("RuntimeError: broken \N{SYMBOL FOR ESCAPE}") == 1
    )
    assert link.partition("#token=")[2] not in shown.partition("Ctrl-C")[2]
