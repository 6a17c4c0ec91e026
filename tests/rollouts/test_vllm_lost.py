"""The client's reaction to a vLLM server (a stand-in) that restarts, dies, hangs or is absent."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.errors import raises_error
from tests.rollouts.vllm_server import FREE, PROMPTS, Drop, Fake, generator, serving, weights
from valence.rollouts.client import MAX_LOSSES
from valence.rollouts.protocol import Sampling
from valence.rollouts.transports import DiskTransfer
from valence.rollouts.vllm import ROUTE, VLLMGenerator


def test_a_restarted_server_is_sent_the_weights_before_it_samples(
    fake: Fake, sampler: VLLMGenerator, notes: list[str]
) -> None:
    sampler.sync(1, weights)
    fake.version = "default"
    fake.requests.clear()
    rows = sampler.generate(PROMPTS, 1, Sampling())
    assert {row[0].version for row in rows} == {1}
    paths = fake.paths()
    assert paths.index("/finish_weight_update") < paths.index(ROUTE)
    (note,) = notes
    assert fake.url in note
    assert "version 1" in note


def test_a_server_killed_while_it_answers(
    fake: Fake, sampler: VLLMGenerator, notes: list[str]
) -> None:
    sampler.sync(1, weights)
    died: list[int] = []

    def die(body: Any) -> None:
        if body["token_ids"] == list(PROMPTS[1]) and not died:
            died.append(1)
            fake.version = "default"
            raise Drop

    fake.on[ROUTE] = die
    expected = generator_of_the_same(fake, sampler)
    rows = sampler.generate(PROMPTS, 2, FREE)
    assert died
    assert [[answer.tokens for answer in row] for row in rows] == expected
    assert {answer.version for row in rows for answer in row} == {1}
    assert len([path for path in fake.paths() if path == "/finish_weight_update"]) == 2
    assert len(notes) == 2, "one of the wait, one of the weights that were sent again"
    assert all(fake.url in note for note in notes)


def generator_of_the_same(fake: Fake, sampler: VLLMGenerator) -> list[list[tuple[int, ...]]]:
    """The answers of a server that is never killed."""
    on, fake.on = fake.on, {}
    rows = sampler.generate(PROMPTS, 2, FREE)
    fake.on = on
    return [[answer.tokens for answer in row] for row in rows]


def test_a_server_that_goes_again_and_again_is_given_up(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on[ROUTE] = lambda body: (500, {"error": {"message": "EngineCore died"}})
    with raises_error("rollout-server-lost", where=fake.url) as raised:
        sampler.generate(PROMPTS[:1], 1, Sampling())
    assert "EngineCore died" in raised.error.message
    assert fake.paths().count(ROUTE) == MAX_LOSSES


def test_a_dead_server_is_started_again(tmp_path: Path) -> None:
    with serving(Fake()) as alive:
        url = alive.url
    revived: list[Any] = []
    fake = Fake()

    def revive() -> None:
        revived.append(again := serving_at(fake, url))
        again.__enter__()

    sampler = generator(url, DiskTransfer(tmp_path), revive=revive)
    try:
        assert len(sampler.generate([(5,)], 1, Sampling())[0]) == 1
        assert len(revived) == 1
    finally:
        for item in revived:
            item.__exit__(None, None, None)
        sampler.close()


def serving_at(fake: Fake, url: str) -> Any:
    return serving(fake, port=int(url.rpartition(":")[2]))


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with serving(Fake()) as gone:
        url = gone.url
    sampler = generator(url, DiskTransfer(tmp_path), timeout=0.3)
    with raises_error("rollout-server-lost", where=url, fix="rollout.timeout") as raised:
        sampler.generate(PROMPTS, 1, Sampling())
    assert "0.3 s" in raised.error.message


def test_a_server_that_takes_connections_and_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sampler = generator(url, DiskTransfer(tmp_path), timeout=0.4)
        for ask in (
            lambda: sampler.generate(PROMPTS, 1, Sampling()),
            lambda: sampler.sync(1, weights),
        ):
            with raises_error("rollout-server-hangs", where=url) as raised:
                ask()
            assert "0.4 s" in raised.error.message
            assert f"{url}/health" in raised.error.message


def test_a_server_that_is_only_slow(fake: Fake, tmp_path: Path) -> None:
    sampler = generator(fake.url, DiskTransfer(tmp_path), timeout=0.4)
    fake.on[ROUTE] = fake.hang
    with raises_error("rollout-server-slow", where=fake.url, fix="rollout.timeout"):
        sampler.generate(PROMPTS, 1, Sampling())
