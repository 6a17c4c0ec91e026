"""All backends of the head against a dense log-softmax in float64, and the memory that they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from tests.errors import raises_error
from tests.simulated_cuda import simulated_device
from valence.models import native
from valence.models.head import (
    HEAD_BACKENDS,
    LAYER_ROWS,
    Head,
    TorchKernels,
    TritonKernels,
    choose_head_backend,
    requested_head_backend,
)

ROWS, VOCABULARY, WIDTH = 37, 211, 16
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "soft-cap": {"softcap": 1.5},
    "scale": {"scale": 0.25},
    "temperature": {"temperature": 0.6},
    "bias and scale": {"bias": True, "scale": 0.3, "temperature": 1.7},
    "all": {"bias": True, "softcap": 2.0, "scale": 0.3, "temperature": 1.7},
}
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float64": (torch.float64, False),
    "float32": (torch.float32, False),
    "bfloat16 products": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
    "bfloat16 weights": (torch.bfloat16, False),
}
"""Dtype of the weights, and whether operands are rounded to bfloat16."""
VALUE_TOLERANCE = dict.fromkeys(PRECISIONS, 1e-5) | {"float64": 1e-12}
"""Largest error in nats, for the operands as they are after rounding."""
GRADIENT_TOLERANCE = dict.fromkeys(PRECISIONS, 3 * 2**-9) | {"float64": 1e-12, "float32": 1e-5}
"""Largest relative error. In bfloat16 each number of a gradient is rounded at most three times: two
operands and the result of a product.
"""
ALL = tuple(VARIANTS)
SUPPORT: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": dict.fromkeys(("bfloat16 products", "bfloat16"), ("plain", "scale", "temperature")),
    "triton": {name: ALL for name in PRECISIONS if name != "float64"},
    "torch": dict.fromkeys(PRECISIONS, ALL),
    "layer": dict.fromkeys(("float64", "float32"), ALL),
}
"""Backend -> precision -> variants that it computes exactly where its libraries are installed."""
ON_GPU = ("triton", "torch", "layer")
INTERPRETED = "triton"
"""The backend that Triton's interpreter runs on a CPU."""
MACHINE = (
    "not installed", "need a CUDA device", "VALENCE_NATIVE", "no instructions", "cannot be compiled"
)  # fmt: skip
"""Parts of reasons that depend on the machine."""


def make_layer(
    dtype: torch.dtype = torch.float64, bias: bool = False, vocabulary: int = VOCABULARY
) -> nn.Linear:
    """A layer with large weights, so that some probabilities are large."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, vocabulary, bias=bias, dtype=dtype)
    layer.weight.data.mul_(8)
    return layer


def make_rows(
    dtype: torch.dtype = torch.float64, count: int = ROWS, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Hidden states [count, WIDTH] and targets [count]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    target = torch.randint(0, vocabulary, (count,), generator=generator)
    return hidden.to(dtype).requires_grad_(), target


def dense(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by PyTorch's log-softmax."""
    logps = torch.log_softmax(logits, -1)
    return logps.gather(1, target[:, None]).squeeze(1), -(logps.exp() * logps).sum(-1)


def objective(logps: Tensor, entropies: Tensor | None, *, entropy: bool) -> Tensor:
    """A sum with a different factor for each token."""
    generator = torch.Generator().manual_seed(2)
    factors = torch.randn(2, len(logps), dtype=torch.float64, generator=generator).to(logps.device)
    total = (logps * factors[0]).sum()
    return total + (entropies * factors[1]).sum() if entropy and entropies is not None else total


