"""Several vLLM servers (stand-ins) that share prompts: which server gets which, and what happens
when one is killed, hangs, or comes back.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rollouts.vllm_server import (
    UPDATE,
    Completions,
    Fake,
    Words,
    generator,
    serving,
    weights,
)
from valence.rollouts.openai import OpenAIGenerator
from valence.rollouts.protocol import Sampling
from valence.rollouts.transports import DiskTransfer, LoraTransfer
from valence.rollouts.vllm import ROUTE, VLLMGenerator

PROMPTS = [(5, 6, i) for i in range(12)]
SAMPLING = Sampling(max_new_tokens=2, seed=7)


@pytest.fixture
def fakes() -> Iterator[tuple[Fake, Fake]]:
    with serving(Fake()) as first, serving(Fake()) as second:
        yield first, second


@pytest.fixture
def pool(fakes: tuple[Fake, Fake], tmp_path: Path, notes: list[str]) -> Iterator[VLLMGenerator]:
    result = generator(
        [fake.url for fake in fakes],
        DiskTransfer(tmp_path / "weights"),
        concurrency=4,
        log=notes.append,
    )
    yield result
    result.close()


def prompts_sent(fake: Fake) -> list[int]:
    """The prompts that a server was asked to answer, in order."""
    return [body["token_ids"][-1] for path, body in fake.requests if path == ROUTE]


def tokens(rows: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in row] for row in rows]


def expected(place: Path, n: int = 2) -> list[list[tuple[int, ...]]]:
    """The completions of one server that is never killed."""
    with serving(Fake()) as fake:
        alone = generator(fake.url, DiskTransfer(place / "alone"))
        rows = alone.generate(PROMPTS, n, SAMPLING)
        alone.close()
    return tokens(rows)


def test_prompts_are_divided_in_their_order(
    fakes: tuple[Fake, Fake], pool: VLLMGenerator, tmp_path: Path
) -> None:
    started = threading.Barrier(8)  # of both servers, before one of them replies

    def wait(body: Any) -> None:
        if body["token_ids"][-1] < 8:
            started.wait(30)

    for fake in fakes:
        fake.on[ROUTE] = wait
    assert tokens(pool.generate(PROMPTS, 1, SAMPLING)) == expected(tmp_path, 1)
    # at most four are in progress at each server
    assert [sorted(prompts_sent(fake)[:4]) for fake in fakes] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(prompts_sent(fakes[0]) + prompts_sent(fakes[1])) == list(range(12))


def test_prompts_of_a_killed_server_go_to_the_other_once(
    fakes: tuple[Fake, Fake],
    pool: VLLMGenerator,
    notes: list[str],
    tmp_path: Path,
) -> None:
    """It has replied to two prompts, and has two others in progress, when its sockets close."""
    first, second = fakes
    wanted = expected(tmp_path)
    is_killed = threading.Event()
    pool.sync(1, weights)
    held: list[int] = []
    progress: list[int] = []

    def answer_two(body: Any) -> None:
        number = body["token_ids"][-1]
        if number in (0, 2):
            return
        held.append(number)
        if len(held) == 2:
            wait_until(lambda: sum(progress) == 4)
            first.kill()
            is_killed.set()
        first.hang(body)

    first.on[ROUTE] = answer_two
    second.on[ROUTE] = lambda body: is_killed.wait(30) and time.sleep(0.02)
    rows = pool.generate(PROMPTS, 2, SAMPLING, progress=progress.append)
    assert len(held) == 2
    assert tokens(rows) == wanted
    assert sum(progress) == 2 * len(PROMPTS)
    assert set(held) <= set(prompts_sent(second))
    assert not {0, 2} & set(prompts_sent(second))
    assert len(prompts_sent(second)) == len(set(prompts_sent(second))) == 10
    (note,) = notes
    assert first.url in note


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_server_that_is_back_has_the_newest_weights_before_it_samples(
    fakes: tuple[Fake, Fake], pool: VLLMGenerator, notes: list[str]
) -> None:
    """It missed an update, and still has the label of the version before."""
    first, second = fakes
    pool.sync(1, weights)
    old = first.version
    unavailable = {path: (lambda body: (503, {})) for path in ("/health", "/weight_info", ROUTE)}
    first.on |= unavailable
    pool.sync(2, weights)
    assert (first.version, second.version) == (old, pool.label)
    rows = pool.generate(PROMPTS, 1, SAMPLING)
    assert prompts_sent(first) == []
    assert {row[0].version for row in rows} == {2}
    first.on.clear()
    first.requests.clear()
    second.on[ROUTE] = lambda body: wait_until(lambda: len(prompts_sent(first)) > 0)
    rows = pool.generate(PROMPTS, 1, SAMPLING)
    assert {row[0].version for row in rows} == {2}
    paths = first.paths()
    assert [path for path in paths if path in UPDATE] == UPDATE
    assert paths.index("/finish_weight_update") < paths.index(ROUTE)
    assert first.version == pool.label
    assert notes.count(f"{first.url}: the server is back") == 1


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_server_that_is_restarted_while_others_sample(
    has_adapter: bool, fakes: tuple[Fake, Fake], tmp_path: Path
) -> None:
    """It is killed in the middle of a request, and another process takes its address."""
    first, second = fakes
    transport = (LoraTransfer if has_adapter else DiskTransfer)(tmp_path / "weights")
    pool = generator([first.url, second.url], transport, concurrency=2, timeout=30.0)
    pool.sync(4, weights, (lambda folder: None) if has_adapter else None)
    restarted = Fake()
    with ExitStack() as stack:

        def restart(body: Any) -> None:
            first.kill()
            port = int(first.url.rpartition(":")[2])
            stack.enter_context(serving(restarted, port))
            first.hang(body)

        def wait_for_restarted(body: Any) -> None:
            if len(prompts_sent(second)) > 4:  # so that the other one gets the rest
                wait_until(lambda: len(prompts_sent(restarted)) > 0)

        first.on[ROUTE] = restart
        second.on[ROUTE] = wait_for_restarted
        rows = pool.generate(PROMPTS, 2, SAMPLING)
    assert {completion.version for row in rows for completion in row} == {4}
    assert tokens(rows) == expected(tmp_path)
    sent = "/v1/load_lora_adapter" if has_adapter else "/finish_weight_update"
    paths = restarted.paths()
    assert paths.index(sent) < paths.index(ROUTE)
    pool.close()


def test_a_server_that_never_replies_is_replaced(fakes: tuple[Fake, Fake], tmp_path: Path) -> None:
    """It accepts connections. With a single server, this ends the run."""
    first, second = fakes
    pool = generator([first.url, second.url], DiskTransfer(tmp_path / "weights"), timeout=0.6)
    pool.sync(1, weights)
    first.on |= {ROUTE: first.hang}

    def hang_then(body: Any) -> None:
        first.on["/health"] = first.hang
        first.hang(body)

    first.on[ROUTE] = hang_then
    rows = pool.generate(PROMPTS, 2, SAMPLING)
    assert tokens(rows) == expected(tmp_path)
    pool.close()


def test_all_servers_are_lost(tmp_path: Path) -> None:
    with serving(Fake()) as first, serving(Fake()) as second:
        urls = [first.url, second.url]
    pool = generator(urls, DiskTransfer(tmp_path / "weights"), timeout=0.3)
    for ask in (
        lambda: pool.generate(PROMPTS, 1, Sampling()),
        lambda: pool.sync(1, weights),
    ):
        with raises_error("rollout-server-lost", where=", ".join(urls), fix="rerun") as raised:
            ask()
        assert all(url in raised.error.message for url in urls)
    pool.close()


def test_a_prompt_that_ends_every_server_is_given_up(
    fakes: tuple[Fake, Fake], pool: VLLMGenerator
) -> None:
    for fake in fakes:
        fake.on[ROUTE] = lambda body: (500, {"error": {"message": "EngineCore died"}})
    with raises_error("rollout-server-lost") as raised:
        pool.generate(PROMPTS[:1], 1, Sampling())
    assert raised.error.message.count("EngineCore died") == 2


def test_a_server_that_has_been_silent_since_the_start(
    fakes: tuple[Fake, Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("valence.rollouts.client.HEALTH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = generator([url, fakes[0].url], DiskTransfer(tmp_path / "weights"), timeout=5.0)
        start = time.monotonic()
        assert tokens(pool.generate(PROMPTS, 2, SAMPLING)) == expected(tmp_path)
        assert time.monotonic() - start < 4.0
        pool.close()


def test_every_server_is_checked(fakes: tuple[Fake, Fake], pool: VLLMGenerator) -> None:
    _, second = fakes
    second.mode = "raw_logprobs"
    with raises_error("rollout-logps-unprocessed", where=second.url):
        pool.generate(PROMPTS, 1, Sampling(temperature=0.5))
    second.dtype = "bfloat16"
    with raises_error("rollout-servers-differ") as raised:
        pool.sync(1, weights)
    assert second.url in raised.error.message


def test_an_adapter_is_removed_from_every_server(fakes: tuple[Fake, Fake], tmp_path: Path) -> None:
    pool = generator([fake.url for fake in fakes], LoraTransfer(tmp_path))
    for version in (1, 2, 3):
        pool.sync(version, lambda: [], lambda folder: None)
    for fake in fakes:
        assert [name.rpartition("-v")[2] for name in fake.adapters] == ["base", "2", "3"]
    assert len(list(tmp_path.iterdir())) == 2
    pool.close()
    assert [fake.adapters for fake in fakes] == [["base"]] * 2
    assert list(tmp_path.iterdir()) == []


def test_an_address_twice(fakes: tuple[Fake, Fake], tmp_path: Path) -> None:
    url = fakes[0].url
    with raises_error("rollout-url-duplicate", where="rollout.url", fix="once"):
        generator([url, f"{url}/v1"], DiskTransfer(tmp_path))


def test_servers_with_the_completions_api(tmp_path: Path) -> None:
    first, second = Completions(speaks=True), Completions(speaks=True)
    with serving(first), serving(second):
        sampler = OpenAIGenerator(
            [first.url, second.url],
            Words(),  # type: ignore[arg-type]
            end_ids=[3],
            timeout=5.0,
            concurrency=2,
        )
        route = "/v1/completions"
        alone = sampler.generate(PROMPTS, 1, SAMPLING)
        assert all(route in fake.paths() for fake in (first, second))
        first.on[route] = lambda body: first.kill()
        assert tokens(sampler.generate(PROMPTS, 1, SAMPLING)) == tokens(alone)
        sampler.close()
