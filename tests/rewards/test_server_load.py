"""A reward server under load, with slow rewards, with clients that leave, and with its process
killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from benchmarks.reward_server.connection import Connection
from tests.command import command, command_error
from tests.errors import check_error
from tests.rewards.kit import has_words, wait_for
from tests.rewards.reward_servers import (
    Numbers,
    hash_score,
    http_get,
    http_post,
    served,
    served_as_command,
)
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence import cli
from valence.apps.serve.reward_batches import Batcher, Limits
from valence.config.load import load_reward
from valence.rewards import reward_of, score_all
from valence.rewards.calls import FailedCall
from valence.types import Completion, Score

CLIENTS = 200


def answer(text: str) -> Completion:
    return Completion("p", (), (), text, "eos")


@pytest.mark.slow
def test_two_hundred_clients_at_a_time_have_their_own_scores() -> None:
    """Each asks several times, for different numbers of answers, over one connection; some requests
    are malformed, some have an answer that fails.
    """

    def score(c: Completion) -> Score:
        return Score(float("nan")) if "bad" in c.text else Score(hash_score(c.text))

    async def one(url: str, k: int) -> tuple[int, int]:
        draw, failed, good, client = random.Random(k), 0, 0, Connection(url)
        for turn in range(4):
            texts = [f"{k} {turn} {i}" for i in range(draw.randrange(1, 24))]
            if k % 10 == turn:
                texts[-1] = "bad"
            body = json.dumps({"query": texts} if k % 7 or turn else {"query": texts, "labels": []})
            status, _, reply = await client.post(body.encode())
            if status == 200:
                assert json.loads(reply)["rewards"] == [hash_score(text) for text in texts]
                good += len(texts)
            else:
                assert status == (422 if k % 7 == 0 and turn == 0 else 500)
                assert "rewards" not in json.loads(reply)
                failed += 1
        return good, failed

    async def all_of_them(url: str) -> list[tuple[int, int]]:
        return await asyncio.gather(*(one(url, k) for k in range(CLIENTS)))

    with served(Numbers(score), Limits(concurrency=2)) as server:
        result = asyncio.run(all_of_them(server.url))
        statuses = server.statuses
        num_scored = server.service.metrics.value("answers_total", outcome="scored")
    malformed = len(range(0, CLIENTS, 7))
    assert statuses[422] == malformed
    assert sum(failed for _, failed in result) == statuses[500] + malformed
    assert statuses[500] >= 60
    assert sum(statuses.values()) == 4 * CLIENTS
    assert sum(good for good, _ in result) <= num_scored
    calls = [len(call) for call in server.reward.calls]
    assert max(calls) <= 64
    assert len(calls) < 400  # of 771 requests with answers: several were scored together


async def rounds_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    max_batch=st.integers(1, 8),
    concurrency=st.integers(1, 3),
    bad=st.sets(st.integers(0, 100), max_size=6),
    fails=st.sampled_from(["raises", "failed call", "failed scores"]),
    seed=st.integers(0, 1000),
)
def test_whatever_the_batches_each_request_has_its_own_scores(
    sizes: list[int], max_batch: int, concurrency: int, bad: set[int], fails: str, seed: int
) -> None:
    """Requests come in any number and size at any time; calls end in any order; some answers fail,
    or make a call fail with an error that quotes all of them. No request gets an error of
    another's, and no answer is given to the reward often.
    """
    draw = random.Random(seed)
    times = Counter[int]()

    class Any_:
        name, deterministic = "any", True

        async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
            assert 0 < len(completions) <= max_batch
            await rounds_of_the_loop(draw.randrange(6))
            numbers = [int(c.text) for c in completions]
            times.update(numbers)
            if bad & set(numbers) and fails == "raises":
                raise ValueError(f"cannot score {numbers}")
            if bad & set(numbers) and fails == "failed call":
                return [FailedCall(None, error=f"cannot score {numbers}")] * len(numbers)
            return [Score(None, error=f"no {n}") if n in bad else Score(float(n)) for n in numbers]

        async def close(self) -> None:
            pass

    async def ask(batcher: Batcher, numbers: Sequence[int]) -> list[Score]:
        await rounds_of_the_loop(draw.randrange(6))
        return await batcher.submit([answer(str(n)) for n in numbers]).result

    async def run() -> list[tuple[Sequence[int], list[Score]]]:
        limits = Limits(max_batch=max_batch, concurrency=concurrency, max_delay=0.0005)
        batcher = Batcher(Any_(), limits)
        await batcher.start()
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        requests = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        outcome = await asyncio.gather(*(ask(batcher, numbers) for numbers in requests))
        await batcher.close()
        assert not batcher.waiting
        return list(zip(requests, outcome, strict=True))

    for numbers, scores in asyncio.run(run()):
        for n, score in zip(numbers, scores, strict=True):
            if n in bad or (fails != "failed scores" and bad & set(numbers)):
                assert score.value is None or (score.value == n and n not in bad)
                assert {int(digits) for digits in re.findall(r"\d+", score.error)} <= set(numbers)
            else:
                assert score.value == n
    assert max(times.values(), default=0) <= 3


# Slow rewards, and clients that leave


@pytest.mark.parametrize("blocks", [False, True])
def test_a_slow_reward_has_a_deadline(blocks: bool) -> None:
    """The server answers all the while.

    What comes too late is nobody's score, and the next request has its own.
    """
    gate = threading.Event()
    with served(Numbers(gate=gate, blocks=blocks), Limits(timeout=0.4)) as server:
        late = server.post(query=["late", "later"])
        assert late.status_code == 504
        assert has_words(late.json()["error"], 2, "0.4 s")
        assert http_get(f"{server.url}/health").status_code == 200
        assert http_get(f"{server.url}/ready").status_code == 503
        assert server.post(query=["waits behind it"]).status_code == 504
        gate.set()
        wait_for(lambda: http_get(f"{server.url}/ready").status_code == 200)
        assert server.post(query=["next", "one"]).json()["rewards"] == [
            hash_score("next"),
            hash_score("one"),
        ]
    texts = [[c.text for c in call] for call in server.reward.calls]
    # nobody waited any more for what stood behind
    assert texts == [
        ["late", "later"],
        ["next", "one"],
    ]


def test_why_a_server_is_not_ready_is_shown_to_those_who_have_the_token() -> None:
    async def probe() -> str:
        return "it failed: secret.py:7"

    with served(Numbers(), token="s3cret", is_ready=False, probe=probe) as server:
        for headers, shown in (
            ({}, {}),
            ({"authorization": "Bearer s3cret"}, {"reason": "it failed: secret.py:7"}),
        ):
            reply = http_get(f"{server.url}/ready", headers=headers)
            assert (reply.status_code, reply.json()) == (503, {"status": "not ready", **shown})


def test_answers_of_a_client_that_left_are_not_scored() -> None:
    gate = threading.Event()
    body = json.dumps({"query": ["nobody waits"]}).encode()
    head = (
        b"POST /get_reward HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with served(Numbers(gate=gate)) as server:
        first = threading.Thread(target=lambda: server.post(query=["first"]))
        first.start()
        wait_for(lambda: len(server.reward.calls) == 1)
        with server.raw() as connection:
            connection.sendall(head + body)
            wait_for(lambda: len(server.service.batcher.waiting) == 1)
            (waiting,) = server.service.batcher.waiting
        wait_for(waiting[0].result.cancelled)
        gate.set()
        first.join()
        assert server.post(query=["second"]).status_code == 200
        assert server.statuses == {200: 2, 499: 1}
        assert len(server.lines) == 1
    assert [[c.text for c in call] for call in server.reward.calls] == [["first"], ["second"]]


def test_calls_are_as_many_as_may_be_at_a_time() -> None:
    gate = threading.Event()
    with served(Numbers(gate=gate), Limits(max_batch=1, concurrency=3)) as server:
        thread = threading.Thread(target=lambda: server.post(query=["a"] * 5))
        thread.start()
        wait_for(lambda: len(server.reward.calls) == 3)
        busy = threading.Thread(target=lambda: server.post(query=["b"]))
        busy.start()
        wait_for(lambda: len(server.service.batcher.waiting) == 3)  # two of the five, and that one
        assert len(server.reward.calls) == 3
        gate.set()
        busy.join()
        thread.join()
        assert len(server.reward.calls) == 6


# The command

FUNCTION = "benchmarks.reward_server.hash_reward:score"
ROOT = Path(cli.__file__).parents[2]


class Command:
    """`valence serve --reward` in a separate process."""

    def __init__(self, *words: str, function: str = FUNCTION, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "valence", "serve", "--reward", function, *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        result = re.search(r"http://\S+?/get_reward", self.line)
        assert result, self.line + self.process.stdout.read()
        self.url = result[0]

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=30)
        return self.process.returncode, rest


@pytest.mark.slow
def test_a_signal_waits_for_requests_that_are_under_way(tmp_path: Path) -> None:
    server = Command("--port", "0", function="tests.rewards.served_functions:obeys")
    assert server.url.startswith("http://127.0.0.1:")
    query, begun, result = (
        [f"touch {tmp_path / 'begun'}", "wait 1"],
        tmp_path / "begun",
        list[httpx.Response](),
    )
    thread = threading.Thread(
        target=lambda: result.append(http_post(server.url, json={"query": query}, timeout=30))
    )
    thread.start()
    wait_for(begun.exists)
    status, rest = server.end(signal.SIGTERM)
    thread.join()
    assert result[0].json()["rewards"] == list(map(hash_score, query))
    assert status == -signal.SIGTERM
    assert re.findall(r"\d+", rest) == ["2", "0"]
    with pytest.raises(httpx.ConnectError):
        http_get(server.url)


@pytest.mark.slow
def test_killed_in_mid_run_and_started_again_no_client_has_a_wrong_score() -> None:
    """The client asks again until the server is back. Whatever it has is the answer's own score."""
    server = Command("--port", "0", PAUSE="0.05")
    port = server.url.split(":")[2].partition("/")[0]
    spec = load_reward(server.url, ["retries=12", "batch_size=8", "timeout=20"])
    client = reward_of([spec])
    answers = [answer(f"text {i}") for i in range(800)]
    scored, killed = 0, list[Command]()

    def progress(count: int) -> None:
        nonlocal scored
        scored += count
        if scored >= 100 and not killed:
            assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
            killed.append(Command("--port", port, PAUSE="0.05"))

    result = score_all(client, answers, progress=progress)
    assert killed
    assert killed[0].end(signal.SIGINT)[0] == 128 + signal.SIGINT
    assert [score.value for score in result] == [hash_score(c.text) for c in answers]
    assert scored == 800


