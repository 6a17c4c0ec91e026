"""The HTTP API of a reward server: requests, responses, and rejected requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.errors import raises_error
from tests.rewards.kit import has_words, wait_for
from tests.rewards.reward_servers import (
    Numbers,
    Served,
    hash_score,
    http_get,
    http_post,
    http_request,
    served,
)
from valence.apps.serve.http_server import open_socket
from valence.apps.serve.reward_batches import Limits, Rate
from valence.apps.serve.reward_server import ENDS, MAX_ITEMS, split_query
from valence.types import Completion, Score

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(Numbers(), Limits(timeout=5.0, max_body=100_000)) as server:
        yield server


# What is read and given


def test_each_answer_has_its_own_score_in_order(plain: Served) -> None:
    texts = [f"answer {i}" for i in range(40)]
    result = plain.post(
        query=[f"question {t}" for t in texts], prompts=["question "] * 40, labels=list(range(40))
    )
    assert result.status_code == 200
    assert result.json() == {
        "rewards": (expected := [hash_score(t) for t in texts]),
        "scores": expected,
        "extra_logs": {},
    }


def test_without_prompts_the_whole_query_is_the_answer(plain: Served) -> None:
    assert plain.post(query=["one", "two"]).json()["rewards"] == [
        hash_score("one"),
        hash_score("two"),
    ]
    assert plain.post(query=["one"], prompts=None, labels=None).json()["rewards"] == [
        hash_score("one")
    ]
    assert plain.post(query=["one", "two"], prompts=["o", None]).json()["rewards"] == [
        hash_score("ne"),
        hash_score("two"),
    ]


def test_no_answers_have_no_scores_and_the_reward_is_not_asked(plain: Served) -> None:
    before = len(plain.reward.calls)
    result = plain.post(query=[], prompts=[], labels=[])
    assert (result.status_code, result.json()["rewards"]) == (200, [])
    assert len(plain.reward.calls) == before


def test_a_reward_is_given_prompt_answer_and_label(plain: Served) -> None:
    plain.post(query=["What? Paris</s>"], prompts=["What? "], labels=[{"answer": ["Paris", 1.5]}])
    (inputs,) = plain.reward.calls[-1]
    assert (inputs.prompt, inputs.rendered, inputs.text) == ("What? ", "What? ", "Paris")
    assert inputs.info == {"label": {"answer": ["Paris", 1.5]}}
    plain.post(query=["x"])
    assert plain.reward.calls[-1][0].info == {}


def test_a_reward_of_whole_texts_is_given_the_query_as_it_is() -> None:
    with served(Numbers(), reads_query=True) as server:
        query = "<s>What? Paris</s>"
        assert server.post(query=[query], prompts=["another"]).json()["rewards"] == [
            hash_score(query)
        ]
        (inputs,) = server.reward.calls[-1]
        assert (inputs.prompt, inputs.rendered, inputs.text) == ("", "", query)


@pytest.mark.parametrize(
    ("query", "prompt", "answer"),
    [
        ("abc", "", "abc"),
        ("abc", "ab", "c"),
        ("abc", "abc", ""),
        ("abab", "ab", "ab"),
        ("<s>abc", "ab", "c"),
        ("<s> abc", "ab", "c"),
        ("<|begin_of_text|>abc", "ab", "c"),
        ("[BOS]abc", "ab", "c"),
        ("<s>abc", "<s>ab", "c"),
        ("<s>s!", "s", "!"),
        ("xabc", "ab", None),
        ("<not a mark>abc", "ab", None),
        ("ab", "abc", None),
        ("ab c<|im_end|>", "ab ", "c"),
        ("ab c<|im_end|>\n", "ab ", "c"),
        ("ab c</s></s><pad>", "ab ", "c"),
        ("ab </s> c", "ab ", "</s> c"),
        ("ab c \n", "ab ", "c \n"),
        ("ab <b>c</b>", "ab ", "<b>c</b>"),
        ("ab</s>", "ab", ""),
        ("ab</s>", "ab</s>", ""),
    ],
)
def test_the_answer_is_what_follows_the_prompt(query: str, prompt: str, answer: str | None) -> None:
    assert split_query(query, prompt, ENDS) == answer


def test_other_texts_may_end_an_answer() -> None:
    assert split_query("q a STOP", "q ", ("STOP",)) == "a "
    with served(Numbers(), ends=("STOP",)) as server:
        result = server.post(query=["q aSTOP", "q a</s>"], prompts=["q ", "q "]).json()
    assert result["rewards"] == [hash_score("a"), hash_score("a</s>")]


def test_parts_that_all_answers_have_are_told() -> None:
    def score(c: Completion) -> Score:
        return Score(
            1.0, {"length": float(len(c.text)), **({"rare": 2.0} if c.text == "b" else {})}
        )

    with served(Numbers(score)) as server:
        assert server.post(query=["a", "bb"]).json()["extra_logs"] == {"length": [1.0, 2.0]}
        assert server.post(query=["b"]).json()["extra_logs"] == {"length": [1.0], "rare": [2.0]}


def test_numbers_arrive_as_they_are() -> None:
    values = [0.1 + 0.2, -1e-308, 1.7976931348623157e308, -0.0, 3]
    with served(Numbers(lambda c: Score(values[int(c.text)]))) as server:
        result = server.post(query=[str(i) for i in range(5)]).json()["rewards"]
    assert list(map(repr, result)) == list(map(repr, map(float, values)))


# What is refused


@pytest.mark.parametrize(("body", "words"), [
    (b"", ["JSON"]), (b"nonsense", ["JSON"]), (b'{"query": ["a"]', ["JSON"]),
    (b"\xff\xfe", ["JSON"]),
    (b"null", ["object"]), (b"[]", ["object"]), (b'"text"', ["object"]), (b"{}", ["query:"]),
    (b'{"query": "text"}', ["query:"]), (b'{"query": null}', ["query:"]),
    (b'{"query": [1]}', ["query.0"]),
    (b'{"query": [null]}', ["query.0"]), (b'{"query": [["a"]]}', ["query.0"]),
    (b'{"query": {"0": "a"}}', ["query:"]),
    (b'{"query": ["a"], "prompts": "a"}', ["prompts:"]),
    (b'{"query": ["a"], "prompts": [1]}', ["prompts.0"]),
    (b'{"query": ["a"], "prompts": []}', [1, "0 prompts"]),
    (b'{"query": ["a"], "labels": [1, 2]}', [1, "2 labels"]),
    (b'{"query": [], "labels": [1]}', [0, "1 labels"]),
    (b'{"query": ["a"], "images": ["x"]}', ["images"]),
    (b'{"query": ["\\ud800"]}', ["JSON"]),
    (b'{"query": ["a"], "labels": [' + b"[" * 9000 + b"]" * 9000 + b"]}", ["JSON"]),
    (b"[" * 99_000, ["JSON"]),
    (b'{"query": ["ab", "xy"], "prompts": ["a", "a"]}', [1, 2]),
])  # fmt: skip
def test_malformed_requests_have_no_scores(plain: Served, body: bytes, words: list[object]) -> None:
    request = len(plain.reward.calls)
    result = http_post(f"{plain.url}/get_reward", content=body, headers=JSON)
    assert result.status_code == 422
    assert has_words(result.json()["error"], *words)
    assert len(plain.reward.calls) == request
    assert plain.post(query=["still there"]).json()["rewards"] == [hash_score("still there")]


def test_queries_without_their_prompt_are_named(plain: Served) -> None:
    result = plain.post(query=["ab", "xy", "ac", "z"], prompts=["a"] * 4).json()
    assert [item["index"] for item in result["failed"]] == [1, 3]


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_only_json_is_read(plain: Served, kind: str | None) -> None:
    """What a page of another site can have a browser send is none."""
    headers = {} if kind is None else {"content-type": kind}
    assert (
        http_post(
            f"{plain.url}/get_reward", content=b'{"query": ["a"]}', headers=headers
        ).status_code
        == 415
    )
    named = {"content-type": "Application/JSON; charset=utf-8"}
    assert (
        http_post(f"{plain.url}/get_reward", content=b'{"query": ["a"]}', headers=named).status_code
        == 200
    )


def test_other_paths_and_methods(plain: Served) -> None:
    for method, path, status in (
        ("GET", "/get_reward", 405),
        ("POST", "/other", 404),
        ("PUT", "/health", 405),
    ):
        result = http_request(method, plain.url + path)
        assert (result.status_code, list(result.json())) == (status, ["error"])


def test_large_bodies_are_not_read_to_their_end(plain: Served) -> None:
    for size in (100_001, 1_000_000):
        result = http_post(f"{plain.url}/get_reward", content=b"x" * size, headers=JSON)
        assert result.status_code == 413
        assert has_words(result.json()["error"], 100_000)

    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 100_000
            yield b" " * 100_000

    # it may be cut off while it writes
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        assert (
            http_post(
                f"{plain.url}/get_reward", content=endless(), headers=JSON, timeout=30
            ).status_code
            == 413
        )
    assert sent < 500 * 100_000
    assert plain.service.bodies.num_bytes == 0
    assert plain.post(query=["still there"]).status_code == 200


def test_many_large_bodies_at_a_time_do_not_fill_the_memory() -> None:
    with served(Numbers(), Limits(timeout=20.0, max_body=1000)) as server:
        begun = [server.raw() for _ in range(8)]
        for connection in begun:
            head = (
                b"POST /get_reward HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
            )
            connection.sendall(head + b" " * 990)
        wait_for(lambda: server.service.bodies.num_bytes == 8 * 990)
        result = http_post(f"{server.url}/get_reward", content=b" " * 500, headers=JSON)
        assert (result.status_code, result.headers["retry-after"]) == (503, "1")
        for connection in begun:
            connection.close()


def test_too_many_answers(plain: Served) -> None:
    assert plain.post(query=["a"] * MAX_ITEMS).status_code == 200
    result = plain.post(query=["a"] * (MAX_ITEMS + 1))
    assert result.status_code == 413
    assert has_words(result.json()["error"], MAX_ITEMS + 1, MAX_ITEMS)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with served(Numbers(), Limits(timeout=0.2)) as server, server.raw() as connection:
        head = (
            b"POST /get_reward HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
        connection.sendall(head + b'{"query"')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_client_has_its_share_of_requests() -> None:
    rate = Rate(2.0)
    assert [rate.wait("a", 0.0), rate.wait("a", 0.0), rate.wait("b", 0.0)] == [0.0, 0.0, 0.0]
    assert rate.wait("a", 0.0) == pytest.approx(0.5)
    assert rate.wait("a", 0.4) == pytest.approx(0.1)
    assert rate.wait("a", 0.5) == 0.0
    assert [rate.wait("a", 100.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    slow = Rate(0.1)
    assert [slow.wait("a", 0.0), slow.wait("a", 0.0)] == [0.0, pytest.approx(10.0)]
    assert Rate(None).wait("a") == 0.0
    many = Rate(1.0)
    for i in range(5000):
        many.wait(str(i), 0.0)
    assert len(many.buckets) <= 4096


def test_too_many_requests_are_told_when_to_come_back() -> None:
    with served(Numbers(), Limits(rate=1.0)) as server:
        assert server.post(query=["a"]).status_code == 200
        result = server.post(query=["a"])
        assert (result.status_code, result.headers["retry-after"]) == (429, "1")
        assert http_get(f"{server.url}/health").status_code == 200


def test_only_so_many_answers_wait() -> None:
    gate = threading.Event()
    with served(Numbers(gate=gate), Limits(max_batch=1, max_waiting=3)) as server:
        results = list[httpx.Response]()
        threads = [
            threading.Thread(target=lambda: results.append(server.post(query=["a"] * 2)))
            for _ in range(2)
        ]
        # the first answer is being scored
        for waiting, thread in zip((1, 3), threads, strict=True):
            thread.start()
            wait_for(lambda waiting=waiting: len(server.service.batcher.waiting) == waiting)
        busy = server.post(query=["a"])
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        gate.set()
        for thread in threads:
            thread.join()
        assert [f.status_code for f in results] == [200, 200]


# Who is served


def test_a_token_is_needed_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[tuple[Any, Any]]()
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    with served(Numbers(), token="s3cret-é") as server:

        def status(path: str, header: bytes | None) -> int:
            headers = [
                (b"content-type", b"application/json"),
                *([(b"authorization", header)] if header is not None else []),
            ]
            method, content = (
                ("POST", b'{"query": ["a"]}') if path == "/get_reward" else ("GET", None)
            )
            return http_request(
                method, server.url + path, content=content, headers=headers
            ).status_code

        right = "Bearer s3cret-é".encode()
        wrong = (
            None,
            b"",
            b"Bearer",
            b"Bearer s3cret",
            right + b"x",
            right[7:],
            b"Basic " + right[7:],
        )
        for path in ("/get_reward", "/metrics"):
            assert [status(path, header) for header in wrong] == [401] * len(wrong)
            assert status(path, right) == 200
            assert status(path, b"bearer " + right[7:]) == 200
        # never by a comparison that ends with the first difference
        assert {b for _, b in compared} == {right[7:]}
        assert status("/health", None) == status("/ready", None) == 200
        result = http_post(f"{server.url}/get_reward", content=b"x" * 1000)
        assert (result.status_code, result.headers["www-authenticate"]) == (401, "Bearer")
        assert len(server.reward.calls) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_other_machines_are_served_only_with_a_token(host: str) -> None:
    with raises_error("server-token-missing", where="--host"):
        open_socket(host, 0, has_tokens=False)
    if host != "::":
        open_socket(host, 0, has_tokens=True).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_this_machine_is_served_without(host: str) -> None:
    with open_socket(host, 0, has_tokens=False) as place:
        assert place.getsockname()[0].startswith("127.")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises_error("server-cannot-listen", where=f"--port {port}", fix="--port"):
            open_socket("127.0.0.1", port, has_tokens=False)


# What it tells of itself


def test_health_and_metrics() -> None:
    def score(c: Completion) -> Score:
        return Score(None, error="no") if c.text == "bad" else Score(1.0)

    with served(Numbers(score)) as server:
        server.post(query=["a", "b", "c"])
        server.post(query=["a", "bad"])
        server.post(query="malformed")
        assert http_get(f"{server.url}/health").json()["reward"] == "numbers"
        result = http_get(f"{server.url}/metrics")
        assert result.headers["content-type"].startswith("text/plain; version=0.0.4")
        sample = re.compile(r'[a-z_]+(?:\{[a-z]+="[^"]+"\})? [0-9.e+-]+')
        lines = result.text.splitlines()
        assert [
            line for line in lines if not line.startswith("# ") and not sample.fullmatch(line)
        ] == []
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    named = {name.removeprefix("valence_reward_"): float(value) for name, value in values.items()}
    assert [named[f'requests_total{{status="{status}"}}'] for status in (200, 422, 500)] == [
        1,
        1,
        1,
    ]
    assert [named[f'answers_total{{outcome="{name}"}}'] for name in ("scored", "failed")] == [4, 1]
    assert (named["call_answers_total"], named["waiting"]) == (5, 0)
    for name, count in (("request_seconds", 3), ("call_seconds", 2)):
        classes = [named[key] for key in named if key.startswith(f"{name}_bucket")]
        assert classes == sorted(classes)
        assert classes[-1] == named[f"{name}_count"] == count


def test_it_prints_its_address_and_how_many_answers_it_scored() -> None:
    with served(Numbers(), Limits(max_batch=7)) as server:
        server.post(query=["a", "b"])
    assert has_words(server.lines[0], "numbers", f"{server.url}/get_reward", 7)
    assert re.findall(r"\d+", server.lines[-1]) == ["2", "0"]
    assert server.reward.closed


def test_the_schema_names_every_status(plain: Served) -> None:
    result = http_get(f"{plain.url}/openapi.json").json()["paths"]["/get_reward"]["post"]
    assert {int(code) for code in result["responses"]} == {
        200, 400, 401, 408, 413, 415, 421, 422, 429, 431, 500, 503, 504,
    }  # fmt: skip
    properties = result["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert list(properties) == ["query", "prompts", "labels"]


# Failures


def test_what_is_no_finite_number_is_never_sent() -> None:
    values = {
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": -float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0],
    }

    def score(c: Completion) -> Score:
        value: Any = values.get(c.text, hash_score(c.text))
        return Score(value)

    with served(Numbers(score)) as server:
        for bad in values:
            result = server.post(query=["a", bad, "b", bad])
            assert result.status_code == 500
            message = result.json()
            assert [item["index"] for item in message["failed"]] == [1, 3]
            assert message["scored"] == [
                {"index": 0, "reward": hash_score("a")},
                {"index": 2, "reward": hash_score("b")},
            ]
            assert not {"rewards", "scores"} & set(message)
            assert has_words(message["error"], 2, 4)
            assert has_words(server.lines[-1], "HTTP 500", 2, 4)
        assert server.post(query=["a", "b"]).json()["rewards"] == [hash_score("a"), hash_score("b")]


class Broken:
    """Fails as a whole, in some way, when it sees a certain answer."""

    name, deterministic = "broken", True

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def __call__(self, completions: Sequence[Completion]) -> Any:
        scores = [Score(hash_score(c.text)) for c in completions]
        if all(c.text != "bad" for c in completions):
            return scores
        if self.mode == "raises":
            raise ValueError("I do not like \ud800 this")
        if self.mode == "leaves":
            raise SystemExit(3)
        return {"fewer": scores[:-1], "more": [*scores, Score(1.0)], "none": None}[self.mode]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["raises", "leaves", "fewer", "more", "none"])
def test_a_call_that_fails_as_a_whole_concerns_only_its_request(mode: str) -> None:
    """Three requests are scored in one call.

    That with the answer that breaks it fails; the others do not notice.
    """

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            queries = (["a", "b"], ["c", "bad"], ["d"])
            return list(
                await asyncio.gather(
                    *(client.post("/get_reward", json={"query": q}) for q in queries)
                )
            )

    with served(Broken(mode), Limits(max_delay=0.3)) as server:
        first, second, third = asyncio.run(ask(server.url))
        assert server.post(query=["e"]).json()["rewards"] == [hash_score("e")]
    assert [first.json()["rewards"], third.json()["rewards"]] == [
        [hash_score("a"), hash_score("b")],
        [hash_score("d")],
    ]
    assert second.status_code == 500
    assert [item["index"] for item in second.json()["failed"]] == [0, 1]
    assert "broken" in json.dumps(second.json())
