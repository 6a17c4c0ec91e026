"""Answers of a chat model, token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.errors import raises_error
from tests.serving.kit import (
    HELLO,
    SAMPLING,
    hooked_forward,
    parts_of,
    run,
    save_model,
    saved_model,
    trainer,
)
from tests.tiny import tiny_tokenizer
from valence.apps.serve.chat import Answer, ChatModel, TextStream
from valence.distributed.process_group import SingleProcess
from valence.rollouts import Sampling
from valence.training.open_run import open_run
from valence.training.sampling import PolicySampler


@pytest.fixture
def model() -> Iterator[ChatModel]:
    model = ChatModel(trainer(), "tiny")
    yield model
    model.close()


LONG = Sampling(max_new_tokens=200, temperature=0)


def test_a_character_is_held_back_until_all_its_bytes_are_there() -> None:
    tokenizer = tiny_tokenizer()
    text = "né 😀 好!"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == text
    assert pieces.count("") == 1 + 3 + 2  # all bytes of é, 😀 and 好 but the last
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.mark.parametrize("start", ["<tool_call>", "<|im_start|>"])  # as text, a special token
def test_a_call_is_held_back(start: str) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(f"a < b {start} hello", add_special_tokens=False)
    stream = TextStream(tokenizer, holds=(start,))
    assert "".join(map(stream.push, tokens)) == "a < b "
    plain = TextStream(tokenizer, holds=(start,))
    tokens = tokenizer.encode("a <tool or <|im, b", add_special_tokens=False)
    assert "".join(map(plain.push, tokens)) == "a <tool or <|im, b"


def test_bytes_that_are_no_character_are_shown_once_others_follow() -> None:
    tokenizer = tiny_tokenizer()
    (face,) = tokenizer("😀", add_special_tokens=False)["input_ids"][:1]
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (a, face, b)] == ["a", "", "\N{REPLACEMENT CHARACTER}b"]


@pytest.mark.parametrize("seed", range(8))
def test_pieces_add_up_to_the_text_of_the_completion(model: ChatModel, seed: int) -> None:
    """Random tokens are mostly no valid UTF-8."""
    sampling = Sampling(max_new_tokens=40, seed=seed, temperature=2.0)
    pieces, answer = run(parts_of(model, sampling=sampling))
    assert len(pieces) > 5
    assert "".join(pieces) == answer.completion.text
    tokens = list(answer.completion.tokens)
    tokenizer = trainer().prepared.tokenizer
    assert answer.completion.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(answer.completion.logps) == len(tokens)


def test_a_seed_gives_the_same_answer(model: ChatModel) -> None:
    first, second = (run(parts_of(model))[1] for _ in range(2))
    assert first.completion == second.completion
    assert first.id != second.id
    other = run(parts_of(model, sampling=replace(SAMPLING, seed=4)))[1]
    assert other.completion.tokens != first.completion.tokens


def test_log_probabilities_are_those_of_the_distribution_sampled_from(model: ChatModel) -> None:
    answer = run(parts_of(model, sampling=Sampling(max_new_tokens=5, temperature=0.7)))[1]
    ids = torch.tensor([[*answer.prompt_ids, *answer.completion.tokens]])
    with torch.no_grad():
        model_alone = AutoModelForCausalLM.from_pretrained(saved_model().name, dtype="float32")
        logits = model_alone(ids).logits[0] / 0.7
    tokens = ids[0, len(answer.prompt_ids) :]
    expected = logits.log_softmax(-1)[-len(tokens) - 1 : -1].gather(1, tokens[:, None])
    assert answer.completion.logps == pytest.approx(expected.squeeze(1).tolist(), abs=1e-4)


def test_the_long_answer_of_these_tests_is_long(model: ChatModel) -> None:
    assert len(run(parts_of(model, sampling=LONG))[1].completion.tokens) == 200


def test_sampling_ends_soon_after_the_caller_leaves(model: ChatModel) -> None:
    sizes = list[int]()

    async def leave() -> None:
        prompt = model.encode(HELLO)
        async with aclosing(model.stream(prompt, LONG)) as parts:
            async for _ in parts:
                break
        assert model.num_requests == 0
        answer = await model.answer(prompt, SAMPLING)
        assert answer.completion.tokens

    with hooked_forward(lambda tokens, _: sizes.append(len(tokens))):
        run(leave())
    assert sum(sizes) < 100


def test_a_request_that_is_cancelled_again_and_again_leaves_the_model_free(
    model: ChatModel,
) -> None:
    """As anyio cancels what belongs to a client that has left."""

    async def work() -> None:
        prompt = model.encode(HELLO)
        waiting = asyncio.create_task(model.answer(prompt, LONG))
        queued = asyncio.create_task(model.answer(prompt, LONG))
        await asyncio.sleep(0.02)
        for _ in range(5):
            waiting.cancel()
            queued.cancel()
            await asyncio.sleep(0)
        assert model.num_requests == 0
        assert (await model.answer(prompt, SAMPLING)).completion.tokens

    run(work())


def test_requests_at_once_have_the_answers_that_they_have_alone(model: ChatModel) -> None:
    samplings = [
        Sampling(max_new_tokens=5 + 3 * seed, seed=seed, temperature=[0.0, 1.0, 2.0][seed % 3])
        for seed in range(6)
    ]
    texts = ["hello", "a longer question", "hi"] * 2

    async def answer(text: str, sampling: Sampling, pause: float = 0.0) -> Answer:
        await asyncio.sleep(pause)
        prompt = model.encode([{"role": "user", "content": text}])
        return await model.answer(prompt, sampling)

    async def together() -> list[Answer]:
        work = zip(texts, samplings, (0.0, 0.0, 0.005, 0.01, 0.01, 0.02), strict=True)
        return await asyncio.gather(*(answer(*item) for item in work))

    alone = [run(answer(*item)).completion for item in zip(texts, samplings, strict=True)]
    completions = [answer.completion for answer in run(together())]
    assert [completion.tokens for completion in completions] == [
        completion.tokens for completion in alone
    ]
    for mine, expected in zip(completions, alone, strict=True):
        assert mine.text == expected.text
        assert mine.logps == pytest.approx(expected.logps, abs=1e-5)


def test_answers_are_those_of_valence_sample(model: ChatModel) -> None:
    prompt = model.encode(HELLO)
    sampler = PolicySampler(trainer().policy, model.encoder, version=lambda: 0)
    for seed in range(3):
        sampling = Sampling(max_new_tokens=30, seed=seed, top_p=0.9)
        answer = run(model.answer(prompt, sampling))
        ((expected,),) = sampler.generate([prompt.ids], 1, sampling)
        assert answer.completion == expected


def test_an_adapter_run_answers_as_its_merged_model(tmp_path: Path) -> None:
    """Greedily, as the library samples; with random numbers, as the run itself does."""
    folder = str(save_model(tmp_path / "model"))
    opened = open_run(
        folder, ["model.lora={rank: 4}", "data.max_length=256"], group=SingleProcess()
    )
    policy: Any = opened.policy.model
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    merged = deepcopy(policy).merge_and_unload()
    merged.set_attn_implementation("sdpa")
    model = ChatModel(opened, "adapter")
    sampler = PolicySampler(opened.policy, model.encoder, version=lambda: opened.step)
    prompts = [
        model.encode([{"role": "user", "content": text}]) for text in ("hello", "a longer question")
    ]

    async def answers(sampling: Sampling) -> list[Answer]:
        return await asyncio.gather(*(model.answer(prompt, sampling) for prompt in prompts))

    greedy = run(answers(Sampling(max_new_tokens=20, temperature=0)))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    changed = False
    for prompt, answer in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt.ids])
        settings: Any = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
        settings["eos_token_id"] = sorted(model.encoder.end_ids)
        mask = torch.ones_like(ids)
        expected, base = (
            item.generate(input_ids=ids, attention_mask=mask, **settings)[0, ids.shape[1] :]
            for item in (merged, plain)
        )
        assert list(answer.completion.tokens) == expected.tolist()
        changed |= expected.tolist() != base.tolist()
    assert changed
    random = Sampling(max_new_tokens=20, seed=5)
    for prompt, answer in zip(prompts, run(answers(random)), strict=True):
        ((expected_completion,),) = sampler.generate([prompt.ids], 1, random)
        assert answer.completion.tokens == expected_completion.tokens
        assert answer.completion.logps == pytest.approx(expected_completion.logps, abs=1e-5)
    model.close()


def test_at_most_max_batch_completions_are_sampled_at_once() -> None:
    model = ChatModel(trainer(), "tiny", max_batch=3)
    sizes, seeds = list[int](), list[int]()

    async def answer(seed: int) -> None:
        content = f"hello {seed}"
        prompt = model.encode([{"role": "user", "content": content}])
        await model.answer(prompt, Sampling(max_new_tokens=10, temperature=0, seed=seed))
        seeds.append(seed)

    async def together() -> None:
        await asyncio.gather(*map(answer, range(7)))

    with hooked_forward(lambda tokens, _: sizes.append(len(tokens))):
        run(together())
    model.close()
    assert max(sizes) == 3
    assert sum(sizes) == 70
    assert [seed // 3 for seed in seeds] == [0, 0, 0, 1, 1, 1, 2]  # in the order of arrival


def test_a_short_answer_does_not_wait_for_a_long_one(model: ChatModel) -> None:
    async def work() -> None:
        prompt = model.encode(HELLO)
        long = asyncio.create_task(model.answer(prompt, LONG))
        while not model._active:
            await asyncio.sleep(0.001)
        await model.answer(prompt, SAMPLING)
        assert not long.done()
        await long

    run(work())


def test_a_client_that_reads_slowly_does_not_hold_up_others(model: ChatModel) -> None:
    async def work() -> None:
        prompt = model.encode(HELLO)
        async with aclosing(model.stream(prompt, LONG)) as parts:
            await anext(parts)  # and nothing more for a while
            for seed in range(3):
                answer = await model.answer(prompt, replace(SAMPLING, seed=seed))
                assert answer.completion.tokens
            *_, slow = [part async for part in parts]
        assert isinstance(slow, Answer)
        assert len(slow.completion.tokens) == 200

    run(work())


def test_a_prompt_that_fails_leaves_the_other_requests(model: ChatModel) -> None:
    def fail(tokens: Tensor, _: Tensor) -> None:
        if tokens.shape[1] > 20:
            raise RuntimeError("out of memory")

    async def work() -> None:
        prompts = [model.encode([{"role": "user", "content": text}]) for text in ("a", "a" * 30)]
        assert len(prompts[0].ids) < 20 < len(prompts[1].ids)
        answer = asyncio.create_task(model.answer(prompts[0], LONG))
        with pytest.raises(RuntimeError, match="out of memory"):
            await model.answer(prompts[1], SAMPLING)
        assert len((await answer).completion.tokens) == 200
        assert model.num_requests == 0

    with hooked_forward(fail):
        run(work())


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=0)])
def test_an_answer_that_cannot_be_sampled_leaves_the_others(
    model: ChatModel, sampling: Sampling
) -> None:
    def spoil(_: Tensor, logits: Tensor) -> None:
        logits[1:] = math.nan  # of the second answer

    async def work() -> None:
        prompt = model.encode(HELLO)
        answer = asyncio.create_task(model.answer(prompt, LONG))
        while not model._active:
            await asyncio.sleep(0.001)
        with raises_error("sampling-failed"):
            await model.answer(prompt, sampling)
        assert len((await answer).completion.tokens) == 200
        assert model.num_requests == 0

    with hooked_forward(spoil):
        run(work())


def parts_until(
    model: ChatModel, stops: Sequence[str], sampling: Sampling
) -> tuple[list[str], Answer]:
    async def work() -> tuple[list[str], Answer]:
        prompt = model.encode(HELLO)
        parts = [part async for part in model.stream(prompt, sampling, stops=stops)]
        assert isinstance(parts[-1], Answer)
        return [part for part in parts if isinstance(part, str)], parts[-1]

    return run(work())


@pytest.mark.parametrize("seed", range(6))
def test_text_ends_before_a_stop_string(model: ChatModel, seed: int) -> None:
    sampling = Sampling(max_new_tokens=40, seed=seed, temperature=2.0)
    _, full = run(parts_of(model, sampling=sampling))
    text = full.completion.text
    for size in (1, 2, 5):
        middle = len(text) // 2
        stop = text[middle : middle + size]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        pieces, answer = parts_until(model, ["never there", stop], sampling)
        assert "".join(pieces) == answer.completion.text == text[: text.index(stop)]
        assert answer.completion.stop == "stop"
        tokens = answer.completion.tokens
        assert tokens == full.completion.tokens[: len(tokens)]
        decode: Any = trainer().prepared.tokenizer.decode
        assert stop in decode(list(tokens), skip_special_tokens=True)
        assert stop not in decode(list(tokens[:-1]), skip_special_tokens=True)


def test_text_that_only_starts_like_a_stop_string_is_sent(model: ChatModel) -> None:
    sampling = Sampling(max_new_tokens=20, seed=1, temperature=2.0)
    text = run(parts_of(model, sampling=sampling))[1].completion.text
    stops = [f"{text[at:]}and more" for at in range(len(text))]
    pieces, answer = parts_until(model, stops, sampling)
    assert "".join(pieces) == answer.completion.text == text
    assert answer.completion.stop != "stop"


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    size = len(ChatModel(trainer(), "tiny").encode(HELLO).ids)
    short = ChatModel(trainer(), "tiny", max_context=size)
    with raises_error("prompt-too-long", where="messages"):
        short.encode(HELLO)
    longer = ChatModel(trainer(), "tiny", max_context=size + 3)
    sampling = replace(SAMPLING, top_p=0.5)
    answer = run(parts_of(longer, sampling=sampling))[1]
    assert len(answer.completion.tokens) == 3
    assert answer.completion.stop == "length"
    assert answer.sampling == replace(sampling, max_new_tokens=3)  # with its top_p


def test_the_context_is_that_of_the_model(model: ChatModel) -> None:
    assert model.max_context == trainer().policy.causal.config.max_position_embeddings


def test_a_model_that_is_closed_answers_no_more(model: ChatModel) -> None:
    async def close_amid() -> None:
        prompt = model.encode(HELLO)
        async with aclosing(model.stream(prompt, LONG)) as parts:
            async for _ in parts:
                model.close()

    with raises_error("server-stopped"):
        run(close_amid())
    with raises_error("server-stopped"):
        run(parts_of(model))


def test_weights_that_are_not_finite_are_an_error(model: ChatModel) -> None:
    def spoil(_: Tensor, logits: Tensor) -> None:
        logits.fill_(math.nan)

    with hooked_forward(spoil), raises_error("sampling-failed"):
        run(parts_of(model))
    assert run(parts_of(model))[1].completion.tokens  # the model still answers


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "plain", template=None)
    opened = open_run(str(folder), group=SingleProcess())
    with raises_error("chat-template-missing", where="plain", fix="data.chat_template"):
        ChatModel(opened, "plain")
    templated = open_run(str(folder), ["data.chat_template=chatml"], group=SingleProcess())
    assert ChatModel(templated, "plain").encode(HELLO).ids


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    opened = open_run(str(folder), ["method=bradley_terry"], group=SingleProcess())
    with raises_error("reward-model-cannot-generate", where="judge"):
        ChatModel(opened, "judge")


def test_the_tokens_of_a_correction_end_the_turn(model: ChatModel) -> None:
    answer = run(parts_of(model))[1]
    tokenizer = trainer().prepared.tokenizer
    ids = model.encode_correction(answer, "better")
    assert tokenizer.decode(ids) == "better<|im_end|>"
    assert model.encode_correction(replace(answer, vocabulary="another"), "better") == ()
    with raises_error("row-too-long", where="correction"):
        model.encode_correction(answer, "long " * 300)
