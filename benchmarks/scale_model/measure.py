"""One of two processes that measure the inputs of the model on this machine, and the steps that it
predicts.

``python -m benchmarks.scale_model.measure FILE ROUNDS`` under ``valence.distributed.launcher``:
rank 0 writes the result.
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
from valence.models import speed
from valence.models.build import build_policy
from valence.models.policy_model import PolicyModel
from valence.models.shape import decoder_layers, shape_of
from valence.models.speed import Work
from valence.trainer.methods import METHODS
from valence.trainer.step import Objective, optimizer_step
from valence.types import Origin, TokenizedCompletion, TokenizedExample

HIDDEN, INNER, LAYERS, VOCABULARY = 512, 1536, 4, 4096
BUDGET = 256
STEPS = {"512 tokens": 512, "1,536 tokens": 1536}
"""Tokens of the predicted steps: few, so that communication counts, and many."""
WAYS = {"one process": 1, "two processes": 2, "two, sharded": 2}
SENT = (1 << 16, 1 << 24)
"""Bytes of the gradients whose sums are timed."""
UPDATED = 1 << 22
"""Weights whose update is timed."""
SPACING = 1024
"""Tokens of the step that measures the speed of a process that waits for no other."""


def rows(tokens: int) -> list[TokenizedExample]:
    """Demonstrations of uneven lengths."""
    draw, examples, left = random.Random(tokens), list[TokenizedExample](), tokens
    while left > 0:
        length = min(left, draw.randint(24, 96))
        ids = tuple(draw.randrange(3, VOCABULARY) for _ in range(length + 2))
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
        left -= length
    return examples


class Way:
    """Steps of a model that learns nothing, so that all of them have the same loss. group: of the
    processes that take part.
    """

    def __init__(self, policy: PolicyModel, group: Group) -> None:
        method = METHODS["sft"]
        self.objective = Objective(
            method, method.resolve({}), policy, None, group, BUDGET, max_length=256
        )
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0)
        self.loss = 0.0

    def step(self, tokens: int) -> None:
        self.loss = float(
            optimizer_step(self.objective, self.optimizer, rows(tokens), iter(()), 1.0)[0].loss
        )

    def operations(self, tokens: int) -> float:
        """Of a step that this process runs alone."""
        return sum(
            speed.step(shape_of(self.objective.policy.causal), work)
            for work in self.laid_out(tokens)
        )

    def laid_out(self, tokens: int) -> list[Work]:
        """What each of this process's micro-batches of a step runs, counted on the rows."""
        units = rows(tokens)
        return [
            Work(float(len(b.tokens)), float(b.loss_mask.sum()), float((b.position_ids + 1).sum()))
            for b in self.objective.divide(units).local
        ]


class Timer:
    """Seconds by name, each measured several times in turn, by one process while the other waits or
    by both at once.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.seconds = group, dict[str, list[float]]()

    def time(self, name: str, processes: int, call: Callable[..., object], *arguments: Any) -> None:
        """As long as the slower one takes."""
        self.group.barrier(name)
        local_seconds = _seconds(call, *arguments) if self.group.rank < processes else 0.0
        self.seconds.setdefault(name, []).append(
            float(self.group.gather(torch.tensor([local_seconds], dtype=torch.float64)).max())
        )

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.seconds.items()}


def _seconds(call: Callable[..., object], *arguments: Any) -> float:
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def ways(group: Group) -> dict[str, Way]:
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
    replicated, split = (
        build_policy(source, dtype=torch.float32) for source in (model, deepcopy(model))
    )
    several: Any = group
    shard(split, decoder_layers(split.causal), several, sum_every_backward=True)
    return dict(
        zip(
            WAYS,
            (Way(replicated, SingleProcess()), Way(replicated, group), Way(split, group)),
            strict=True,
        )
    )


def timed(group: Group, variants: dict[str, Way], rounds: int) -> dict[str, float]:
    """Seconds of all measurements, as medians of ``rounds`` rounds."""
    sent = [torch.zeros(size // 4, requires_grad=True) for size in SENT]
    weights = torch.zeros(UPDATED, requires_grad=True)
    for buffer in (*sent, weights):
        buffer.grad = torch.ones_like(buffer)
    update = torch.optim.AdamW([weights], lr=1e-6).step
    timer = Timer(group)
    for done in range(rounds + 1):
        for name, way in variants.items():
            # what slows these slows that, too
            timer.time(f"apart, {WAYS[name]}", WAYS[name], variants["one process"].step, SPACING)
            for step, tokens in STEPS.items():
                timer.time(f"{step}, {name}", WAYS[name], way.step, tokens)
        for processes in (1, 2):
            timer.time(f"update, {processes}", processes, update)
        for size, buffer in zip(SENT, sent, strict=True):
            timer.time(f"sum, {size}", 2, group.reduce_gradients, [buffer])
        if not done:
            timer.seconds.clear()  # what is set up at first
    return timer.medians()


def measured(group: Group, rounds: int) -> dict[str, Any]:
    """Seconds by name, the shape, and of each step its work and, by the way it was run, its loss
    and the operations of each process's micro-batches.
    """
    variants = ways(group)
    shape = shape_of(variants["one process"].objective.policy.causal)
    results: dict[str, Any] = {
        "seconds": timed(group, variants, rounds),
        "shape": asdict(shape),
        "apart": variants["one process"].operations(SPACING),
    }
    for step, tokens in STEPS.items():
        for name, way in variants.items():
            way.step(tokens) if group.rank < WAYS[name] else None
            costs = [speed.step(shape, work) for work in way.laid_out(tokens)]
            results[f"{step}, {name}"] = {
                "loss": way.loss,
                "operations": gather_objects(group, costs)[: WAYS[name]],
            }
        works = variants["one process"].laid_out(tokens)
        results[step] = [sum(getattr(work, slot) for work in works) for slot in Work.__slots__]
    return results


def main() -> int:
    file, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    group = start(device="cpu")
    results = measured(group, int(rounds))
    if group.rank == 0:
        Path(file).write_text(json.dumps(results), encoding="utf-8")
    group.barrier("end")
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
