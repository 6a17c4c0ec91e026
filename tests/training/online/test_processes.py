"""Rounds of several processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.rig import run as together
from tests.distributed.test_run import train
from tests.rollouts.vllm_server import Fake, serving
from tests.training.online.rig import logged, make, recipe, recipe_without_eval
from valence.distributed.process_group import SingleProcess

pytestmark = [pytest.mark.dist, pytest.mark.slow]
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
        ranks = together(train, 2, [online], deadline=2.0)
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
    ranks = together(train, 2, recipes(tmp_path, "two"), deadline=60.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"] * len(METHODS))] * 2
    for method in METHODS:
        one, two = logged(tmp_path, f"one {method}"), logged(tmp_path, f"two {method}")
        assert [row["step"] for row in one] == [row["step"] for row in two]
        for ours, theirs in zip(one, two, strict=True):
            assert ours.keys() - DIFFER == theirs.keys() - DIFFER
            for name in ours.keys() - DIFFER:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), (method, name)
