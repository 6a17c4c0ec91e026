"""What the compiler is told of the layers."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.models import tiny
from valence.engine.check import plain_batch
from valence.engine.compiling import compile_layers
from valence.engine.models import build_policy


def test_attention_is_not_run_again_in_the_backward_pass() -> None:
    """The compiler computes again what it thinks cheap, and knows nothing of this operator but what it is told."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    engine = build_policy(tiny(dtype=torch.float32), dtype=torch.bfloat16)
    assert compile_layers(engine)
    batch = plain_batch([torch.arange(1, 41), torch.arange(2, 25)])
    engine(batch).logp.sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        engine(batch).logp.sum().backward()
    count = {event.key: event.count for event in seen.key_averages()}
    layers = engine.causal.config.num_hidden_layers
    assert count["valence::forest_attention_backward"] == layers
    assert count["valence::forest_attention"] == layers
