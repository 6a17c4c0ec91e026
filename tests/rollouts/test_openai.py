"""Sampling from a completions endpoint: with token ids where the server speaks them, with text
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rollouts.vllm_server import END, PROMPTS, Completions, Fake, Words, serving
from valence.rollouts.openai import OpenAIGenerator
from valence.rollouts.protocol import Sampling


@pytest.fixture(params=[True, False], ids=["tokens", "text"])
def server(request: pytest.FixtureRequest) -> Iterator[Completions]:
    with serving(Completions(speaks=request.param)) as fake:
        yield fake  # type: ignore[misc]


def generator(fake: Fake, **settings: Any) -> OpenAIGenerator:
    return OpenAIGenerator(fake.url + "/v1", Words(), end_ids=[END], timeout=5.0, **settings)  # type: ignore[arg-type]


def test_answers(server: Completions) -> None:
    sampler, heard = generator(server), []
    assert sampler.gives_tokens is server.speaks
    rows = sampler.generate(PROMPTS, 3, Sampling(temperature=0.5, seed=1), progress=heard.append)
    assert sum(heard) == 6
    requests = [body for path, body in server.requests if path == "/v1/completions"][1:]
    assert {body["model"] for body in requests} == {"base"}
    assert len({body["seed"] for body in requests}) == 6
    assert {str(body["prompt"]) for body in requests} == (
        {"[5, 6, 7]", "[8, 9]"} if server.speaks else {"5 6 7", "8 9"}
    )
    for row in rows:
        assert [answer.index for answer in row] == [0, 1, 2]
        for answer in row:
            first = answer.tokens[0]
            # What ends an answer is one of its tokens, also where the server only says that it
            # ended.
            assert (answer.tokens[-1] == END) == (answer.stop == "eos")
            assert answer.text == (
                str(first) if server.speaks and answer.stop == "eos" else f"{first} 8"
            )
            assert len(answer.logps) == (len(answer.tokens) if server.speaks else 0)
    assert {answer.stop for row in rows for answer in row} == {"eos", "length"}
    again = generator(server).generate(PROMPTS, 3, Sampling(temperature=0.5, seed=1))
    assert [[a.tokens for a in row] for row in again] == [[a.tokens for a in row] for row in rows]
    if not server.speaks:
        assert requests[0]["stop"] == ["3"]


def test_the_first_end_token_is_the_most_important(server: Completions) -> None:
    """It stands for an end of which only the text is known, and is among the strings that a server
    may be given.
    """
    ends = [9, END, 6, 7, 5]
    sampler = OpenAIGenerator(server.url + "/v1", Words(), end_ids=ends, timeout=5.0)  # type: ignore[arg-type]
    rows = sampler.generate(PROMPTS, 3, Sampling(temperature=0.5, seed=1))
    requests = [body for path, body in server.requests if path == "/v1/completions"][-1]
    if server.speaks:
        assert set(requests["stop_token_ids"]) == set(ends)
    else:
        assert requests["stop"] == ["9", "3", "6", "7"]
        assert {answer.tokens[-1] for row in rows for answer in row if answer.stop == "eos"} == {9}


def test_a_text_begins_once(server: Completions) -> None:
    """The server, too, puts the first token before it."""
    generator(server, prefix=(1,)).generate([(1, 5, 6), (5, 6)], 1, Sampling())
    requests = [str(body["prompt"]) for path, body in server.requests if path == "/v1/completions"][
        1:
    ]
    assert sorted(requests) == (["[1, 5, 6]", "[5, 6]"] if server.speaks else ["5 6", "5 6"])


def test_answers_where_an_event_loop_runs(server: Completions) -> None:
    async def program() -> object:
        return generator(server).generate(PROMPTS, 2, Sampling(seed=1))

    assert asyncio.run(program()) == generator(server).generate(PROMPTS, 2, Sampling(seed=1))


def test_a_busy_server_is_asked_again(server: Completions) -> None:
    sampler, busy = generator(server), [1, 1, 1]
    sampler.gives_tokens  # noqa: B018 (asks once)
    server.on["/v1/completions"] = lambda body: (
        (429, {"error": {"message": "slow down"}}) if busy and busy.pop() else None
    )
    assert len(sampler.generate([(5,)], 1, Sampling())[0]) == 1
    server.on["/v1/completions"] = lambda body: (429, {"error": {"message": "slow down"}})
    server.requests.clear()
    with raises_error("rollout-server-lost", where=server.url) as raised:
        sampler.generate([(5,)], 1, Sampling())
    assert "slow down" in raised.error.message
    assert server.paths().count("/v1/completions") == 8


def test_refusals(server: Completions) -> None:
    server.on["/v1/completions"] = lambda body: (401, {"error": {"message": "no key"}})
    with raises_error("rollout-server-refused", where=server.url, fix="OPENAI_API_KEY") as raised:
        generator(server).generate([(5,)], 1, Sampling())
    assert "no key" in raised.error.message
    server.adapters = ["one", "two"]
    with raises_error("rollout-model-ambiguous", where=server.url, fix="rollout.url") as raised:
        generator(server).generate([(5,)], 1, Sampling())
    assert "one, two" in raised.error.message
    assert generator(server, model="two").model == "two"


def test_the_key_is_sent(server: Completions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert generator(server).pool.clients[0].headers == {"Authorization": "Bearer secret"}


def test_it_has_weights_of_its_own(server: Completions) -> None:
    sampler = generator(server)
    with raises_error("rollout-weights-unsupported", where=server.url, fix="rollout.engine"):
        sampler.sync(1, lambda: [])
    with raises_error("rollout-scoring-unsupported", fix="rollout.check_prompts"):
        sampler.logps([((1,), (2,))])
    with raises_error("prompt-empty", where="prompt 0"):
        sampler.generate([()], 1, Sampling())
    sampler.close()
