"""Activation checkpointing: the same values and gradients, bit for bit, with fewer saved
activations.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    _VersionWrapper,  # pyright: ignore[reportPrivateUsage]
    checkpoint,
)

from tests.errors import raises_error
from tests.tiny_models import tiny
from valence.models import checkpointing
from valence.models.build import build_policy
from valence.models.check import plain_batch
from valence.models.checkpointing import (
    _contexts,  # pyright: ignore[reportPrivateUsage]
    recompute_layers,
)
from valence.models.compiling import why_not
from valence.models.memory import _results  # pyright: ignore[reportPrivateUsage]
from valence.models.policy_model import CPU_TOKEN_MULTIPLE, PolicyModel
from valence.models.shape import shape_of

LAYERS = 5
RECOMPUTED = {
    "off": (),
    "selective": (1, 3),
    "selective_op": range(LAYERS),
    "full": range(LAYERS),
    "offloaded": range(LAYERS),
}
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


def stored_numbers(engine: PolicyModel) -> int:
    """Numbers that a forward pass stores for the backward pass, without weights: saved tensors, and
    results that ``create_selective_checkpoint_contexts`` stores.
    """
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    def stored_results() -> list[_VersionWrapper]:
        return [item for item in gc.get_objects() if type(item) is _VersionWrapper]

    earlier = stored_results()  # of other tests
    with saved_tensors_hooks(note, lambda tensor: tensor):
        logp = engine(plain_batch(ROWS)).logp
    for item in stored_results():
        if not any(item is other for other in earlier) and isinstance(item.val, Tensor):
            note(item.val)
    del logp
    return sum(sizes.values()) - sum(
        p.numel() for p in engine.parameters() if p.data_ptr() in sizes
    )


def test_less_is_kept_the_more_is_computed_again() -> None:
    off, selective, selective_op, full = (
        stored_numbers(policy("llama", mode))
        for mode in ("off", "selective", "selective_op", "full")
    )
    assert full < 0.4 * off
    assert selective < 0.75 * off
    assert full < selective_op < 0.75 * off


class CountOperators(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 0.3)]
)
def test_products_and_attention_are_computed_once(
    dtype: torch.dtype, dropout: float | None
) -> None:
    lora = dropout and SimpleNamespace(rank=3, alpha=None, dropout=dropout, targets="all-linear")
    counts: dict[str, Counter[str]] = {}
    for mode in ("off", "selective_op", "full"):
        engine = policy("llama", mode, dtype=dtype, lora=lora or None)
        with CountOperators() as counter:
            measured(engine)
        counts[mode] = counter.calls
    for name in ("aten.mm", "valence.prefix_tree_attention"):
        assert counts["off"][name] == counts["selective_op"][name] < counts["full"][name]
    # the rest runs again
    assert counts["off"]["aten.silu"] < counts["selective_op"]["aten.silu"]


@pytest.mark.slow
@pytest.mark.skipif(why_not(torch.device("cpu")) is not None, reason="there is no compiler")
def test_compiled_attention_inside_a_recomputed_layer() -> None:
    """As FlexAttention on CUDA. Its products write into buffers that other programs overwrite."""
    linear = nn.Linear(16, 16)
    compiled: Any = torch.compile(lambda x: (x @ x).sin().cos(), fullgraph=True, dynamic=False)

    def layer(x: Tensor) -> Tensor:
        return linear(compiled(linear(x))) * x

    def recomputed(x: Tensor) -> Tensor:
        contexts = partial(_contexts, linear, adapted=False, stores_products=True)
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    gradients: list[Tensor] = []
    for run in (layer, recomputed):
        x = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
        gradients.append(torch.autograd.grad(run(x).square().sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_the_estimate_counts_what_is_stored(dropout: float | None) -> None:
    """The difference of two numbers of layers, because the model stores more outside of them."""
    lora = SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear")
    numbers: list[int] = []
    estimates: list[int] = []
    for count in (2, 6):
        model = tiny("llama", dtype=torch.float32, num_hidden_layers=count)
        adapter = None if dropout is None else lora
        estimates.append(_results(shape_of(model, lora=adapter), 1))
        engine = build_policy(
            model, dtype=torch.float32, lora=adapter, checkpointing="selective_op"
        )
        numbers.append(stored_numbers(engine))
    tokens = -(-len(plain_batch(ROWS).tokens) // CPU_TOKEN_MULTIPLE) * CPU_TOKEN_MULTIPLE
    hidden = 4 * 32 * tokens  # the layers' inputs
    expected = tokens * (estimates[1] - estimates[0]) + hidden
    assert numbers[1] - numbers[0] == pytest.approx(expected, rel=0.1)


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
