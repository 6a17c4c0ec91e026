"""Answers that call tools: made by the service for raters, or by the client of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.kit import Served, events, run
from tests.training.online.tool_kit import BY_CHANCE, SCALE, SHOP, make_with_short_turns
from valence.apps.serve import chat as chat_module
from valence.apps.serve.chat import Answer, ChatModel, FinishedTurn
from valence.config.load import load_recipe
from valence.distributed.process_group import SingleProcess
from valence.rollouts import Sampling
from valence.training import episodes
from valence.training.open_run import open_run
from valence.training.prepare import prepare
from valence.training.trainer import Trainer

SAMPLING = Sampling(max_new_tokens=150, seed=0)
ASK = [{"role": "user", "content": "say hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "scale",
        "description": "Scale.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}

Serve = Callable[..., Served]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_with_short_turns(tmp_path, max_position_embeddings=4096)
    for module in (episodes, chat_module):
        monkeypatch.setattr(module, "call_format_of", lambda _: BY_CHANCE)
    return tmp_path


def opened(place: Path, *overrides: str) -> Trainer:
    settings = ["data.chat_template=chatml", "data.max_length=1400", "rollout.max_turns=4"]
    return open_run(str(place / "model"), [*settings, *overrides], group=SingleProcess())


@pytest.fixture
def serve(place: Path) -> Iterator[Serve]:
    services = list[Served]()

    def serve(*overrides: str, **options: Any) -> Served:
        for earlier in services:
            earlier.close()
        model = ChatModel(opened(place, *overrides), "tiny")
        services.append(Served(place, model=model, **options))
        services[-1].service.sampling = SAMPLING
        return services[-1]

    yield serve
    for served in services:
        served.close()


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(f"rollout.tools=[{SCALE}]")


def first_answer(served: Served, num_turns: int = 3, **more: Any) -> tuple[list[Any], Answer]:
    """The events of the first answer with this many turns, none of them empty, and the answer."""
    messages = more.pop("messages", ASK)
    for _ in range(60):
        shown = served.ask(messages, **more)
        answer = served.store.answer(shown[-1]["done"])
        if len(answer.messages) >= num_turns and has_texts(answer):
            return shown, answer
    raise AssertionError("no answer has enough turns")


def has_texts(answer: Answer) -> bool:
    return all(turn["content"].strip() or turn.get("tool_calls") for turn in answer.messages)


# The page


def test_the_service_calls_tools_and_shows_each_turn(served: Served) -> None:
    shown, answer = first_answer(served)
    roles = [message["role"] for message in answer.messages]
    assert roles[:2] == ["assistant", "tool"] or roles[:2] == ["assistant", "user"]
    assert roles[-1] == "assistant"
    turns = [event["turn"] for event in shown if "turn" in event]
    assert len(turns) == roles.count("assistant")
    messages = list(answer.messages)
    for turn in turns:
        message = messages.pop(0)
        assert turn["content"] == message["content"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert [(c["name"], json.loads(c["arguments"])) for c in turn["calls"]] == [
            (call["name"], call["arguments"]) for call in calls
        ]
        assert turn["results"] == [messages.pop(0)["content"] for _ in turn["results"]]
    assert not messages
    assert served.errors == []


def test_rows_have_all_turns_and_the_tokens_that_were_sampled(served: Served, place: Path) -> None:
    _, answer = first_answer(served)
    served.post("/api/rate", {"answer": answer.id, "label": True})
    (row,) = served.rows()
    assert row["prompt"] == ASK
    assert [tool["function"]["name"] for tool in row["tools"]] == ["scale"]
    assert row["completion"] == list(answer.messages)
    tokenizer = served.model.encoder.tokenizer
    mask = row["sampled"]["mask"]
    assert len(mask) == len(row["completion_ids"]) == len(row["logps"])
    assert row["sampled"]["vocabulary"] == served.model.encoder.vocab.digest
    results = tokenizer.decode(list(compress(row["completion_ids"], (not m for m in mask))))
    assert results.count("<|im_start|>assistant\n") == len(answer.messages) // 2
    assert all(logp == 0 for logp in compress(row["logps"], (not m for m in mask)))
    (unit,) = prepared(place, "apo_zero_unpaired", served.out)
    assert list(unit.prompt_ids) == row["prompt_ids"]
    (trained,) = unit.answers
    assert list(trained.ids) == row["completion_ids"]
    assert list(map(int, trained.mask)) == mask


def prepared(place: Path, method: str, path: Path) -> Any:
    """The tokenized rows that a method would train on."""
    settings = {
        "method": method,
        "model": {"name": str(place / "model")},
        "data": {"train": [str(path)], "chat_template": "chatml", "max_length": 1400},
        "train": {"batch_size": 1},
    }
    return prepare(load_recipe(settings)).corpora["train"].encoded.units


def test_log_probabilities_are_those_of_the_whole_sequence(served: Served, place: Path) -> None:
    _, answer = first_answer(served)
    ids = torch.tensor([[*answer.prompt_ids, *answer.completion.tokens]])
    model: Any = AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32")
    with torch.no_grad():
        logps = model(ids).logits[0].log_softmax(-1)
    start = len(answer.prompt_ids)
    expected = logps[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].tolist()
    for logp, other, is_sampled in zip(
        answer.completion.logps, expected, answer.completion.mask, strict=True
    ):
        assert logp == (pytest.approx(other, abs=1e-4) if is_sampled else 0)


def compared(served: Served) -> tuple[Answer, Answer]:
    a, b = served.ask(ASK, compare=True)[-1]["done"].split("-")
    return served.store.answer(a), served.store.answer(b)


def test_pairs_of_answers_with_results_have_no_tokens(served: Served, place: Path) -> None:
    a, b = next(
        (a, b)
        for a, b in (compared(served) for _ in range(60))
        if len(a.messages) > 1 and has_texts(a) and has_texts(b)
    )
    vote = {"comparison": f"{a.id}-{b.id}", "winner": "a"}
    assert served.post("/api/compare", vote).status_code == 200
    (pair,) = served.rows("pairs")
    assert pair["chosen"] == list(a.messages)
    assert not {"prompt_ids", "chosen_ids", "rejected_ids"} & set(pair)
    assert len(prepared(place, "dpo", served.out.with_suffix(".pairs.jsonl"))) == 1
    served.post("/api/compare", {**vote, "winner": "both_bad"})
    thumbs = served.rows()
    assert [row["label"] for row in thumbs] == [False, False]
    assert thumbs[0]["completion_ids"] == list(a.completion.tokens)
    assert thumbs[0]["sampled"]["mask"] == list(map(int, a.completion.mask))


def test_a_liked_and_a_disliked_answer_are_a_pair_without_tokens(served: Served) -> None:
    _, good = first_answer(served)
    _, bad = first_answer(served)
    served.post("/api/rate", {"answer": good.id, "label": True})
    served.post("/api/rate", {"answer": bad.id, "label": False})
    (pair,) = served.rows("pairs")
    assert (pair["chosen"], pair["rejected"]) == (list(good.messages), list(bad.messages))
    assert "chosen_ids" not in pair


def test_a_correction_follows_the_results_of_the_tools(served: Served) -> None:
    _, answer = first_answer(served)
    served.post("/api/rate", {"answer": answer.id, "correction": "better"})
    (row,) = served.rows("demonstrations")
    assert row["prompt"] == [*ASK, *answer.messages[:-1]]
    assert row["completion"] == "better"
    (pair,) = served.rows("pairs")
    assert pair["prompt"] == row["prompt"]
    assert pair["chosen"] == "better"
    assert "chosen_ids" not in pair


def test_the_next_message_follows_all_turns(serve: Serve) -> None:
    served = serve(f"rollout.tools=[{SCALE}]")
    _, answer = first_answer(served)
    served = serve(f"rollout.tools=[{SCALE}]")  # answers are read from the file
    assert served.store.answer(answer.id).messages == answer.messages
    more = [{"role": "user", "content": "and now?"}]
    following = served.store.answer(served.ask(more, after=answer.id)[-1]["done"])
    assert following.prompt == (*ASK, *answer.messages, *more)
    rendered = served.model.encoder.tokenizer.decode(list(following.prompt_ids))
    for message in answer.messages:
        if message["role"] == "tool":
            assert f"<tool_response>\n{message['content']}\n</tool_response>" in rendered
    ids = [
        call["id"]
        for message in (*following.prompt, *following.messages)
        for call in message.get("tool_calls", ())
    ]
    assert len(set(ids)) == len(ids)
    assert served.post("/api/answer", {"messages": more, "after": "x"}).status_code == 404


def test_prompts_are_done_after_a_vote(serve: Serve) -> None:
    prompts = [{"prompt": "first"}, {"prompt": "second"}]
    served = serve(f"rollout.tools=[{SCALE}]", prompts=prompts)
    first = served.post("/api/next-prompt").json()
    _, answer = first_answer(served, 1, messages=first["messages"], prompt=first["number"])
    served.post("/api/rate", {"answer": answer.id, "label": True})
    assert served.post("/api/next-prompt").json()["number"] == 2


def test_an_environment_reads_the_row_and_adds_to_the_prompt(serve: Serve) -> None:
    prompts = [{"prompt": "first", "wanted": 3}, {"prompt": "second", "wanted": 0}]
    served = serve(f"rollout.environment={SHOP}", prompts=prompts)
    first = [{"role": "user", "content": "first"}]
    *_, stop, done = served.ask(first, prompt=1)
    assert stop["prompt"] == "first Buy 3."
    answer = served.store.answer(done["done"])
    assert answer.prompt == ({"role": "user", "content": "first Buy 3."},)
    served.post("/api/rate", {"answer": done["done"], "label": True})
    (row,) = served.rows()
    assert row["prompt"][0]["content"] == "first Buy 3."
    assert "Buy 3." in served.model.encoder.tokenizer.decode(row["prompt_ids"])
    assert served.post("/api/next-prompt").json()["number"] == 2
    *_, stop, _ = served.ask([{"role": "user", "content": "second"}], prompt=2)
    assert "prompt" not in stop
    [error] = served.ask(first)
    assert error["error"]["code"] == "environment-failed"
    assert "wanted" in error["error"]["message"]


def test_answers_of_unequal_environments_are_not_compared(serve: Serve) -> None:
    served = serve(f"rollout.environment={SHOP}", prompts=[{"prompt": "a", "wanted": 3}])
    comparison = served.ask([{"role": "user", "content": "a"}], prompt=1, compare=True)[-1]["done"]
    vote = {"comparison": comparison, "winner": "a"}
    assert served.post("/api/compare", vote).status_code == 200
    one = served.store.answer(comparison.split("-")[0])
    other = replace(one, id="0123", prompt=({"role": "user", "content": "a Buy 4."},))
    served.store.add(other)
    response = served.post("/api/compare", {**vote, "comparison": f"{one.id}-0123"})
    assert response.json()["error"]["code"] == "comparison-unequal"


def test_tools_end_when_the_page_is_closed_or_the_service_ends(place: Path) -> None:
    async def leave(model: ChatModel) -> None:
        prompt = model.encode(ASK)
        stream = model.stream(prompt, SAMPLING)
        async for part in stream:
            if isinstance(part, FinishedTurn):
                break
        await stream.aclose()
        assert model.num_requests == 0
        answer = await model.answer(prompt, SAMPLING)
        assert answer.completion.tokens

    with closing(ChatModel(opened(place, f"rollout.tools=[{SCALE}]"), "tiny")) as model:
        run(leave(model))
        assert model.tool_use is not None
        tools = model.tool_use.tools
    assert tools._server is None
    model.close()


def test_several_answers_call_tools_at_once(served: Served) -> None:
    async def ask_all() -> list[Any]:
        async with served.client() as client:
            body = {"messages": ASK}
            work = [client.post("/api/answer", json=body) for _ in range(12)]
            return [events(response) for response in await asyncio.gather(*work)]

    for shown in run(ask_all()):
        assert shown[-1]["done"], shown


# OpenAI's interface


def complete(served: Served, **body: Any) -> Any:
    body = {"messages": ASK, "max_tokens": 150, **body}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response


def called(served: Served, **body: Any) -> Any:
    """The first completion that calls a tool."""
    for seed in range(40):
        result = complete(served, tools=[TOOL], seed=seed, **body).json()
        if result["choices"][0]["finish_reason"] == "tool_calls":
            return result
    raise AssertionError("no completion calls a tool")


def test_the_client_gets_calls_and_sends_results(serve: Serve, place: Path) -> None:
    served = serve()
    result = called(served)
    (choice,) = result["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "scale")
    number = json.loads(call["function"]["arguments"])["number"]
    assert isinstance(number, int)
    response = {"role": "tool", "tool_call_id": call["id"], "content": "forty-two"}
    following = complete(served, messages=[*ASK, message, response], tools=[TOOL]).json()
    answer = served.store.answer(following["id"].removeprefix("chatcmpl-"))
    rendered = served.model.encoder.tokenizer.decode(list(answer.prompt_ids))
    assert f'"arguments": {{"number": {number}}}' in rendered
    assert "<tool_response>\nforty-two\n</tool_response>" in rendered
    served.post("/feedback", {"id": result["id"], "label": True})
    (row,) = served.rows()
    assert row["tools"] == [TOOL]
    (turn,) = row["completion"]
    assert turn["tool_calls"][0]["function"] == {"name": "scale", "arguments": {"number": number}}
    assert "mask" not in row["sampled"]
    (unit,) = prepared(place, "apo_zero_unpaired", served.out)
    assert list(unit.answers[0].ids) == row["completion_ids"]


def test_calls_are_streamed_as_one_delta(serve: Serve) -> None:
    served = serve()
    seed = next(
        seed
        for seed in range(40)
        if complete(served, tools=[TOOL], seed=seed).json()["choices"][0]["finish_reason"]
        == "tool_calls"
    )
    response = complete(served, tools=[TOOL], seed=seed).json()["choices"][0]
    *chunks, done = events(complete(served, tools=[TOOL], seed=seed, stream=True))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [{**call, "index": 0} for call in response["message"]["tool_calls"]] == calls
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == (response["message"]["content"] or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_malformed_call_is_content(serve: Serve) -> None:
    served = serve()
    for seed in range(60):
        (choice,) = complete(served, tools=[TOOL], seed=seed).json()["choices"]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop" and text and len(text) % 10 == 0:
            break
    else:
        raise AssertionError("no call is malformed")
    assert "tool_calls" not in choice["message"]


def test_without_tools_of_the_client_the_service_calls_its_own(served: Served) -> None:
    seed, num_turns, choice = -1, 0, dict[str, Any]()
    while num_turns < 2:
        seed += 1
        result = complete(served, seed=seed, logprobs=True).json()
        answer = served.store.answer(result["id"].removeprefix("chatcmpl-"))
        (choice,) = result["choices"]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == answer.messages[-1]["content"]
        assert len(choice["logprobs"]["content"]) == sum(answer.completion.mask)
        num_turns = len(answer.messages)
    *chunks, _ = events(complete(served, seed=seed, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == choice["message"]["content"]
    body = {"messages": ASK, "stop": ["x"]}
    response = served.post("/v1/chat/completions", body)
    assert response.json()["error"]["param"] == "stop"
    assert served.post("/v1/chat/completions", {**body, "tools": [TOOL]}).status_code == 200


def test_other_formats_of_arguments_are_passed_as_they_are(place: Path, serve: Serve) -> None:
    served = serve()
    for arguments in ("{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ]
        result = complete(served, messages=messages, tools=[TOOL]).json()
        answer = served.store.answer(result["id"].removeprefix("chatcmpl-"))
        assert answer.prompt[1]["tool_calls"] == [call]
        assert answer.prompt[1]["content"] == ""
