"""What samples for a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.errors import raises_error
from tests.rollouts.vllm_server import END, UPDATE, Fake, Words, serving
from valence.config.schema import Rollout
from valence.distributed.process_group import Group, SingleProcess, ignore
from valence.rollouts import Sampling
from valence.rollouts.transports import IpcTransfer, NcclTransfer
from valence.training import engines
from valence.training.collector import QueuedRound
from valence.training.engines import ServerEngine


class Endless:
    """A server's client that answers until it is stopped."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)

    def generate(
        self, prompts: Any, n: int, sampling: Sampling, *, progress: Callable[[int], None]
    ) -> Any:
        self.began.release()
        while True:
            progress(0)

    def close(self) -> None:
        pass


def test_sampling_ends_when_it_is_not_needed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the caller cancels it, and at the end of the run, which it would delay."""
    client = Endless()
    monkeypatch.setattr("valence.rollouts.openai.OpenAIGenerator", lambda *_, **__: client)
    rollout = SimpleNamespace(
        engine="openai", urls=["http://127.0.0.1:1"], timeout=1.0, uses_plugin=False
    )
    encoder = SimpleNamespace(end_ids=(), tokenizer=None, vocab=SimpleNamespace(prefix=()))
    recipe = SimpleNamespace(rollout=rollout)
    prepared: Any = SimpleNamespace(recipe=recipe, encoder=encoder)
    state: Any = SimpleNamespace(has_split_weights=False, policy=None)
    messages: Any = SimpleNamespace(warn=pytest.fail)
    source = ServerEngine(prepared, state, messages, None)
    queued = QueuedRound([], 0, 0)
    first = source.begin([(1,)], 1, Sampling(), queued.advance)
    assert client.began.acquire(timeout=60)
    second = source.begin([(2,)], 1, Sampling(), lambda _: None)
    queued.is_cancelled = True
    assert isinstance(first.exception(timeout=60), CancelledError)
    assert client.began.acquire(timeout=60)
    source.close()
    assert isinstance(second.exception(timeout=60), CancelledError)


def server_engine(
    settings: dict[str, Any], folder: Path, device: Any = "cpu", world: Group | None = None
) -> ServerEngine:
    """An engine of a policy with one weight, at step 0."""
    values = Rollout(**{"engine": "vllm", "check_prompts": 0, "timeout": 5.0} | settings)
    model = torch.nn.Linear(2, 3, bias=False)
    policy = SimpleNamespace(model=model, causal=model, device=torch.device(device))
    encoder = SimpleNamespace(end_ids=(END,), tokenizer=Words())
    recipe = SimpleNamespace(
        rollout=values,
        model=SimpleNamespace(
            name="model", dtype="bfloat16", trust_remote_code=False, tokenizer=None
        ),
        data=SimpleNamespace(max_length=64),
    )
    prepared: Any = SimpleNamespace(recipe=recipe, encoder=encoder)
    state: Any = SimpleNamespace(has_split_weights=False, policy=policy, step=0)
    messages: Any = SimpleNamespace(warn=pytest.fail, note_once=lambda _: None)
    return ServerEngine(prepared, state, messages, folder, world=world, server_share=lambda: 0.35)


def sample(engine: ServerEngine) -> None:
    engine.generate([(5, 6)], 1, Sampling(), first=0, progress=lambda _: None)


def test_a_server_sleeps_while_the_policy_is_trained(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        engine = server_engine({"url": fake.url, "sleep": True}, tmp_path)
        rounds: list[list[str]] = []
        for step in (0, 0, 1):
            state: Any = engine._state
            state.step = step
            sample(engine)
            assert fake.asleep
            paths = [p for p in fake.paths() if p not in ("/server_info", "/weight_info")]
            rounds.append(paths[sum(map(len, rounds)) :])
        engine.close()
    generate = "/inference/v1/generate"
    assert rounds == [
        ["/wake_up", *UPDATE, generate, "/sleep"],
        ["/wake_up", generate, "/sleep"],
        ["/wake_up", *UPDATE, generate, "/sleep"],
    ]


def test_a_server_that_cannot_sleep_is_an_error(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        fake.on["/wake_up"] = lambda body: (404, {"detail": "Not Found"})
        engine = server_engine({"url": fake.url, "sleep": True}, tmp_path)
        with raises_error("rollout-server-cannot-sleep", where="/wake_up", fix="rollout.sleep"):
            sample(engine)
        engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_a_shared_gpu_is_free_before_the_server_starts_and_wakes_up(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of every process: the server may use the GPUs of several."""
    events: list[str] = []

    class World(SingleProcess):
        def barrier(self, name: str) -> None:
            events.append("barrier")

        @contextmanager
        def long_phase(
            self, name: str, assist: Callable[[], object] = ignore
        ) -> Iterator[Callable[[], None]]:
            events.append("phase")
            yield ignore

    class Sampler:
        def generate(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def wake(self) -> None:
            events.append("wake")

        def sleep(self) -> None:
            events.append("sleep")

        def sync(self, *_: Any) -> None: ...

    def start(self: ServerEngine) -> Sampler:
        if "start" not in events:
            events.append("start")
        return Sampler()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("free"))
    monkeypatch.setattr(engines, "VLLMGenerator", Sampler)
    monkeypatch.setattr(ServerEngine, "generator", property(start))
    engine = server_engine({"start": True}, tmp_path, device="cuda", world=World())
    with engine.phase("sampling"):
        if rank == 0:
            sample(engine)
    requests = ["start", "wake", "sleep"] if rank == 0 else []
    assert events == ["free", "barrier", "phase", *requests]


