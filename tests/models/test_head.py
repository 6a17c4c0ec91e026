"""The head against a dense log-softmax in float64: values, gradients, and what it must not hold in
memory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from valence.models import head, native
from valence.models.head import Head

ROWS, VOCABULARY, WIDTH = 37, 211, 16
QUIRKS = {
    "plain": {},
    "bias": {"bias": True},
    "soft-cap": {"softcap": 1.5},
    "scale": {"scale": 0.25},
    "temperature": {"temperature": 0.6},
    "all": {"bias": True, "softcap": 2.0, "scale": 0.3, "temperature": 1.7},
}


def layer(
    dtype: torch.dtype = torch.float64, bias: bool = False, vocabulary: int = VOCABULARY
) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, vocabulary, bias=bias, dtype=dtype)
    made.weight.data.mul_(8)  # so that some probabilities are large
    return made


def rows(
    dtype: torch.dtype = torch.float64, count: int = ROWS, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    hidden = (
        torch.randn(count, WIDTH, dtype=torch.float64, generator=made).to(dtype).requires_grad_()
    )
    return hidden, torch.randint(0, vocabulary, (count,), generator=made)


def slopes(count: int = ROWS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    return tuple(torch.randn(2, count, dtype=torch.float64, generator=made))  # type: ignore[return-value]


def dense(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logps = torch.log_softmax(logits, -1)
    return logps.gather(1, target[:, None]).squeeze(1), -(logps.exp() * logps).sum(-1)


def oracle(
    found: Head, hidden: Tensor, target: Tensor, *, entropy: bool, rounded: bool = False
) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and the gradients of ``objective`` to hidden, weight and (if
    there is one) bias.
    """
    assert isinstance(found.layer, nn.Linear)
    leaves = [t.detach() for t in (hidden, found.layer.weight, found.layer.bias) if t is not None]
    leaves = [
        (t.bfloat16() if rounded and t.ndim == 2 else t).double().requires_grad_() for t in leaves
    ]
    logits = found.scale * linear(*leaves)
    if found.softcap is not None:
        logits = found.softcap * torch.tanh(logits / found.softcap)
    logits = logits / found.temperature
    values = dense(logits, target)
    return *values, *torch.autograd.grad(objective(*values, entropy=entropy), leaves)


def objective(logp: Tensor, spread: Tensor | None, *, entropy: bool) -> Tensor:
    one, other = slopes(len(logp))
    total = (logp * one).sum()
    return total + (spread * other).sum() if entropy and spread is not None else total


def ours(found: Head, hidden: Tensor, target: Tensor, *, entropy: bool) -> tuple[Any, ...]:
    values = found(hidden, target, entropy)
    assert (values[1] is None) == (not entropy)
    assert isinstance(found.layer, nn.Linear)
    leaves = [t for t in (hidden, found.layer.weight, found.layer.bias) if t is not None]
    return *values, *torch.autograd.grad(objective(*values, entropy=entropy), leaves)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("keep", ["all", "some", "none"])
@pytest.mark.parametrize("columns", [7, 8192])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("quirk", QUIRKS)
def test_values_and_gradients_are_those_of_a_dense_softmax(
    quirk: str, entropy: bool, columns: int, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK", columns)
    monkeypatch.setattr(head, "KEEP", {"all": 2**30, "some": 3 * 7 * ROWS * 8, "none": 0}[keep])
    quirks = dict(QUIRKS[quirk])
    found = Head(layer(bias=bool(quirks.pop("bias", False))), **quirks)  # type: ignore[arg-type]
    for one, other in zip(
        ours(found, *rows(), entropy=entropy), oracle(found, *rows(), entropy=entropy), strict=True
    ):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (0.25, 0.6)])
