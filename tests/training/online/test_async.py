"""Rounds that are sampled and scored in the background, while earlier ones are trained on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.process_groups import run as run_in_processes
from tests.distributed.test_run import train as train_together
from tests.errors import raises_error
from tests.rollouts.vllm_server import Fake, serving
from tests.rollouts.weighted_server import WeightedServer
from tests.training.online.recipes import logged, make, recipe, recipe_without_eval
from tests.training.online.test_servers import kill_at, slot
from tests.training.resuming import killed, resumed_steps, train, weights
from valence.rollouts.vllm import ROUTE
from valence.training.trainer import Trainer
from valence.types import Completion

STEPS = 6
REWARD = "tests.training.online.test_async:remainder"


def remainder(completions: Sequence[Completion], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [sum(completion.tokens) % 17 / 17 for completion in completions]


def settings(
    place: Path, name: str, ahead: int, *fakes: Fake, method: str = "grpo", every: float = 0,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """every: steps between evaluations; 0: there are none."""
    rollout = {
        "engine": "vllm", "url": [fake.url for fake in fakes], "check_prompts": 0,
        "num_rollouts": 4, "timeout": 30.0, "ahead": ahead,
    }  # fmt: skip
    changes |= {
        "rollout": rollout | changes.get("rollout", {}),
        "train": {"max_steps": STEPS} | changes.get("train", {}),
        "run": {"dir": str(place / name), "save_every": 1},
    }
    changes.setdefault("reward", REWARD)
    if not every:
        return recipe_without_eval(place, method, **changes)
    return recipe(place, method, eval={"every": every}, **changes)


def log_of(place: Path, name: str) -> list[dict[str, Any]]:
    """The log without the staleness, which only a run with a queue has."""
    rows = logged(place, name)
    return [{k: v for k, v in row.items() if k != "rollout/staleness"} for row in rows]


def same_weights(a: Trainer, b: Trainer) -> bool:
    ours, theirs = weights(a), weights(b)
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"rollout": {"epochs": 2, "steps": 2}, "train": {"max_steps": 16}},
    "online_dpo": {},
    "online_kto": {},
    "dapo": {"rollout": {"max_resample": 2}},
}


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_queue_trains_as_a_server_with_old_weights_does(
    method: str, ahead: int, place: Path
) -> None:
    """The same run without a queue, with a server that answers each request with the weights of
    ``ahead`` rounds before, has the same completions, losses, gradients and weights.
    """
    changes = {"method": method, **METHODS[method]}
    with serving(WeightedServer(lag=ahead)) as fake:
        expected, _ = train(settings(place, "expected", 0, fake, **changes), quiet=True)
    with serving(WeightedServer(delay=lambda: random.uniform(0, 0.02))) as fake:
        run, _ = train(settings(place, "queue", ahead, fake, **changes), quiet=True)
    assert log_of(place, "queue") == log_of(place, "expected")
    assert same_weights(run, expected)
    rows = logged(place, "queue")
    assert not any("rollout/staleness" in row for row in logged(place, "expected"))
    per_round = 4 if method == "ppo" else 1
    stale = [row["rollout/staleness"] for row in rows if "rollout/staleness" in row]
    expected_staleness = [float(min(n, ahead) * per_round) for n in range(len(stale))]
    if method != "dapo":  # its further prompts come from the current weights
        assert stale == expected_staleness
    assert max(stale) > 0


def test_without_a_queue_the_run_differs(place: Path) -> None:
    for name, ahead in (("current", 0), ("older", 1)):
        with serving(WeightedServer()) as fake:
            train(settings(place, name, ahead, fake), quiet=True)
    assert log_of(place, "current") != log_of(place, "older")


def test_weights_are_sent_only_while_nothing_is_sampled(place: Path) -> None:
    """Also before an evaluation, and where the reward is slow."""
    with (
        serving(WeightedServer(delay=lambda: 0.05)) as a,
        serving(WeightedServer(delay=lambda: 0.02)) as b,
    ):
        train(settings(place, "run", 2, a, b, every=1.0), quiet=True)
    assert a.sent_while_running == b.sent_while_running == 0
    assert len(a.digests) == STEPS + 1


def slow_remainder(completions: Sequence[Completion], **_: Any) -> list[float]:
    time.sleep(random.uniform(0, 0.1))
    return remainder(completions)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_killed_run_resumes_exactly(ahead: int, steps: int, place: Path) -> None:
    """After any step, with servers that have random delays, and checkpoints with rounds of which
    some have no scores yet.
    """
    changes = {
        "rollout": {"steps": steps}, "reward": "tests.training.online.test_async:slow_remainder",
    }  # fmt: skip
    with serving(WeightedServer()) as fake:
        expected, _ = train(
            settings(place, "undisturbed", ahead, fake, every=3, **changes), quiet=True
        )
        delayed = WeightedServer(delay=lambda: random.uniform(0, 0.1))
        with serving(delayed) as other:
            recipe = settings(place, "killed", ahead, fake, other, every=3, **changes)
            for step in range(1, STEPS):
                killed(recipe, step)
            run, _ = train(recipe, quiet=True)
    assert resumed_steps(place / "killed") == list(range(STEPS - 1))
    assert logged(place, "killed") == logged(place, "undisturbed")
    assert same_weights(run, expected)


def test_completions_of_a_checkpoint_are_not_sampled_again(place: Path) -> None:
    sampled: Counter[tuple[int, ...]] = Counter()
    with serving(WeightedServer()) as fake:
        recipe = settings(place, "killed", 2, fake)
        for step in (2, 4):
            killed(recipe, step)
        train(recipe, quiet=True)
        sampled.update(slot(body) for path, body in fake.requests if path == ROUTE)
    with serving(WeightedServer()) as fake:
        train(settings(place, "undisturbed", 2, fake), quiet=True)
        undisturbed = Counter(slot(body) for path, body in fake.requests if path == ROUTE)
    assert sampled.keys() == undisturbed.keys()
    assert max(undisturbed.values()) == 1
    # each kill lost the round that began after the checkpoint, at most
    assert (sampled - undisturbed).total() <= 2 * 3


def test_requests_of_a_lost_server_go_to_another(place: Path) -> None:
    with serving(WeightedServer()) as fake:
        train(settings(place, "undisturbed", 2, fake), quiet=True)
    with serving(WeightedServer()) as first, serving(WeightedServer()) as second:
        unanswered = kill_at(first, 3)
        train(settings(place, "killed", 2, first, second, rollout={"timeout": 1.0}), quiet=True)
    assert unanswered
    assert logged(place, "killed") == logged(place, "undisturbed")


failing = {"calls": 0, "until": 10**9}


def fails_later(completions: Sequence[Completion], **_: Any) -> list[float]:
    failing["calls"] += 1
    if failing["calls"] >= failing["until"]:
        raise ValueError("the judge is ill")
    return remainder(completions)


def test_an_error_of_the_reward_is_raised_when_its_round_is_due(place: Path) -> None:
    """Steps before that are trained and saved; the rerun command continues."""
    changes: dict[str, Any] = {
        "reward": "tests.training.online.test_async:fails_later",
        "rollout": {"on_failure": "stop"},
    }  # fmt: skip
    with serving(WeightedServer()) as fake:
        expected, _ = train(settings(place, "undisturbed", 2, fake, **changes), quiet=True)
        failing.update(calls=0, until=4)
        recipe = settings(place, "failing", 2, fake, **changes)
        with raises_error("reward-failed") as raised:
            train(recipe, quiet=True)
        assert "the judge is ill" in raised.error.message
        assert [row["step"] for row in logged(place, "failing")] == [1, 2, 3]
        failing.update(until=10**9)
        run, _ = train(recipe, quiet=True)
    assert resumed_steps(place / "failing") == [3]
    assert logged(place, "failing") == logged(place, "undisturbed")
    assert same_weights(run, expected)


def test_a_run_without_servers_saves_what_was_sampled(place: Path) -> None:
    """The missing round is then sampled with newer weights, and no prompt is left out."""
    with serving(WeightedServer()) as fake:
        recipe = settings(place, "run", 1, fake, rollout={"timeout": 0.5})
        kill_at(fake, 11)
        with raises_error("rollout-server-lost"):
            train(recipe, quiet=True)
        port = int(fake.url.rpartition(":")[2])
    num_done = logged(place, "run")[-1]["step"]
    assert num_done >= 2
    with serving(WeightedServer(), port):
        train(recipe, quiet=True)
    assert resumed_steps(place / "run") == [num_done]
    assert [row["prompts"] for row in logged(place, "run")] == [3, 6, 9, 12, 15, 18]


def test_changed_settings_drop_the_queue(place: Path) -> None:
    with serving(WeightedServer()) as fake:
        recipe = settings(place, "run", 2, fake)
        killed(recipe, 3)
        sent = len(fake.requests)
        recipe["rollout"]["max_new_tokens"] = 5
        train(recipe, quiet=True, allow=["rollout.max_new_tokens"])
        bodies = [body for path, body in fake.requests[sent:] if path == ROUTE]
    assert {body["sampling_params"]["max_tokens"] for body in bodies} == {5}
    (step,) = resumed_steps(place / "run")
    assert len(bodies) == 3 * (STEPS - step)
    assert [row["prompts"] for row in logged(place, "run")] == [3, 6, 9, 12, 15, 18]


def test_true_means_one_round(place: Path) -> None:
    with serving(WeightedServer()) as fake:
        run, _ = train(settings(place, "run", True, fake, train={"max_steps": 2}), quiet=True)
    assert run.recipe.rollout.ahead == 1


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_train_as_with_a_server_with_old_weights(place: Path) -> None:
    for name, lag, ahead in (("expected", 2, 0), ("queue", 0, 2)):
        with serving(WeightedServer(lag=lag)) as fake:
            recipe = settings(place, name, ahead, fake, every=0)
            ranks = run_in_processes(train_together, 2, [recipe], deadline=20.0)
        assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * 2
    assert log_of(place, "queue") == log_of(place, "expected")
