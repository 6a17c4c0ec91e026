"""Activation checkpointing: the same values and gradients, bit for bit, with fewer saved
activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models import checkpointing
from valence.models.build import build_policy
from valence.models.check import plain_batch
from valence.models.checkpointing import recompute_layers
from valence.models.policy_model import CPU_TOKEN_MULTIPLE, PolicyModel

LAYERS = 5
RECOMPUTED = {"off": (), "selective": (1, 3), "full": range(LAYERS), "offloaded": range(LAYERS)}
ROWS = [torch.arange(3 + k, 3 + k + n) for k, n in enumerate((9, 2, 14))]


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Lets a CPU offload to itself. What is moved is noted."""
    moved: list[Tensor] = []

    class Noted(save_on_cpu):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            pack = self.pack_hook
            self.pack_hook: Callable[[Tensor], Any] = lambda tensor: (
                moved.append(tensor),
                pack(tensor),
            )[1]

    monkeypatch.setattr(checkpointing, "HOST_MEMORY_DEVICES", ())
    monkeypatch.setattr(checkpointing, "save_on_cpu", Noted)
    return moved


def policy(
    kind: str, mode: Any, *, dtype: torch.dtype = torch.float32, lora: Any = None
) -> PolicyModel:
    layers = {"n_layer": LAYERS} if kind == "gpt2" else {"num_hidden_layers": LAYERS}
    model = tiny(kind, dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **layers)
    return build_policy(model, dtype=dtype, lora=lora, checkpointing=mode)


def measured(engine: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Values, and the gradient of something that every one of them enters, with the same random
    numbers each time.
    """
    torch.manual_seed(1)
    logp = engine(plain_batch(ROWS)).logp
    (logp * torch.arange(len(logp))).sum().backward()
    return logp.detach(), {
        name: p.grad for name, p in engine.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "dropout"),
    [
        ("llama", torch.float64, None),
        ("llama", torch.bfloat16, 0.3),
        *(
            pytest.param(*item, marks=pytest.mark.slow)
            for item in (
                ("llama", torch.float64, 0.3),
                ("llama", torch.bfloat16, None),
                ("llama", torch.bfloat16, 0.0),
                ("gpt2", torch.float64, 0.3),
                ("gemma2", torch.float64, None),
                ("qwen3_moe", torch.float32, None),
                ("qwen3_moe", torch.float32, 0.0),
            )
        ),
    ],
)
@pytest.mark.usefixtures("offloading")
def test_values_and_gradients_are_those_without(
    kind: str, dtype: torch.dtype, dropout: float | None
) -> None:
    """All weights, or an adapter (dropout: on its input)."""
    lora = (
        None
        if dropout is None
        else SimpleNamespace(rank=3, alpha=None, dropout=dropout, targets="all-linear")
    )
    results = {
        options: measured(policy(kind, options, dtype=dtype, lora=lora)) for options in RECOMPUTED
    }
    values, gradients = results.pop("off")
    assert gradients
    for mode, (others, slopes) in results.items():
        assert torch.equal(values, others), mode
        assert gradients.keys() == slopes.keys(), mode
        assert all(torch.equal(gradients[name], slopes[name]) for name in gradients), mode


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_the_selected_layers_are_recomputed(mode: str, offloading: list[Tensor]) -> None:
    engine = policy("llama", mode)
    runs = [0] * LAYERS

    def count(i: int, *_: Any) -> None:
        runs[i] += 1

    for i, layer in enumerate(engine.causal.model.layers):
        layer.mlp.register_forward_pre_hook(partial(count, i))
    measured(engine)
    assert runs == [1 + (i in RECOMPUTED[mode]) for i in range(LAYERS)]
    runs[:] = [0] * LAYERS
    with torch.no_grad():
        engine(plain_batch(ROWS))
    assert runs == [1] * LAYERS
    # PyTorch 2.11 also keeps empty ones
    moved = [tensor for tensor in offloading if tensor.numel()]
    assert len(moved) == (LAYERS if mode == "offloaded" else 0)
    filled = -(-len(plain_batch(ROWS).tokens) // CPU_TOKEN_MULTIPLE) * CPU_TOKEN_MULTIPLE
    # the input of a layer, and nothing else
    assert all(tensor.shape == (1, filled, 32) for tensor in moved)


def test_less_is_kept_the_more_is_computed_again() -> None:
    remaining: list[int] = []
    for mode in ("off", "selective", "full"):
        engine, sizes = policy("llama", mode), {}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            logp = engine(plain_batch(ROWS)).logp
        remaining.append(
            sum(sizes.values())
            - sum(p.numel() for p in engine.parameters() if p.data_ptr() in sizes)
        )
        del logp
    off, selective, full = remaining
    assert full < 0.4 * off
    assert selective < 0.75 * off


def test_a_compiled_layer_is_recomputed_identically() -> None:
    plain = measured(policy("llama", "full"))
    engine = policy("llama", "full")
    for layer in engine.causal.model.layers:
        layer.compile(backend="eager", dynamic=True)
    values, gradients = measured(engine)
    assert torch.equal(values, plain[0])
    assert all(torch.equal(gradients[name], slope) for name, slope in plain[1].items())


def test_offloading_on_a_cpu_is_an_error() -> None:
    with raises_error("checkpointing-unsupported", where="train.checkpointing", fix="full"):
        recompute_layers(tiny(), "offloaded", torch.device("cpu"))


def test_a_model_without_layers_to_recompute_is_refused() -> None:
    with raises_error("checkpointing-unsupported", where="train.checkpointing", fix="off"):
        recompute_layers(nn.Linear(2, 2), "full", torch.device("cpu"))
    recompute_layers(nn.Linear(2, 2), "off", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offloaded_inputs_come_back_from_the_host() -> None:
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for mode in ("full", "offloaded"):
        model = tiny(dtype=torch.float32).cuda().train()
        recompute_layers(model, mode, torch.device("cuda"))
        logits = model(input_ids=ROWS[2][None].cuda(), use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        results.append(
            (
                logits.detach(),
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            )
        )
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(slope, results[1][1][name]) for name, slope in results[0][1].items())