@pytest.mark.parametrize("keep", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_in_bfloat16_cost_their_own_rounding_and_no_more(
    dtype: torch.dtype,
    keep: int,
    scale: float,
    temperature: float,
    entropy: bool,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values are exact for the rounded operands.

    Each number of a gradient is rounded at most three times: its two operands and the result of a
    product; so it is off by less than three times 2^-9.
    """
    monkeypatch.setattr(head, "CHUNK", 50)
    monkeypatch.setattr(head, "KEEP", keep)
    if not compiled:
        monkeypatch.setattr(native, "measures", lambda *_: False)
    found = Head(layer(dtype), scale=scale, half=True, temperature=temperature)
    logp, spread, *gradients = ours(found, *rows(dtype), entropy=entropy)
    wanted, disorder, *exact = oracle(found, *rows(dtype), entropy=entropy, rounded=True)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), wanted, rtol=1e-6, atol=1e-5)
    if entropy:
        torch.testing.assert_close(spread.double(), disorder, rtol=1e-6, atol=1e-5)
    assert {g.dtype for g in gradients} == {dtype}
    for one, other in zip(gradients, exact, strict=True):
        assert 1e-4 < relative(one, other) < 3 * 2**-9


def along_one_axis(logits: list[float]) -> tuple[nn.Linear, Tensor]:
    """A head, and a hidden state [1, WIDTH] that it gives these logits."""
    made = nn.Linear(WIDTH, len(logits), bias=False)
    made.weight.data.zero_()[:, 0] = torch.tensor(logits)
    return made, torch.eye(1, WIDTH).requires_grad_()


@pytest.mark.parametrize("keep", [0, 2**30])
def test_a_nearly_certain_token_keeps_its_gradient(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its p is 1 in bfloat16; p - 1 is not 0."""
    monkeypatch.setattr(head, "KEEP", keep)
    made, hidden = along_one_axis([8, 0, 0])
    Head(made, half=True)(hidden, torch.tensor([0]))[0].sum().backward()
    p = torch.softmax(torch.tensor([8.0, 0, 0]).double(), -1)[0]
    assert p > 1 - 2**-9
    assert hidden.grad is not None
    assert float(hidden.grad[0, 0]) == pytest.approx(float(8 * (1 - p)), rel=0.01)


@pytest.mark.parametrize("target", [0, 4])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("keep", [0, 2**30])
def test_a_range_far_below_the_others_has_no_say_and_a_target_in_it_a_gradient(
    target: int, half: bool, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is 200 nats down: exp(-200) is 0 in float32, whether its range is the first or the
    last.
    """
    monkeypatch.setattr(head, "CHUNK", 2)
    monkeypatch.setattr(head, "KEEP", keep)
    logits = [-200.0, -201, 0, 1, -200, -202]
    made, hidden = along_one_axis(logits)
    Head(made, half=half)(hidden, torch.tensor([target]))[0].sum().backward()
    wanted = torch.softmax(torch.tensor(logits).double(), 0).neg()
    wanted[target] += 1
    assert made.weight.grad is not None
    torch.testing.assert_close(made.weight.grad[:, 0].double(), wanted, rtol=0.01, atol=1e-6)


def test_rounding_does_not_add_up_over_a_large_vocabulary() -> None:
    """As ``log_softmax`` in float32 lets it."""
    found = Head(layer(torch.float32, vocabulary=49152))
    hidden, target = rows(torch.float32, vocabulary=49152)
    assert isinstance(found.layer, nn.Linear)
    wanted = dense(hidden.detach().double() @ found.layer.weight.detach().double().t(), target)[0]
    assert abs((found(hidden, target)[0].double() - wanted).sum()) < 2e-5


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    found = Head(layer())
    hidden, target = rows()
    assert isinstance(found.layer, nn.Linear)
    weight = found.layer.weight
    wanted = oracle(found, hidden, target, entropy=False)
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    objective(*found(hidden, target), entropy=False).backward()
    if frozen == "weight":
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, wanted[2], rtol=1e-12, atol=1e-12)
    else:
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, wanted[3], rtol=1e-12, atol=1e-12)


def test_no_rows() -> None:
    found = Head(layer())
    hidden, target = rows(count=0)
    logp, spread = found(hidden, target, entropy=True)
    assert spread is not None
    assert logp.shape == spread.shape == (0,)
    (logp.sum() + spread.sum()).backward()
    assert hidden.grad is not None
    assert isinstance(found.layer, nn.Linear)
    assert torch.equal(found.layer.weight.grad, torch.zeros_like(found.layer.weight))  # type: ignore[arg-type]


def test_two_calls_before_one_backward_pass_and_the_same_bits_each_time() -> None:
    def run() -> list[Tensor]:
        found = Head(layer(torch.float32), half=True)
        one, other = rows(torch.float32), rows(torch.float32, count=11)
        logps = [found(*one)[0], found(*other)[0]]
        sum(logp.sum() for logp in logps).backward()  # type: ignore[union-attr]
        return [t.grad for t in (*found.layer.parameters(), one[0], other[0])]  # type: ignore[misc]

    both, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(both, again, strict=True))
    parts = torch.zeros(VOCABULARY, WIDTH)
    for count in (ROWS, 11):
        found = Head(layer(torch.float32), half=True)
        found(*rows(torch.float32, count=count))[0].sum().backward()
        parts += found.layer.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(both[0], parts)


@pytest.mark.parametrize("half", [False, True])
def test_autocast_does_not_reach_it(half: bool) -> None:
    found = Head(layer(torch.float32), half=half)
    hidden, target = rows(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = ours(found, hidden, target, entropy=True)
    for one, other in zip(inside, ours(found, hidden, target, entropy=True), strict=True):
        assert torch.equal(one, other)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor made inside the block."""

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
@pytest.mark.parametrize("half", [False, True])
def test_neither_all_logits_nor_a_second_gradient_of_the_weight_exist(
    half: bool, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK", 100)
    monkeypatch.setattr(head, "KEEP", keep)
    found = Head(layer(torch.float32, vocabulary=2000), half=half)
    weight = found.layer.weight
    for step in range(2):
        hidden, target = rows(torch.float32, vocabulary=2000)
        with Largest() as largest:
            found(hidden, target)[0].sum().backward()
        if step:  # the first of a step makes the gradient
            assert largest.elements <= 100 * ROWS < min(weight.numel(), ROWS * 2000)
    assert largest.elements > 0


def test_a_gradient_that_is_there_is_added_to_in_place() -> None:
    found = Head(layer())
    weight: Any = found.layer.weight
    wanted = oracle(found, *rows(), entropy=False)[3]
    for times in (1, 2, 3):
        before = weight.grad
        objective(*found(*rows()), entropy=False).backward()
        assert before is None or weight.grad is before
        torch.testing.assert_close(weight.grad, times * wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["grad", "hook", "after", "inputs"])
def test_a_gradient_is_handed_over_where_somebody_waits_for_it(how: str) -> None:
    """By torch.autograd.grad, or a hook of the weight: it is not merely to be added to what is
    there.
    """
    found = Head(layer())
    weight: Any = found.layer.weight
    hidden, target = rows()
    wanted = oracle(found, hidden, target, entropy=False)[3]
    weight.grad = torch.ones_like(weight)
    value = objective(*found(hidden, target), entropy=False)
    seen: list[Tensor] = []
    if how == "grad":
        seen += torch.autograd.grad(value, [weight])
        assert torch.equal(weight.grad, torch.ones_like(weight))
    elif how == "hook":
        weight.register_hook(seen.append)
        value.backward()
    elif how == "after":
        weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad - 1))
        value.backward()
    else:
        value.backward(inputs=[hidden])
        assert torch.equal(weight.grad, torch.ones_like(weight))
        seen.append(wanted)
    torch.testing.assert_close(seen[0], wanted, rtol=1e-12, atol=1e-12)


def test_a_weight_that_is_also_the_embedding_gets_both_gradients() -> None:
    tied = layer()
    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
    embedding.weight = tied.weight
    tokens, target = rows()[1].flip(0), rows()[1]
    wanted = torch.zeros_like(tied.weight)
    for _ in range(2):
        value = dense(embedding(tokens).tanh() @ tied.weight.t(), target)[0]
        wanted += torch.autograd.grad(value.sum(), [tied.weight])[0]
        Head(tied)(embedding(tokens).tanh(), target)[0].sum().backward()
        torch.testing.assert_close(tied.weight.grad, wanted, rtol=1e-12, atol=1e-12)


def test_an_adapter_on_the_head_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear as Adapted
    from peft.tuners.lora import LoraConfig

    monkeypatch.setattr(head, "ROWS", 5)
    adapted = Adapted(layer(), "default", config=LoraConfig(r=2, lora_alpha=4), r=2, lora_alpha=4)
    weights: list[Any] = [adapted.lora_A["default"].weight, adapted.lora_B["default"].weight]
    for weight in weights:
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(3))
    hidden, target = rows()
    values = Head(adapted, temperature=0.8)(hidden, target, True)
    found = torch.autograd.grad(objective(*values, entropy=True), [hidden, *weights])
    wanted = dense(adapted(hidden) / 0.8, target)
    exact = torch.autograd.grad(objective(*wanted, entropy=True), [hidden, *weights])
    for one, other in zip((*values, *found), (*wanted, *exact), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    narrow = Head(adapted.float())
    hidden = hidden.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = narrow(hidden, target)[0]
    assert torch.equal(inside, narrow(hidden, target)[0])


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.gpu  # or Triton's interpreter
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    not torch.cuda.is_available() and not interpreted(),
    reason="no CUDA device, and TRITON_INTERPRET is not 1",
)
def test_the_kernel_says_what_the_plain_operations_say() -> None:
    from valence.models import head_triton

    device = "cpu" if interpreted() else "cuda"
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 37, generator=made).mul_(5).to(device)
    logits[2, 5] = logits[3] = -torch.inf
    column = torch.tensor([0, 36, -1, 4, 37, 100, 12, -500, 20], device=device)
    wanted, found = torch.zeros(2, 4, 9, device=device)
    kept = head.measure_logits(
        logits.cpu().clone(), column.cpu(), wanted, entropy=False, keep=torch.float32
    )
    assert kept is not None
    kept = kept.to(device)
    wanted[2] = torch.where(kept > 0, kept * (logits - wanted[0, :, None]), 0).sum(-1)
    fused = head_triton.measure(logits, column, found, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused, kept, rtol=1e-5, atol=1e-7)
    assert head_triton.measure(logits, column, found, None) is None
    reference, value = torch.randn(2, 9, generator=made).to(device)
    plain = head.softmax_exponentials(
        logits.cpu().clone(), column.cpu(), reference.cpu(), value.cpu(), torch.bfloat16
    )
    fused = head_triton.exponentials(logits, column, reference, value, torch.bfloat16)
    torch.testing.assert_close(fused.cpu(), plain, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("part", [0.0, 1 / 32])
def test_on_a_cuda_device(part: float, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "KEEP_CUDA", part)
    monkeypatch.setattr(head, "CHUNK", 50)
    found = Head(layer(torch.float32), half=half, temperature=0.7)
    wanted = oracle(found, *rows(torch.float32), entropy=False, rounded=half)
    found.layer.cuda()
    hidden, target = rows(torch.float32)
    moved = hidden.detach().cuda().requires_grad_()
    weight: Any = found.layer.weight
    for _ in range(2):  # the second adds in place
        logp, spread = found(moved, target.cuda(), entropy=True)
        (logp * slopes()[0].cuda()).sum().backward()
    assert spread is not None
    torch.testing.assert_close(logp.double().cpu(), wanted[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(spread.double().cpu(), wanted[1], rtol=1e-5, atol=1e-4)
    assert relative(moved.grad.cpu() / 2, wanted[2]) < (3 * 2**-9 if half else 1e-4)  # type: ignore[union-attr]
    assert relative(weight.grad.cpu() / 2, wanted[3]) < (3 * 2**-9 if half else 1e-4)
