"""python -m benchmarks.size [--quick]: check that the cost of a micro-batch grows only with its
number of tokens.

Forward and backward pass of one micro-batch (bfloat16 with float32 weights, compiled layers where
there is a compiler) on random tokens: (1) answers of 256 tokens to prompts of 256, in micro-batches
of 1k to 64k tokens; (2) 1 to 64 answers of 64 tokens to one prompt of 512. Exit status: 0 all
figures are within their bars, 1 some are not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.step import THREADS
from benchmarks.step.cases import SMALL
from benchmarks.step.inputs import save_models
from benchmarks.step.memory import peak_above_idle
from valence.batching.micro_batches import make_micro_batch
from valence.models.build import build_policy, load_model
from valence.models.compiling import compile_layers, why_not
from valence.models.policy_model import PolicyModel
from valence.training.models import best_device
from valence.types import MicroBatch, Origin, TokenizedCompletion, TokenizedExample

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
ANSWERS = (1, 2, 4, 8, 16, 32, 64)
MIN_SPEED, MAX_MEMORY, MAX_SECONDS = 0.8, 1.3, 1.3
"""Minimum speed, and maximum memory per token, of the largest size relative to 4k tokens; maximum
time per distinct token with many answers relative to one.
"""


def micro_batch(
    prompt: int, answer: int, prompts: int, answers: int, draw: random.Random, device: torch.device
) -> MicroBatch:
    """Random tokens: ``prompts`` prompts with ``answers`` answers each. prompt, answer: lengths."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, SMALL.vocabulary) for _ in range(count))

    units = [
        TokenizedExample(
            id=str(i),
            origin=Origin("made", i + 1),
            kind="ranking",
            prompt_ids=ids(prompt),
            prompt_mask=(False,) * prompt,
            answers=tuple(
                TokenizedCompletion(ids(answer), (True,) * answer) for _ in range(answers)
            ),
        )
        for i in range(prompts)
    ]
    return make_micro_batch(units, device=device)


def measure(engine: PolicyModel, batch: MicroBatch, repeats: int) -> tuple[float, float]:
    """Median seconds, and peak memory above idle (MB) without the gradients of the weights, of a
    forward and backward pass.
    """

    def step() -> float:
        start = time.perf_counter()
        engine(batch).logp.sum().backward()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step()  # compiles, and allocates memory
    seconds, peak = peak_above_idle(step, engine.device)
    return median([seconds, *(step() for _ in range(repeats - 1))]), peak


def sizes(engine: PolicyModel, largest: int, repeats: int) -> list[tuple[int, float, float]]:
    """Measure micro-batches of increasing size: tokens, tokens per second, bytes per token."""
    print(f"{'tokens':>8}{'seconds':>9}{'tokens/s':>10}{'peak MB':>9}{'kB/token':>10}", flush=True)
    results: list[tuple[int, float, float]] = []
    for tokens in (size for size in SIZES if size <= largest):
        batch = micro_batch(256, 256, tokens // 512, 1, random.Random(tokens), engine.device)
        seconds, peak = measure(engine, batch, repeats)
        results.append((tokens, tokens / seconds, peak * 1e6 / tokens))
        print(
            f"{tokens:8}{seconds:9.2f}{tokens / seconds:10.0f}{peak:9.0f}"
            f"{peak * 1e3 / tokens:10.1f}",
            flush=True,
        )
    return results


def many_answers(engine: PolicyModel, max_answers: int, repeats: int) -> list[tuple[int, float]]:
    """Measure one prompt with many answers: number of answers, seconds per distinct token."""
    print(
        f"\n{'answers':>8}{'tokens':>9}{'unshared':>9}{'seconds':>9}{'tokens/s':>10}{'unshared/s':>12}",
        flush=True,
    )
    results: list[tuple[int, float]] = []
    for answers in (count for count in ANSWERS if count <= max_answers):
        batch = micro_batch(512, 64, 1, answers, random.Random(answers), engine.device)
        seconds, _ = measure(engine, batch, repeats)
        distinct, unshared = len(batch.tokens), answers * (512 + 64)
        results.append((answers, seconds / distinct))
        print(
            f"{answers:8}{distinct:9}{unshared:9}{seconds:9.3f}"
            f"{distinct / seconds:10.0f}{unshared / seconds:12.0f}",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 8k tokens and 16 answers")
    quick = parser.parse_args().quick
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    with TemporaryDirectory() as scratch:
        folder = save_models(SMALL, Path(scratch), lora=False).policy
        engine = build_policy(
            load_model(str(folder), dtype=torch.float32).to(best_device()), dtype=torch.bfloat16
        )
    if not why_not(engine.device):
        compile_layers(engine)
    by_size = sizes(engine, 8192 if quick else SIZES[-1], 3)
    by_answers = many_answers(engine, 16 if quick else ANSWERS[-1], 5)
    rate, memory = next((rate, memory) for tokens, rate, memory in by_size if tokens == 4096)
    figures = [
        ("speed", by_size[-1][1] / rate, MIN_SPEED, by_size[-1][1] / rate >= MIN_SPEED),
        ("memory", by_size[-1][2] / memory, MAX_MEMORY, by_size[-1][2] / memory <= MAX_MEMORY),
        (
            "answers",
            by_answers[-1][1] / by_answers[0][1],
            MAX_SECONDS,
            by_answers[-1][1] / by_answers[0][1] <= MAX_SECONDS,
        ),
    ]
    summary = " ".join(
        f"{name} {value:.2f} (bar {bar:g}) {'held' if is_within_bar else 'short'}"
        for name, value, bar, is_within_bar in figures
    )
    print(f"\n{summary}")
    return 0 if all(is_within_bar for *_, is_within_bar in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
