"""The same numbers on a CUDA device as on the CPU, in float32 and bfloat16, and as one sequence at
a time.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from benchmarks.gpu.correctness import (
    BACKENDS,
    GROUPED,
    PACKED_LIMITS,
    backends_for,
    compare_packed,
)
from tests.models.test_oracle import PATTERNS, one_by_one, prefix_tree_batch
from tests.prefix_trees import conversations
from tests.tiny_models import tiny
from valence.losses.views import sum_by_index
from valence.models.build import build_policy
from valence.models.check import check_layout
from valence.models.compiling import compile_layers
from valence.models.policy_model import PolicyModel
from valence.types import MicroBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
WIDE: dict[str, dict[str, int]] = {
    "llama": {"head_dim": 16}, "mistral-window": {"head_dim": 16}, "gemma2": {"head_dim": 16},
    "gpt2": {"n_embd": 64, "hidden_size": 64},
    "llama-shared": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1},
}  # fmt: skip
"""FlexAttention has no kernel for heads narrower than 16.

The last has as many heads to a key as common models have.
"""
NAMES = list(WIDE)


def wide(name: str, *, dtype: torch.dtype = torch.float32, **changes: int) -> torch.nn.Module:
    return tiny(name.removesuffix("-shared"), dtype=dtype, **(WIDE[name] | changes))


CUDA = torch.device("cuda")


def moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch on a device (``read`` and ``host`` stay on the CPU)."""
    tensors = {
        f.name: getattr(batch, f.name)
        for f in fields(batch)
        if isinstance(getattr(batch, f.name), torch.Tensor)
    }
    return replace(
        batch,
        **{
            name: values.to(device)
            for name, values in tensors.items()
            if name not in ("read", "host")
        },
    )


def measured(
    engine: PolicyModel, batch: MicroBatch, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and the norm of the gradient of their sum over what trains, on the CPU."""
    engine.zero_grad()
    engine.max_joint_rows = extra
    logp = engine(batch).logp
    logp.sum().backward()
    norm = torch.stack(
        [p.grad.double().norm() for p in engine.parameters() if p.grad is not None]
    ).norm()
    return logp.detach().cpu().double(), norm.cpu()


@pytest.mark.parametrize("extra", [0, 10_000])
@pytest.mark.parametrize("trains", PATTERNS[:2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_agree(
    name: str, dtype: torch.dtype, tolerance: float, trains: tuple[bool, ...], extra: int
) -> None:
    batch = prefix_tree_batch(conversations(), trains)
    results = []
    for device in (torch.device("cpu"), CUDA):
        engine = PolicyModel(wide(name, dtype=dtype).to(device))
        check_layout(engine)
        assert engine.packs
        results.append(measured(engine, moved(batch, device), extra))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=max(tolerance, 0.02), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_tree_equals_one_by_one(name: str) -> None:
    engine = PolicyModel(wide(name).to(CUDA))
    batch = moved(prefix_tree_batch(conversations()), CUDA)
    with torch.device(CUDA):
        wanted = one_by_one(engine, batch)
    torch.testing.assert_close(engine(batch).logp.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_layers_are_the_same_computation(name: str) -> None:
    batch = moved(prefix_tree_batch(conversations(), PATTERNS[1]), CUDA)
    engine = build_policy(wide(name).to(CUDA), dtype=torch.float32)
    plain = measured(engine, batch, engine.max_joint_rows)
    assert compile_layers(engine)
    result = measured(engine, batch, engine.max_joint_rows)
    torch.testing.assert_close(result[0], plain[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(result[1], plain[1], rtol=1e-3, atol=1e-3)


def test_no_more_rows_are_filled_in_than_the_model_has_positions() -> None:
    """A large pass is filled up by many tokens, all at the first position."""
    engine = PolicyModel(wide("gpt2", max_position_embeddings=32).to(CUDA))
    units = conversations()
    with torch.no_grad():
        out = engine(moved(prefix_tree_batch(units * 30), CUDA)).logp
    assert out.isfinite().all()


def test_sums_are_those_of_the_cpu_and_always_the_same() -> None:
    """A resumed run ends bit for bit as an undisturbed one."""
    values, place = torch.randn(2, 100_000), torch.randint(0, 7, (100_000,))
    result = sum_by_index(values.to(CUDA), place.to(CUDA), 7)
    torch.testing.assert_close(
        result.cpu().double(), sum_by_index(values.double(), place, 7), rtol=1e-4, atol=1e-2
    )
    assert all(
        torch.equal(result, sum_by_index(values.to(CUDA), place.to(CUDA), 7)) for _ in range(5)
    )


@pytest.mark.parametrize("dtype", PACKED_LIMITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_blocks_of_attention_equal_one_by_one(backend: str, dtype: torch.dtype) -> None:
    """Full blocks, shared prefixes, two passes of different sizes, and seven heads to a key."""
    if backend not in backends_for(dtype):
        return
    figures = compare_packed(GROUPED, dtype, CUDA, backend)
    assert {name: figures[name] <= limit for name, limit in PACKED_LIMITS[dtype].items()} == (
        dict.fromkeys(figures, True)
    )
