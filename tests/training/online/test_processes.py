"""Rounds of several processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.process_groups import run as run_in_processes
from tests.distributed.test_run import train
from tests.rollouts.vllm_server import Fake, serving
from tests.training.online.recipes import logged, make, recipe, recipe_without_eval
from valence.distributed.process_group import SingleProcess

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Weights = dict[str, torch.Tensor]
DIFFER = {
    "ranks",
    "tokens/rank_max",
    "tokens/rank_min",
    "micro_batches",
    "tokens",
    "tokens_seen",
    "waste",
}


METHODS = ("ppo", "online_kto")


def test_processes_wait_for_a_server_that_takes_longer_than_their_deadline(tmp_path: Path) -> None:
    """Only rank 0 asks it."""
    make(tmp_path)
    with serving(Fake()) as fake:
        fake.on["/inference/v1/generate"] = lambda body: time.sleep(3.0)
        settings = {"engine": "vllm", "url": fake.url, "check_prompts": 0, "num_rollouts": 2}
        online = recipe_without_eval(
            tmp_path,
            "online_kto",
            rollout=settings,
            train={"max_steps": 1},
            reward="tests.training.online.rewards:by_index",
        )
        ranks = run_in_processes(train, 2, [online], deadline=2.0)
        assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * 2
        assert fake.paths().count("/v1/load_lora_adapter") == 1
        num_prompts = logged(tmp_path)[-1]["prompts"]
        assert fake.paths().count("/inference/v1/generate") == num_prompts


def recipes(place: Path, of: str) -> list[dict[str, Any]]:
    more: dict[str, Any] = {
        "model": {"dtype": "float64"},
        "rollout": {"epochs": 2},
        "train": {"max_steps": 4},
    }
    return [
        recipe(place, method, **more, run={"dir": str(place / f"{of} {method}")})
        for method in METHODS
    ]


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Each samples and judges some of the answers: of three prompts one has two."""
    make(tmp_path)
    assert train(SingleProcess(), recipes(tmp_path, "one")) == ["done"] * len(METHODS)
    ranks = run_in_processes(train, 2, recipes(tmp_path, "two"), deadline=60.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"] * len(METHODS))] * 2
    for method in METHODS:
        one, two = logged(tmp_path, f"one {method}"), logged(tmp_path, f"two {method}")
        assert [row["step"] for row in one] == [row["step"] for row in two]
        for ours, theirs in zip(one, two, strict=True):
            assert ours.keys() - DIFFER == theirs.keys() - DIFFER
            for name in ours.keys() - DIFFER:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), (method, name)


def versions_sent(
    size: int,
    place: Path,
    *,
    lora: dict[str, int] | None,
    dtype: str = "float32",
    **changes: dict[str, Any],
) -> list[Weights]:
    """The weights of each version that a server receives.

    Its log-probabilities, which it does not compute with these weights, are compared as well.
    """
    versions: list[Weights] = []

    def receive(folder: str) -> None:
        parts = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        versions.append({name: tensor for part in parts for name, tensor in part.items()})

    with serving(Fake()) as fake:
        fake.dtype = dtype
        fake.on["/update_weights"] = lambda body: receive(body["update_info"]["folder"])
        fake.on["/v1/load_lora_adapter"] = lambda body: receive(body["lora_path"])
        settings = {"engine": "vllm", "url": fake.url, "check_prompts": 2, "max_mismatch": 1e6}
        online = recipe_without_eval(
            place,
            "online_kto",
            model={"lora": lora},
            rollout=settings,
            train={"max_steps": 2},
            reward="tests.training.online.rewards:by_index",
            run={"dir": str(place / f"{size} {changes} {lora} {dtype}")},
            **changes,
        )
        if size == 1:
            assert train(SingleProcess(), [online]) == ["done"]
        else:
            ranks = run_in_processes(train, size, [online], deadline=20.0)
            assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * size
    return versions


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_weights_that_are_split_over_processes_reach_a_server(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    make(tmp_path)
    expected = versions_sent(1, tmp_path, lora=lora)
    assert len(expected) == 2
    assert any(not torch.equal(expected[0][name], expected[1][name]) for name in expected[0])
    splits: list[tuple[int, dict[str, Any]]]
    splits = [(2, {"shard": "full"}), (4, {"shard": "full"}), (2, {"tensor": 2})]
    for size, parallel in splits:
        versions = versions_sent(size, tmp_path, lora=lora, parallel=parallel)
        assert len(versions) == len(expected)
        for actual, version in zip(versions, expected, strict=True):
            assert actual.keys() == version.keys()
            for name, tensor in version.items():
                torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_split_weights_are_gathered_in_the_dtype_of_the_server(tmp_path: Path) -> None:
    make(tmp_path)
    expected = versions_sent(1, tmp_path, lora=None)[0]
    actual = versions_sent(2, tmp_path, lora=None, dtype="bfloat16", parallel={"shard": "full"})[0]
    assert {tensor.dtype for tensor in actual.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(actual[name].dtype))