@pytest.mark.slow
def test_a_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Command("--port", "0", "--host", "0.0.0.0", "--token-env", "TOKEN", TOKEN="s3cret")
    try:
        assert "s3cret" not in server.line
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert http_post(url, json={"query": ["a"]}).status_code == 401
        monkeypatch.setenv("MINE", "s3cret")
        (score,) = score_all(reward_of([load_reward(url, ["token_env=MINE"])]), [answer("a")])
        assert score.value == hash_score("a")
    finally:
        server.end(signal.SIGTERM)


FUNCTIONS = "tests.rewards.served_functions"


@pytest.mark.parametrize(
    ("words", "options", "code", "where", "fix"),
    [
        (["exact_match"], ["--host", "0.0.0.0"], "server-token-missing", "--host", "--token-env"),
        (
            ["exact_match"],
            ["--token-env", "NOT_SET"],
            "environment-variable-missing",
            "--token-env",
            None,
        ),
        (["exact_mach"], [], "reward-not-found", "exact_mach", "exact_match"),
        (
            ["http://localhost:1/get_reward"],
            [],
            "reward-not-servable",
            "http://localhost:1/get_reward",
            None,
        ),
        (["http://user:hunter2@host/x"], [], "address-credentials", "reward", "token_env"),
        (["length"], [], "reward-needs-tokens", "settings.unit", "settings.unit=characters"),
        (["exact_match", "setings.answer=label"], [], "setting-unknown", "setings", "settings?"),
        (["no_such.module:fn"], [], "reward-module-not-found", "no_such.module:fn", None),
        (
            [f"{FUNCTIONS}:of_tokens"],
            [],
            "reward-needs-tokens",
            f"{FUNCTIONS}:of_tokens",
            "completion_ids",
        ),
        (["exact_match", "token_env=HOME"], [], "reward-setting-unused", "token_env", None),
    ],
)
def test_what_cannot_be_served_is_a_mistake(
    words: list[str], options: list[str], code: str, where: str | None, fix: str | None
) -> None:
    error = command_error("serve", "--reward", *words, *options)
    check_error(error, code, where=where, fix=fix)


