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
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from valence.data.sampler import canonical_order
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS
from valence.models.build import build_policy, build_reference
from valence.models.reference import FrozenReference
from valence.training.metrics import Meter
from valence.training.step import Objective
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample

ROWS, MAX_LENGTH = 14, 256
BUDGETS = (10_000, 800, 300, 1)
CUTS = tuple((seed, budget) for seed in range(2) for budget in BUDGETS)
"""Seeds of the order of the rows, and tokens of a micro-batch."""
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
"""Maximum differences between micro-batch sizes and orders of the rows.

In bfloat16 the weights are float32. In float64 gradients are less exact than losses, because Llama
and most other models compute their normalization layers in float32.
"""
LAYOUT_BOUNDS: dict[torch.dtype, Difference] = {
    torch.float64: BOUNDS[torch.float64],
    torch.float32: Difference(1e-5, 1e-5, 1e-4, 1e-4, 1e-5),
    torch.bfloat16: Difference(1e-2, 5e-2, 1e-1, 5e-2, 2e-2),
}
"""Maximum differences between packed sequences and one sequence at a time."""


def model(seed: int) -> torch.nn.Module:
    """A random Llama of two layers."""
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
    """Rows of different lengths, some of which share a prompt."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 97) for _ in range(rng.randint(low, high)))

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
            scores=tuple(rng.random() for _ in range(sides)) if kind == "ranking" else (),
        ))  # fmt: skip
    return examples


def differences(
    name: str,
    dtype: torch.dtype,
    *,
    packed: bool = True,
    cuts: Sequence[tuple[int, int]] = CUTS,
) -> tuple[Difference, set[int]]:
    """Largest differences of a step from the same step in one packed micro-batch, and the numbers
    of micro-batches that were compared. packed: False to compare with one sequence at a time.
    """
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
        expected_grad = torch.cat(
            [p.grad.double().flatten() for p in policy.parameters() if p.grad is not None]
        )
        return (
            {"loss": float(outcome.loss)} | meter.reduce(objective.group),
            expected_grad,
            outcome.micro_batches,
        )

    expected_metrics, expected_grad, _ = step(units, BUDGETS[0])
    difference, micro_batches = Difference(), set[int]()
    for engine in (policy, reference.engine):
        engine.lay_out(packed=packed)
    for seed, budget in cuts:
        shuffled = random.Random(seed).sample(units, len(units))
        metrics, actual_grad, count = step(shuffled, budget)
        micro_batches.add(count)

        def difference_of(metric: str, metrics: dict[str, float] = metrics) -> float:
            return (
                abs(metrics[metric] - expected_metrics[metric])
                if metric in expected_metrics
                else 0.0
            )

        difference = difference.largest(Difference(
            abs(metrics["loss"] - expected_metrics["loss"]) / abs(expected_metrics["loss"]),
            float(abs(actual_grad.norm() - expected_grad.norm()) / expected_grad.norm()),
            float((actual_grad - expected_grad).norm() / expected_grad.norm()),
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
    is_within_bounds = True
    for dtype, name, packed in CASES:
        difference, counts = differences(name, dtype, packed=packed)
        is_within_bounds &= not exceeded(difference, dtype, packed)
        numbers = "".join(f"{getattr(difference, name):>11.1e}" for name in names)
        micro_batches = ",".join(map(str, sorted(counts))) if packed else "one by one"
        print(
            f"{str(dtype).removeprefix('torch.'):<10}{name:<8}{micro_batches:<16}{numbers}",
            flush=True,
        )
    print("held" if is_within_bounds else "short")
    return 0 if is_within_bounds else 1


if __name__ == "__main__":
    sys.exit(main())
