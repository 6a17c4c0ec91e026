"""On a CUDA device, here a pretended one, the engine packs, says and learns what it does on the
host, and waits for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_oracle import PATTERNS
from tests.prefix_trees import conversations, sharing
from tests.pretend import CUDA, HOST, pretended
from tests.tiny_models import ARCHITECTURES, tiny
from valence.batching.micro_batches import make_micro_batch
from valence.models.build import build_policy
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch

CASES: list[Any] = [("llama", "off", PATTERNS[0]), ("llama", "full", PATTERNS[1])]
CASES += [
    pytest.param(
        name, "off", PATTERNS[1], marks=[] if name in ("gemma2", "qwen3_moe") else pytest.mark.slow
    )
    for name in ARCHITECTURES
]


def built(
    name: str, checkpointing: Any, trains: tuple[bool, ...], device: torch.device
) -> tuple[PolicyModel, MicroBatch]:
    model = tiny(name, dtype=torch.float32).to(device)
    engine = build_policy(model, dtype=torch.float32, checkpointing=checkpointing)
    engine.max_joint_rows = 0
    units = conversations()
    with sharing(4):
        return engine, replace(make_micro_batch(units, device=device), requires_grad=trains)


def measured(engine: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their sum."""
    logp = engine(batch).logp
    logp.sum().backward()
    return logp.detach(), torch.cat(
        [p.grad.flatten() for p in engine.parameters() if p.grad is not None]
    )


@pytest.mark.parametrize(("name", "checkpointing", "trains"), CASES)
def test_a_device_says_what_the_host_does(
    name: str, checkpointing: Any, trains: tuple[bool, ...]
) -> None:
    wanted = measured(*built(name, checkpointing, trains, HOST))
    with pretended() as waits:
        engine, batch = built(name, checkpointing, trains, CUDA)
        assert engine.device == CUDA
        assert engine.packs
        waits.clear()  # loading a model, and looking whether it packs
        result = measured(engine, batch)
        assert waits == []
        result = [item.cpu() for item in result]
    torch.testing.assert_close(result[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result[1], wanted[1], rtol=1e-3, atol=1e-3)
