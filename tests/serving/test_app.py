"""The web application: every route, and every refusal."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.disk import full_disk
from tests.serving.kit import (
    HELLO,
    SAMPLING,
    TOKENS,
    Served,
    events,
    hooked_forward,
    open_trainer,
    rows,
    run,
    save_model,
    tool_trainer,
)
from tests.tiny import BOS
from valence.apps.serve import app as app_module
from valence.apps.serve.app import DEFECT, HEADERS, MAX_BODY
from valence.apps.serve.chat import ChatModel
from valence.distributed.process_group import SingleProcess
from valence.rollouts import Sampling
from valence.training.open_run import open_run

Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    services = list[Served]()

    def serve(**options: Any) -> Served:
        for earlier in services:
            earlier.close()
        services.append(Served(tmp_path, **options))
        return services[-1]

    yield serve
    for served in services:
        served.close()


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# The page


def test_the_page_and_its_files_need_no_token(served: Served) -> None:
    page = served.get("/", token=None)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = ("page/page.js", "page/page.css")
    assert all(f'"{name}"' in page.text for name in names)
    for name, kind in zip(names, ("text/javascript", "text/css"), strict=True):
        response = served.get(f"/{name}", token=None)
        assert (response.status_code, response.headers["content-type"]) == (
            200,
            f"{kind}; charset=utf-8",
        )
        assert HEADERS.items() <= response.headers.items()
    assert served.get("/page/app.py").status_code == 404
    assert served.get("/page/..%2Fapp.py").status_code == 404


@pytest.mark.parametrize("path", ["/", "/health", "/api/session", "/nothing", "/v1/models"])
def test_all_responses_forbid_other_sites_and_caches(served: Served, path: str) -> None:
    for token in ("token-of-anna", "wrong"):
        headers = served.get(path, token=token).headers
        assert HEADERS.items() <= headers.items()
        assert not any(name.startswith("access-control") for name in headers)


def test_health_needs_no_token(served: Served) -> None:
    health = served.get("/health", token=None).json()
    assert (health["status"], health["model"]) == ("alive", "tiny")


def test_the_interface_is_described(served: Served) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    assert {"/feedback", "/v1/chat/completions", "/v1/models"} <= set(paths)


ROUTES = [
    ("GET", "/api/session"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("POST", "/api/next-prompt"),
    ("POST", "/api/answer"),
    ("POST", "/api/rate"),
    ("POST", "/api/compare"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/feedback"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, "wrong", "token-of-ann", "tökén"])
def test_a_request_without_a_known_token_is_refused(
    served: Served, method: str, path: str, token: str | None
) -> None:
    headers = {} if token is None else {"authorization": f"Bearer {token}".encode()}
    response = served.request(method, path, {}, token=None, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(response)["type"] == "invalid_request_error"


def test_the_token_must_be_a_bearer_token(served: Served) -> None:
    for scheme, status in (("Basic", 401), ("bearer", 200), ("BEARER", 200)):
        headers = {"authorization": f"{scheme} token-of-ben"}
        response = served.get("/api/session", token=None, headers=headers)
        assert response.status_code == status
    assert served.get("/api/session?token=token-of-ben", token=None).status_code == 401


def test_without_tokens_everybody_is_the_same_rater(serve: Serve) -> None:
    served = serve(tokens={})
    assert served.get("/api/session", token=None).json()["rater"] == ""
    id = served.ask()[-1]["done"]
    served.post("/api/rate", {"answer": id, "label": True}, token=None)
    served.post("/api/rate", {"answer": id, "label": False}, token="any")
    assert [row["info"]["raters"] for row in served.rows()] == [["local"]]


@pytest.mark.parametrize("method_path", ROUTES)
def test_a_page_of_another_site_is_refused(serve: Serve, method_path: tuple[str, str]) -> None:
    """Also without tokens: by a name that was made to resolve to this machine, and without asking
    first.
    """
    served = serve(tokens={})
    method, path = method_path
    response = served.request(method, path, {}, token=None, host="evil.example")
    assert response.status_code == 421
    if method == "POST":
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            None,
        ):
            headers = {} if kind is None else {"content-type": kind}
            response = served.request(method, path, content=b"{}", token=None, headers=headers)
            assert response.status_code == 415
    request = {"origin": "http://evil.example", "access-control-request-method": method}
    response = served.request("OPTIONS", path, token=None, headers=request)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


def test_large_bodies_are_refused_unread(served: Served) -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")
        yield b""

    for headers in ({"content-length": str(MAX_BODY + 1)}, {"transfer-encoding": "chunked"}):
        kind = {"content-type": "application/json"}
        response = served.request("POST", "/api/rate", content=never(), headers=headers | kind)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"


BAD_BODIES = [
    ("/api/answer", {"messages": []}, "messages"),
    ("/api/answer", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ("/api/answer", {"messages": HELLO, "other": 1}, "other"),
    ("/api/rate", {"answer": "a", "label": "perhaps"}, "label"),
    ("/api/rate", {"answer": "a", "label": True, "comment": "x" * 100_001}, "comment"),
    ("/api/compare", {"comparison": "a-b", "winner": "c"}, "winner"),
    ("/api/next-prompt", {"skip": "one"}, "skip"),
    ("/feedback", {"id": "a", "score": "NaN"}, "score"),
    ("/feedback", {"label": True}, "id"),
    ("/v1/chat/completions", {"messages": HELLO, "n": 9}, "n"),
    ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"3": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": HELLO, "temperature": 3}, "temperature"),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"messages": HELLO, "seed": -1}, "seed"),
    ("/v1/chat/completions", {"messages": HELLO, "n": True}, "n"),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": "5"}, "max_tokens"),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2**40}, "max_tokens"),
    ("/v1/chat/completions", {"messages": HELLO, "temperature": "0.5"}, "temperature"),
    ("/v1/chat/completions", {"messages": HELLO, "stream": "yes"}, "stream"),
    ("/v1/chat/completions", {"messages": HELLO, "stop": 5}, "stop"),
    ("/v1/chat/completions", {"messages": HELLO, "stop": ["a"] * 5}, "stop"),
    ("/v1/chat/completions", {"messages": HELLO, "stream": "perhaps"}, "stream"),
    ("/v1/chat/completions", {"messages": HELLO, "tools": "add"}, "tools"),
    ("/v1/chat/completions", {"messages": "hello"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
]


@pytest.mark.parametrize(("path", "body", "place"), BAD_BODIES)
def test_a_body_of_another_form_is_refused(
    served: Served, path: str, body: Any, place: str
) -> None:
    response = served.post(path, body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["type"]) == (place, "invalid_request_error")
    assert not any(word in error["message"] for word in ("Input", "valid ", "Value error", "Field"))


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [70, 200, 500, 1000, 10_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a", "x": %b}]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"a": %b}]}]}'),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"a": %b}]}',
        ),
        ("/v1/chat/completions", b'{"messages": %b}'),
        ("/v1/chat/completions", b'{"logit_bias": %b}'),
        ("/api/answer", b'{"messages": [{"role": "user", "content": "a", "x": %b}]}'),
        ("/feedback", b'{"id": "a", "label": %b}'),
        ("/api/rate", b"%b"),
    ],
)
def test_a_body_that_is_nested_too_deeply_is_refused(
    served: Served, path: str, body: bytes, depth: int
) -> None:
    headers = {"content-type": "application/json"}
    response = served.request("POST", path, content=body % nested(depth), headers=headers)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert served.errors == []


def test_tools_of_usual_depth_are_accepted(serve: Serve) -> None:
    served = serve(model=ChatModel(tool_trainer(), "tiny"))
    schema: Any = "a"
    for _ in range(20):
        schema = {"a": schema}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    response = complete(served, tools=[tool])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/answer"])
def test_tools_that_the_template_does_not_print_are_refused(served: Served, path: str) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    response = served.post(path, {"messages": HELLO, "tools": [tool]})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("tools-unsupported", "tools")


def test_a_body_that_comes_slowly_is_cut_and_takes_bounded_memory(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(app_module, "MAX_BODIES", 3000)
    served = serve()

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000
            await asyncio.sleep(0.02)

    async def send(client: Any, content: Any) -> int:
        headers = {"content-type": "application/json", "content-length": "100000"}
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
        return response.status_code

    async def work() -> None:
        async with served.client() as client:
            slow = [asyncio.create_task(send(client, trickle())) for _ in range(2)]
            await asyncio.sleep(0.1)
            # there is no room for a large body meanwhile
            assert await send(client, b" " * 2999) == 503
            assert set(await asyncio.gather(*slow)) <= {408, 503}
            assert (
                await client.post("/feedback", json={"id": "a", "label": True})
            ).status_code == 404

    run(work())


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"score": NaN}'])
def test_a_body_that_is_no_object_is_refused(served: Served, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = served.request("POST", "/feedback", content=content, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["message"]
    assert served.errors == []


@pytest.mark.parametrize("path", ["/api/answer", "/v1/chat/completions"])
def test_messages_that_cannot_be_answered_are_refused(served: Served, path: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    cases = {
        "content-not-text": [{"role": "user", "content": [image]}],
        "prompt-too-long": [{"role": "user", "content": "long " * 300}],
    }
    for code, messages in cases.items():
        response = served.post(path, {"messages": messages})
        assert (response.status_code, error_of(response)["code"]) == (400, code)
    headers = {"content-type": "application/json"}
    for key in ('"a": "\\ud800"', '"a": NaN', '"a": Infinity'):
        content = f'{{"messages": [{{"role": "user", "content": "a", {key}}}]}}'.encode()
        response = served.request("POST", path, content=content, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (400, "field-invalid")
    assert served.errors == []
    assert not served.out.with_suffix(".answers.jsonl").read_bytes()


def test_a_template_that_fails_is_an_error_of_the_request(served: Served) -> None:
    response = served.post("/api/answer", {"messages": [{"role": "user", "content": None}]})
    assert response.status_code == 400
    assert error_of(response)["code"]
    assert served.errors == []


def test_parts_of_text_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": parts}]
    id = served.ask(messages)[-1]["done"]
    assert served.store.answer(id).prompt == (
        {"role": "system", "content": "short"},
        {"role": "user", "content": "hello"},
    )


UNKNOWN = [
    ("GET", "/nothing", None, 404),
    ("GET", "/api/rate", None, 405),
    ("POST", "/api/rate", {"answer": "x", "label": True}, 404),
    ("POST", "/api/compare", {"comparison": "x-y", "winner": "a"}, 404),
    ("POST", "/api/compare", {"comparison": "", "winner": "a"}, 404),
    ("POST", "/feedback", {"id": "chatcmpl-x", "label": True}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), UNKNOWN)
def test_what_is_not_there_is_not_found(
    served: Served, method: str, path: str, body: Any, status: int
) -> None:
    response = served.request(method, path, body)
    assert response.status_code == status
    assert error_of(response)["message"]


# What the page asks for


def test_an_answer_is_streamed_and_rated(served: Served) -> None:
    *pieces, stop, done = served.ask()
    answer = served.store.answer(done["done"])
    assert "".join(piece["text"] for piece in pieces) == answer.completion.text
    assert stop == {"side": "a", "stop": answer.completion.stop}
    body = {
        "answer": answer.id,
        "label": False,
        "correction": "better",
        "comment": "<b>",
        "tags": ["t"],
    }
    assert served.post("/api/rate", body).json() == {"votes": 1}
    (row,) = served.rows()
    assert (row["label"], row["info"]["comment"], row["info"]["tags"]) == (False, "<b>", ["t"])
    assert row["completion_ids"] == list(answer.completion.tokens)
    (pair,) = served.rows("pairs")
    expected = served.model.encode_correction(answer, "better")
    assert pair["chosen_ids"] == list(expected)
    assert served.get("/api/session").json()["votes"] == 1


def test_two_answers_are_compared(served: Served) -> None:
    result = served.ask(compare=True)
    texts = {
        side: "".join(e["text"] for e in result if e.get("side") == side and "text" in e)
        for side in "ab"
    }
    a, b = (served.store.answer(id) for id in result[-1]["done"].split("-"))
    assert texts == {"a": a.completion.text, "b": b.completion.text}
    assert a.completion.tokens != b.completion.tokens
    vote = {"comparison": result[-1]["done"], "winner": "b", "comment": "clear"}
    assert served.post("/api/compare", vote).json() == {"votes": 1, "models": []}
    (pair,) = served.rows("pairs")
    assert (pair["chosen"], pair["info"]["comment"]) == (b.completion.text, "clear")
    withdrawn = served.post("/api/compare", {**vote, "winner": None}).json()
    assert withdrawn == {"votes": 0, "models": []}
    assert served.rows("pairs") == []


def test_two_answers_are_written_at_once(served: Served) -> None:
    sides = [event["side"] for event in served.ask(compare=True)[:-1]]
    first_end = min(len(sides) - sides[::-1].index(side) for side in "ab")
    assert set(sides[: first_end - 1]) == {"a", "b"}


def test_answers_to_different_prompts_cannot_be_compared(served: Served) -> None:
    a = served.ask()[-1]["done"]
    b = served.ask([{"role": "user", "content": "other"}])[-1]["done"]
    for comparison in (f"{a}-{b}", f"{a}-{a}", f"{a}-{a}-{a}"):
        response = served.post("/api/compare", {"comparison": comparison, "winner": "a"})
        assert response.status_code == 404


def test_a_page_that_was_open_during_a_restart_can_still_vote(serve: Serve) -> None:
    served = serve()
    one = served.ask()[-1]["done"]
    two = served.ask(compare=True)[-1]["done"]
    served = serve()
    assert served.post("/api/rate", {"answer": one, "label": True}).status_code == 200
    assert served.post("/api/compare", {"comparison": two, "winner": "a"}).json() == {
        "votes": 2,
        "models": [],
    }


def test_raters_work_through_the_prompts(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    prompts = [
        {"prompt": "first"},
        {
            "prompt": [
                {"role": "user", "content": [{"type": "text", "text": "second"}], "name": None}
            ]
        },
        {
            "prompt": [{"role": "developer", "content": "a"}, {"role": "user", "content": "third"}],
            "tools": [tool],
        },
    ]
    served = serve(prompts=prompts, model=ChatModel(tool_trainer(), "tiny"))
    assert served.get("/api/session").json()["prompts"] == 3

    def next_prompt(token: str, **body: Any) -> dict[str, Any]:
        return served.post("/api/next-prompt", body, token=token).json()

    def vote(shown: dict[str, Any]) -> None:
        messages, tools = shown["messages"], shown["tools"]
        answer = served.ask(messages, tools=tools)[-1]["done"]
        served.post("/api/rate", {"answer": answer, "label": True})

    first = next_prompt("token-of-anna")
    assert first == {
        "number": 1,
        "total": 3,
        "messages": [{"role": "user", "content": "first"}],
        "tools": [],
    }
    assert next_prompt("token-of-anna") == first  # a reload keeps the prompt
    vote(first)
    assert next_prompt("token-of-anna")["number"] == 2
    assert next_prompt("token-of-ben")["number"] == 1
    third = next_prompt("token-of-anna", skip=2)
    assert (third["number"], third["tools"]) == (3, [tool])
    vote(third)
    assert next_prompt("token-of-anna", skip=10**9)["messages"] is None
    served = serve(prompts=prompts)  # what was skipped comes again, what was voted on does not
    second = next_prompt("token-of-anna")
    assert (second["number"], second["messages"][0]["content"]) == (2, "second")
    vote(second)
    assert next_prompt("token-of-anna") == {"number": 3, "total": 3, "messages": None, "tools": []}


def test_two_raters_vote_at_once(served: Served) -> None:
    id = served.ask()[-1]["done"]

    async def vote_all() -> list[int]:
        async with served.client() as anna, served.client("token-of-ben") as ben:
            votes = [
                client.post("/api/rate", json={"answer": id, "label": number % 2 == 0})
                for number in range(20)
                for client in (anna, ben)
            ]
            return [response.status_code for response in await asyncio.gather(*votes)]

    assert run(vote_all()) == [200] * 40
    assert served.store.num_votes == 2
    assert len(served.rows()) <= 1


# OpenAI's interface


def complete(served: Served, **body: Any) -> Any:
    return served.post("/v1/chat/completions", {"messages": HELLO, "model": "tiny", **body})


def test_models_are_listed(served: Served) -> None:
    (model,) = served.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")


def test_a_completion_has_the_shape_of_openai(served: Served) -> None:
    response = complete(served, max_tokens=3, seed=5, user="u", frequency_penalty=0, stop=None)
    result = response.json()
    assert set(result) == {"id", "object", "created", "model", "choices", "usage"}
    assert (result["object"], result["model"]) == ("chat.completion", "tiny")
    (choice,) = result["choices"]
    answer = served.store.answer(result["id"].removeprefix("chatcmpl-"))
    assert choice == {
        "index": 0,
        "id": result["id"],
        "message": {"role": "assistant", "content": answer.completion.text, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    prompt = len(answer.prompt_ids)
    assert result["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
    }
    assert answer.sampling.temperature == SAMPLING.temperature


def test_a_seed_gives_the_same_completion(served: Served) -> None:
    texts = [
        complete(served, seed=seed).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2, None, None)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_settings_of_a_request_are_used(served: Served) -> None:
    body = {"temperature": 0, "top_p": 0.5, "max_completion_tokens": 2, "max_tokens": 7}
    result = complete(served, **body).json()
    answer = served.store.answer(result["id"].removeprefix("chatcmpl-"))
    assert (answer.sampling.temperature, answer.sampling.top_p) == (0, 0.5)
    assert len(answer.completion.tokens) == 2
    defaults = complete(served).json()
    assert defaults["usage"]["completion_tokens"] <= SAMPLING.max_new_tokens


def test_several_choices_can_be_rated_one_by_one(served: Served) -> None:
    result = complete(served, n=2, seed=1).json()
    first, second = result["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["id"] == result["id"] != second["id"]
    assert first["message"] != second["message"]
    alone = complete(served, seed=1).json()["choices"][0]
    assert alone["message"] == first["message"]
    assert result["usage"]["completion_tokens"] > alone_tokens(served, first)
    for choice, label in ((first, True), (second, False)):
        response = served.post("/feedback", {"id": choice["id"], "label": label})
        assert response.status_code == 200
    labels = {row["completion"]: row["label"] for row in served.rows()}
    assert labels == {first["message"]["content"]: True, second["message"]["content"]: False}
    assert len(served.rows("pairs")) == 1


def alone_tokens(served: Served, choice: dict[str, Any]) -> int:
    return len(served.store.answer(choice["id"].removeprefix("chatcmpl-")).completion.tokens)


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_completion_is_the_same(served: Served, n: int) -> None:
    full = complete(served, seed=7, n=n).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, end = events(complete(served, seed=7, n=n, **options))
    assert end == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == full["usage"]
    keys = {"id", "object", "created", "model", "choices", "usage"}
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {
        (usage["id"], "chat.completion.chunk")
    }
    assert all(set(chunk) == keys and chunk["usage"] is None for chunk in chunks)
    for index, expected in enumerate(full["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert (
            "".join(c["delta"].get("content", "") for c in mine) == expected["message"]["content"]
        )
        assert mine[-1]["delta"] == {}
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [
            expected["finish_reason"]
        ]
        response = served.post("/feedback", {"id": mine[0]["id"], "label": True})
        assert response.status_code == 200
    assert all("usage" not in event for event in events(complete(served, stream=True))[:-1])


def test_tools_reach_the_prompt_and_the_rows(serve: Serve) -> None:
    served = serve(model=ChatModel(tool_trainer(), "tiny"))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    result = complete(served, tools=[tool], tool_choice="auto").json()
    served.post("/feedback", {"id": result["id"], "label": True})
    assert served.rows()[0]["tools"] == [tool]


def test_feedback_of_users_is_told_apart(served: Served) -> None:
    id = complete(served).json()["id"]
    for user, label in (("u1", True), ("u2", True), ("u1", False)):
        body = {"id": id, "label": label, "user": user, "comment": user, "tags": ["a"]}
        assert served.post("/feedback", body).status_code == 200
    assert served.store.num_votes == 2
    assert served.rows() == []  # one likes it, one does not
    served.post("/feedback", {"id": id, "label": True})  # of the app
    (row,) = served.rows()
    assert (row["label"], len(row["info"]["raters"])) == (True, 3)
    assert "u1" not in row["info"]["raters"]


def test_scores_and_corrections_of_an_app(served: Served) -> None:
    id = complete(served).json()["id"]
    served.post("/feedback", {"id": id, "score": 0.25, "correction": "better"})
    assert [row["score"] for row in served.rows("scores")] == [0.25]
    assert [row["completion"] for row in served.rows("demonstrations")] == ["better"]


# What goes wrong


@pytest.mark.parametrize("path", ["/api/answer", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_defects_are_logged_and_told_in_plain_words(
    served: Served, path: str, stream: bool
) -> None:
    error = RuntimeError("secret detail")

    def fail(*_: Any) -> None:
        raise error

    body = {"messages": HELLO} | ({"stream": stream} if path.startswith("/v1") else {})
    with hooked_forward(fail):
        response = served.post(path, body)
    is_stream = stream or path == "/api/answer"
    shown = events(response)[-1]["error"] if is_stream else error_of(response)
    assert response.status_code == (200 if is_stream else 500)
    assert shown["message"] == DEFECT
    assert served.errors == [error]
    assert served.ask()[-1]["done"]


def test_a_defect_while_voting_is_logged(served: Served) -> None:
    id = served.ask()[-1]["done"]
    served.store.close()  # no vote can be added
    response = served.post("/api/rate", {"answer": id, "label": True})
    assert (response.status_code, error_of(response)["message"]) == (500, DEFECT)
    assert [type(error) for error in served.errors] == [ValueError]


def test_a_full_disk_is_told_to_the_rater_and_logged(served: Served) -> None:
    id = served.ask()[-1]["done"]
    with full_disk():
        vote = served.post("/api/rate", {"answer": id, "label": True})
        assert (vote.status_code, error_of(vote)["code"]) == (507, "file-not-writable")
        assert served.ask()[-1]["error"]["code"] == "file-not-writable"
        assert complete(served).status_code == 507
    assert len(served.errors) == 3
    assert served.post("/api/rate", {"answer": id, "label": True}).json() == {"votes": 1}


@pytest.mark.parametrize("path", ["/api/answer", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_next_client_is_served_when_one_leaves(served: Served, path: str, stream: bool) -> None:
    served.service.sampling = Sampling(max_new_tokens=200, temperature=0)
    body = {"messages": HELLO} | ({"stream": stream} if path.startswith("/v1") else {})
    sent = list[Any]()

    async def leave() -> None:
        started = asyncio.Event()
        data = json.dumps(body).encode()
        requests = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> Any:
            for message in requests:
                return message
            while served.model.num_requests == 0:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            started.set()

        headers = {
            "host": "127.0.0.1",
            "content-type": "application/json",
            "content-length": str(len(data)),
            "authorization": "Bearer token-of-anna",
        }
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await served.app(scope, receive, send)
        async with served.client() as client:
            response = await client.post(
                "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}
            )
            assert response.status_code == 200

    run(leave())
    assert served.errors == []
    assert served.model.num_requests == 0
    (answer,) = rows(served.out.with_suffix(".answers.jsonl"))  # not that of the client who left
    assert len(answer["completion_ids"]) == 2


def test_answers_do_not_wait_for_votes_that_are_written(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = served.ask()[-1]["done"]
    blocked, free = threading.Event(), threading.Event()

    def wait(file: int) -> None:  # the first time, which is for the vote
        if not blocked.is_set():
            blocked.set()
            assert free.wait(30)

    monkeypatch.setattr(os, "fsync", wait)

    async def both() -> None:
        async with served.client() as client:
            vote = asyncio.create_task(client.post("/api/rate", json={"answer": id, "label": True}))
            await asyncio.to_thread(blocked.wait, 30)
            answer = await client.post("/v1/chat/completions", json={"messages": HELLO})
            assert answer.status_code == 200
            assert not vote.done()
            free.set()
            assert (await vote).json() == {"votes": 1}

    run(both())


def test_an_empty_answer_can_be_rated(serve: Serve) -> None:
    served = serve()
    model = served.model
    end = model.encoder.end_ids[0]
    answer = replace(
        run(model.answer(model.encode(HELLO), SAMPLING)),
        id="empty",
    )
    empty = replace(
        answer,
        completion=replace(answer.completion, tokens=(end,), logps=(-1.0,), text="", stop="eos"),
    )
    served.store.add(empty)
    served.post("/api/rate", {"answer": "empty", "label": False, "correction": "Hello!"})
    (row,) = served.rows()
    assert (row["completion"], row["completion_ids"]) == ("", [end])
    (pair,) = served.rows("pairs")
    assert (pair["chosen"], pair["rejected_ids"]) == ("Hello!", [end])


def test_hostile_text_stays_text(served: Served) -> None:
    text = "<script>alert(1)</script>\u202e\x00\x1b]0;title\x07"
    messages = [{"role": "user", "content": text}]
    id = served.ask(messages)[-1]["done"]
    body = {"answer": id, "label": True, "comment": text, "correction": text, "tags": [text]}
    assert served.post("/api/rate", body).status_code == 200
    (row,) = served.rows()
    assert (row["prompt"][0]["content"], row["info"]["comment"]) == (text, text)
    assert served.rows("demonstrations")[0]["completion"] == text


# Two models


@pytest.fixture
def two(serve: Serve) -> Served:
    """A service with two models and an owner."""
    rival = ChatModel(open_trainer(), "rival")  # two models sample at once
    return serve(rival=rival, tokens={**TOKENS, "token-of-owner": ""})


def compare(served: Served, winner: str | None, **options: Any) -> tuple[list[str], httpx.Response]:
    """Vote on two new answers. Returns their models in the order in which they are shown."""
    id = served.ask(compare=True)[-1]["done"]
    models = [served.store.answer(side).model for side in id.split("-")]
    body = {"comparison": id, "winner": winner}
    return models, served.post("/api/compare", body, **options)


def test_two_models_are_compared_blindly(two: Served) -> None:
    session = two.get("/api/session").json()
    assert (session["model"], session["is_blind"], session["has_results"]) == ("", True, False)
    for _ in range(3):
        text = two.post("/api/answer", {"messages": HELLO, "compare": True}).text
        assert "tiny" not in text
        assert "rival" not in text


def test_sides_are_random_and_the_page_cannot_ask_for_one_model(two: Served) -> None:
    orders = set[tuple[str, ...]]()
    for compare in (True, False) * 20:
        id = two.ask(compare=compare)[-1]["done"]
        orders.add(tuple(two.store.answer(side).model for side in id.split("-")))
        if len(orders) == 2:
            break
    assert orders == {("tiny", "rival"), ("rival", "tiny")}


@pytest.mark.parametrize("winner", ["a", "b"])
def test_rows_say_which_model_won(two: Served, winner: str) -> None:
    models, reply = compare(two, winner)
    assert reply.json() == {"votes": 1, "models": models}
    (row,) = two.rows("pairs")
    chosen, rejected = models if winner == "a" else reversed(models)
    assert (row["info"]["chosen_model"], row["info"]["rejected_model"]) == (chosen, rejected)
    assert row["info"]["sides"] == models
    assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(row)
    results = two.get("/api/results", token="token-of-owner").json()
    assert results == {"wins": {chosen: 1, rejected: 0}, "ties": 0, "both_bad": 0}


def test_ties_and_bad_answers_are_counted_apart(two: Served) -> None:
    for winner in ("tie", "both_bad", None):
        compare(two, winner)
    results = two.get("/api/results", token="token-of-owner").json()
    assert results == {"wins": {"tiny": 0, "rival": 0}, "ties": 1, "both_bad": 1}
    (row,) = two.rows("pairs")
    assert row["soft"] == 0.5
    assert len(two.rows()) in (1, 2)  # two bad answers, which may be the same


def test_raters_do_not_see_the_results(two: Served) -> None:
    assert two.get("/api/session", token="token-of-owner").json()["has_results"]
    assert two.get("/api/results").status_code == 403


def test_one_model_has_no_results(served: Served) -> None:
    assert served.get("/api/results").status_code == 404


def test_a_verdict_is_final_once_the_names_are_shown(two: Served) -> None:
    id = two.ask(compare=True)[-1]["done"]
    vote = {"comparison": id, "winner": "a"}
    first = two.post("/api/compare", vote).json()
    assert two.post("/api/compare", vote).json() == first  # a page that got no reply asks again
    for winner in ("b", "tie", None):
        reply = two.post("/api/compare", vote | {"winner": winner})
        assert reply.json()["error"]["code"] == "comparison-final"
    other = two.post("/api/compare", vote | {"winner": "b"}, token="token-of-ben")
    assert other.status_code == 200
    assert two.store.num_votes == 2


def test_an_app_names_the_model_that_answers(two: Served) -> None:
    names = [model["id"] for model in two.get("/v1/models").json()["data"]]
    assert names == ["tiny", "rival"]
    for name, expected in (*zip(names, names, strict=True), ("other", "tiny"), (None, "tiny")):
        body = {"messages": HELLO, "model": name}
        assert two.post("/v1/chat/completions", body).json()["model"] == expected


def test_answers_of_models_with_other_tokens_give_rows_without_tokens(
    serve: Serve, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "other", template=BOS)
    rival = ChatModel(open_run(str(folder), group=SingleProcess()), "rival")
    two = serve(rival=rival)
    _, reply = compare(two, "a")
    assert reply.status_code == 200
    (row,) = two.rows("pairs")
    assert not {"prompt_ids", "chosen_ids", "rejected_ids"} & set(row)
    assert {"chosen_model", "rejected_model"} <= set(row["info"])
