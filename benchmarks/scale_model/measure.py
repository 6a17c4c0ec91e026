"""Measure the inputs of the cost model on this machine, and the steps whose times it predicts.

Two processes run this program. ``python -m benchmarks.scale_model.measure FILE ROUNDS`` under
``valence.distributed.launcher``: rank 0 writes the result.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from valence.distributed.fsdp2 import shard
from valence.distributed.process_group import Group, SingleProcess, gather_objects, start
from valence.methods import METHODS
from valence.models import speed
from valence.models.build import build_policy
from valence.models.policy_model import PolicyModel
from valence.models.shape import decoder_layers, shape_of
from valence.models.speed import Work
from valence.training.step import Objective, optimizer_step
from valence.types import Origin, TokenizedCompletion, TokenizedExample

HIDDEN, INNER, LAYERS, VOCABULARY = 512, 1536, 4, 4096
BUDGET = 256
STEPS = {"512 tokens": 512, "1,536 tokens": 1536}
"""Number of tokens of the predicted steps. With few tokens, communication dominates the time."""
NUM_PROCESSES = {"one process": 1, "two processes": 2, "two, sharded": 2}
"""Number of training processes of each variant."""
GRADIENT_BYTES = (1 << 16, 1 << 24)
"""Sizes of the gradients in the measured all-reduces."""
UPDATED_WEIGHTS = 1 << 22
"""Number of weights in the measured optimizer update."""
UNCOUPLED_TOKENS = 1024
"""Number of tokens of the step that measures the speed of processes without communication."""


def rows(tokens: int) -> list[TokenizedExample]:
    """Demonstrations of 24 to 96 tokens, ``tokens`` in total."""
    rng, examples, remaining = random.Random(tokens), list[TokenizedExample](), tokens
    while remaining > 0:
        length = min(remaining, rng.randint(24, 96))
        ids = tuple(rng.randrange(3, VOCABULARY) for _ in range(length + 2))
        answer = TokenizedCompletion(ids[2:], (True,) * length)
        examples.append(
            TokenizedExample(
                id=str(len(examples)),
                origin=Origin("made", len(examples) + 1),
                kind="demonstration",
                prompt_ids=ids[:2],
                prompt_mask=(False, False),
                answers=(answer,),
            )
        )
        remaining -= length
    return examples


class Variant:
    """Steps of a policy with learning rate 0, so that all of them have the same loss. group: the
    processes that train together.
    """

    def __init__(self, policy: PolicyModel, group: Group) -> None:
        method = METHODS["sft"]
        self.objective = Objective(
            method, method.resolve({}), policy, None, group, BUDGET, max_length=256
        )
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0)
        self.loss = 0.0

    def step(self, tokens: int) -> None:
        """Run one optimizer step on ``rows(tokens)``."""
        self.loss = float(optimizer_step(self.objective, self.optimizer, rows(tokens), 1.0)[0].loss)

    def operations(self, tokens: int) -> float:
        """Floating-point operations of a step that one process runs."""
        return sum(
            speed.step(shape_of(self.objective.policy.causal), work)
            for work in self.micro_batch_work(tokens)
        )

    def micro_batch_work(self, tokens: int) -> list[Work]:
        """Work of each micro-batch of this process in a step, counted on its tokens."""
        units = rows(tokens)
        return [
            Work(float(len(b.tokens)), float(b.loss_mask.sum()), float((b.position_ids + 1).sum()))
            for b in self.objective.divide(units).local
        ]


class Timer:
    """Repeated measurements (s) by name, of one process alone or of both at once."""

    def __init__(self, group: Group) -> None:
        self.group, self.seconds = group, dict[str, list[float]]()

    def time(self, name: str, processes: int, call: Callable[..., object], *arguments: Any) -> None:
        """Time a call in the first ``processes`` processes, and record the maximum."""
        self.group.barrier(name)
        local_seconds = _seconds(call, *arguments) if self.group.rank < processes else 0.0
        self.seconds.setdefault(name, []).append(
            float(self.group.gather(torch.tensor([local_seconds], dtype=torch.float64)).max())
        )

    def medians(self) -> dict[str, float]:
        """Median seconds by name."""
        return {name: median(values) for name, values in self.seconds.items()}


def _seconds(call: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def make_variants(group: Group) -> dict[str, Variant]:
    """The variants of NUM_PROCESSES, on the same random model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=VOCABULARY,
        )
    )
    replicated, sharded = (
        build_policy(source, dtype=torch.float32) for source in (model, deepcopy(model))
    )
    any_group: Any = group
    shard(sharded, decoder_layers(sharded.causal), any_group, sum_every_backward=True)
    return dict(
        zip(
            NUM_PROCESSES,
            (
                Variant(replicated, SingleProcess()),
                Variant(replicated, group),
                Variant(sharded, group),
            ),
            strict=True,
        )
    )


def time_all(group: Group, variants_by_name: dict[str, Variant], rounds: int) -> dict[str, float]:
    """Median seconds of all measurements over ``rounds`` rounds."""
    gradients = [torch.zeros(size // 4, requires_grad=True) for size in GRADIENT_BYTES]
    weights = torch.zeros(UPDATED_WEIGHTS, requires_grad=True)
    for buffer in (*gradients, weights):
        buffer.grad = torch.ones_like(buffer)
    update = torch.optim.AdamW([weights], lr=1e-6).step
    timer = Timer(group)
    for round_index in range(rounds + 1):
        for name, variant in variants_by_name.items():
            # in turn with the steps, so that other load on the machine affects both
            timer.time(
                f"uncoupled, {NUM_PROCESSES[name]}",
                NUM_PROCESSES[name],
                variants_by_name["one process"].step,
                UNCOUPLED_TOKENS,
            )
            for step, tokens in STEPS.items():
                timer.time(f"{step}, {name}", NUM_PROCESSES[name], variant.step, tokens)
        for processes in (1, 2):
            timer.time(f"update, {processes}", processes, update)
        for size, buffer in zip(GRADIENT_BYTES, gradients, strict=True):
            timer.time(f"sum, {size}", 2, group.reduce_gradients, [buffer])
        if not round_index:
            timer.seconds.clear()  # the first round includes initialization
    return timer.medians()


def measure_all(group: Group, rounds: int) -> dict[str, Any]:
    """Median seconds by name, the shape of the model, the work of each step, and the loss and the
    operations of each process's micro-batches by step and variant.
    """
    variants_by_name = make_variants(group)
    shape = shape_of(variants_by_name["one process"].objective.policy.causal)
    results: dict[str, Any] = {
        "seconds": time_all(group, variants_by_name, rounds),
        "shape": asdict(shape),
        "uncoupled": variants_by_name["one process"].operations(UNCOUPLED_TOKENS),
    }
    for step, tokens in STEPS.items():
        for name, variant in variants_by_name.items():
            variant.step(tokens) if group.rank < NUM_PROCESSES[name] else None
            costs = [speed.step(shape, work) for work in variant.micro_batch_work(tokens)]
            results[f"{step}, {name}"] = {
                "loss": variant.loss,
                "operations": gather_objects(group, costs)[: NUM_PROCESSES[name]],
            }
        works = variants_by_name["one process"].micro_batch_work(tokens)
        results[step] = [sum(getattr(work, slot) for work in works) for slot in Work.__slots__]
    return results


def main() -> int:
    file, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    group = start(device="cpu")
    results = measure_all(group, int(rounds))
    if group.rank == 0:
        Path(file).write_text(json.dumps(results), encoding="utf-8")
    group.barrier("end")
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
