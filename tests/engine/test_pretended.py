"""On a CUDA device, here a pretended one, the engine packs, and says and learns what it does on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.test_oracle import PATTERNS
from tests.forests import conversations, sharing
from tests.models import ARCHITECTURES, tiny
from tests.pretend import CUDA, HOST, pretended
from valence.data.pack import collate
from valence.engine.models import build_policy


def measured(name: str, device: torch.device, trains: tuple[bool, ...], **how: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Log-probabilities, the gradient of their sum, and the engine."""
    engine = build_policy(tiny(name, dtype=torch.float32).to(device), dtype=torch.float32, **how)
    engine.along = 0
    units = conversations()
    with sharing(4):
        batch = replace(collate(units, range(len(units)), device=device), trains=trains)
    logp = engine(batch).logp
    logp.sum().backward()
    grad = torch.cat([p.grad.flatten() for p in engine.parameters() if p.grad is not None])
    return logp.detach().cpu(), grad.cpu(), engine


@pytest.mark.parametrize("trains", PATTERNS[:2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_device_says_what_the_host_does(name: str, trains: tuple[bool, ...]) -> None:
    wanted = measured(name, HOST, trains)
    with pretended():
        found = measured(name, CUDA, trains)
        assert found[2].device == CUDA
        assert found[2].packs is wanted[2].packs is True
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-3)
