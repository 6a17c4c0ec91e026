"""Runs whose prompts are shared by several servers (stand-ins), some of which are killed."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.process_groups import run as run_in_processes
from tests.distributed.test_run import train as train_together
from tests.errors import raises_error
from tests.rollouts.vllm_server import Fake, serving
from tests.training.online.recipes import logged, make, recipe_without_eval
from tests.training.resuming import resumed_steps, train
from valence.rollouts.vllm import ROUTE

STEPS = 4


def settings(place: Path, name: str, fakes: list[Fake], **changes: Any) -> dict[str, Any]:
    """Four rounds of two prompts; the log-probabilities of the stand-ins are not compared."""
    rollout = {
        "engine": "vllm",
        "url": [fake.url for fake in fakes],
        "check_prompts": 0,
        "num_rollouts": 2,
        "timeout": 30.0,
    }
    return recipe_without_eval(
        place,
        "online_kto",
        rollout=rollout | changes.pop("rollout", {}),
        train={"max_steps": STEPS},
        reward="tests.training.online.rewards:by_index",
        run={"dir": str(place / name), "save_every": 1},
        **changes,
    )


def slot(body: Any) -> tuple[int, ...]:
    """The prompt and the seed of a request, which no two requests of a run share."""
    return (*body["token_ids"], body["sampling_params"]["seed"])


def answered(fake: Fake) -> Counter[tuple[int, ...]]:
    """How often each request was sent to a server."""
    return Counter(slot(body) for path, body in fake.requests if path == ROUTE)


def kill_at(fake: Fake, number: int) -> list[Any]:
    """Kill a server in the middle of this request. Returns the requests that it never answers."""
    started: list[Any] = []
    unanswered: list[Any] = []

    def act(body: Any) -> None:
        started.append(body)
        if len(started) >= number:
            unanswered.append(body)
            fake.kill()
            fake.hang(body)

    fake.on[ROUTE] = act
    return unanswered


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


@pytest.fixture
def undisturbed(place: Path) -> tuple[list[dict[str, Any]], Counter[tuple[int, ...]]]:
    """The log of a run with one server that is never killed, and its requests."""
    with serving(Fake()) as fake:
        train(settings(place, "undisturbed", [fake]), quiet=True)
    return logged(place, "undisturbed"), answered(fake)


def test_a_run_continues_without_a_killed_server(place: Path, undisturbed: Any) -> None:
    log, requests = undisturbed
    with serving(Fake()) as first, serving(Fake()) as second:
        unanswered = kill_at(first, 3)
        _, printed = train(settings(place, "killed", [first, second], rollout={"timeout": 1.0}))
    assert unanswered
    assert logged(place, "killed") == log
    assert f"{first.url}" in printed
    sent = answered(first) + answered(second)
    assert sent == requests + Counter(map(slot, unanswered))


def test_a_run_without_servers_resumes_once_one_is_back(place: Path, undisturbed: Any) -> None:
    log, requests = undisturbed
    with serving(Fake()) as first, serving(Fake()) as second:
        recipe = settings(place, "lost", [first, second], rollout={"timeout": 0.5})
        for fake in (first, second):
            kill_at(fake, 3)
        with raises_error("rollout-server-lost", fix="rerun the same call") as raised:
            train(recipe, quiet=True)
        assert all(fake.url in raised.error.message for fake in (first, second))
    with serving(Fake(), int(second.url.rpartition(":")[2])) as back:
        train(recipe, quiet=True)
    assert resumed_steps(place / "lost")
    assert logged(place, "lost") == log
    paths = back.paths()  # it does not sample with the weights that it was started with
    assert paths.index("/v1/load_lora_adapter") < paths.index(ROUTE)
    assert max(requests.values()) == 1
    sampled = answered(first) + answered(second) + answered(back)
    assert sampled.keys() == requests.keys()


def test_every_server_is_compared_with_the_trainer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []

    def record(*args: Any, evidence: Any) -> None:
        compared.append(evidence.url)

    def count(*args: Any, **options: Any) -> list[Any]:
        sorts.append(args)
        return nsmallest(*args, **options)

    sorts: list[Any] = []
    monkeypatch.setattr("valence.rollouts.check.check", record)
    monkeypatch.setattr("valence.training.engines.nsmallest", count)
    with serving(Fake()) as first, serving(Fake()) as second:
        train(settings(place, "run", [first, second], rollout={"check_prompts": 2}), quiet=True)
    assert compared == [first.url, second.url] * STEPS
    assert len(sorts) == 1  # all prompts are read once, not for each change of the weights


def test_a_server_that_is_lost_while_it_is_compared(place: Path, undisturbed: Any) -> None:
    rollout = {"check_prompts": 2, "max_mismatch": 1e6, "timeout": 1.0}
    with serving(Fake()) as first, serving(Fake()) as second:
        kill_at(first, 1)
        _, printed = train(settings(place, "killed", [first, second], rollout=rollout))
    assert answered(first)
    assert printed.count("until the server is back") == 1
    assert "waiting" not in printed
    assert logged(place, "killed") == undisturbed[0]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "full"])
def test_two_processes_share_servers_of_which_one_is_killed(place: Path, shard: str | None) -> None:
    """Split weights are gathered again for each server, and for one that comes back."""
    changes = {"parallel": {"shard": shard}, "model": {"lora": None}} if shard else {}
    with serving(Fake()) as first, serving(Fake()) as second:
        recipe = settings(place, "undisturbed", [first, second], **changes)
        ranks = run_in_processes(train_together, 2, [recipe], deadline=20.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * 2
    requests = answered(first) + answered(second)
    assert answered(first)
    assert answered(second)
    assert max(requests.values()) == 1
    with serving(Fake()) as first, serving(Fake()) as second:
        unanswered = kill_at(first, 3)
        recipe = settings(place, "killed", [first, second], rollout={"timeout": 1.0}, **changes)
        ranks = run_in_processes(train_together, 2, [recipe], deadline=20.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", ["done"])] * 2
    assert unanswered
    assert logged(place, "killed") == logged(place, "undisturbed")
    sent = answered(first) + answered(second)
    assert sent == requests + Counter(map(slot, unanswered))
