"""Measure this device: the rate of products and copies, the head, and complete steps without the
optimizer's update. Weights and tokens are random.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.step.cases import PROMPT_400, TINY, Case, Shape
from benchmarks.step.floor import work_of
from benchmarks.step.inputs import MAX_LENGTH, config_of, draw_sets
from valence.distributed.process_group import SingleProcess
from valence.models import speed
from valence.models.build import build_policy
from valence.models.compiling import compile_layers, why_not
from valence.models.digest import Digests
from valence.models.gradients import clear
from valence.models.head import Head
from valence.models.memory import out_of_memory, predict
from valence.models.policy_model import PolicyModel
from valence.models.shape import shape_of, skeleton_of
from valence.trainer.methods import METHODS
from valence.trainer.step import Objective
from valence.types import MicroBatch, TokenizedExample

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
PROMPTS_ON_A_CPU = 2


@dataclass(frozen=True)
class Lora:
    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str = "all-linear"


@dataclass(frozen=True)
class Variant:
    """A model and how it trains. The weights and gradients of all 8 billion weights would need
    80 GB, so that the larger model trains an adapter.
    """

    shape: Shape
    lora: bool = False
    recomputed: bool = False

    def __str__(self) -> str:
        options = " lora" * self.lora + ", recomputed" * self.recomputed
        return f"{self.shape.name}{options}"


VARIANTS = (
    Variant(SMALLER),
    Variant(SMALLER, recomputed=True),
    Variant(LARGER, lora=True, recomputed=True),
)
SMALL_VARIANTS = (
    Variant(TINY),
    Variant(TINY, recomputed=True),
    Variant(TINY, lora=True, recomputed=True),
)
"""Without a GPU."""


@dataclass(frozen=True)
class StepFigures:
    """A measured step. share: of the operations per second of a large product that its necessary
    operations are. peak, reserved: bytes of the device that tensors had, and that PyTorch reserved.
    predicted: the estimate for tensors. failure: why there are no figures.
    """

    case: str
    variant: Variant
    loss: float = math.nan
    seconds: float = math.nan
    tokens_per_second: float = math.nan
    share: float = math.nan
    peak: int = 0
    reserved: int = 0
    predicted: int = 0
    failure: str = ""

    def __str__(self) -> str:
        name = f"{self.case:>12} {self.variant!s:22}"
        if self.failure:
            return f"{name} {self.failure}"
        return (
            f"{name} loss {self.loss:9.4f}  {self.seconds:8.3f} s  "
            f"{self.tokens_per_second:10,.0f} tokens/s  {self.share:5.2f} of the ceiling  "
            f"{self.peak / 1e9:5.1f} GB, reserved {self.reserved / 1e9:5.1f}, "
            f"predicted {self.predicted / 1e9:5.1f}"
        )


@dataclass
class ConstantReference:
    """A reference with cached values (nats, [T]): every token is equally likely."""

    vocabulary: int
    name: str = "constant"
    precision: torch.dtype = torch.bfloat16

    def digests(self) -> Digests:
        return Digests(self.name, self.name)

    def __call__(self, batch: MicroBatch) -> Tensor:
        return torch.where(batch.loss_mask, -math.log(self.vocabulary), 0.0)


def median_seconds(run: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median duration of a call, without two first calls, which compile."""
    durations: list[float] = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        durations.append(time.perf_counter() - start)
    return median(durations[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release_memory(device: torch.device) -> None:
    """Return the memory of deleted tensors to the device. The frames of an error may hold each
    other, and activations.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def product_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of bfloat16 matrices."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device)


def copy_rate(device: torch.device, size: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(size * size * 8, device=device, dtype=torch.bfloat16)
    out = torch.zeros_like(source)
    return 2 * source.nbytes / median_seconds(lambda: out.copy_(source), device)


def head_seconds(shape: Shape, tokens: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of the head, forward and backward, and those of its three products."""
    layer = nn.Linear(shape.hidden, shape.vocabulary, bias=False).to(device)
    hidden = torch.randn(tokens, shape.hidden, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, shape.vocabulary, (tokens,), device=device)
    grad = torch.randn(tokens, device=device)
    head = Head(layer, rounds_to_bfloat16=True)

    def run() -> None:
        hidden.grad = layer.weight.grad = None
        head(hidden, target)[0].backward(grad)

    weight, x = layer.weight.detach().bfloat16(), hidden.detach()
    slopes = torch.randn(tokens, shape.vocabulary, device=device).bfloat16()

    def multiply() -> None:
        torch.mm(x, weight.t())
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), x)

    return median_seconds(run, device), median_seconds(multiply, device)


