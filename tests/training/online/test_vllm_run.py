"""A complete online run that samples from a vLLM server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rollouts.vllm_server import HERE, needs_vllm
from tests.training.online.recipes import logged, make, recipe
from tests.training.online.tool_kit import BY_CHANCE, make_with_short_turns, tool_recipe
from tests.training.resuming import train
from valence.training import episodes
from valence.training.collector import Collector

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@needs_vllm
def test_a_server_is_started_kept_up_to_date_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round is sampled while one is trained on: its answers are one version old, but for
    those of the first.
    """
    make(tmp_path, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    rollout = {"engine": "vllm", "start": True, "python": str(HERE), "ahead": 1}
    begun, begin = list[int](), Collector.begin
    monkeypatch.setattr(
        Collector,
        "begin",
        lambda self, *args: (begun.append(self._state.step), begin(self, *args)),
    )
    run, _ = train(recipe(tmp_path, rollout=rollout))
    assert run.examples is not None
    server = run.examples.collector.engine.server  # type: ignore[attr-defined]
    assert server.log.is_file()
    assert server.process is None
    rows = logged(tmp_path)[1:]
    assert [row["prompts"] for row in rows] == [3, 6, 9, 12, 15, 18]
    assert rows[0]["sampler/kl"] == pytest.approx(0, abs=1e-5)
    assert max(abs(row["sampler/kl"]) for row in rows[1:]) > 1e-5
    assert all(row["rollout/failed"] == 0 for row in rows)
    assert begun == [0, 1, 2, 3, 4]  # behind the sixth round comes no other
    assert not [
        item
        for item in os.listdir("/proc")
        if item.isdigit() and _is_vllm(Path("/proc") / item, tmp_path)
    ]


@needs_vllm
def test_a_server_samples_the_turns_of_episodes(
    tmp_path: Path, forking_vllm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn is sampled behind the tokens so far: the policy gives the same log-probabilities to
    the sampled tokens of the whole conversation."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    make_with_short_turns(tmp_path, max_position_embeddings=2048, **sizes)
    monkeypatch.setattr(episodes, "call_format_of", lambda _: BY_CHANCE)
    rollout = {"engine": "vllm", "start": True, "python": forking_vllm}
    train(tool_recipe(tmp_path, rollout=rollout, train={"max_steps": 3}))
    rows = logged(tmp_path)[1:]
    assert all(row["rollout/turns"] > 1.2 and row["rollout/tool_calls"] > 0 for row in rows)
    assert max(abs(row["sampler/kl"]) for row in rows) < 1e-5


def _is_vllm(process: Path, place: Path) -> bool:
    try:
        return str(place) in (process / "cmdline").read_text()
    except OSError:
        return False