def test_an_update_that_failed_does_not_leave_the_other_processes_alone(tmp_path: Path) -> None:
    """They gather all weights, so that this process does too before it asks for anything else."""
    engine = server_engine({"url": "http://127.0.0.1:1"}, tmp_path)
    events: list[str] = []

    def part(name: str) -> Any:
        gathered = SimpleNamespace(full_tensor=lambda: events.append(f"gather {name}"))
        return SimpleNamespace(detach=lambda: gathered)

    state: Any = engine._state
    state.has_split_weights = True
    state.policy.causal = SimpleNamespace(
        named_parameters=lambda: ((name, part(name)) for name in "ab")
    )
    engine.generator.__dict__["weight_dtype"] = None
    with engine.phase("sampling"):
        engine._call_assistants = lambda: events.append("ask")
        failed = iter(engine._weights())
        next(failed)
        next(iter(engine._weights()))
    assert events == ["ask", "gather a", "gather b"] * 2
    engine.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each server that was started."""
    servers: list[dict[str, Any]] = []

    class Started:
        url, log = "http://127.0.0.1:1", Path("vllm.log")

        def __init__(self, model: str, **settings: Any) -> None:
            servers.append(settings)

        def start(self) -> Started:
            return self

        def revive(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr(engines, "Server", Started)
    monkeypatch.setattr(engines, "largest_rank", lambda model: 0)
    return servers


def test_a_server_on_the_gpu_of_the_policy_has_the_planned_share(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    engine = server_engine({"start": True}, tmp_path, device="cuda")
    assert not started  # only the process that asks it starts it
    transport = engine.generator.transport  # type: ignore[attr-defined]
    assert isinstance(transport, IpcTransfer)
    assert not transport.copies
    (settings,) = started
    names = ("devices", "memory_share", "sleeps", "transport")
    assert [settings[name] for name in names] == [(0,), 0.35, True, "ipc"]
    other = server_engine({"start": True, "memory_share": 0.2}, tmp_path, device="cuda")
    assert other.generator
    assert started[1]["memory_share"] == 0.2


def test_a_server_on_another_gpu_has_all_of_it(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = server_engine({"start": True, "ahead": True}, tmp_path, device="cuda")
    transport = engine.generator.transport  # type: ignore[attr-defined]
    assert isinstance(transport, NcclTransfer)
    assert transport.copies  # the policy changes while the server samples
    (settings,) = started
    names = ("devices", "memory_share", "sleeps", "transport")
    assert [settings[name] for name in names] == [(1,), None, False, "nccl"]


def test_a_server_is_refused_on_a_gpu_that_it_cannot_share(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises_error("rollout-device-shared", where="rollout.devices", fix="rollout.sleep"):
        server_engine({"start": True, "sleep": False}, tmp_path, device="cuda")
    with raises_error("rollout-transport-unsupported", where="rollout.transport", fix="ipc"):
        server_engine({"start": True, "transport": "nccl"}, tmp_path, device="cuda")
    assert not started


@pytest.mark.parametrize(
    ("lora", "rank"), [(None, 0), ({"r": 4}, 4), ({"r": 4, "rank_pattern": {"q_proj": 24}}, 24)]
)
def test_a_server_has_room_for_the_largest_rank_of_an_adapter(lora: Any, rank: int) -> None:
    from peft import LoraConfig, get_peft_model

    from tests.tiny_models import tiny
    from valence.models.adapters import largest_rank

    model: Any = tiny()
    wrapped = (
        model
        if lora is None
        else get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], **lora))
    )
    assert largest_rank(wrapped) == rank
