"""The minimum time of a step on this machine: its necessary matrix multiplications at the rates
that PyTorch reaches for their shapes.

Necessary is: each distinct prompt token and each trained token once through the layers, forward and
backward; each measured token (KTO's mismatched completions, and all tokens of a teacher) forward;
the head at trained and measured tokens alone; attention over what each token sees. Nothing is
counted for norms, rotations, activations, softmax, casts, or reading weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.step.cases import Case, Shape
from benchmarks.step.valence_side import mismatched
from valence.types import TokenizedExample

REPEATS = 2
GRAIN = 128  # rates are measured for multiples of this number of tokens
RANK = 16  # rank of the adapter


@dataclass(frozen=True)
class Work:
    """The minimum number of tokens that some steps must process, with a gradient and without.

    layers: tokens through the layers. head: tokens through the head (almost none for a reward
    model).
    attended: pairs of a token and a token that it attends to, which may be itself. mean: mean
    length of a sequence.
    """

    layers: tuple[int, int]
    head: tuple[int, int]
    attended: tuple[int, int]
    mean: int


def floor(case: Case, units: list[TokenizedExample], dtype: torch.dtype) -> float:
    """Minimum seconds of a step of these units, at rates measured now."""
    linear_seconds.cache_clear()
    attention_seconds.cache_clear()
    shape, work = case.shape, work_of(case, units)
    trained, measured = work.layers
    total = 0.0
    for inputs, outputs, count in linear_layers(shape):
        forward, to_inputs, to_weights = linear_seconds(_rounded(trained), inputs, outputs, dtype)
        backward = (
            to_inputs + (RANK / inputs + RANK / outputs) * 3 * forward
            if case.lora
            else to_inputs + to_weights
        )
        total += count * shape.layers * (trained * (forward + backward) + measured * forward)
    if work.head[0]:
        forward, to_inputs, to_weights = linear_seconds(
            _rounded(work.head[0]), shape.hidden, shape.vocabulary, dtype
        )
        total += (
            work.head[0] * (forward + to_inputs + (0 if case.lora else to_weights))
            + work.head[1] * forward
        )
    scores, mixed = attention_seconds(_rounded(work.mean), shape.heads, shape.head_dim, dtype)
    # Backward: the gradient of the scores' weights, and those of queries, keys and values.
    attended, attended_no_grad = work.attended
    return total + shape.layers * (
        attended * (2 * scores + 4 * mixed) + attended_no_grad * (scores + mixed)
    )


def work_of(case: Case, units: list[TokenizedExample]) -> Work:
    """Count the necessary work of a step."""
    prompts = {unit.prompt_ids for unit in units}
    answers = [(len(unit.prompt_ids), len(answer.ids)) for unit in units for answer in unit.answers]
    extra = (
        [(len(u.prompt_ids), len(u.answers[0].ids)) for u in mismatched(units)]
        if case.method == "kto"
        else []
    )
    trained, measured = sum(n for _, n in answers), sum(n for _, n in extra)
    attended = sum(_pairs(0, len(p)) for p in prompts) + sum(_pairs(p, n) for p, n in answers)
    through_layers = sum(map(len, prompts)) + trained
    no_grad = measured, measured, sum(_pairs(p, n) for p, n in extra)
    if case.method == "distill":  # the teacher reads what the policy reads
        no_grad = through_layers, trained, attended
    return Work(
        layers=(through_layers, no_grad[0]),
        head=(0, 0) if case.is_reward_model else (trained, no_grad[1]),
        attended=(attended, no_grad[2]),
        mean=sum(p + n for p, n in answers) // len(answers),
    )


def _pairs(before: int, count: int) -> int:
    """Pairs of a query and a key for ``count`` tokens after ``before`` others, which attend to
    themselves and all earlier tokens.
    """
    return count * before + count * (count + 1) // 2


def linear_layers(shape: Shape) -> list[tuple[int, int, int]]:
    """(inputs, outputs, count) of the matrices of one layer."""
    query_size, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (shape.hidden, query_size, 1), (shape.hidden, shared, 2), (query_size, shape.hidden, 1),
        (shape.hidden, shape.intermediate, 2), (shape.intermediate, shape.hidden, 1),
    ]  # fmt: skip


@cache
def linear_seconds(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Seconds per token: the product, its gradient to the inputs, and that to the
    weights.
    """
    sizes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    x, w, g = (torch.randn(size, dtype=dtype) for size in sizes)
    durations = [_seconds(lambda: x @ w.t()), _seconds(lambda: g @ w), _seconds(lambda: g.t() @ x)]
    return durations[0] / tokens, durations[1] / tokens, durations[2] / tokens


@cache
def attention_seconds(
    length: int, heads: int, width: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds per pair of tokens, all heads: the product over the heads' width, and one
    over tokens.
    """
    sizes = (heads, length, width), (heads, length, width), (heads, length, length)
    q, k, weights = (torch.randn(size, dtype=dtype) for size in sizes)
    durations = [_seconds(lambda: q @ k.transpose(1, 2)), _seconds(lambda: weights @ k)]
    return durations[0] / length**2, durations[1] / length**2


def _rounded(tokens: int) -> int:
    return -(-tokens // GRAIN) * GRAIN


def _seconds(call: Callable[[], Tensor]) -> float:
    """Minimum seconds of a call, after a warm-up call."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
