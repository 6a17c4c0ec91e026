"""On a CUDA device, here a simulated one, the engine packs, says and learns what it does on the
host, and waits for nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import simulated_cuda
from tests.errors import raises_error
from tests.models.test_oracle import PATTERNS
from tests.prefix_trees import conversations, sharing
from tests.simulated_cuda import CUDA, HOST, simulated_device
from tests.tiny_models import ARCHITECTURES, tiny
from valence.batching.micro_batches import make_micro_batch
from valence.models import attention
from valence.models.build import build_policy
from valence.models.check import PackingWarning
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
    name: str,
    checkpointing: Any,
    trains: tuple[bool, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[PolicyModel, MicroBatch]:
    model = tiny(name, dtype=torch.float32).to(device)
    engine = build_policy(model, dtype=dtype, checkpointing=checkpointing)
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
def test_the_simulated_device_equals_the_host(
    name: str, checkpointing: Any, trains: tuple[bool, ...]
) -> None:
    wanted = measured(*built(name, checkpointing, trains, HOST))
    with simulated_device() as waits:
        engine, batch = built(name, checkpointing, trains, CUDA)
        assert engine.device == CUDA
        assert engine.packs
        waits.clear()  # loading a model, and looking whether it packs
        result = measured(engine, batch)
        assert waits == []
        result = [item.cpu() for item in result]
    torch.testing.assert_close(result[0], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result[1], wanted[1], rtol=1e-3, atol=1e-3)


class TritonError(Exception):
    """As the base class of Triton's errors, which is not installed everywhere."""


ERRORS = {
    "a missing header for Triton's launcher": CalledProcessError(1, "gcc"),
    "Triton": TritonError("out of resource: shared memory"),
}


@pytest.fixture(autouse=True)
def triton_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", SimpleNamespace(TritonError=TritonError))


def failing(error: Exception = ERRORS["Triton"]) -> Callable[..., Tensor]:
    def run(*_: Any) -> Tensor:
        raise error

    return run


def break_sdpa(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "attend_by_sdpa", lambda *_: 1 / 0)


@pytest.mark.parametrize("error", [None, *ERRORS.values()], ids=["no error", *ERRORS])
def test_the_next_attention_backend_is_used_if_one_fails(error: Exception | None) -> None:
    """For float32, which FlashAttention does not support."""
    backend, computation, flex = "flex", "None prefix tree", simulated_cuda.attention
    if error is not None:
        backend, computation, flex = "sdpa", "None prefix tree attention sdpa", failing(error)
    expected = measured(*built("gemma2", "off", PATTERNS[1], HOST))
    with simulated_device(flex), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, batch = built("gemma2", "off", PATTERNS[1], CUDA)
        assert (engine.packs, engine.attention_backend) == (True, backend)
        assert engine.computation == computation
        results = [item.cpu() for item in measured(engine, batch)]
    problems = [item.message for item in caught if isinstance(item.message, PackingWarning)]
    assert [problem.code for problem in problems] == ["attention-fallback"] * (error is not None)
    torch.testing.assert_close(results[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1], expected[1], rtol=1e-3, atol=1e-3)


def test_flash_attention_comes_before_attention_by_blocks() -> None:
    with simulated_device(failing()):
        with pytest.warns(PackingWarning):
            engine, _ = built("llama", "off", PATTERNS[1], CUDA, torch.bfloat16)
        assert engine.attention_backend == "flash"


def test_one_sequence_at_a_time_on_a_device_must_be_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = measured(*built("llama", "off", PATTERNS[0], HOST))[0]
    with simulated_device(failing()), monkeypatch.context() as patch:
        break_sdpa(patch)
        with raises_error("packing-fails", where="VALENCE_ATTENTION", fix="one_by_one"):
            built("llama", "off", PATTERNS[0], CUDA)
        patch.setenv("VALENCE_ATTENTION", "one_by_one")
        with warnings.catch_warnings():
            warnings.simplefilter("error", PackingWarning)
            engine, batch = built("llama", "off", PATTERNS[0], CUDA)
        assert not engine.packs
        result = measured(engine, batch)[0].cpu()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_a_requested_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_ATTENTION", "sdpa")
    with simulated_device():
        engine, _ = built("llama", "off", PATTERNS[0], CUDA)
        assert engine.attention_backend == "sdpa"
        with monkeypatch.context() as patch:
            break_sdpa(patch)
            with raises_error("packing-fails", where="VALENCE_ATTENTION"):
                built("llama", "off", PATTERNS[0], CUDA)
    with raises_error("attention-backend-unsupported", where="VALENCE_ATTENTION"):
        built("llama", "off", PATTERNS[0], HOST)
    monkeypatch.setenv("VALENCE_ATTENTION", "flex_small")
    with raises_error("environment-variable-invalid", where="VALENCE_ATTENTION", fix="sdpa"):
        built("llama", "off", PATTERNS[0], HOST)


def test_flash_attention_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with two passes and a sliding window; refused for float32."""
    expected = measured(*built("qwen3", "full", PATTERNS[1], HOST, torch.bfloat16))
    monkeypatch.setenv("VALENCE_ATTENTION", "flash")
    with simulated_device():
        engine, batch = built("qwen3", "full", PATTERNS[1], CUDA, torch.bfloat16)
        assert (engine.packs, engine.attention_backend) == (True, "flash")
        assert engine.computation == "torch.bfloat16 prefix tree attention flash"
        results = [item.cpu() for item in measured(engine, batch)]
        with raises_error("packing-fails", where="VALENCE_ATTENTION"):
            built("qwen3", "off", PATTERNS[0], CUDA)
    torch.testing.assert_close(results[0], expected[0], rtol=0.02, atol=0.05)
    error = (results[1] - expected[1]).norm() / expected[1].norm()
    assert error < 0.03


def test_a_model_that_does_not_pack_runs_one_sequence_at_a_time_on_a_device_too() -> None:
    model = tiny("bloom", dtype=torch.float32)
    with simulated_device():
        with pytest.warns(PackingWarning) as caught:
            engine = build_policy(model.to(CUDA), dtype=torch.float32)
        assert not engine.packs
    assert [getattr(item.message, "code", None) for item in caught][-1:] == ["sequences-leak"]