def test_the_command_ends_with_the_status_of_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("serve", "--reward", "exact_match", "--host", "0.0.0.0", "--token-env", "NOT_SET")
    assert command(*words) == 2
    assert has_words(capsys.readouterr().err, "NOT_SET")


# Rewards of every kind


def test_a_rule_reads_the_label() -> None:
    with served_as_command("exact_match", "settings.answer=label") as server:
        body = {
            "query": ["Capital? Paris<|im_end|>", "Capital? Rome", "Sum? 4"],
            "prompts": ["Capital? ", "Capital? ", "Sum? "],
        }
        assert server.post(**body, labels=["Paris", "Paris", "4"]).json()["rewards"] == [
            1.0,
            0.0,
            1.0,
        ]
        assert [
            item["index"]
            for item in server.post(**body, labels=["Paris", None, "4"]).json()["failed"]
        ] == [1]
        # without labels there is nothing to compare with, and so no number
        assert server.post(**body).status_code == 500


def test_a_reward_model_reads_a_query_as_it_is(tmp_path: Path) -> None:
    """Token for token, without a start or an end that it does not have; as the model of
    transformers scores it.
    """
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(adds_bos=True)
    config: Any = tiny(vocab_size=len(tokenizer)).config
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    model: Any = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    queries = [
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>",
        "<s>You are",
        "x y",
        "The sun is a star. " * 9,
    ]
    with (
        served_as_command(str(tmp_path / "judge"), "settings.dtype=float32") as server,
        torch.no_grad(),
    ):
        result = server.post(query=queries, prompts=["other"] * 4, labels=[None] * 4)
        assert result.status_code == 200, result.text
        refused = server.post(query=["", "word " * 3000]).json()
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in queries]
    expected = [model(torch.tensor([item])).logits[0, 0].item() for item in ids]
    assert result.json()["rewards"] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4
    assert [item["index"] for item in refused["failed"]] == [0, 1]
    assert "2048" not in refused["failed"][0]["error"]  # it has no tokens
    assert "2048" in refused["failed"][1]["error"]  # longer texts have no score; none is cut
