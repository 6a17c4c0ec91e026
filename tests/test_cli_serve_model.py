"""`valence serve` and its A/B tests: what they refuse, that they serve until they are stopped or
killed, and what is left then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.arch.source import ROOT
from tests.command import command, command_error, write_place
from tests.errors import check_error
from tests.programs import Program
from tests.serving.kit import rows, save_model, saved_model
from valence.apps.serve.experiment import Experiment, ServedRun

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {**HELLO, "max_tokens": 200, "temperature": 0}
"""This answer of the tiny model has 200 tokens."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", ["'serve', '--help'", "'ab', 'none.jsonl'"])
def test_neither_the_help_nor_a_result_waits_for_torch(words: str) -> None:
    code = f"""
import sys
from valence import cli
sys.argv = ["valence", {words}]
try:
    cli.main()
finally:
    assert not {{"torch", "transformers", "fastapi", "uvicorn"}} & set(sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in process.stderr
    assert process.returncode == (0 if "help" in words else 2)


@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    error = command_error("serve", "model")
    check_error(error, "library-missing", where="serve", fix="valence-align[serve]")
    assert name in error.message


REFUSED: list[tuple[list[str], str, str]] = [
    (["--host", "0.0.0.0"], "server-token-missing", "--host"),
    (["--token-env", "NOT_SET_HERE"], "environment-variable-missing", "--token-env"),
    (["--share", "0.1"], "option-unused", "--share"),
    (["other", "--share", "0"], "ab-share-invalid", "--share"),
    (["other", "--share", "1"], "ab-share-invalid", "--share"),
    (["no-model"], "models-identical", "no-model"),
    (["--max-new-tokens", "10000000"], "sampling-value", "max_new_tokens"),
    (["--out", "feedback.csv"], "output-not-jsonl", "feedback.csv"),
    (["--out", "foreign.jsonl"], "output-foreign", "foreign.jsonl"),
    (["other", "--out", "test.ab.jsonl", "--overwrite"], "path-invalid-output", "--out"),
]


@pytest.mark.parametrize(("words", "code", "where"), REFUSED)
def test_mistakes_are_found_before_the_model_is_loaded(
    words: list[str], code: str, where: str
) -> None:
    Path("foreign.jsonl").write_text("{}\n")
    check_error(command_error("serve", "no-model", "--port", "0", *words), code, where=where)


def test_a_port_that_is_used_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        check_error(command_error("serve", "no-model", "--port", port), "server-cannot-listen")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_result_of_a_test_is_printed(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    runs = (ServedRun("runs/\x1b[2Jfirst", 26), ServedRun("runs/second", 52))
    experiment = Experiment(Path("feedback.ab.jsonl"), runs, 0.5)
    for number in range(100):
        assignment = experiment.plan.assign(str(number))
        experiment.vote(assignment, str(number), "", assignment.side == "b")
    experiment.close()
    assert command("report", "feedback.jsonl", *(["--json"] if as_json else [])) == 0
    shown = capsys.readouterr().out
    if as_json:
        result = json.loads(shown)
        assert (result["better"], result["b"]["rate"], result["min_votes"]) == ("b", 1.0, 10)
    else:
        assert "B is better: established after" in shown
        assert "runs/second" in shown
        assert "\x1b[2J" not in shown
    check_error(command_error("report", "none.jsonl"), "ab-test-missing", where="none.ab.jsonl")


@contextmanager
def serving(
    *words: str, target: str | None = None, token: str = ""
) -> Iterator[tuple[Program, str, Path]]:
    """The command as it runs, its address, and the file of what it prints. target: default: a tiny
    model.
    """
    output = Path("output")
    output.unlink(missing_ok=True)
    target = target or saved_model().name
    program = Program("serve", target, *words, "--port", "0", output=output, TOKEN_OF_TEST=token)
    try:
        until = time.monotonic() + 60
        while "stop with Ctrl-C" not in (output.read_text() if output.exists() else ""):
            assert program.poll() is None, output.read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        (address,) = re.findall(r"http://\S+/v1", output.read_text())
        yield program, address, output
    finally:
        with suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGKILL)
        program.process.join()


def post(address: str, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{address.removesuffix('/v1')}{path}", json=body, timeout=60, **options)


@pytest.mark.slow
def test_the_command_serves_with_the_token_of_the_environment() -> None:
    with serving("--token-env", "TOKEN_OF_TEST", token="secret") as served:
        program, address, output = served
        assert post(address, "/v1/chat/completions", HELLO).status_code == 401
        headers = {"authorization": "Bearer secret"}
        completion = post(address, "/v1/chat/completions", HELLO, headers=headers).json()
        vote = {"id": completion["id"], "label": True}
        assert post(address, "/feedback", vote, headers=headers).json() == {"votes": 1}
        evil = {**headers, "host": "evil.example"}
        assert post(address, "/v1/chat/completions", HELLO, headers=evil).status_code == 421
        # another server cannot write the same files
        second = command_error("serve", "no-model", "--port", "0")
        check_error(second, "output-locked", where="feedback")
        os.kill(program.pid, signal.SIGINT)
        program.process.join(60)
        assert program.poll() == 130
        assert "1 vote in feedback.jsonl" in output.read_text()
        assert "secret" not in output.read_text()
    assert [row["label"] for row in rows(Path("feedback.jsonl"))] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_run_are_finished_after_a_signal(stream: bool) -> None:
    with serving() as (program, address, output):
        responses = list[httpx.Response]()

        def ask() -> None:
            responses.append(post(address, "/v1/chat/completions", {**LONG, "stream": stream}))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while httpx.get(f"{address.removesuffix('v1')}metrics").text.count(
            'requests_in_progress{side="a"} 3.0'
        ) != 1:  # fmt: skip
            assert time.monotonic() < until
        os.kill(program.pid, signal.SIGTERM)
        for thread in threads:
            thread.join()
        program.process.join(60)
        assert program.poll() == -signal.SIGTERM
        assert "Traceback" not in output.read_text()
    assert [response.status_code for response in responses] == [200] * 3
    for response in responses:
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["usage"]["completion_tokens"] == 200


@pytest.mark.slow
def test_a_kill_loses_no_feedback_that_was_confirmed(tmp_path: Path) -> None:
    rival = str(save_model(tmp_path / "rival", seed=5))
    expected = dict[str, bool]()
    for attempt in range(3):
        with serving(rival, "data.max_length=256", "--share", "0.4") as (program, address, _):
            for number in range(4):
                user = f"{attempt} {number}"
                body = {**HELLO, "user": user, "max_tokens": 3}
                completion = post(address, "/v1/chat/completions", body).json()
                assert completion["model"] == "valence"
                vote = {"id": completion["id"], "label": number % 2 == 0, "user": user}
                assert post(address, "/feedback", vote).status_code == 200
                expected[completion["id"].removeprefix("chatcmpl-")] = number % 2 == 0
            stream = {**LONG, "stream": True}
            with httpx.stream("POST", f"{address}/chat/completions", json=stream) as response:
                next(response.iter_lines())
                os.kill(program.pid, signal.SIGKILL)
                program.process.join()
    with serving(rival, "data.max_length=256", "--share", "0.4") as (program, address, output):
        result = httpx.get(f"{address.removesuffix('v1')}ab").json()
        first = next(iter(expected))
        late = {"id": first, "label": False, "user": "0 0"}
        assert post(address, "/feedback", late).status_code == 200
        os.kill(program.pid, signal.SIGTERM)
        program.process.join(60)
        assert "not established" in output.read_text()
    assert sum(result[side]["votes"] for side in "ab") == len(expected)
    assert sum(result[side]["ups"] for side in "ab") == sum(expected.values())
    written = {
        row["info"]["votes"][0].partition("/")[0]: row for row in rows(Path("feedback.jsonl"))
    }
    assert {id: row["label"] for id, row in written.items()} == expected | {first: False}
    sides = {row["info"]["side"]: row["info"]["run"] for row in written.values()}
    assert set(sides.values()) <= {saved_model().name, rival}
    error = command_error("serve", saved_model().name, rival, "--port", "0", "--share", "0.5")
    check_error(error, "ab-share-changed", where="--share")


@pytest.mark.slow
def test_a_lora_run_and_its_exports_answer_as_the_run_samples(place: Path) -> None:
    write_place(place)
    settings = ("train.learning_rate=0.05", "train.epochs=3", "model.lora.rank=4")
    assert command("train", "recipe.yaml", *settings, "run.export=adapter") == 0
    assert command("export", "runs/first", "merged") == 0
    assert command("export", "runs/first", "adapter", "--adapter") == 0
    assert Path("adapter/adapter_config.json").exists()
    assert not Path("merged/adapter_config.json").exists()
    prompts = [f"question {i}" for i in range(4)]
    expected = {target: sampled(target, prompts) for target in ("model", "runs/first")}
    of_run = expected["runs/first"]
    assert all(
        before[0] != after[0] for before, after in zip(expected["model"], of_run, strict=True)
    )
    assert any(logp < -0.1 for _, logps in of_run for logp in logps)
    for target in ("runs/first", "runs/first/model", "adapter", "merged"):
        with serving(target=target) as (_, address, _):
            for prompt, (text, logps) in zip(prompts, of_run, strict=True):
                body = {
                    "messages": [{"role": "user", "content": prompt}],
                    **{"temperature": 0, "max_tokens": 12, "logprobs": True},
                }
                (choice,) = post(address, "/v1/chat/completions", body).json()["choices"]
                assert choice["message"]["content"] == text, target
                served = [token["logprob"] for token in choice["logprobs"]["content"]]
                assert served == pytest.approx(logps, abs=1e-4), target


def sampled(target: str, prompts: list[str]) -> list[tuple[str, list[float]]]:
    """Greedy answers of a model with the log-probabilities of their tokens."""
    out = Path(f"{target.replace('/', '-')}.jsonl")
    questions = [word for prompt in prompts for word in ("--prompt", prompt)]
    words = ("--temperature", "0", "--max-new-tokens", "12", "--out", str(out))
    assert command("sample", target, *questions, *words) == 0
    return [(row["completion"], row["logps"]) for row in rows(out)]