def oracle(tested: Head, hidden: Tensor, target: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and the gradients of ``objective`` with respect to hidden,
    weight and bias (if there is one), in float64.
    """
    assert isinstance(tested.layer, nn.Linear)
    leaves = [t.detach() for t in (hidden, tested.layer.weight, tested.layer.bias) if t is not None]
    leaves = [
        (t.bfloat16() if tested.rounds_to_bfloat16 and t.ndim == 2 else t).double().requires_grad_()
        for t in leaves
    ]
    logits = tested.scale * linear(*leaves)
    if tested.softcap is not None:
        logits = tested.softcap * torch.tanh(logits / tested.softcap)
    values = dense(logits / tested.temperature, target)
    return *values, *torch.autograd.grad(objective(*values, entropy=entropy), leaves)


def compute(tested: Head, hidden: Tensor, target: Tensor, *, entropy: bool) -> tuple[Any, ...]:
    """The same values, computed by the head."""
    values = tested(hidden, target, entropy)
    assert (values[1] is None) == (not entropy)
    assert isinstance(tested.layer, nn.Linear)
    leaves = [t for t in (hidden, tested.layer.weight, tested.layer.bias) if t is not None]
    return *values, *torch.autograd.grad(objective(*values, entropy=entropy), leaves)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def make_head(
    backend: str, precision: str, variant: str = "plain", device: str = "cpu"
) -> tuple[Head, Tensor, Tensor]:
    """A head, hidden states [N, WIDTH] and targets [N]."""
    dtype, rounds = PRECISIONS[precision]
    settings = dict(VARIANTS[variant])
    layer = make_layer(dtype, bias=settings.pop("bias", False)).to(device)
    # The interpreter computes one row at a time.
    is_interpreted = backend == INTERPRETED and device == "cpu"
    hidden, target = make_rows(dtype, count=16 if is_interpreted else ROWS)
    hidden = hidden.detach().to(device).requires_grad_()
    tested = Head(layer, **settings, rounds_to_bfloat16=rounds, backend=backend)
    return tested, hidden, target.to(device)


def backend_cases() -> list[Any]:
    """Every backend with each device, precision and variant that it supports. Those of Triton run
    in its interpreter if there is no CUDA device.
    """
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [(backend, "cpu", ()) for backend in SUPPORT if backend != INTERPRETED]
    cases += [(backend, gpu, pytest.mark.gpu) for backend in ON_GPU]
    if gpu == "cpu":
        cases = [case for case in cases if not case[2] or case[0] == INTERPRETED]
    return [
        pytest.param(backend, device, precision, variant, marks=marks)
        for backend, device, marks in cases
        for precision, variants in SUPPORT[backend].items()
        for variant in variants
    ]


@pytest.mark.parametrize(("columns", "cache_bytes"), [(8192, 2**30), (50, 2**30), (50, 0)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("backend", "device", "precision", "variant"), backend_cases())
def test_each_backend_computes_the_oracle(
    backend: str, device: str, precision: str, variant: str,
    entropy: bool, columns: int, cache_bytes: int,
) -> None:  # fmt: skip
    """Values and gradients, for one range of the vocabulary and for several, with all
    probabilities kept and with none.
    """
    tested, hidden, target = make_head(backend, precision, variant, device)
    tested = replace(tested, max_columns=columns, cache_bytes=cache_bytes)
    reason = HEAD_BACKENDS[backend].unsupported(tested, hidden)
    if reason and any(part in reason for part in MACHINE):
        pytest.skip(reason)
    assert reason is None
    results = compute(tested, hidden, target, entropy=entropy)
    expected = oracle(tested, hidden, target, entropy=entropy)
    assert {t.dtype for t in results[:2] if t is not None} == {
        torch.promote_types(torch.float32, PRECISIONS[precision][0])
    }
    for result, exact in zip(results[:2], expected[:2], strict=True):
        if result is not None:
            tolerance = VALUE_TOLERANCE[precision]
            torch.testing.assert_close(result.double(), exact, rtol=tolerance / 10, atol=tolerance)
    for result, exact in zip(results[2:], expected[2:], strict=True):
        assert result.dtype == PRECISIONS[precision][0]
        assert relative_error(result, exact) < GRADIENT_TOLERANCE[precision]


@pytest.mark.parametrize("keep", [3, 0])
def test_some_probabilities_are_kept(keep: int) -> None:
    """The first ranges come from the cache, the others are computed again."""
    tested, hidden, target = make_head("torch", "float64")
    tested = replace(tested, max_columns=7, cache_bytes=keep * 7 * ROWS * 8)
    logps, _ = tested(hidden, target)
    cache = logps.grad_fn.saved_tensors[9:]  # type: ignore[union-attr]
    assert len(cache) == keep
    for result, exact in zip(
        compute(tested, hidden, target, entropy=False)[2:],
        oracle(tested, hidden, target, entropy=False)[2:],
        strict=True,
    ):
        torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.gpu if name == INTERPRETED else ())
        for name in HEAD_BACKENDS
    ],
)
def test_each_backend_refuses_what_it_does_not_support(
    backend: str, variant: str, precision: str
) -> None:
    """The oracle tests exactly the supported cases. The layer itself also computes in bfloat16, as
    PyTorch does.
    """
    tested, hidden, target = make_head(backend, precision, variant)
    reason = HEAD_BACKENDS[backend].unsupported(tested, hidden)
    if reason and any(part in reason for part in MACHINE):
        pytest.skip(reason)
    is_supported = variant in SUPPORT[backend].get(precision, ()) or backend == "layer"
    assert (reason is None) == is_supported
    if reason:
        with raises_error("head-backend-unsupported", where="VALENCE_HEAD"):
            tested(hidden, target)


def test_the_automatic_choice() -> None:
    """A name is used as it is."""

    def chosen(precision: str, variant: str = "plain") -> str:
        return choose_head_backend(*make_head("auto", precision, variant)[:2])

    native_or_torch = "torch" if native.unavailable() else "cpu"
    assert chosen("float64") == chosen("float32") == "torch"
    assert chosen("bfloat16") == chosen("bfloat16 products") == native_or_torch
    assert chosen("bfloat16", "bias") == chosen("bfloat16", "soft-cap") == "torch"
    assert choose_head_backend(*make_head("layer", "float32")[:2]) == "layer"


def test_the_environment_requests_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VALENCE_HEAD", raising=False)
    assert requested_head_backend() == "auto"
    monkeypatch.setenv("VALENCE_HEAD", "torch")
    assert requested_head_backend() == "torch"
    monkeypatch.setenv("VALENCE_HEAD", "liger")
    with raises_error("environment-variable-invalid", where="VALENCE_HEAD", fix="torch, layer"):
        requested_head_backend()


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [torch.float32, None])
def test_triton_kernels_compute_the_statistics_of_torch(keep: torch.dtype | None) -> None:
    """Also with logits of minus infinity, and for columns outside the range."""
    if reason := HEAD_BACKENDS["triton"].unsupported(*make_head("triton", "float32")[:2]):
        pytest.skip(reason)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    triton_kernels, torch_kernels = TritonKernels(), TorchKernels()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 37, generator=generator).mul_(5).to(device)
    logits[2, 5] = logits[3] = -torch.inf
    column = torch.tensor([0, 36, -1, 4, 37, 100, 12, -500, 20], device=device)
    expected, stats = torch.zeros(2, 4, 9, device=device)
    plain = torch_kernels.logit_statistics(logits.clone(), column, expected, False, torch.float32)
    assert plain is not None
    expected[2] = torch.where(plain > 0, plain * (logits - expected[0, :, None]), 0).sum(-1)
    fused = triton_kernels.logit_statistics(logits, column, stats, True, keep)
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-5)
    if keep is None:
        assert fused is None
    else:
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-7)
    reference, value = torch.randn(2, 9, generator=generator).to(device)
    plain = torch_kernels.exponentials(logits.clone(), column, reference, value, torch.bfloat16)
    fused = triton_kernels.exponentials(logits, column, reference, value, torch.bfloat16)
    torch.testing.assert_close(fused, plain, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16 products"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_existing_gradients_are_added_to_in_place_on_cuda(backend: str, precision: str) -> None:
    tested, hidden, target = make_head(backend, precision, device="cuda")
    expected = oracle(tested, hidden, target, entropy=False)[3]
    weight: Any = tested.layer.weight
    for _ in range(2):
        before = weight.grad
        objective(*tested(hidden, target), entropy=False).backward()
        assert before is None or weight.grad is before
    assert relative_error(weight.grad / 2, expected) < GRADIENT_TOLERANCE[precision]


def layer_with_logits(logits: list[float]) -> tuple[nn.Linear, Tensor]:
    """A layer and a hidden state [1, WIDTH] with these logits."""
    layer = nn.Linear(WIDTH, len(logits), bias=False)
    layer.weight.data.zero_()[:, 0] = torch.tensor(logits)
    return layer, torch.eye(1, WIDTH).requires_grad_()


@pytest.mark.parametrize("keep", [0, 2**30])
def test_the_gradient_of_a_nearly_certain_token_is_not_zero(keep: int) -> None:
    """p is 1 in bfloat16, but p - 1 is not 0."""
    layer, hidden = layer_with_logits([8, 0, 0])
    tested = Head(layer, rounds_to_bfloat16=True, cache_bytes=keep)
    tested(hidden, torch.tensor([0]))[0].sum().backward()
    p = torch.softmax(torch.tensor([8.0, 0, 0]).double(), -1)[0]
    assert p > 1 - 2**-9
    assert hidden.grad is not None
    assert float(hidden.grad[0, 0]) == pytest.approx(float(8 * (1 - p)), rel=0.01)


@pytest.mark.parametrize("target", [0, 4])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("keep", [0, 2**30])
def test_a_target_in_a_range_of_negligible_probability_has_a_gradient(
    target: int, rounds: bool, keep: int
) -> None:
    """exp(-200) is 0 in float32. The range of the target is the first or the last one."""
    logits = [-200.0, -201, 0, 1, -200, -202]
    layer, hidden = layer_with_logits(logits)
    tested = Head(layer, rounds_to_bfloat16=rounds, max_columns=2, cache_bytes=keep)
    tested(hidden, torch.tensor([target]))[0].sum().backward()
    expected = torch.softmax(torch.tensor(logits).double(), 0).neg()
    expected[target] += 1
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[:, 0].double(), expected, rtol=0.01, atol=1e-6)


def test_rounding_errors_do_not_add_up_over_a_large_vocabulary() -> None:
    """Those of PyTorch's ``log_softmax`` in float32 do."""
    tested = Head(make_layer(torch.float32, vocabulary=49152))
    hidden, target = make_rows(torch.float32, vocabulary=49152)
    assert isinstance(tested.layer, nn.Linear)
    expected = dense(hidden.detach().double() @ tested.layer.weight.detach().double().t(), target)[
        0
    ]
    assert abs((tested(hidden, target)[0].double() - expected).sum()) < 2e-5


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen_tensors_get_no_gradient(frozen: str) -> None:
    tested = Head(make_layer())
    hidden, target = make_rows()
    assert isinstance(tested.layer, nn.Linear)
    weight = tested.layer.weight
    expected = oracle(tested, hidden, target, entropy=False)
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    objective(*tested(hidden, target), entropy=False).backward()
    if frozen == "weight":
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, expected[2], rtol=1e-12, atol=1e-12)
    else:
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, expected[3], rtol=1e-12, atol=1e-12)


