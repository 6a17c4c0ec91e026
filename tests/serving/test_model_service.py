"""`valence serve`: the interface of apps, and an A/B test of two models."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.serving.kit import HELLO, SAMPLING, Served, events, rows, run, save_model, trainer
from valence.apps.serve.app import MAX_BODY, MAX_REQUESTS
from valence.apps.serve.chat import ChatModel
from valence.apps.serve.experiment import Experiment, ServedRun, ab_path, read_result
from valence.apps.serve.feedback import FeedbackStore
from valence.apps.serve.http_server import RequestGuard, host_names
from valence.apps.serve.model_service import ModelService, application
from valence.apps.serve.prompts import PromptQueue
from valence.distributed.process_group import SingleProcess
from valence.rollouts import Sampling
from valence.training.open_run import open_run
from valence.training.sampling import PolicySampler
from valence.training.trainer import Trainer

TOKEN = "secret"


@cache
def rival_trainer() -> Trainer:
    folder = TemporaryDirectory()
    torch.manual_seed(1)
    save_model(Path(folder.name), seed=7)
    opened = open_run(folder.name, ["data.max_length=256"], group=SingleProcess())
    opened.folder_of_test = folder  # type: ignore[attr-defined]
    return opened


class Api(Served):
    """A service for apps."""

    def __init__(
        self,
        folder: Path,
        *,
        share: float | None = None,
        token: str | None = TOKEN,
        max_batch: int = 8,
    ) -> None:
        self.out, self.errors = folder / "feedback.jsonl", list[BaseException]()
        self.store = FeedbackStore(self.out, on_error=self.errors.append)
        self.model = ChatModel(trainer(), "first", max_batch=max_batch)
        runs, rival, experiment = [ServedRun("runs/first", 26)], None, None
        if share is not None:
            rival = ChatModel(rival_trainer(), "second")
            runs.append(ServedRun("runs/second", 52))
            experiment = Experiment(ab_path(self.out), (runs[0], runs[1]), share)
        self.service = ModelService(
            self.model, self.store, SAMPLING, PromptQueue([]), rival=rival,
            tokens={} if token is None else {token: ""}, log=self.errors.append, runs=runs,
            experiment=experiment,
        )  # fmt: skip
        self.token = token
        self.app = RequestGuard(application(self.service), host_names("127.0.0.1"))

    def client(self, token: str | None = TOKEN, host: str = "127.0.0.1") -> Any:
        return super().client(token, host)

    def complete(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        registry = self.service.metrics.registry
        return registry.get_sample_value(f"valence_serve_{name}", labels) or 0.0


Serve = Callable[..., Api]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    services = list[Api]()

    def serve(**options: Any) -> Api:
        for earlier in services:
            earlier.close()
        services.append(Api(tmp_path, **options))
        return services[-1]

    yield serve
    for service in services:
        service.close()


@pytest.fixture
def api(serve: Serve) -> Api:
    return serve()


def info_of(api: Api) -> list[dict[str, Any]]:
    return [row["info"] for row in api.rows()]


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/ab"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/feedback"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_token_is_required(api: Api, method: str, path: str) -> None:
    for token in (None, "wrong"):
        response = api.request(method, path, {}, token=token)
        assert response.status_code == 401
        assert "Bearer" in response.json()["error"]["message"]


def test_there_is_no_page(api: Api) -> None:
    for path in ("/", "/page/page.js", "/api/session"):
        assert api.get(path).status_code == 404
    health = api.get("/health", token=None)
    assert (health.status_code, health.json()["model"]) == (200, "first")


def test_answers_are_those_of_the_runs_own_sampling(api: Api) -> None:
    sampler = PolicySampler(trainer().policy, api.model.encoder, version=lambda: 0)
    prompt = api.model.encode(HELLO)
    for seed in range(4):
        body = {"seed": seed, "max_tokens": 20, "temperature": 1.3, "top_p": 0.9}
        completion = api.complete(**body)
        sampling = Sampling(seed=seed, max_new_tokens=20, temperature=1.3, top_p=0.9)
        ((expected,),) = sampler.generate([prompt.ids], 1, sampling)
        assert completion["choices"][0]["message"]["content"] == expected.text
        assert completion["usage"]["completion_tokens"] == len(expected.tokens)
        api.post("/feedback", {"id": completion["id"], "label": True})
        assert api.rows()[seed]["completion_ids"] == list(expected.tokens)


def test_stop_strings_end_answers_and_their_rows_have_text_alone(api: Api) -> None:
    body = {"seed": 3, "max_tokens": 40, "temperature": 2.0}
    text = api.complete(**body)["choices"][0]["message"]["content"]
    stop = next(letter for letter in text[3:] if letter.isascii())
    choice = (stopped := api.complete(**body, stop=[stop, "never"]))["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert api.complete(**body, stop=stop)["choices"][0]["message"] == choice["message"]
    api.post("/feedback", {"id": stopped["id"], "label": False})
    (row,) = api.rows()
    assert row["completion"] == choice["message"]["content"]
    assert not {"prompt_ids", "completion_ids", "logps"} & row.keys()


def test_log_probabilities_are_those_of_the_row(api: Api) -> None:
    body = {"messages": HELLO, "logprobs": True, "seed": 1, "temperature": 1.5}
    completion = api.post("/v1/chat/completions", body).json()
    content = completion["choices"][0]["logprobs"]["content"]
    api.post("/feedback", {"id": completion["id"], "label": True})
    assert [token["logprob"] for token in content] == api.rows()[0]["logps"]
    chunks = events(api.post("/v1/chat/completions", {**body, "stream": True}))[:-1]
    streamed = [c for chunk in chunks if (c := chunk["choices"][0]["logprobs"])]
    assert [item["content"] for item in streamed] == [content]
    assert api.complete()["choices"][0]["logprobs"] is None


def test_choices_are_sampled_together(api: Api) -> None:
    completion = api.complete(n=5, seed=2, max_tokens=6)
    texts = [choice["message"]["content"] for choice in completion["choices"]]
    alone = [
        api.complete(seed=2 + index, max_tokens=6)["choices"][0]["message"]["content"]
        for index in range(5)
    ]
    assert texts == alone
    ids = {choice["id"] for choice in completion["choices"]}
    assert len(ids) == 5
    for id in ids:
        assert api.post("/feedback", {"id": id, "label": True}).status_code == 200
    assert len(api.rows()) == 5


@pytest.mark.parametrize("model", ["first", "valence", None])
def test_the_model_can_be_named(api: Api, model: str | None) -> None:
    completion = api.complete(**({} if model is None else {"model": model}))
    assert completion["model"] == "first"
    assert [item["id"] for item in api.get("/v1/models").json()["data"]] == ["first"]


def test_an_unknown_model_is_refused(api: Api) -> None:
    response = api.post("/v1/chat/completions", {"messages": HELLO, "model": "gpt"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model-not-found"


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "store": False,
    "top_logprobs": 0,
    "stop": None,
    "user": None,
}


def test_fields_are_honoured_or_refused(api: Api) -> None:
    assert api.complete(**NEUTRAL)["choices"]
    for name, value in (
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": -100}),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 5),
        ("best_of", 3),
        ("top_k", 5),
        ("functions", []),
        ("stop", ["a"] * 5),
        ("stop", ""),
    ):
        response = api.post("/v1/chat/completions", {"messages": HELLO, name: value})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert error["param"].split(".")[0] == name
        is_unknown = name in ("best_of", "top_k", "functions")
        assert error["code"] == ("field-unsupported" if is_unknown else "field-invalid"), name


def test_metrics_count_what_happened(api: Api) -> None:
    completion = api.complete(max_tokens=5, seed=1)
    api.post("/feedback", {"id": completion["id"], "label": True})
    api.post("/feedback", {"id": completion["id"], "label": False})
    api.post("/feedback", {"id": "unknown", "label": False})
    usage = completion["usage"]
    assert api.metric("completions_total", side="a", stop="length") == 1
    assert api.metric("tokens_total", side="a") == usage["completion_tokens"]
    assert api.metric("prompt_tokens_total", side="a") == usage["prompt_tokens"]
    assert api.metric("feedback_total", label="up") == api.metric("feedback_total", label="down")
    assert api.metric("requests_total", path="/feedback", status="404") == 1
    assert api.metric("request_seconds_count") == 1
    text = api.get("/metrics")
    assert "valence_serve_requests_in_progress" in text.text
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_rows_name_the_run_and_its_step(api: Api) -> None:
    completion = api.complete()
    api.post("/feedback", {"id": completion["id"], "label": True, "comment": "good"})
    (info,) = info_of(api)
    assert (info["run"], info["step"], info["comment"]) == ("runs/first", 26, "good")
    assert "side" not in info
    assert api.get("/ab").status_code == 404


def test_malformed_and_huge_requests_are_refused(api: Api) -> None:
    json_body = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", "/feedback"):
        for content in (b"{", b"[]", b"\xff"):
            response = api.request("POST", path, content=content, headers=json_body)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"
        huge = {**json_body, "content-length": str(MAX_BODY + 1)}
        assert api.request("POST", path, content=b"", headers=huge).status_code == 413
        assert api.request("POST", path, content=b"a=1").status_code == 415
        assert api.post(path, {}, host="evil.example").status_code == 421
    fields = b'"messages": [{"role": "user", "content": "a"}]'
    halves = b"{%b, %b}" % (fields, b'"metadata": {"conversation_id": "\\ud800"}')
    path = "/v1/chat/completions"
    assert api.request("POST", path, content=halves, headers=json_body).status_code == 400
    assert api.post("/feedback", {"id": "chatcmpl-0", "label": True}).status_code == 404
    assert api.rows() == []


# A/B tests


def test_each_user_gets_one_model_and_no_response_names_it(serve: Serve) -> None:
    api, texts = serve(share=0.5), dict[str, Any]()
    users = [f"user {number}" for number in range(12)]
    for user in users:
        completion = api.complete(user=user, seed=1, temperature=0)
        assert completion["model"] == "valence"
        assert "first" not in json.dumps(completion)
        assert "second" not in json.dumps(completion)
        texts[user] = completion["choices"][0]["message"]["content"]
        api.post("/feedback", {"id": completion["id"], "label": True, "user": user})
    assert [item["id"] for item in api.get("/v1/models").json()["data"]] == ["valence"]
    assert api.get("/health").json()["model"] == "valence"
    infos = info_of(api)
    sides = [info["side"] for info in infos]
    assert set(sides) == {"a", "b"}
    names = {"a": ("first", "runs/first", 26), "b": ("second", "runs/second", 52)}
    assert [(info["model"], info["run"], info["step"]) for info in infos] == [
        names[side] for side in sides
    ]
    assert len(set(texts.values())) == 2  # one greedy answer of each model
    api = serve(share=0.5)  # after a restart
    for user in users:
        completion = api.complete(user=user, seed=1, temperature=0)
        assert completion["choices"][0]["message"]["content"] == texts[user]


def test_a_conversation_keeps_its_model(serve: Serve) -> None:
    api = serve(share=0.5)

    def side(messages: list[dict[str, str]], **fields: Any) -> str:
        body = {"messages": messages, "max_tokens": 1, **fields}
        id = api.post("/v1/chat/completions", body).json()["id"]
        return api.store.answer(id.removeprefix("chatcmpl-")).info["unit"]

    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    later = [
        *first,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and then?"},
    ]
    assert side(first) == side(later) != side(first[1:])
    conversation = {"metadata": {"conversation_id": "7"}}
    assert side(first, **conversation) == side(later[-1:], **conversation) != side(first)
    assert side(first, user="u") == side(later, user="u", **conversation) != side(first)


def test_clients_cannot_choose_a_side(serve: Serve) -> None:
    api = serve(share=0.5)
    for model in ("first", "second"):
        response = api.post("/v1/chat/completions", {"messages": HELLO, "model": model})
        assert response.status_code == 404


def test_votes_are_counted_by_side(serve: Serve) -> None:
    api = serve(share=0.3)
    expected = Counter[tuple[str, bool]]()
    for number in range(30):
        completion = api.complete(user=str(number), max_tokens=2)
        id, label = completion["id"], number % 3 > 0
        side = api.store.answer(id.removeprefix("chatcmpl-")).info["side"]
        api.post("/feedback", {"id": id, "label": not label})
        api.post("/feedback", {"id": id, "label": label})  # the last one counts
        expected[side, label] += 1
    result = api.get("/ab").json()
    for side in ("a", "b"):
        assert result[side]["thumbs_up"] == expected[side, True]
        assert result[side]["thumbs_down"] == expected[side, False]
        assert result[side]["ups"] == expected[side, False]  # of the first votes
        assert result[side]["votes"] == expected[side, True] + expected[side, False]
    assert result["better"] is None
    assert result["share"] == 0.3
    assert read_result(api.out).to_dict() == result | {"e_values": tuple(result["e_values"])} | {
        side: result[side] | {"interval": tuple(result[side]["interval"])} for side in "ab"
    }
    assert {row["label"] for row in rows(api.out)} <= {True, False}
    again = serve(share=0.3).get("/ab").json()
    assert again == result


def test_feedback_that_is_not_a_thumb_does_not_count_in_the_test(serve: Serve) -> None:
    api = serve(share=0.5)
    id = api.complete(user="u")["id"]
    for verdict in ({"score": 0.5}, {"correction": "better"}, {"comment": "hm"}):
        assert api.post("/feedback", {"id": id, **verdict}).status_code == 200
    result = api.get("/ab").json()
    assert result["a"]["votes"] + result["b"]["votes"] == 0


# Many clients


def test_a_client_that_leaves_frees_its_place(serve: Serve) -> None:
    api = serve(max_batch=1)

    async def work() -> None:
        async with api.client() as client:
            body: Mapping[str, Any] = {
                "messages": HELLO, "max_tokens": 10_000, "temperature": 0
            }  # fmt: skip
            slow = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not api.model._active:
                await asyncio.sleep(0.001)
            slow.cancel()
            body = {"messages": HELLO, "max_tokens": 3}
            async with asyncio.timeout(20):
                response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200

    run(work())


def test_more_requests_than_can_wait_are_refused(api: Api) -> None:
    async def work() -> list[int]:
        async with api.client() as client:
            body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
            busy = [asyncio.create_task(client.post("/v1/chat/completions", json=body))
                    for _ in range(MAX_REQUESTS)]  # fmt: skip
            while api.model.num_requests < MAX_REQUESTS:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.json()["error"]["code"] == "server-busy"
            return [
                refused.status_code,
                *[item.status_code for item in await asyncio.gather(*busy)],
            ]

    assert run(work()) == [503, *[200] * MAX_REQUESTS]
