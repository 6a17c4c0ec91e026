"""python -m benchmarks.device [--quick]: how near does a step come to what this device can do?

(1) The rate of a large product in bfloat16 and of a copy, which are the ceilings. (2) The head,
forward and backward, next to its three bare products. (3) Steps without an update of kto, dpo and
grpo, all weights training, with the reference's values known: seconds, and the share of the first
ceiling that their necessary operations make; those of 1 to 2 billion weights once more with
activations recomputed. Weights and tokens are random. It is made for a GPU; on a CPU models are
tiny, and nothing is held against the bar. --quick: the smaller model alone. Exit status: 0 all
figures held, 1 some fell short.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.step import THREADS
from benchmarks.step.cases import PROMPT_400, TINY, Case, Shape
from benchmarks.step.floor import work_of
from benchmarks.step.memory import peak_above_idle
from benchmarks.step.stage import MAX_LENGTH, config_of, draw_sets
from valence.distributed.process_group import SingleProcess
from valence.lifecycle.models import best_device
from valence.models import speed
from valence.models.build import build_policy
from valence.models.compiling import compile_layers, why_not
from valence.models.digest import Digests
from valence.models.gradients import clear
from valence.models.head import Head
from valence.models.shape import shape_of
from valence.trainer.methods import METHODS
from valence.trainer.step import Objective
from valence.types import MicroBatch

HEAD_BAR = 1.5
"""Most time of the head, against its bare products."""
BUDGET = 16_384  # tokens of a micro-batch
REPEATS = 5
SMALLER = Shape(
    "1.5b", 151_936, hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, head_dim=128
)
LARGER = Shape(
    "8b", 151_936, hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8, head_dim=128
)
CASES = (
    Case("kto", "kto", prompts=64),
    Case("dpo", "dpo", prompts=32, answers=2),
    Case("grpo 8@400", "grpo", prompts=8, answers=8, prompt=PROMPT_400),
)


@dataclass
class Known:
    """A reference whose values (nats, [T]) are at hand, as those in a cache are: each token of the
    vocabulary is as likely.
    """

    vocabulary: int
    name: str = "known"
    precision: torch.dtype = torch.bfloat16

    def digests(self) -> Digests:
        return Digests(self.name, self.name)

    def __call__(self, batch: MicroBatch) -> Tensor:
        return torch.where(batch.loss_mask, -math.log(self.vocabulary), 0.0)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median of some runs, when the device is done; the first two, which compile, do not
    count.
    """
    durations: list[float] = []
    for _ in range(REPEATS + 2):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        durations.append(time.perf_counter() - began)
    return median(durations[2:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ceilings(device: torch.device) -> float:
    """Operations per second of a large product in bfloat16; prints them, and the rate of a copy."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds(lambda: a @ b, device)
    source = torch.empty(size * size * 8, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: out.copy_(source), device)
    print(
        f"ceilings: {rate / 1e12:.3g} TFLOP/s in bfloat16, {copied / 1e12:.3g} TB/s of a copy",
        flush=True,
    )
    return rate


def head(shape: Shape, tokens: int, device: torch.device) -> float:
    """Seconds of the head over ``tokens`` tokens, forward and backward, divided by those of its
    three bare products.
    """
    layer = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device)
    hidden = torch.randn(
        tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    target = torch.randint(0, shape.vocabulary, (tokens,), device=device)
    grad = torch.randn(tokens, device=device)
    half_head = Head(layer, rounds_to_bfloat16=True)

    def run() -> None:
        hidden.grad = layer.weight.grad = None
        half_head(hidden, target)[0].backward(grad)

    weight, x = layer.weight.detach().bfloat16(), hidden.detach()
    slopes = torch.randn(tokens, shape.vocabulary, device=device, dtype=torch.bfloat16)

    def bare() -> None:
        torch.mm(x, weight.t())
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), x)

    duration, baseline = seconds(run, device), seconds(bare, device)
    print(
        f"head: {tokens} tokens, {shape.vocabulary} x {shape.hidden}: {duration:.4f} s, bare "
        f"products {baseline:.4f} s",
        flush=True,
    )
    return duration / baseline


def steps(shape: Shape, device: torch.device, rate: float, *, recomputed: bool) -> None:
    """A line for each case."""
    policy = policy_of(shape, device, recomputed)
    for case in CASES:
        case = replace(case, shape=shape, prompts=case.prompts if device.type == "cuda" else 4)
        (units,) = draw_sets(case, 1)
        if case.method == "grpo":  # as a round hands them to training
            units = [
                replace(
                    unit,
                    answers=tuple(
                        replace(
                            a,
                            columns=(
                                ("old", (-12.0,) * len(a.ids)),
                                ("adv", (score,) * len(a.ids)),
                            ),
                        )
                        for a, score in zip(unit.answers, unit.scores, strict=True)
                    ),
                )
                for unit in units
            ]
        method = METHODS[case.method]
        objective = Objective(
            method,
            method.resolve({}),
            policy,
            Known(shape.vocabulary),
            SingleProcess(),
            BUDGET,
            MAX_LENGTH,
        )

        def run(objective: Objective = objective, units: Any = units) -> float:
            loss = objective.run(units, backward=True).loss.item()
            clear(policy.parameters())
            return loss

        duration = seconds(run, device)
        loss, peak = peak_above_idle(run, device)
        work = work_of(case, units)
        parts = [speed.Work(work.layers[k], work.head[k], work.attended[k]) for k in (0, 1)]
        share = speed.step(shape_of(policy.causal), *parts) / rate / duration
        tokens = sum(work.layers) / duration
        kind = f"{shape.name}{', recomputed' if recomputed else ''}"
        print(
            f"{case.name:>12} {kind:18} loss {loss:9.4f}  {duration:8.3f} s  {tokens:10,.0f} "
            f"tokens/s  "
            f"{share:5.2f} of the ceiling  {peak / 1e3:6.1f} GB above weights",
            flush=True,
        )


def policy_of(shape: Shape, device: torch.device, recomputed: bool) -> Any:
    """Random weights in float32, products in bfloat16, layers compiled where they can be."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config_of(shape))
    policy = build_policy(
        model, dtype=torch.bfloat16, checkpointing="full" if recomputed else "off"
    )
    if not why_not(policy.device):
        compile_layers(policy)
    print(f"{shape.name}: packed {policy.packs}, compiled {policy.compiled}", flush=True)
    return policy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model alone")
    quick = parser.parse_args().quick
    device = best_device()
    torch.set_num_threads(THREADS)
    on_gpu = device.type == "cuda"
    print(
        torch.cuda.get_device_name()
        if on_gpu
        else "a CPU: models are tiny, and nothing is held against the bar",
        flush=True,
    )
    rate = ceilings(device)
    share = head(LARGER, 8192, device) if on_gpu else head(TINY, 256, device)
    for shape in ((SMALLER,) if quick else (SMALLER, LARGER)) if on_gpu else (TINY,):
        for recomputed in (False, True) if shape is not LARGER else (False,):
            torch.compiler.reset()
            steps(shape, device, rate, recomputed=recomputed)
    held = share <= HEAD_BAR
    print(
        f"\nhead {share:.2f} (bar {HEAD_BAR:g}) "
        f"{'held' if held else 'short' if on_gpu else 'not held against it'}"
    )
    return 0 if held or not on_gpu else 1


if __name__ == "__main__":
    sys.exit(main())
