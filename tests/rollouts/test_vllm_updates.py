"""New weights to a vLLM server, against a stand-in: in which order, by which transport, and which
version an answer is of.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.errors import raises_error
from tests.rollouts.vllm_server import PROMPTS, UPDATE, WEIGHTS, Drop, Fake, generator, weights
from valence.rollouts.protocol import Sampling
from valence.rollouts.transports import FAILED, DiskTransfer, GlooTransfer, LoraTransfer
from valence.rollouts.vllm import VLLMGenerator
from valence.rollouts.vllm_plugin import join, layout

# Versions


def test_an_update_in_order_and_what_carries_its_version(
    fake: Fake, sampler: VLLMGenerator
) -> None:
    sampler.sync(3, weights)
    assert fake.paths() == ["/server_info", "/weight_info", *UPDATE]
    rows = sampler.generate(PROMPTS, 1, Sampling())
    assert {(row[0].version, row[0].versions) for row in rows} == {(3, ())}
    salts = {body["cache_salt"] for path, body in fake.requests if path == "/inference/v1/generate"}
    assert salts == {fake.version}
    sampler.sync(4, weights)
    assert {row[0].version for row in sampler.generate(PROMPTS, 1, Sampling())} == {4}


def test_tokens_from_before_and_after_an_update_are_told_apart(
    fake: Fake, sampler: VLLMGenerator
) -> None:
    sampler.sync(3, weights)
    old = fake.version
    sampler.sync(4, weights)
    plain = fake.choice

    def mixed(settings: Any, index: int) -> dict[str, Any]:
        spans = [
            {"version": old, "start": 0, "end": 1},
            {"version": fake.version, "start": 1, "end": 2},
        ]
        return {**plain(settings, index), "weight_versions": spans}

    fake.choice = mixed  # type: ignore[method-assign]
    (answer,) = sampler.generate([(5,)], 1, Sampling())[0]
    assert (answer.version, answer.versions) == (3, (3, 4))


def test_answers_of_weights_that_were_not_sent_are_asked_for_again(
    fake: Fake, sampler: VLLMGenerator
) -> None:
    sampler.sync(1, weights)
    plain, inputs = fake.choice, []

    def other(settings: Any, index: int) -> dict[str, Any]:
        inputs.append(1)
        answer = plain(settings, index)
        return (
            answer
            if len(inputs) > 1
            else {**answer, "weight_versions": [{"version": "default", "start": 0, "end": 2}]}
        )

    fake.choice = other  # type: ignore[method-assign]
    assert sampler.generate([(5,)], 1, Sampling())[0][0].version == 1
    assert len(inputs) == 2


def test_a_failed_update_never_leaves_the_server_paused(fake: Fake, sampler: VLLMGenerator) -> None:
    fake.on["/update_weights"] = lambda body: (
        500,
        {"error": {"message": "the new weights lack lm_head.weight"}},
    )
    where = f"{fake.url}/update_weights"
    with raises_error("rollout-weights-refused", where=where, fix="valence docs vllm") as raised:
        sampler.sync(1, weights)
    assert "lm_head.weight" in raised.error.message
    assert not fake.paused
    assert fake.version == FAILED
    assert "/abort_requests" in fake.paths()
    # Its answers are worth nothing until an update has worked.
    with raises_error("rollout-weights-refused", where=where):
        sampler.generate(PROMPTS, 1, Sampling())
    del fake.on["/update_weights"]
    assert sampler.generate(PROMPTS, 1, Sampling())[0][0].version == 1


def test_a_server_that_dies_in_an_update_is_sent_it_again(
    fake: Fake, sampler: VLLMGenerator
) -> None:
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


def test_an_update_waits_for_no_answer_and_no_answer_for_it(
    fake: Fake, sampler: VLLMGenerator
) -> None:
    sampler.sync(1, weights)
    request, updated = threading.Event(), threading.Event()

    def answer_after_the_update(body: Any) -> None:
        request.set()
        updated.wait(60)

    fake.on["/inference/v1/generate"] = answer_after_the_update
    sampler.pool.clients[0].timeout = 60.0
    rows: list[Any] = []
    thread = threading.Thread(target=lambda: rows.extend(sampler.generate(PROMPTS, 1, Sampling())))
    thread.start()
    assert request.wait(60)
    sampler.sync(2, weights)
    assert not rows
    updated.set()
    thread.join()
    assert {row[0].version for row in rows} == {2}


# Transports


def test_a_folder_per_version(sampler: VLLMGenerator, fake: Fake, tmp_path: Path) -> None:
    sent: list[dict[str, torch.Tensor]] = []

    def read(body: Any) -> None:
        sent.append(
            {
                k: v
                for file in Path(body["update_info"]["folder"]).iterdir()
                for k, v in load_file(file).items()
            }
        )

    fake.on["/update_weights"] = read
    sampler.sync(1, weights)
    first = set((tmp_path / "weights").iterdir())
    sampler.sync(2, lambda: [(name, value + 1) for name, value in WEIGHTS.items()])
    second = set((tmp_path / "weights").iterdir())
    assert len(first) == len(second) == 1
    assert first != second
    assert all(
        torch.equal(sent[0][name], WEIGHTS[name]) and torch.equal(sent[1][name], WEIGHTS[name] + 1)
        for name in WEIGHTS
    )
    sampler.close()
    assert not list((tmp_path / "weights").iterdir())


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "valence-1-0-v1").mkdir()
    (tmp_path / "mine").mkdir()
    DiskTransfer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_adapters_have_a_folder_and_a_name_per_version(fake: Fake, tmp_path: Path) -> None:
    sampler = generator(fake.url, LoraTransfer(tmp_path))

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
    sampler = generator(fake.url, LoraTransfer(tmp_path))
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
    with raises_error("rollout-transport-needs-adapter", where="rollout.transport"):
        generator(fake.url, LoraTransfer(tmp_path)).sync(1, weights)


def test_gloo_carries_every_byte(fake: Fake) -> None:
    groups: list[Any] = []
    got: dict[str, torch.Tensor] = {}

    def enter(body: Any) -> None:
        info = body["init_info"]
        groups.append(
            join(info["host"], info["port"], 1, info["world_size"], info["seconds"], serve=False)
        )

    def receive(body: Any) -> None:
        info = body["update_info"]
        parts = layout(info["dtypes"], info["shapes"])
        row = torch.empty(sum(-(-size // 16) * 16 for _, _, size in parts), dtype=torch.uint8)
        groups[-1].broadcast(row, root=0).wait()
        for name, shape, (dtype, at, size) in zip(
            info["names"], info["shapes"], parts, strict=True
        ):
            got[name] = row[at : at + size].view(dtype).view(shape).clone()
        assert info["last"]

    fake.on |= {"/init_weight_transfer_engine": enter, "/update_weights": receive}
    sampler = generator(fake.url, GlooTransfer(5.0))
    live = {name: value.clone() for name, value in WEIGHTS.items()}
    sampler.sync(1, lambda: live.items())
    assert all(
        torch.equal(got[name], value) and got[name].dtype == value.dtype
        for name, value in WEIGHTS.items()
    )
    sampler.sync(2, lambda: live.items())
    assert len(groups) == 1
    # Training goes on; a restarted server is given the weights of its version all the same.
    live["a"].zero_()
    fake.version = "default"
    sampler.generate([(5,)], 1, Sampling())
    assert torch.equal(got["a"], WEIGHTS["a"])
    assert len(groups) == 2
    sampler.close()


@pytest.mark.timeout(60)
def test_gloo_does_not_wait_for_a_server_that_refused(fake: Fake) -> None:
    refusal = (500, {"error": {"message": "no such transport"}})
    fake.on["/init_weight_transfer_engine"] = lambda body: refusal
    sampler = generator(fake.url, GlooTransfer(3600.0), timeout=3600.0)
    with raises_error("rollout-weights-refused", where=fake.url) as raised:
        sampler.sync(1, weights)
    assert "no such transport" in raised.error.message
    assert not fake.paused
