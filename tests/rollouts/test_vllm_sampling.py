"""Requests to a vLLM server, and the accepted responses, with a stand-in."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rollouts.vllm_server import END, FREE, PROMPTS, Fake, weights
from valence.rollouts.client import RequestRefused, ServerClient, server_root
from valence.rollouts.protocol import Sampling
from valence.rollouts.vllm import VLLMGenerator
from valence.types import Ids, content_id


def test_tokens_in_and_out(fake: Fake, sampler: VLLMGenerator) -> None:
    heard: list[int] = []
    rows = sampler.generate(PROMPTS, 3, FREE, progress=heard.append)
    assert sum(heard) == 6
    bodies = {
        tuple(body["token_ids"]): body
        for path, body in fake.requests[-2:]
        if path == "/inference/v1/generate"
    }
    assert set(bodies) == set(PROMPTS)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert [answer.index for answer in row] == [0, 1, 2]
        assert [answer.stop for answer in row] == ["length", "eos", "length"]
        assert row[1].tokens[-1] == END
        assert row[1].text == str(row[1].tokens[0])
        assert all(answer.logps == tuple(-float(t) for t in answer.tokens) for answer in row)
        assert {answer.prompt_id for answer in row} == {content_id("prompt", Ids(prompt))}
    settings = bodies[PROMPTS[0]]["sampling_params"]
    # Unsaid, these would be the model's own defaults.
    assert {
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "ignore_eos",
    } <= set(settings)
    assert settings["stop_token_ids"] == [END]
    assert (settings["temperature"], settings["max_tokens"], settings["top_p"]) == (0.7, 2, 1.0)


def test_seeds_differ_by_prompt_and_seed_and_repeat(fake: Fake, sampler: VLLMGenerator) -> None:
    def seeds(seed: int) -> list[int]:
        fake.requests.clear()
        sampler.generate(PROMPTS, 2, Sampling(seed=seed))
        return sorted(
            body["sampling_params"]["seed"]
            for path, body in fake.requests
            if path == "/inference/v1/generate"
        )

    first = seeds(1)
    assert seeds(1) == first
    assert len({*first, *seeds(2)}) == 4
    assert all(0 <= seed < 2**63 - 2**20 for seed in first)


def test_nothing_to_ask(sampler: VLLMGenerator) -> None:
    assert sampler.generate([], 2, Sampling()) == []
    with raises_error("prompt-empty", where="prompt 1"):
        sampler.generate([(4,), ()], 1, Sampling())
    with raises_error("sampling-value", where="n"):
        sampler.generate(PROMPTS, 0, Sampling())


def test_log_probabilities_of_given_answers(sampler: VLLMGenerator) -> None:
    assert sampler.logps([((1, 2, 3), (4, 5)), ((1,), (9,))]) == [[-2.5, -3.5], [-0.5]]


def test_log_probabilities_of_another_distribution_are_refused(
    fake: Fake, sampler: VLLMGenerator
) -> None:
    fake.mode = "raw_logprobs"
    fix = "--logprobs-mode processed_logprobs"
    with raises_error("rollout-logps-unprocessed", where=fake.url, fix=fix):
        sampler.generate(PROMPTS, 1, FREE)
    assert sampler.generate(PROMPTS, 1, Sampling(temperature=1.0, max_new_tokens=2))


def test_log_probabilities_that_are_no_numbers(fake: Fake, sampler: VLLMGenerator) -> None:
    plain = fake.choice
    fake.choice = lambda s, k: {  # type: ignore[method-assign]
        **(answer := plain(s, k)),
        "logprobs": {"content": [{"token_id": t, "logprob": -9999.0} for t in answer["token_ids"]]},
    }
    with pytest.raises(FloatingPointError):
        sampler.generate([(5,)], 1, Sampling())


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": "stop", "token_ids": [10, 11]},
        {"finish_reason": "stop"},
        {"index": 4},
        {"weight_versions": None},
    ],
    ids=["tokens without log-probabilities", "no end token", "index", "weights"],
)
def test_answers_that_make_no_sense(fake: Fake, sampler: VLLMGenerator, change: Any) -> None:
    sampler.sync(1, weights)
    plain = fake.choice
    fake.choice = lambda settings, index: {**plain(settings, index), **change}  # type: ignore[method-assign]
    with raises_error("rollout-server-version", where=fake.url, fix="valence docs vllm"):
        sampler.generate([(5,)], 1, Sampling())


def test_an_aborted_answer_is_asked_for_again(fake: Fake, sampler: VLLMGenerator) -> None:
    plain, inputs = fake.choice, []

    def aborted(settings: Any, index: int) -> dict[str, Any]:
        inputs.append(1)
        return (
            plain(settings, index)
            if len(inputs) > 1
            else {**plain(settings, index), "finish_reason": "abort"}
        )

    fake.choice = aborted  # type: ignore[method-assign]
    assert len(sampler.generate([(5,)], 1, Sampling())[0][0].tokens) == 2


def test_refusals_are_passed_on(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on["/inference/v1/generate"] = lambda body: (
        400,
        {"error": {"message": "the prompt is longer than 512"}},
    )
    with raises_error("rollout-server-refused", fix="rollout.max_new_tokens") as raised:
        sampler.generate(PROMPTS, 1, Sampling())
    assert "longer than 512" in raised.error.message
    fake.on["/inference/v1/generate"] = lambda body: (404, {"detail": "Not Found"})
    with raises_error("rollout-server-refused", fix="valence docs vllm"):
        sampler.generate(PROMPTS, 1, Sampling())


def test_of_refusals_at_the_same_time_one_is_raised_and_none_is_printed(
    sampler: VLLMGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> None:
        raise RequestRefused("url", 400, "no")

    monkeypatch.setattr(ServerClient, "post_async", refuse)
    with raises_error("rollout-server-refused"):
        sampler.generate(PROMPTS, 1, Sampling())
    gc.collect()
    assert caplog.messages == []


def test_addresses() -> None:
    assert {
        server_root(url) for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")
    } == {"http://a:1"}
    for wrong in ("localhost:8000", "ftp://a", ""):
        with raises_error("rollout-url-invalid", where="rollout.url"):
            server_root(wrong)
    with raises_error("address-credentials", where="rollout.url", fix="VLLM_API_KEY"):
        server_root("http://user:hunter2@a:1")