def test_results_do_not_depend_on_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass computes again, and so rounds again, is the same on all GPUs."""
    layer = nn.Linear(8, 4096, bias=False)
    hidden, target = torch.randn(64, 8, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)
    with simulated_device():
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: 1 / 0)
        rows = hidden.to("cuda").requires_grad_()
        tested = Head(layer.to("cuda"), rounds_to_bfloat16=True, max_columns=64)
        tested(rows, target.to("cuda"))[0].sum().backward()
        assert rows.grad is not None
        monkeypatch.undo()


@pytest.mark.parametrize(
    "backend",
    ["torch", "layer", pytest.param(INTERPRETED, marks=pytest.mark.gpu)],
)
def test_no_rows(backend: str) -> None:
    tested = Head(make_layer(torch.float32), backend=backend)
    hidden, target = make_rows(torch.float32, count=0)
    if reason := HEAD_BACKENDS[backend].unsupported(tested, hidden):
        pytest.skip(reason)
    logps, entropies = tested(hidden, target, entropy=True)
    assert logps.shape == (0,)
    assert entropies is not None
    assert entropies.shape == (0,)
    (logps.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert isinstance(tested.layer, nn.Linear)
    assert torch.equal(tested.layer.weight.grad, torch.zeros_like(tested.layer.weight))  # type: ignore[arg-type]


def test_two_calls_before_one_backward_pass_are_reproducible() -> None:
    def run() -> list[Tensor]:
        tested = Head(make_layer(torch.float32), rounds_to_bfloat16=True)
        one, other = make_rows(torch.float32), make_rows(torch.float32, count=11)
        logps = [tested(*one)[0], tested(*other)[0]]
        sum(logp.sum() for logp in logps).backward()  # type: ignore[union-attr]
        return [t.grad for t in (*tested.layer.parameters(), one[0], other[0])]  # type: ignore[misc]

    both, repeated = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(both, repeated, strict=True))
    parts = torch.zeros(VOCABULARY, WIDTH)
    for count in (ROWS, 11):
        tested = Head(make_layer(torch.float32), rounds_to_bfloat16=True)
        tested(*make_rows(torch.float32, count=count))[0].sum().backward()
        parts += tested.layer.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(both[0], parts)


@pytest.mark.parametrize("rounds", [False, True])
def test_autocast_does_not_change_results(rounds: bool) -> None:
    tested = Head(make_layer(torch.float32), rounds_to_bfloat16=rounds)
    hidden, target = make_rows(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = compute(tested, hidden, target, entropy=True)
    for one, other in zip(inside, compute(tested, hidden, target, entropy=True), strict=True):
        assert torch.equal(one, other)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that is created inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return out


@pytest.mark.parametrize("keep", [0, 2**30])
@pytest.mark.parametrize("rounds", [False, True])
def test_memory_has_neither_all_logits_nor_a_second_gradient_of_the_weight(
    rounds: bool, keep: int
) -> None:
    layer = make_layer(torch.float32, vocabulary=2000)
    tested = Head(layer, rounds_to_bfloat16=rounds, max_columns=100, cache_bytes=keep)
    weight: Any = tested.layer.weight
    elements = 0
    for step in range(2):
        hidden, target = make_rows(torch.float32, vocabulary=2000)
        with (largest := LargestTensor()):
            tested(hidden, target)[0].sum().backward()
        elements = largest.elements
        if step:  # the first step allocates the gradient of the weight
            assert elements <= 100 * ROWS < min(weight.numel(), ROWS * 2000)
    assert elements > 0


def test_existing_gradients_are_added_to_in_place() -> None:
    tested = Head(make_layer())
    weight: Any = tested.layer.weight
    expected = oracle(tested, *make_rows(), entropy=False)[3]
    for times in (1, 2, 3):
        before = weight.grad
        objective(*tested(*make_rows()), entropy=False).backward()
        assert before is None or weight.grad is before
        torch.testing.assert_close(weight.grad, times * expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("request_", ["grad", "hook", "after", "inputs"])
def test_the_gradient_reaches_autograd_where_it_is_requested(request_: str) -> None:
    """By torch.autograd.grad, a hook of the weight, or backward with other inputs."""
    tested = Head(make_layer())
    weight: Any = tested.layer.weight
    hidden, target = make_rows()
    expected = oracle(tested, hidden, target, entropy=False)[3]
    weight.grad = torch.ones_like(weight)
    value = objective(*tested(hidden, target), entropy=False)
    received: list[Tensor] = []
    if request_ == "grad":
        received += torch.autograd.grad(value, [weight])
        assert torch.equal(weight.grad, torch.ones_like(weight))
    elif request_ == "hook":
        weight.register_hook(received.append)
        value.backward()
    elif request_ == "after":
        weight.register_post_accumulate_grad_hook(lambda w: received.append(w.grad - 1))
        value.backward()
    else:
        value.backward(inputs=[hidden])
        assert torch.equal(weight.grad, torch.ones_like(weight))
        received.append(expected)
    torch.testing.assert_close(received[0], expected, rtol=1e-12, atol=1e-12)


def test_a_tied_weight_gets_both_gradients() -> None:
    tied = make_layer()
    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
    embedding.weight = tied.weight
    tokens, target = make_rows()[1].flip(0), make_rows()[1]
    expected = torch.zeros_like(tied.weight)
    for _ in range(2):
        value = dense(embedding(tokens).tanh() @ tied.weight.t(), target)[0]
        expected += torch.autograd.grad(value.sum(), [tied.weight])[0]
        Head(tied)(embedding(tokens).tanh(), target)[0].sum().backward()
        torch.testing.assert_close(tied.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_an_adapter_on_the_head_is_part_of_the_logits() -> None:
    from peft.tuners.lora import Linear as Adapted
    from peft.tuners.lora import LoraConfig

    adapted = Adapted(
        make_layer(), "default", config=LoraConfig(r=2, lora_alpha=4), r=2, lora_alpha=4
    )
    weights: list[Any] = [adapted.lora_A["default"].weight, adapted.lora_B["default"].weight]
    for weight in weights:
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(3))
    hidden, target = make_rows(count=LAYER_ROWS + 1)
    values = Head(adapted, temperature=0.8)(hidden, target, True)
    results = torch.autograd.grad(objective(*values, entropy=True), [hidden, *weights])
    expected = dense(adapted(hidden) / 0.8, target)
    exact = torch.autograd.grad(objective(*expected, entropy=True), [hidden, *weights])
    for one, other in zip((*values, *results), (*expected, *exact), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    float32 = Head(adapted.float())
    hidden = hidden.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = float32(hidden, target)[0]
    assert torch.equal(inside, float32(hidden, target)[0])