def measure_steps(
    variant: Variant, device: torch.device, rate: float, repeats: int = REPEATS
) -> Iterator[StepFigures]:
    """Measure a step of each case. A case that runs out of memory has a failure, and the next ones
    are still measured.

    rate: operations per second of a large product.
    """
    torch.compiler.reset()
    try:
        policy = make_policy(variant, device)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        policy = None
    for case in CASES:
        if policy is None:
            yield StepFigures(case.name, variant, failure="out of memory while loading")
            continue
        try:
            figures = _measure_step(case, variant, policy, rate, repeats)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            figures = StepFigures(case.name, variant, failure="out of memory")
        clear(list(policy.parameters()), keep=False)
        release_memory(device)
        yield figures


def make_policy(variant: Variant, device: torch.device) -> PolicyModel:
    """Return a policy with random weights and products in bfloat16, compiled on a GPU."""
    torch.manual_seed(0)
    config = config_of(variant.shape)
    dtype = torch.bfloat16 if variant.lora else torch.float32
    if torch.cuda.is_available():
        with torch.device(device):
            model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    else:
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
        model.to(device)  # pyright: ignore[reportArgumentType]
    policy = build_policy(
        model,
        dtype=torch.bfloat16,
        lora=Lora() if variant.lora else None,
        checkpointing="full" if variant.recomputed else "off",
    )
    if not why_not(policy.device) and torch.cuda.is_available():
        compile_layers(policy)
    return policy


def _measure_step(
    case: Case, variant: Variant, policy: PolicyModel, rate: float, repeats: int
) -> StepFigures:
    device, on_gpu = policy.device, torch.cuda.is_available()
    case = replace(
        case,
        shape=variant.shape,
        lora=variant.lora,
        prompts=case.prompts if on_gpu else PROMPTS_ON_A_CPU,
    )
    units = [_with_advantages(unit) for unit in draw_sets(case, 1)[0]]
    method = METHODS[case.method]
    objective = Objective(
        method,
        method.resolve({}),
        policy,
        ConstantReference(variant.shape.vocabulary),
        SingleProcess(),
        BUDGET,
        MAX_LENGTH,
    )

    def run() -> float:
        loss = objective.run(units, backward=True).loss.item()
        clear(list(policy.parameters()))
        return loss

    seconds = median_seconds(run, device, repeats)
    peak = reserved = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss = run()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
    work = work_of(case, units)
    parts = [speed.Work(work.layers[k], work.head[k], work.attended[k]) for k in (0, 1)]
    checkpointing = "full" if variant.recomputed else "off"
    shape = shape_of(skeleton_of(policy.causal), lora=Lora() if variant.lora else None)
    memory = predict(
        shape,
        width=2,
        frozen_copy=False,
        checkpointing=checkpointing,
        compiled=policy.compiled,
        device=device,
    )
    predicted = memory.total(min(BUDGET, sum(work.layers))) - memory.program - memory.optimizer
    return StepFigures(
        case.name,
        variant,
        loss=loss,
        seconds=seconds,
        tokens_per_second=sum(work.layers) / seconds,
        share=speed.step(shape, *parts) / rate / seconds,
        peak=peak,
        reserved=reserved,
        predicted=predicted,
    )


def _with_advantages(unit: TokenizedExample) -> TokenizedExample:
    """A ranking with the columns of an online round: old log-probabilities and advantages."""
    return replace(
        unit,
        answers=tuple(
            replace(
                answer,
                columns=(("old", (-12.0,) * len(answer.ids)), ("adv", (score,) * len(answer.ids))),
            )
            for answer, score in zip(unit.answers, unit.scores, strict=True)
        )
        if unit.scores
        else unit.answers,
    )
