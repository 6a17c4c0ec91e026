"""python -m benchmarks.head [--rows N] [--vocabulary V] [--hidden H]: the backends of the head.

Prints the error of each backend against float64 (log-probabilities in nats, gradient of the hidden
states relative to its norm) and its time for a forward and backward pass relative to the backend
``torch``. Hidden states and weights are random; the logits have a standard deviation of 2.4, as
those of a trained model have. Errors are relative to the operands after rounding. Rounds alternate
between the backends, and Liger's kernel if it is installed. Without a CUDA device, set
TRITON_INTERPRET=1, which gives the same errors and meaningless times; take few rows.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor, nn

from valence.models.head import HEAD_BACKENDS, Head

ROUNDS = 1 if os.environ.get("TRITON_INTERPRET") == "1" else 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def head_of(name: str, weight: Tensor) -> Head:
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return Head(layer, rounds_to_bfloat16=weight.dtype == torch.bfloat16, backend=name)


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's fused linear cross-entropy, which computes logits in the dtype of its operands."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, nn.Parameter(weight), target, None, None, -100, 0.0, 0.0, "none"
    )
    return -loss


def oracle(hidden: Tensor, weight: Tensor, target: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the gradient of the hidden states, in float64."""
    hidden = hidden.detach().double().requires_grad_()
    logps = torch.log_softmax(hidden @ weight.detach().double().t(), -1)
    logps = logps.gather(1, target[:, None]).squeeze(1)
    return logps.detach(), torch.autograd.grad(logps, hidden, grad.double())[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the backends of the head.")
    for name, default in (("rows", 256), ("vocabulary", 49_152), ("hidden", 576)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(sizes.rows, sizes.hidden, device=device)
    weight = torch.randn(sizes.vocabulary, sizes.hidden, device=device) * 2.4 / sizes.hidden**0.5
    target = torch.distributions.Categorical(logits=hidden @ weight.t()).sample()
    grad = torch.randn(sizes.rows, device=device)
    print(f"{'backend':<28}{'worst nats':>12}{'mean nats':>12}{'gradient':>12}{'time':>8}")
    for kind, dtype in DTYPES.items():
        operands = hidden.to(dtype).detach().requires_grad_(), weight.to(dtype), target
        exact_logps, exact_grad = oracle(*operands, grad)
        runs: dict[str, Run] = {}
        for name, backend in HEAD_BACKENDS.items():
            tested = head_of(name, operands[1])
            reason = backend.unsupported(tested, operands[0])
            if reason is None:
                runs[f"{name}, {kind}"] = lambda *args, tested=tested: tested(*args[::2])[0]
            else:
                print(f"{f'{name}, {kind}':<28}{reason}")
        if find_spec("liger_kernel"):
            runs[f"liger, {kind}"] = liger
        times: dict[str, list[float]] = {name: [] for name in runs}
        errors: dict[str, tuple[float, float, float]] = {}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                operands[0].grad = None
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                logps = run(*operands)
                logps.backward(grad.to(logps.dtype))
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - start)
                difference = (logps.detach().double() - exact_logps).abs()
                assert operands[0].grad is not None
                error = (operands[0].grad.double() - exact_grad).norm() / exact_grad.norm()
                errors[name] = float(difference.max()), float(difference.mean()), float(error)
        base = median(times[f"torch, {kind}"])
        for name, (worst, mean, error) in errors.items():
            ratio = median(times[name]) / base
            print(f"{name:<28}{worst:>12.2g}{mean:>12.2g}{error:>12.2g}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
