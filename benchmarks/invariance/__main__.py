"""python -m benchmarks.invariance: how much a step depends on its micro-batches and on the order of
its rows.

One optimizer step of kto, dpo and grpo on a random model of 2 layers is computed in one micro-batch
and again in 2 to 14, in two orders of the rows, with each `model.dtype`; and, for kto, one sequence
at a time, as models that do not support packing run. Some rows share a prompt. The output is the
largest difference from the first result: relative for the loss, the gradient's norm and the
gradient as a vector, in nats for `kl/raw` (kto's reference point before its clamp at 0) and in its
unit for `rewards/margins`. Exit status: 0 if every difference is within BOUNDS, 1 if not.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, fields

import torch

from valence.data.sampler import canonical_order
from valence.distributed.process_group import SingleProcess
from valence.models.build import build_policy, build_reference
from valence.models.reference import FrozenReference
from valence.reports.metrics import Meter
from valence.trainer.methods import METHODS
from valence.trainer.step import Objective
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample

ROWS, MAX_LENGTH = 14, 256
BUDGETS = (10_000, 800, 300, 1)
METHODS_MEASURED = ("kto", "dpo", "grpo")


@dataclass(frozen=True)
class Difference:
    """Largest differences: relative (loss, grad_norm, gradient), nats (kl), units of reward
    (margins).
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    gradient: float = 0.0
    kl: float = 0.0
    margins: float = 0.0

    def largest(self, other: Difference) -> Difference:
        return Difference(
            *(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )


BOUNDS: dict[torch.dtype, Difference] = {
    torch.float64: Difference(1e-10, 1e-7, 1e-6, 1e-10, 1e-10),
    torch.float32: Difference(1e-6, 1e-6, 1e-5, 1e-5, 1e-6),
    torch.bfloat16: Difference(1e-3, 1e-3, 1e-2, 2e-3, 1e-3),
}
"""Of micro-batches and order.

Weights are float32 under bfloat16 products. Gradients in float64 are those of a model whose norms
are in float32 whatever its weights are, as Llama's and most others' are.
"""
LAYOUT_BOUNDS: dict[torch.dtype, Difference] = {
    torch.float64: BOUNDS[torch.float64],
    torch.float32: Difference(1e-5, 1e-5, 1e-4, 1e-4, 1e-5),
    torch.bfloat16: Difference(1e-2, 5e-2, 1e-1, 5e-2, 2e-2),
}
"""Of packed sequences and one at a time."""


def model(seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(8)  # so that log-probabilities of the two models differ by some nats
    return model.eval()


def rows(kind: Kind, seed: int = 0) -> list[TokenizedExample]:
    """Rows of uneven lengths; some share a prompt."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 97) for _ in range(draw.randint(low, high)))

    prompts = [ids(20, 120) for _ in range(ROWS - 4)]
    prompts += prompts[:4]
    sides = {"preference": 2, "ranking": 4}.get(kind, 1)
    examples: list[TokenizedExample] = []
    for i, prompt in enumerate(prompts):
        answers = tuple(
            TokenizedCompletion(a, (True,) * len(a)) for a in (ids(10, 60) for _ in range(sides))
        )
        examples.append(TokenizedExample(
            id=f"row{i}", origin=Origin("made.jsonl", i + 1), kind=kind, prompt_ids=prompt,
            prompt_mask=(False,) * len(prompt), answers=answers,
            label=i % 3 != 0 if kind == "judgement" else None, weight=1.0 + i % 2,
            scores=tuple(draw.random() for _ in range(sides)) if kind == "ranking" else (),
        ))  # fmt: skip
    return examples


def differences(
    name: str, dtype: torch.dtype, *, packed: bool = True
) -> tuple[Difference, set[int]]:
    """Largest differences of a step from the same in one packed micro-batch, and the numbers of
    micro-batches. packed: False to compare with one sequence at a time."""
    policy = build_policy(
        model(0).to(torch.float64 if dtype == torch.float64 else torch.float32), dtype=dtype
    )
    other = model(1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    reference = build_reference(policy, fresh_adapter=False, model=other, name="another")
    assert isinstance(reference, FrozenReference)
    method = METHODS[name]
    units = rows(method.kind)

    def step(
        units: list[TokenizedExample], budget: int
    ) -> tuple[dict[str, float], torch.Tensor, int]:
        policy.zero_grad()
        objective = Objective(
            method, method.resolve({}), policy, reference, SingleProcess(), budget, MAX_LENGTH
        )
        outcome = objective.run([units[i] for i in canonical_order(units, 0, 0)], backward=True)
        meter = Meter()
        meter.pool(outcome.metrics)
        gradient = torch.cat(
            [p.grad.double().flatten() for p in policy.parameters() if p.grad is not None]
        )
        return (
            {"loss": float(outcome.loss)} | meter.reduce(objective.group),
            gradient,
            outcome.micro_batches,
        )

    numbers, gradient, _ = step(units, BUDGETS[0])
    difference, micro_batches = Difference(), set[int]()
    for engine in (policy, reference.engine):
        engine.lay_out(packed=packed)
    for seed in range(2):
        shuffled = random.Random(seed).sample(units, len(units))
        for budget in BUDGETS:
            again, cut_gradient, count = step(shuffled, budget)
            micro_batches.add(count)

            def difference_of(metric: str, again: dict[str, float] = again) -> float:
                return abs(again[metric] - numbers[metric]) if metric in numbers else 0.0

            difference = difference.largest(Difference(
                abs(again["loss"] - numbers["loss"]) / abs(numbers["loss"]),
                float(abs(cut_gradient.norm() - gradient.norm()) / gradient.norm()),
                float((cut_gradient - gradient).norm() / gradient.norm()),
                difference_of("kl/raw"), difference_of("rewards/margins"),
            ))  # fmt: skip
    return difference, micro_batches


CASES = [(dtype, name, True) for dtype in BOUNDS for name in METHODS_MEASURED]
CASES += [(dtype, "kto", False) for dtype in BOUNDS]


def exceeded(difference: Difference, dtype: torch.dtype, packed: bool) -> list[str]:
    """Names of the numbers that differ by more than their bound."""
    bound = (BOUNDS if packed else LAYOUT_BOUNDS)[dtype]
    return [
        f.name
        for f in fields(Difference)
        if not getattr(difference, f.name) <= getattr(bound, f.name)
    ]


def main() -> int:
    names = [f.name for f in fields(Difference)]
    print(
        f"{'dtype':<10}{'method':<8}{'micro-batches':<16}"
        + "".join(f"{name:>11}" for name in names)
    )
    holds = True
    for dtype, name, packed in CASES:
        difference, counts = differences(name, dtype, packed=packed)
        holds &= not exceeded(difference, dtype, packed)
        numbers = "".join(f"{getattr(difference, name):>11.1e}" for name in names)
        cuts = ",".join(map(str, sorted(counts))) if packed else "one by one"
        print(f"{str(dtype).removeprefix('torch.'):<10}{name:<8}{cuts:<16}{numbers}", flush=True)
    print("held" if holds else "short")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
