"""The same numbers on a CUDA device as on the CPU, in float32 and bfloat16, and as one sequence at a time."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tests.engine.test_oracle import PATTERNS, forest_of, one_by_one
from tests.forests import conversations
from tests.models import tiny
from valence.engine.compiling import compile_layers
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy
from valence.types import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
NAMES = ["llama", "mistral-window", "gemma2", "gpt2"]
CUDA = torch.device("cuda")


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same micro-batch on a device (``read`` stays on the CPU)."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}
    return replace(batch, **{name: values.to(device) for name, values in tensors.items() if name != "read"})


def measured(engine: Engine, batch: Batch, along: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and the norm of the gradient of their sum over what trains, on the CPU."""
    engine.zero_grad()
    engine.along = along
    logp = engine(batch).logp
    logp.sum().backward()
    norm = torch.stack([p.grad.double().norm() for p in engine.parameters() if p.grad is not None]).norm()
    return logp.detach().cpu().double(), norm.cpu()


@pytest.mark.parametrize("along", [0, 10_000])
@pytest.mark.parametrize("trains", PATTERNS[:2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_agree(
    name: str, dtype: torch.dtype, tolerance: float, trains: tuple[bool, ...], along: int
) -> None:
    batch = forest_of(conversations(), trains)
    found = []
    for device in (torch.device("cpu"), CUDA):
        engine = Engine(tiny(name, dtype=dtype).to(device))
        engine.check_layout()
        assert engine.packs
        found.append(measured(engine, moved(batch, device), along))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=max(tolerance, 0.02), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_forest_equals_one_by_one(name: str) -> None:
    engine = Engine(tiny(name, dtype=torch.float32).to(CUDA))
    batch = moved(forest_of(conversations()), CUDA)
    with torch.device(CUDA):
        wanted = one_by_one(engine, batch)
    torch.testing.assert_close(engine(batch).logp.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_layers_are_the_same_computation(name: str) -> None:
    batch = moved(forest_of(conversations(), PATTERNS[1]), CUDA)
    engine = build_policy(tiny(name, dtype=torch.float32).to(CUDA), dtype=torch.float32)
    plain = measured(engine, batch, engine.along)
    assert compile_layers(engine)
    found = measured(engine, batch, engine.along)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], plain[1], rtol=1e-3, atol=1e-3)


def test_no_more_rows_are_filled_in_than_the_model_has_positions() -> None:
    """A large pass is filled up by many tokens, all at the first position."""
    engine = Engine(tiny("gpt2", dtype=torch.float32, max_position_embeddings=32).to(CUDA))
    units = conversations()
    with torch.no_grad():
        out = engine(moved(forest_of(units * 30), CUDA)).logp
    assert out.isfinite().all()
