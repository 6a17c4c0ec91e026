"""python -m benchmarks.gpu [--steps ABCD]: is training on this GPU right, and how fast is it?

A: values and gradients of packed sequences against one sequence at a time, and the tests for GPUs.
B: attention with a program for each size and for all sizes, against PyTorch's attention of separate
documents. C: complete steps, and memory against its prediction. D: 60 steps of KTO and of GRPO.

The result is one table: each number with its bar, and for a miss the next thing to do. The first
wrong number ends the benchmark, since the speed of a wrong computation says nothing. On the
simulated device of the tests all sizes are tiny, and only the numbers that have to be right are
compared with their bars. Exit status: 0 if all numbers are within their bars, otherwise 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.device.measure import (
    LARGER,
    SMALL_VARIANTS,
    VARIANTS,
    head_seconds,
    measure_steps,
    product_rate,
)
from benchmarks.gpu import attention, correctness, training
from benchmarks.step.cases import TINY
from valence.models.build import best_device

NEXT_STEPS = {
    "packed": "set VALENCE_ATTENTION to a backend that is right, and make it the automatic choice",
    "tests": "fix the failing tests first",
    "dynamic": "flex remains the automatic choice; use fewer sizes, a quarter of an octave apart",
    "forward": "compare tiles (kernel_options) of FlexAttention",
    "backward": "compare tiles (kernel_options) of FlexAttention",
    "short": "try blocks of 64 rows for short documents",
    "head": "use plain products (VALENCE_HEAD=torch), and profile the kernel",
    "step": "profile a step: the largest kernel that is not a product",
    "peak": "correct valence/models/memory.py",
    "reserved": "fragmentation: compare PYTORCH_ALLOC_CONF, and the sizes of micro-batches",
    "fits": "reduce micro-batches, and correct valence/models/memory.py",
    "loss": "compare single log-probabilities with those of the CPU",
    "idle": "find what the host does between kernels in the profile",
    "compile": "VALENCE_ATTENTION=flex_dynamic; read the reasons of recompilations in the output",
    "allocations": "find the tensor whose size changes from step to step",
}
"""The next thing to do after a miss, by kind of number."""
TEST_FILTER = "many_blocks or sums_are or compiled or (dtype1 and (shared or gemma2))"
BARS = {
    ("1.5b", "kto"): 0.35,
    ("1.5b, recomputed", "kto"): 0.38,
    ("8b lora, recomputed", "dpo"): 0.42,
}
"""Minimum share of the rate of a large product that a step should reach."""


@dataclass(frozen=True)
class Result:
    """A number and its bar. is_minimum: the bar is a minimum, not a maximum. has_to_be_right: a
    miss is a wrong computation, not a slow one.
    """

    step: str
    name: str
    value: float
    bar: float
    kind: str
    is_minimum: bool = False
    has_to_be_right: bool = False

    @property
    def is_within(self) -> bool:
        """Whether the number is within its bar; NaN never is."""
        return self.value >= self.bar if self.is_minimum else self.value <= self.bar

    def verdict(self, *, is_compared: bool) -> str:
        if not is_compared and not self.has_to_be_right:
            return "not compared"
        if self.is_within:
            return "ok"
        return f"{'WRONG' if self.has_to_be_right else 'missed'}: {NEXT_STEPS[self.kind]}"


def check_numbers(device: torch.device) -> Iterator[Result]:
    """Step A."""
    on_gpu = torch.cuda.is_available()
    shape = correctness.GROUPED if on_gpu else correctness.GROUPED_SMALL
    for backend, dtype, *errors in correctness.measure_errors(device, shape):
        dtype_name = str(dtype).removeprefix("torch.")
        for error, bound, quantity in zip(
            errors, correctness.BOUNDS[dtype], ("log-probability", "gradient"), strict=True
        ):
            yield Result(
                "A",
                f"{backend}, {dtype_name}: {quantity}",
                error,
                bound,
                "packed",
                has_to_be_right=True,
            )
    if on_gpu:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-k", TEST_FILTER]
        status = subprocess.run([*command, "tests/models"], check=False).returncode
        yield Result("A", "tests: exit status", status, 0, "tests", has_to_be_right=True)


def measure_attention(device: torch.device) -> Iterator[Result]:
    """Step B."""
    on_gpu = torch.cuda.is_available()
    for case in attention.CASES if on_gpu else attention.SMALL_CASES:
        by_backend: dict[str, attention.AttentionFigures] = {}
        for figures in attention.measure_attention(case, device, 5 if on_gpu else 1):
            print(figures, flush=True)
            by_backend[figures.backend] = figures
        static, dynamic = by_backend["flex"], by_backend["flex_dynamic"]
        name = f"flex_dynamic / flex, {case}"
        yield Result("B", name, dynamic.total / static.total, 1.10, "dynamic")
        flops = case.flops / 1e12
        if case.length >= 4096:
            yield Result(
                "B", f"forward TFLOP/s, {case}", flops / static.forward, 350, "forward", True
            )
            rate = 2.5 * flops / static.backward
            yield Result("B", f"backward TFLOP/s, {case}", rate, 250, "backward", True)
        elif "sdpa" in by_backend:
            ratio = static.total / by_backend["sdpa"].total
            yield Result("B", f"flex / separate documents, {case}", ratio, 2.0, "short")


def measure_training_steps(device: torch.device) -> Iterator[Result]:
    """Step C."""
    on_gpu = torch.cuda.is_available()
    rate = product_rate(device, 8192 if on_gpu else 256)
    seconds, products = head_seconds(*((LARGER, 8192) if on_gpu else (TINY, 256)), device)
    yield Result("C", "head / its products", seconds / products, 1.5, "head")
    for variant in VARIANTS if on_gpu else SMALL_VARIANTS[2:]:
        for figures in measure_steps(variant, device, rate, 5 if on_gpu else 1):
            print(figures, flush=True)
            name = f"{variant} {figures.case}"
            yield Result("C", f"{name}: failures", bool(figures.failure), 0, "fits")
            if figures.failure:
                continue
            if bar := BARS.get((str(variant), figures.case)):
                yield Result("C", f"{name}: share of the ceiling", figures.share, bar, "step", True)
            peak, reserved = figures.peak / figures.predicted, figures.reserved / figures.predicted
            yield Result("C", f"{name}: peak / predicted", peak, 1.05, "peak")
            yield Result("C", f"{name}: reserved / predicted", reserved, 1.15, "reserved")


def measure_runs(_device: torch.device) -> Iterator[Result]:
    """Step D."""
    on_gpu = torch.cuda.is_available()
    shape, steps, rows, compared = (
        (training.HALF_BILLION, 60, 16, 5) if on_gpu else (training.TINY, 2, 2, 2)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training.write_files(folder, shape, *(() if on_gpu else (16, 24)))
        for method in ("kto", "grpo"):
            changes = None if on_gpu else {"rollout.max_new_tokens": 4, "rollout.num_rollouts": 2}
            figures = training.run_training(
                folder,
                method,
                steps,
                batch_size=rows,
                changes=changes if method == "grpo" else None,
            )
            if method == "kto":  # completions that are sampled differ after the first rounding
                expected = training.losses_on_a_cpu(folder, compared, rows)
                differences = [
                    abs(x - y) for x, y in zip(figures.losses[:compared], expected, strict=True)
                ]
                yield Result(
                    "D",
                    "kto: loss against a CPU",
                    max(differences),
                    0.02,
                    "loss",
                    has_to_be_right=True,
                )
            yield Result("D", f"{method}: idle share of the GPU", figures.idle, 0.05, "idle")
            name = f"{method}: compile time after step {training.WARM_UP}"
            yield Result("D", name, figures.compile_share, 0.05, "compile")
            name = f"{method}: cudaMalloc after step {training.WARM_UP}"
            yield Result("D", name, figures.allocations, 0, "allocations")


STEPS: dict[str, Callable[[torch.device], Iterator[Result]]] = {
    "A": check_numbers,
    "B": measure_attention,
    "C": measure_training_steps,
    "D": measure_runs,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--steps", default="".join(STEPS), help="some of ABCD (default: all)")
    steps = parser.parse_args(arguments).steps
    if unknown := set(steps) - set(STEPS):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}")
    device, on_gpu = best_device(), torch.cuda.is_available()
    if device.type != "cuda":
        parser.error("there is no CUDA device")
    print(torch.cuda.get_device_name() if on_gpu else "a simulated device: sizes are tiny")
    results: list[Result] = []
    for step in steps:
        for result in STEPS[step](device):
            results.append(result)
            if result.has_to_be_right and not result.is_within:
                break
        if results and results[-1].has_to_be_right and not results[-1].is_within:
            break
    print_table(results, is_compared=on_gpu)
    compared = [result for result in results if on_gpu or result.has_to_be_right]
    return 0 if all(result.is_within for result in compared) else 1


def print_table(results: list[Result], *, is_compared: bool) -> None:
    width = max(len(result.name) for result in results)
    print(f"\n{'':4}{'':{width}} {'value':>10}    {'bar':>9}")
    for result in results:
        sign = ">=" if result.is_minimum else "<="
        print(
            f"{result.step:4}{result.name:{width}} {result.value:10.4g} {sign} {result.bar:9.4g}  "
            f"{result.verdict(is_compared=is_compared)}"
        )


if __name__ == "__main__":
    sys.exit(main())
