"""The client of a vLLM server against a stand-in: what it asks, in which order, and what it says when something is wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout.fake import END, Drop, Fake, hang, serving
from valence.errors import UserError
from valence.rollout.protocol import Sampling
from valence.rollout.transports import FAILED, Disk, Gloo, Lora, Transport
from valence.rollout.vllm import VLLMGenerator
from valence.rollout.vllm_plugin import join, layout
from valence.rollout.wire import address
from valence.types import Ids, content_id

PROMPTS = [(5, 6, 7), (8, 9)]
FREE = Sampling(temperature=0.7, max_new_tokens=2, seed=4)
WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([7], dtype=torch.bfloat16),
    "c": torch.tensor(3, dtype=torch.int64),
}
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Words:
    """A tokenizer that writes token 7 as "7" and leaves the end token out."""

    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i != END or not skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as server:
        yield server


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def sampler(fake: Fake, tmp_path: Path, notes: list[str]) -> Iterator[VLLMGenerator]:
    made = generator(fake.url, Disk(tmp_path / "weights"), say=notes.append)
    yield made
    made.close()


def generator(url: str, transport: Transport, *, timeout: float = 5.0, **settings: Any) -> VLLMGenerator:
    return VLLMGenerator(url, transport, Words(), end_ids=[END], timeout=timeout, **settings)  # type: ignore[arg-type]


def weights() -> Any:
    return WEIGHTS.items()


def test_tokens_in_and_out(fake: Fake, sampler: VLLMGenerator) -> None:
    heard: list[int] = []
    rows = sampler.generate(PROMPTS, 3, FREE, progress=heard.append)
    assert sum(heard) == 6
    bodies = {tuple(body["token_ids"]): body for path, body in fake.asked[-2:] if path == "/inference/v1/generate"}
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
    assert {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"} <= set(settings)
    assert settings["stop_token_ids"] == [END]
    assert (settings["temperature"], settings["max_tokens"], settings["top_p"]) == (0.7, 2, 1.0)


def test_seeds_differ_by_prompt_and_seed_and_repeat(fake: Fake, sampler: VLLMGenerator) -> None:
    def seeds(seed: int) -> list[int]:
        fake.asked.clear()
        sampler.generate(PROMPTS, 2, Sampling(seed=seed))
        return sorted(body["sampling_params"]["seed"] for path, body in fake.asked if path == "/inference/v1/generate")

    first = seeds(1)
    assert seeds(1) == first
    assert len({*first, *seeds(2)}) == 4
    assert all(0 <= seed < 2**63 - 2**20 for seed in first)


def test_nothing_to_ask(sampler: VLLMGenerator) -> None:
    assert sampler.generate([], 2, Sampling()) == []
    with pytest.raises(UserError, match="prompt 1"):
        sampler.generate([(4,), ()], 1, Sampling())
    with pytest.raises(UserError, match="at least 1"):
        sampler.generate(PROMPTS, 0, Sampling())


def test_an_update_in_order_and_what_carries_its_version(fake: Fake, sampler: VLLMGenerator) -> None:
    sampler.sync(3, weights)
    assert fake.paths() == ["/weight_info", *UPDATE]
    rows = sampler.generate(PROMPTS, 1, Sampling())
    assert {(row[0].version, row[0].versions) for row in rows} == {(3, ())}
    salts = {body["cache_salt"] for path, body in fake.asked if path == "/inference/v1/generate"}
    assert salts == {fake.version}
    sampler.sync(4, weights)
    assert {row[0].version for row in sampler.generate(PROMPTS, 1, Sampling())} == {4}


def test_tokens_from_before_and_after_an_update_are_told_apart(fake: Fake, sampler: VLLMGenerator) -> None:
    sampler.sync(3, weights)
    old = fake.version
    sampler.sync(4, weights)
    plain = fake.choice

    def mixed(settings: Any, index: int) -> dict[str, Any]:
        spans = [{"version": old, "start": 0, "end": 1}, {"version": fake.version, "start": 1, "end": 2}]
        return {**plain(settings, index), "weight_versions": spans}

    fake.choice = mixed  # type: ignore[method-assign]
    (answer,) = sampler.generate([(5,)], 1, Sampling())[0]
    assert (answer.version, answer.versions) == (3, (3, 4))


def test_log_probabilities_of_given_answers(sampler: VLLMGenerator) -> None:
    assert sampler.logps([((1, 2, 3), (4, 5)), ((1,), (9,))]) == [[-2.5, -3.5], [-0.5]]


def test_a_folder_per_version(sampler: VLLMGenerator, fake: Fake, tmp_path: Path) -> None:
    sent: list[dict[str, torch.Tensor]] = []

    def read(body: Any) -> None:
        sent.append({k: v for file in Path(body["update_info"]["folder"]).iterdir() for k, v in load_file(file).items()})

    fake.on["/update_weights"] = read
    sampler.sync(1, weights)
    first = set((tmp_path / "weights").iterdir())
    sampler.sync(2, lambda: [(name, value + 1) for name, value in WEIGHTS.items()])
    second = set((tmp_path / "weights").iterdir())
    assert len(first) == len(second) == 1
    assert first != second
    assert all(torch.equal(sent[0][name], WEIGHTS[name]) and torch.equal(sent[1][name], WEIGHTS[name] + 1) for name in WEIGHTS)
    sampler.close()
    assert not list((tmp_path / "weights").iterdir())


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "valence-1-0-v1").mkdir()
    (tmp_path / "mine").mkdir()
    Disk(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_restarted_server_is_sent_the_weights_before_it_samples(fake: Fake, sampler: VLLMGenerator, notes: list[str]) -> None:
    sampler.sync(1, weights)
    fake.version = "default"
    fake.asked.clear()
    rows = sampler.generate(PROMPTS, 1, Sampling())
    assert {row[0].version for row in rows} == {1}
    paths = fake.paths()
    assert paths.index("/finish_weight_update") < paths.index("/inference/v1/generate")
    assert any("version 1 was sent again" in note for note in notes)


def test_a_server_killed_while_it_answers(fake: Fake, sampler: VLLMGenerator, notes: list[str]) -> None:
    sampler.sync(1, weights)
    died: list[int] = []

    def die(body: Any) -> None:
        if body["token_ids"] == list(PROMPTS[1]) and not died:
            died.append(1)
            fake.version = "default"
            raise Drop

    fake.on["/inference/v1/generate"] = die
    expected = generator_of_the_same(fake, sampler)
    rows = sampler.generate(PROMPTS, 2, FREE)
    assert died
    assert [[answer.tokens for answer in row] for row in rows] == expected
    assert {answer.version for row in rows for answer in row} == {1}
    assert len([path for path in fake.paths() if path == "/finish_weight_update"]) == 2
    assert any("waiting for the server" in note for note in notes)


def generator_of_the_same(fake: Fake, sampler: VLLMGenerator) -> list[list[tuple[int, ...]]]:
    """The answers of a server that is never killed."""
    on, fake.on = fake.on, {}
    rows = sampler.generate(PROMPTS, 2, FREE)
    fake.on = on
    return [[answer.tokens for answer in row] for row in rows]


def test_answers_of_weights_that_were_not_sent_are_asked_for_again(fake: Fake, sampler: VLLMGenerator) -> None:
    sampler.sync(1, weights)
    plain, given = fake.choice, []

    def other(settings: Any, index: int) -> dict[str, Any]:
        given.append(1)
        answer = plain(settings, index)
        return answer if len(given) > 1 else {**answer, "weight_versions": [{"version": "default", "start": 0, "end": 2}]}

    fake.choice = other  # type: ignore[method-assign]
    assert sampler.generate([(5,)], 1, Sampling())[0][0].version == 1
    assert len(given) == 2


def test_an_aborted_answer_is_asked_for_again(fake: Fake, sampler: VLLMGenerator) -> None:
    plain, given = fake.choice, []

    def aborted(settings: Any, index: int) -> dict[str, Any]:
        given.append(1)
        return plain(settings, index) if len(given) > 1 else {**plain(settings, index), "finish_reason": "abort"}

    fake.choice = aborted  # type: ignore[method-assign]
    assert len(sampler.generate([(5,)], 1, Sampling())[0][0].tokens) == 2


def test_a_server_that_goes_again_and_again_is_given_up(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on["/inference/v1/generate"] = lambda body: (500, {"error": {"message": "EngineCore died"}})
    with pytest.raises(UserError, match=r"3 times in a row .*EngineCore died"):
        sampler.generate(PROMPTS, 1, Sampling())


def test_a_dead_server_is_started_again(tmp_path: Path) -> None:
    with serving(Fake()) as alive:
        url = alive.url
    revived: list[Any] = []
    fake = Fake()

    def revive() -> None:
        revived.append(again := serving_at(fake, url))
        again.__enter__()

    sampler = generator(url, Disk(tmp_path), revive=revive)
    try:
        assert len(sampler.generate([(5,)], 1, Sampling())[0]) == 1
        assert len(revived) == 1
    finally:
        for each in revived:
            each.__exit__(None, None, None)
        sampler.close()


def serving_at(fake: Fake, url: str) -> Any:
    return serving(fake, port=int(url.rpartition(":")[2]))


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with serving(Fake()) as gone:
        url = gone.url
    sampler = generator(url, Disk(tmp_path), timeout=0.3)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"not back after 0\.3 s") as error:
        sampler.generate(PROMPTS, 1, Sampling())
    assert time.monotonic() - started < 3
    assert url in str(error.value)
    assert "rollout.timeout" in str(error.value)


def test_a_server_that_takes_connections_and_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("valence.rollout.wire.PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sampler = generator(url, Disk(tmp_path), timeout=0.4)
        for ask in (lambda: sampler.generate(PROMPTS, 1, Sampling()), lambda: sampler.sync(1, weights)):
            started = time.monotonic()
            with pytest.raises(UserError, match=r"no answer in 0\.4 s, and none to .*/health either: the server hangs") as error:
                ask()
            assert time.monotonic() - started < 4
            assert url in str(error.value)
            assert "look at the end of its log" in str(error.value)


def test_a_server_that_is_only_slow(fake: Fake, tmp_path: Path) -> None:
    sampler = generator(fake.url, Disk(tmp_path), timeout=0.4)
    fake.on["/inference/v1/generate"] = hang(3)
    with pytest.raises(UserError, match="though the server says that it is well"):
        sampler.generate(PROMPTS, 1, Sampling())


def test_a_failed_update_never_leaves_the_server_paused(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on["/update_weights"] = lambda body: (500, {"error": {"message": "the new weights lack lm_head.weight"}})
    with pytest.raises(UserError, match=r"the new weights lack lm_head.*\n.*plugin"):
        sampler.sync(1, weights)
    assert not fake.paused
    assert fake.version == FAILED
    assert "/abort_requests" in fake.paths()
    # Its answers are worth nothing until an update has worked.
    with pytest.raises(UserError, match="the new weights lack"):
        sampler.generate(PROMPTS, 1, Sampling())
    del fake.on["/update_weights"]
    assert sampler.generate(PROMPTS, 1, Sampling())[0][0].version == 1


def test_a_server_that_dies_in_an_update_is_sent_it_again(fake: Fake, sampler: VLLMGenerator) -> None:
    died: list[int] = []

    def die(body: Any) -> None:
        if not died:
            died.append(1)
            fake.updating = False
            raise Drop

    fake.on["/update_weights"] = die
    sampler.sync(2, weights)
    assert died
    assert not fake.paused
    assert sampler.generate([(5,)], 1, Sampling())[0][0].version == 2


def test_an_update_that_a_trainer_left_open_is_closed(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.updating = True

    def close(body: Any) -> tuple[int, Any] | None:
        if body["update_info"]:
            return None
        fake.updating = False
        return 500, {"error": {"message": "no folder"}}

    fake.on["/update_weights"] = close
    sampler.sync(1, weights)
    assert sampler.label == fake.version


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish_reason": "stop", "token_ids": [10, 11]}, "do not belong together"),
        ({"finish_reason": "stop"}, "stopped at token"),
        ({"index": 4}, "asked for 1 answers"),
        ({"weight_versions": None}, "which weights"),
    ],
)
def test_answers_that_make_no_sense(fake: Fake, sampler: VLLMGenerator, change: Any, said: str) -> None:
    sampler.sync(1, weights)
    plain = fake.choice
    fake.choice = lambda settings, index: {**plain(settings, index), **change}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=said):
        sampler.generate([(5,)], 1, Sampling())


def test_log_probabilities_that_are_no_numbers(fake: Fake, sampler: VLLMGenerator) -> None:
    plain = fake.choice
    fake.choice = lambda s, k: {  # type: ignore[method-assign]
        **(answer := plain(s, k)),
        "logprobs": {"content": [{"token_id": t, "logprob": -9999.0} for t in answer["token_ids"]]},
    }
    with pytest.raises(FloatingPointError):
        sampler.generate([(5,)], 1, Sampling())


def test_refusals_are_passed_on(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on["/inference/v1/generate"] = lambda body: (400, {"error": {"message": "the prompt is longer than 512"}})
    with pytest.raises(UserError, match="longer than 512") as error:
        sampler.generate(PROMPTS, 1, Sampling())
    assert "rollout.max_new_tokens" in str(error.value)
    fake.on["/inference/v1/generate"] = lambda body: (404, {"detail": "Not Found"})
    with pytest.raises(UserError, match=r"docs/vllm\.md"):
        sampler.generate(PROMPTS, 1, Sampling())


def test_log_probabilities_of_another_distribution_are_refused(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.mode = "raw_logprobs"
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        sampler.generate(PROMPTS, 1, FREE)
    assert sampler.generate(PROMPTS, 1, Sampling(temperature=1.0, max_new_tokens=2))


def test_adapters_have_a_folder_and_a_name_per_version(fake: Fake, tmp_path: Path) -> None:
    sampler = generator(fake.url, Lora(tmp_path))

    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}", encoding="utf-8")

    for version in (1, 2, 3):
        sampler.sync(version, lambda: [], write)
        assert sampler.generate([(5,)], 1, Sampling())[0][0].version == version
    # The last but one stays for answers that began with it.
    assert [name.rpartition("-v")[2] for name in fake.adapters] == ["base", "2", "3"]
    assert sorted(path.name.rpartition("-v")[2] for path in tmp_path.iterdir()) == ["2", "3"]
    assert "/pause" not in fake.paths()
    fake.adapters = ["base"]
    assert sampler.generate([(5,)], 1, Sampling())[0][0].version == 3
    sampler.close()
    assert (fake.adapters, list(tmp_path.iterdir())) == (["base"], [])


def test_an_adapter_that_is_lost_between_looking_and_asking(fake: Fake, tmp_path: Path) -> None:
    sampler = generator(fake.url, Lora(tmp_path))
    sampler.sync(1, lambda: [], lambda folder: None)
    lost: list[int] = []

    def forget(body: Any) -> None:
        if not lost:
            lost.append(1)
            fake.adapters = ["base"]

    fake.on["/inference/v1/generate"] = forget
    assert sampler.generate([(5,)], 1, Sampling())[0][0].version == 1
    sampler.close()


def test_the_adapter_transport_needs_an_adapter(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.transport"):
        generator(fake.url, Lora(tmp_path)).sync(1, weights)


def test_gloo_carries_every_byte(fake: Fake) -> None:
    groups: list[Any] = []
    got: dict[str, torch.Tensor] = {}

    def enter(body: Any) -> None:
        info = body["init_info"]
        groups.append(join(info["host"], info["port"], 1, info["world_size"], info["seconds"], serve=False))

    def receive(body: Any) -> None:
        info = body["update_info"]
        parts = layout(info["dtypes"], info["shapes"])
        row = torch.empty(sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8)
        groups[-1].broadcast(row, root=0).wait()
        for name, shape, (dtype, at, size) in zip(info["names"], info["shapes"], parts, strict=True):
            got[name] = row[at : at + size].view(dtype).view(shape).clone()
        assert info["last"]

    fake.on |= {"/init_weight_transfer_engine": enter, "/update_weights": receive}
    sampler = generator(fake.url, Gloo(5.0))
    live = {name: value.clone() for name, value in WEIGHTS.items()}
    sampler.sync(1, lambda: live.items())
    assert all(torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in WEIGHTS.items())
    sampler.sync(2, lambda: live.items())
    assert len(groups) == 1
    # Training goes on; a restarted server is given the weights of its version all the same.
    live["a"].zero_()
    fake.version = "default"
    sampler.generate([(5,)], 1, Sampling())
    assert torch.equal(got["a"], WEIGHTS["a"])
    assert len(groups) == 2
    sampler.close()


def test_gloo_does_not_wait_for_a_server_that_refused(fake: Fake) -> None:
    fake.on["/init_weight_transfer_engine"] = lambda body: (500, {"error": {"message": "no such transport"}})
    sampler = generator(fake.url, Gloo(30.0), timeout=30.0)
    started = time.monotonic()
    with pytest.raises(UserError, match="no such transport"):
        sampler.sync(1, weights)
    assert time.monotonic() - started < 5
    assert not fake.paused


def test_an_update_waits_for_no_answer_and_no_answer_for_it(fake: Fake, sampler: VLLMGenerator) -> None:
    sampler.sync(1, weights)
    fake.on["/inference/v1/generate"] = hang(0.5)
    rows: list[Any] = []
    thread = threading.Thread(target=lambda: rows.extend(sampler.generate(PROMPTS, 1, Sampling())))
    thread.start()
    time.sleep(0.2)
    sampler.sync(2, weights)
    assert not rows
    thread.join()
    assert {row[0].version for row in rows} == {2}


def test_addresses() -> None:
    assert {address(url) for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")} == {"http://a:1"}
    for wrong in ("localhost:8000", "ftp://a", ""):
        with pytest.raises(UserError, match=r"rollout\.url"):
            address(wrong)
