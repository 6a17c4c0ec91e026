"""What samples for a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from valence.online.engines import ServerEngine
from valence.rollouts import Sampling


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


def test_answers_that_nobody_waits_for_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When others are asked for, and at the end of the run, which they would hold up."""
    client = Endless()
    monkeypatch.setattr("valence.rollouts.openai.OpenAIGenerator", lambda *_, **__: client)
    rollout = SimpleNamespace(engine="openai", url="http://127.0.0.1:1", timeout=1.0)
    encoder = SimpleNamespace(end_ids=(), tokenizer=None, vocab=SimpleNamespace(prefix=()))
    recipe = SimpleNamespace(rollout=rollout)
    prepared: Any = SimpleNamespace(recipe=recipe, encoder=encoder)
    state: Any = SimpleNamespace(has_split_weights=False, policy=None)
    messages: Any = SimpleNamespace(warn=pytest.fail)
    source = ServerEngine(prepared, state, messages, None)
    first = source.begin([(1,)], 1, Sampling())
    assert client.began.acquire(timeout=60)
    second = source.begin([(2,)], 1, Sampling())
    assert isinstance(first.exception(timeout=60), CancelledError)
    assert client.began.acquire(timeout=60)
    source.close()
    assert isinstance(second.exception(timeout=60), CancelledError)


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
