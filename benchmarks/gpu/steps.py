"""Part B: the rates of products and copies, the head, and complete steps without the optimizer's
update, with their memory against its prediction. Weights and tokens are random.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.step.cases import PROMPT_400, TINY, Case, Lengths, Shape
from benchmarks.step.floor import Work, linear_layers, work_of
from benchmarks.step.inputs import MAX_LENGTH, config_of, draw_sets
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS
from valence.models.build import build_policy
from valence.models.checkpointing import Checkpointing
from valence.models.compiling import compile_layers, why_not
from valence.models.digest import Digests
from valence.models.divergence import Distributions
from valence.models.gradients import clear
from valence.models.head import Head
from valence.models.memory import predict
from valence.models.policy_model import PolicyModel
from valence.models.shape import shape_of
from valence.training.step import Objective
from valence.types import MicroBatch, TokenizedExample

BUDGET = 16_384  # tokens of a micro-batch
REPEATS = 3
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
SHORT = Case(
    "sft, documents of 160", "sft", prompts=96, prompt=Lengths(100, 101), completion=Lengths(60, 61)
)
"""A micro-batch of many short documents."""
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

    @property
    def checkpointing(self) -> Checkpointing:
        return "full" if self.recomputed else "off"

    def __str__(self) -> str:
        options = " lora" * self.lora + ", recomputed" * self.recomputed
        return f"{self.shape.name}{options}"


VARIANTS = (
    Variant(SMALLER),
    Variant(LARGER, lora=True, recomputed=True),
    Variant(SMALLER, lora=True),
)
SMALL_VARIANTS = (
    Variant(TINY),
    Variant(TINY, lora=True, recomputed=True),
    Variant(TINY, lora=True),
)
"""Without a GPU."""
LIMITS = {"peak_over_predicted": 1.05, "reserved_over_predicted": 1.15}
SHARES = {"1.5b kto": 0.35, "8b lora, recomputed dpo": 0.42}
"""Minimum share of the rate of a large product that a step should reach."""


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

    def distributions(self, batch: MicroBatch, rows: Tensor, top_k: int | None) -> Distributions:
        raise NotImplementedError("its distributions have no logits")


def median_seconds(run: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median duration of a call, without two first calls, which compile. A rehearsal
    makes a single call.
    """
    durations: list[float] = []
    num_first, repeats = (2, repeats) if torch.cuda.is_available() else (0, 1)
    for _ in range(num_first + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        durations.append(time.perf_counter() - start)
    return median(durations[num_first:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release_memory() -> None:
    """Return the memory of deleted tensors to a GPU. The frames of an error may hold each other,
    and activations.
    """
    if torch.cuda.is_available():
        gc.collect()
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


@cache
def ceilings(device: torch.device) -> dict[str, float]:
    """Return the rates of a large product in bfloat16 and of a copy, and the time of the head
    relative to its products.
    """
    on_gpu = torch.cuda.is_available()
    size = 8192 if on_gpu else 256
    seconds, products = head_seconds(*((LARGER, 8192) if on_gpu else (TINY, 256)), device)
    return {
        "product_tflops": product_rate(device, size) / 1e12,
        "copy_tb_per_s": copy_rate(device, size) / 1e12,
        "head_over_products": seconds / products,
    }


@lru_cache(maxsize=1)
def make_policy(variant: Variant, device: torch.device) -> PolicyModel:
    """Return a policy with random weights and products in bfloat16, compiled on a GPU."""
    release_memory()
    torch.compiler.reset()
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
        checkpointing=variant.checkpointing,
    )
    if not why_not(policy.device) and torch.cuda.is_available():
        compile_layers(policy)
    return policy


Step = tuple[PolicyModel, list[TokenizedExample], Callable[[], float]]


def make_step(case: Case, variant: Variant, device: torch.device) -> Step:
    """Return a policy, the rows of a step, and a function that runs it and returns its loss."""
    # The policy of another variant goes first: both together may not fit.
    policy = make_policy(variant, device)
    clear(list(policy.parameters()), keep=False)
    release_memory()
    case = replace(
        case,
        shape=variant.shape,
        lora=variant.lora,
        prompts=case.prompts if torch.cuda.is_available() else PROMPTS_ON_A_CPU,
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

    return policy, units, run


def measure_step(
    case: Case, variant: Variant, device: torch.device, attention: str | None = None
) -> dict[str, Any]:
    """Measure a step, with this attention backend if one is named: tokens per second; the share of
    the operations per second of a large product that its necessary operations are; the memory of
    tensors and that which PyTorch reserved (GB), and both relative to the estimate for tensors.
    """
    step = make_step(case, variant, device)
    policy = step[0]
    default = policy.attention_backend
    policy.lay_out(packed=policy.packs, attention=attention)
    try:
        return _measure(case, variant, device, step)
    finally:  # the policy is used again
        policy.lay_out(packed=policy.packs, attention=default)


def _measure(case: Case, variant: Variant, device: torch.device, step: Step) -> dict[str, Any]:
    policy, units, run = step
    seconds = median_seconds(run, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss = run()
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss}")
    peak = reserved = 0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
    work = work_of(case, units)
    shape = shape_of(policy.causal)
    memory = predict(
        shape,
        width=2,
        frozen_copy=False,
        checkpointing=variant.checkpointing,
        compiled=policy.compiled,
        device=device,
    )
    predicted = memory.total(min(BUDGET, sum(work.layers))) - memory.program - memory.optimizer
    rate = ceilings(device)["product_tflops"] * 1e12
    return {
        "loss": loss,
        "seconds": seconds,
        "tokens_per_s": sum(work.layers) / seconds,
        "share": _operations(variant, work) / rate / seconds,
        "peak_gb": peak / 1e9,
        "peak_over_predicted": peak / predicted,
        "reserved_over_predicted": reserved / predicted,
        "attention": policy.attention_backend,
        "compiled": policy.compiled,
    }


def _operations(variant: Variant, work: Work) -> float:
    """Floating-point operations that a step needs in any layout, without recomputed layers."""
    shape = variant.shape
    linear = sum(inputs * outputs * count for inputs, outputs, count in linear_layers(shape))
    trained, measured = (
        2 * shape.layers * linear * tokens
        + 4 * shape.layers * shape.heads * shape.head_dim * pairs
        + 2 * shape.hidden * shape.vocabulary * scored
        for tokens, scored, pairs in zip(work.layers, work.head, work.attended, strict=True)
    )
    return (2 if variant.lora else 3) * trained + measured


def profile_step(
    case: Case, variant: Variant, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Profile a step: a trace and a table of the operators by their time on the device. Return the
    share of the time in which the device computed.
    """
    _, _, run = make_step(case, variant, device)
    for _ in range(2):
        run()
    synchronize(device)
    start = time.perf_counter()
    with torch.profiler.profile() as profiler:
        run()
        synchronize(device)
    seconds = time.perf_counter() - start
    by_time = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by_time, row_limit=40)
    (folder / "profile.txt").write_text(f"{variant} {case.name}\n{table}", encoding="utf-8")
    profiler.export_chrome_trace(str(folder / "profile.json.gz"))
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.profiler.DeviceType.CUDA
    )
    busy, end = 0.0, float("-inf")
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {"step": f"{variant} {case.name}", "busy": busy / 1e6 / seconds}


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
